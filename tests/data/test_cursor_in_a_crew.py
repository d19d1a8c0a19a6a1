"""A `Cursor` in a crew: workers are killed, stopped and started, and every sample counts once.

Each worker writes down what it trains on before it steps, and what each round that was kept has
committed. From both the test puts together which samples were committed: the ledger of the run.
"""

import os
import random
import signal
import time
from collections import Counter

import pytest
import torch
from torch import nn

import manyhands as mh
from helpers.crew_workers import Log, Store, Workers, fork
from manyhands.blocks.crew._crew import Crew
from manyhands.errors import CrewFinished

SAMPLES, BATCH, EVERY = 301, 4, 3


class DataWorkers(Workers):
    """Workers that train on samples 0 ... 300, epoch by epoch, until the file `end` says when."""

    @property
    def end(self):
        return self.folder / "end"

    def start(self, numbers, make=mh.LocalSGD, hook=lambda place: None, **options):
        for number in numbers:
            incarnation = self.incarnations[number] = self.incarnations.get(number, 0) + 1
            log = Log(self.folder / f"{number}.{incarnation}.jsonl")

            def work(number=number, log=log):
                crew = Crew(self.store.address, number=number, **self.options)
                try:
                    train(crew, log, self.end, make, hook, **options)
                except CrewFinished:
                    log("late")

            self.pids[number] = fork(work, self.folder / f"{number}.errors")

    def stop_soon(self):
        """Let all end with the epoch after next."""
        epochs = [self.last(number, "step", "epoch") for number in self.incarnations]
        new = self.end.with_suffix(".new")
        new.write_text(str(max(epoch or 0 for epoch in epochs) + 3))
        new.rename(self.end)

    def committed(self):
        """Return how often each (epoch, sample) was committed; check that all saw the same."""
        everything = [event for number in self.incarnations for event in self.events(number)]
        first = min(event["time"] for event in everything if event["event"] == "commit")
        anew = [e for e in everything if e["event"] == "begin" and e["round"] == 0]
        assert all(event["time"] < first for event in anew), "a worker began anew"
        rounds = {}  # by number: what each worker took
        trained = {}  # by worker: (number of the round before, samples since then)
        for number in self.incarnations:
            for event in self.events(number):
                if event["event"] == "commit":
                    said = (event["epoch"], event["taken"])
                    assert rounds.setdefault(event["round"], said) == said, event
        for number in self.incarnations:
            parts, since = [], None
            for event in self.events(number):
                if event["event"] == "begin":  # it has joined, or joined again after a stop
                    since = [event["round"], []]
                    parts.append(since)
                elif event["event"] == "step":
                    since[1] += event["samples"]
            trained[number] = parts
        counts = Counter()
        for index in sorted(rounds):
            epoch, taken = rounds[index]
            for number, amount in taken.items():
                if amount:
                    parts = [part for part in trained[int(number)] if part[0] < index]
                    samples = parts[-1][1]
                    assert len(samples) >= amount, (index, number, amount)
                    counts.update((epoch, sample) for sample in samples[:amount])
                    del samples[:amount]
        return counts

    def each_sample_once(self):
        counts = self.committed()
        epochs = int(self.end.read_text())
        wanted = {(epoch, sample): 1 for epoch in range(epochs) for sample in range(SAMPLES)}
        assert counts == wanted, {
            key: (counts[key], wanted.get(key, 0))
            for key in {*counts, *wanted}
            if counts[key] != wanted.get(key, 0)
        }
        return epochs


def train(crew, log, end, make, hook, pause=0.002, **options):
    loader = {"num_workers": options.pop("num_workers", 0)}
    every = options.pop("every", EVERY)
    if every is not EVERY:
        pause *= crew.number + 1
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = make(optimizer, every=every, crew=crew, **options)
    account = optimizer._sync.account
    commit, begin = account.commit, account.begin

    def logged_commit(taken, own, step):
        # (a round is counted after its samples)
        log("commit", round=optimizer.rounds + 1, epoch=account.ledger.epoch, taken=taken)
        commit(taken, own, step)

    def logged_begin(rules, ledger, step=0):
        log("begin", round=optimizer.rounds, epoch=ledger.epoch)
        begin(rules, ledger, step)

    account.commit, account.begin = logged_commit, logged_begin
    if account.rules is not None:  # received while the optimizer was made
        log("begin", round=optimizer.rounds, epoch=account.ledger.epoch)
    cursor = mh.Cursor(torch.arange(SAMPLES), BATCH, optimizer=optimizer, **loader)
    log("in")
    while not end.exists() or cursor.epoch < int(end.read_text()):
        for batch in cursor:
            samples = batch.tolist()[: cursor.samples]
            log("step", samples=samples, epoch=cursor.epoch)
            optimizer.zero_grad()
            noise = torch.randn(()) * (crew.number + 1)
            cursor.mean((model(batch[:, None].float() / SAMPLES) - noise).square().sum()).backward()
            optimizer.step()
            hook("step")
            time.sleep(pause)
        log("epoch", epoch=cursor.epoch - 1)
    optimizer.finish()
    log("done")


@pytest.fixture
def store():
    with Store() as store:
        yield store


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
        {},
        {"num_workers": 2},
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
        assert workers.events(1, "begin")[0]["round"] > 0
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


def faults(store, folder, workers, events, seed, **options):
    """Kill, stop and start workers at random; check that each sample was committed once."""
    draw = random.Random(seed)
    # Long enough for a busy machine: workers that are all taken for lost would begin anew.
    with DataWorkers(store, folder, expected=2, stall=5.0) as crew:
        crew.start(range(2), **options)
        done, away = 0, list(range(2, workers))
        while done < events:
            inside = crew.present(1)
            if away and (len(inside) < 3 or draw.random() < 0.5):
                number = away.pop(draw.randrange(len(away)))
                crew.start([number], **options)
            elif len(inside) >= 3:  # one that knows the state is always left
                number = draw.choice(inside)
                crew.kill(number, report=draw.random() < 0.95)
                away.append(number)
            else:
                continue
            done += 1
            time.sleep(draw.uniform(0.0, 0.4))
        crew.present(1)
        crew.stop_soon()
        crew.finish(timeout=60)
        crew.each_sample_once()
