"""Blocks in a crew: workers die, stall and join in the middle of sync rounds, and stay equal."""

import hashlib
import itertools
import os
import random
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.crew_workers import Workers, limit
from helpers.link import Link
from manyhands.blocks import _sync
from manyhands.blocks.averaging import _chunks, _round
from manyhands.blocks.crew import _crew, _roster, _shared_roster, _store

SIZE = 200_000  # four chunks, as `small_chunks` has them


class BlockWorkers(Workers):
    """Workers that go down a slope of 1: after n steps parameters are -n, or work is lost."""

    def work(self, make_crew, log, steps, options=None, harm=None, pause=0.002, make=mh.LocalSGD):
        crew = make_crew()
        if harm is not None and self.incarnations[crew.number] == 1:
            harm(crew.number)
        train(crew, log, limit(self.folder, steps), options or {}, pause, make)

    def wait_for_rounds(self, number, rounds):
        self.until(lambda: sum(e["event"] == "round" for e in self.events(number)) >= rounds)

    def one_state_after_each_round(self):
        """Check that all have the same bits after each round; return the states by round."""
        states = {}
        for number in self.incarnations:
            for e in self.events(number, "round"):
                state = (e["steps"], e["state"])
                assert states.setdefault(e["rounds"], state) == state, (number, e, states)
        return states


def train(crew, log, steps, options, pause, make):
    param = nn.Parameter(torch.full((SIZE,), float(crew.number)))
    buffers = nn.BatchNorm1d(4)
    buffers.extra = param
    optimizer = make(SGD([param], lr=1.0), model=buffers, crew=crew, **options)
    log("in", steps=optimizer.steps, size=crew.size)
    rounds = optimizer.rounds
    generator = torch.Generator().manual_seed(crew.number)
    while optimizer.steps < steps():
        noise = torch.randn((), generator=generator)
        param.grad = torch.ones(SIZE)
        param.grad[-1] += noise
        optimizer.step()
        if optimizer.rounds != rounds:
            rounds = optimizer.rounds
            tell(log, "round", optimizer)
        time.sleep(pause)
    optimizer.finish()
    tell(log, "done", optimizer, value=float(param.detach()[0]))


def tell(log, event, optimizer, **more):
    state = hashlib.sha1()
    for bucket in optimizer._sync.anchor.buckets:
        for tensor in [bucket.anchor, *bucket.memories]:
            state.update(tensor.numpy().tobytes())
    seen = optimizer.snapshot()
    log(
        event,
        rounds=seen["rounds"],
        steps=seen["step"],
        state=state.hexdigest(),
        undone=seen["undone"],
        workers=seen["workers"],
        **more,
    )


def dies_at(place, worker, round_number):
    """Return what kills this worker in the middle of a round, where this method is called."""

    def harm(number):
        if number != worker:
            return
        original = getattr(_round.SyncRound, place)
        calls = []

        def fatal(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 4 * round_number - 1:  # the third of its chunks
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *args, **kwargs)

        setattr(_round.SyncRound, place, fatal)

    return harm


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(_chunks, "MIN_CHUNK", 1 << 16)


@pytest.mark.parametrize(
    "place",
    ["_start_mean", *(pytest.param(p, marks=pytest.mark.long) for p in ("_send", "_finish"))],
)
def test_a_death_in_the_middle_of_a_round_loses_no_work_of_the_others(store, tmp_path, place):
    with BlockWorkers(store, tmp_path, expected=4, stall=5.0) as workers:
        workers.start(range(4), None, {"every": 5}, dies_at(place, 2, 6), pause=0.005)
        workers.until(lambda: workers.ended() == {2: -signal.SIGKILL})
        died = time.monotonic()
        workers.shared.report_end(2)
        workers.until(lambda: any(e["time"] > died for e in workers.events(0, "round")))
        assert time.monotonic() - died < 3.5
        workers.start([2], None, {"every": 5}, pause=0.005)
        steps = workers.finish_together(100)
        states = workers.one_state_after_each_round()
        assert len(states) == steps / 5
        done = [workers.events(number, "done")[-1] for number in range(4)]
        assert {e["value"] for e in done} == {-steps}  # not a step of the survivors is missing
        assert len({e["state"] for e in done}) == 1
        assert workers.events(2, "in")[-1]["steps"] % 5 == 0 < workers.events(2, "in")[-1]["steps"]
        assert {e["undone"] for e in done if e["workers"] == 4} <= {0, 1}


OPTIONS = [
    pytest.param(mh.DiLoCo, {"every": 6, "codec": "int8"}, marks=pytest.mark.long),
    (mh.DiLoCo, {"every": 6, "codec": "int4", "overlap": 2, "fragments": 2}),
    (mh.BMUF, {"global_sync_iter": 6, "warmup_iterations": 20, "average_sync": True}),
    pytest.param(mh.DiLoCo, {"every": 6, "warmup": 15}, marks=pytest.mark.long),
]


def test_killed_at_any_moment_in_a_crew_of_hundreds_no_two_ever_differ(
    store, tmp_path, monkeypatch
):
    for module in (_crew, _roster, _shared_roster):
        monkeypatch.setattr(module, "WATCHED", 1)
    test_killed_at_any_moment_no_two_ever_differ(store, tmp_path, mh.DiLoCo, {"every": 6})


@pytest.mark.sample("DiLoCo-options1", "BMUF-options2")
@pytest.mark.parametrize(("make", "options"), OPTIONS)
def test_killed_at_any_moment_no_two_ever_differ(store, tmp_path, make, options):
    with BlockWorkers(store, tmp_path, expected=3, stall=1.0) as workers:
        dice = random.Random(3)
        workers.start(range(3), None, options, make=make, pause=0.005)
        for _ in range(3):
            time.sleep(0.1 + 0.2 * dice.random())
            victim = dice.choice(workers.present(2))
            workers.kill(victim, report=dice.random() < 0.7)
            workers.start([victim], None, options, make=make, pause=0.005)
        workers.finish_together(100)
        states = workers.one_state_after_each_round()
        assert len(states) > 5
        done = [workers.events(number, "done")[-1] for number in range(3)]
        assert len({e["state"] for e in done}) == 1


def test_a_worker_that_stops_in_the_last_block_is_left_behind_by_all_others_together(
    store, tmp_path
):
    """Worker 0 sees first that it is lost, and the others hold the last round with it."""

    def harm(number):
        if number:
            silent = property(lambda self: self.silent_for(3 * self.stall))
            _shared_roster.HeartbeatMonitor.silent = silent
        step = mh.LocalSGD.step

        def stops(self):
            step(self)
            if number == 3 and self.steps == 22:
                os.kill(os.getpid(), signal.SIGSTOP)

        mh.LocalSGD.step = stops

    with BlockWorkers(store, tmp_path, expected=4, stall=0.8) as workers:
        workers.start(range(4), 24, {"every": 10}, harm)
        for number in range(3):
            workers.until(lambda number=number: workers.events(number, "done"))
        done = [workers.events(number, "done")[-1] for number in range(3)]
        assert len({(e["state"], e["rounds"], e["steps"]) for e in done}) == 1
        assert {e["value"] for e in done} == {-24.0} and {e["workers"] for e in done} == {3}
        workers.kill(3, report=True)


def test_alone_without_a_store_a_crew_is_one_worker_with_an_outer_step():
    param = nn.Parameter(torch.zeros(3))
    optimizer = mh.DiLoCo(SGD([param], lr=1.0), every=2, lr=0.5, momentum=0.0, crew=mh.Crew())
    for _ in range(4):
        param.grad = torch.ones(3)
        optimizer.step()
    optimizer.finish()
    assert param.tolist() == [-2.0] * 3 and optimizer.rounds == 2
    for _ in range(2):  # training may go on
        param.grad = torch.ones(3)
        optimizer.step()
    assert param.tolist() == [-3.0] * 3


def test_an_error_of_ones_own_is_raised_and_the_others_go_on(store, tmp_path):
    def breaks(number):
        if number == 1:
            original = _round.SyncRound._start_mean

            def start_mean(self, chunk):
                if self.report.step >= 20:
                    raise TypeError("of worker 1")
                return original(self, chunk)

            _round.SyncRound._start_mean = start_mean

    with BlockWorkers(store, tmp_path, expected=3, stall=0.6) as workers:
        workers.start(range(3), 60, {"every": 5}, breaks, pause=0.005)
        workers.until(lambda: workers.ended() == {1: 1})
        assert "TypeError: of worker 1" in workers.errors(1)
        workers.finish()
        workers.one_state_after_each_round()
        assert workers.events(0, "done")[-1]["workers"] == 2


# -- each worker takes steps of its own ------------------------------------------------------------


def start_unequal(workers, steps, make=mh.LocalSGD, **options):
    """Start workers at paces of 1, 2 and 3."""
    options = {"every": mh.Seconds(0.12, own_steps=True, least=2), **options}
    for number in range(3):
        workers.start([number], steps, options, make=make, pause=0.005 * (number + 1))


@pytest.mark.parametrize("overlap", [0, 1])
def test_unequal_workers_agree_after_each_round_and_leave_after_the_same_one(
    store, tmp_path, overlap
):
    with BlockWorkers(store, tmp_path, expected=3, stall=5.0) as workers:
        start_unequal(workers, 100, make=mh.DiLoCo, overlap=overlap)
        workers.finish()
        states = workers.one_state_after_each_round()
        done = [workers.events(number, "done")[-1] for number in range(3)]
        assert len({(e["state"], e["rounds"], e["steps"]) for e in done}) == 1
        assert {e["undone"] for e in done} == {0} and len(states) > 4
        assert {e["workers"] for e in done} == {3}


# -- a late member, and too few of them ------------------------------------------------------------


@pytest.mark.long
def test_a_member_that_hangs_is_waited_for_by_what_rounds_took_before(store, tmp_path):
    """It is alive, as its heartbeat shows, and would be waited for for 600 s otherwise."""

    def hangs(number):
        if number == 1:
            original = _sync.Sync.count_step

            def count_step(self):
                if self.state.steps == 62 and self.state.own == 62:
                    time.sleep(12)
                original(self)

            _sync.Sync.count_step = count_step

    with BlockWorkers(store, tmp_path, expected=3, patience="auto", stall=5.0) as workers:
        workers.start(range(3), None, {"every": 5}, hangs, pause=0.005)
        workers.until(lambda: workers.last(0, "round", "workers") == 2, timeout=30)
        times = [e["time"] for e in workers.events(0, "round")]
        assert max(b - a for a, b in itertools.pairwise(times)) < 9.0
        workers.until(lambda: workers.last(0, "round", "workers") == 3, timeout=30)
        steps = workers.finish_together(100, 60)
        workers.one_state_after_each_round()
        assert workers.last(0, "done", "steps") == steps


@pytest.mark.long
def test_fewer_than_a_quorum_wait_until_another_comes(store, tmp_path):
    with BlockWorkers(store, tmp_path, expected=3, quorum=2, stall=1.0) as workers:
        workers.start(range(3), 300, {"every": 5}, pause=0.005)
        workers.wait_for_rounds(0, 3)
        for number in (1, 2):
            workers.kill(number, report=True)
        before = len(workers.events(0, "round"))
        time.sleep(2.0)
        assert len(workers.events(0, "round")) <= before + 1
        workers.start([2], 300, {"every": 5}, pause=0.005)
        workers.finish()  # two finish together, and none waits for a quorum at the end
        workers.one_state_after_each_round()
        done = [workers.events(number, "done")[-1] for number in (0, 2)]
        assert {(e["steps"], e["value"], e["workers"]) for e in done} == {(300, -300.0, 2)}


@pytest.mark.long
def test_the_half_that_is_cut_off_from_the_store_waits_and_comes_back(store, tmp_path, monkeypatch):
    """Two of five workers lose the store, and so the others: three go on, and lose nothing."""
    monkeypatch.setattr(_store, "STORE_TIMEOUT", 2.0)
    options = {"expected": 5, "quorum": 3, "stall": 1.0}
    with (
        Link(store.address) as line,
        BlockWorkers(store, tmp_path, **options) as workers,
        BlockWorkers(SimpleNamespace(address=line.address), tmp_path, **options) as far,
    ):
        workers.start(range(3), None, {"every": 5}, pause=0.005)
        far.start([3, 4], None, {"every": 5}, pause=0.005)
        workers.until(lambda: workers.last(0, "round", "workers") == 5)
        line.cut()
        workers.until(lambda: workers.last(0, "round", "workers") == 3)
        time.sleep(4.0)  # the others have found out that the store does not answer
        line.mend()
        workers.until(lambda: workers.last(0, "round", "workers") == 5, timeout=30)
        steps = workers.finish_together(100, 60)
        far.finish(60)
        states = workers.one_state_after_each_round()
        assert workers.last(0, "done", "value") == -steps
        for number in (3, 4):  # the same processes, and no work of theirs but of the cut-off block
            assert far.incarnations[number] == 1
            for e in far.events(number, "round"):
                assert states[e["rounds"]] == (e["steps"], e["state"])
        assert far.last(3, "done", "value") == -steps
