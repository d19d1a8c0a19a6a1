"""A `Cursor` in a crew: workers are killed, stopped and started, and every sample counts once."""

import os
import signal
import time

import pytest

import manyhands as mh
from helpers.data_workers import EVERY, DataWorkers, faults


def test_nothing_is_lost_without_a_fault(store, tmp_path):
    with DataWorkers(store, tmp_path, expected=3) as workers:
        workers.start(range(3))
        workers.until(lambda: (workers.last(0, "epoch", "epoch") or 0) >= 1)
        workers.stop_soon()
        workers.finish()
        assert workers.each_sample_once() >= 2


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"num_workers": 2}, marks=pytest.mark.long),
        {"make": mh.DiLoCo, "overlap": 2},
        {"every": mh.Seconds(0.04, first=3, own_steps=True)},
    ],
    ids=["plain", "loader processes", "overlap", "own steps"],
)
def test_workers_that_die_and_come_back_lose_no_sample(store, tmp_path, options):
    faults(store, tmp_path, workers=4, events=6, seed=1, **options)


def test_as_many_joiners_as_are_expected_do_not_begin_anew(store, tmp_path):
    with DataWorkers(store, tmp_path, expected=1, stall=5.0) as workers:
        workers.start([0], pause=0.03)
        workers.until(lambda: bool(workers.events(0, "commit")))
        workers.start([1], pause=0.03)  # in the middle of a block
        workers.present(2)
        assert workers.events(1, "begin")[0]["step"] > 0
        workers.stop_soon()
        workers.finish()
        workers.each_sample_once()


def test_a_worker_that_was_stopped_loses_no_sample(store, tmp_path):
    with DataWorkers(store, tmp_path, expected=3, stall=0.5) as workers:
        workers.start(range(3))
        for number in (1, 2):
            workers.present(3)
            workers.until(lambda number=number: bool(workers.events(number, "commit")))
            workers.stop(number)
            time.sleep(1.0)
            begun = len(workers.events(number, "begin"))
            workers.wake(number)
            workers.until(lambda n=number, b=begun: len(workers.events(n, "begin")) > b)
        workers.stop_soon()
        workers.finish()
        workers.each_sample_once()


def test_a_worker_that_dies_in_a_round_loses_no_sample(store, tmp_path):
    with DataWorkers(store, tmp_path, expected=2, stall=5.0) as workers:
        workers.start([0])

        def hook(place, calls=[0]):  # noqa: B006
            calls[0] += 1
            if calls[0] == EVERY * 7 - 1:  # the round that follows finds it dead
                os.kill(os.getpid(), signal.SIGKILL)

        for _ in range(3):
            workers.start([1], hook=hook)
            workers.until(lambda: 1 in workers.ended())
            workers.shared.report_end(1)
        workers.stop_soon()
        workers.finish()
        workers.each_sample_once()


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"make": mh.DiLoCo, "overlap": 2}], ids=["plain", "overlap"]
)
def test_a_hundred_kills_and_joins_lose_no_sample(store, tmp_path, options):
    faults(store, tmp_path, workers=8, events=100, seed=2, **options)
