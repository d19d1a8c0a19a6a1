"""Workers of a crew that train on a `Cursor`, and the ledger of the run, from their logs.

Each worker writes down what it trains on before it steps, what each round that was kept has
committed, and a checksum of the state that all have in common. From these follows which samples
were committed, and whether any two workers ever differed.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter

import torch
from torch import nn

import manyhands as mh
from helpers.crew_workers import Workers
from manyhands.errors import CrewFinished

SAMPLES, BATCH, EVERY = 301, 4, 3


class DataWorkers(Workers):
    """Workers that train on samples 0 ... 300, epoch by epoch, until the file `end` says when."""

    @property
    def end(self):
        return self.folder / "end"

    def work(self, make_crew, log, *_, make=mh.LocalSGD, hook=lambda place: None, **options):
        crew = make_crew()
        try:
            train(crew, log, self.end, make, hook, **options)
        except CrewFinished:
            log("late")

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
        anew = [e for e in everything if e["event"] == "begin" and not e["step"]]
        assert all(event["time"] < first for event in anew), "a worker began anew"
        rounds: dict[int, tuple] = {}  # by number: what each worker took
        trained = {}  # by worker: (step at which it was handed samples, what it took since then)
        for number in self.incarnations:
            for event in self.events(number):
                if event["event"] == "commit":
                    said = (event["epoch"], event["taken"], event["step"])
                    assert rounds.setdefault(event["round"], said) == said, event
        for number in self.incarnations:
            parts: list[list] = []
            for event in self.events(number):
                if event["event"] == "begin":  # it has joined, or joined again after a stop
                    parts.append([event["step"], []])
                elif event["event"] == "step":
                    parts[-1][1] += event["samples"]
            trained[number] = parts
        counts: Counter[tuple[int, int]] = Counter()
        for index in sorted(rounds):
            epoch, taken, step = rounds[index]
            for number, amount in taken.items():
                if amount:
                    parts = [part for part in trained[int(number)] if part[0] < step]
                    samples = parts[-1][1]
                    assert len(samples) >= amount, (index, number, amount)
                    counts.update((epoch, sample) for sample in samples[:amount])
                    del samples[:amount]
        return counts

    def one_state_after_each_round(self):
        """Check that all had the same bits after each round; return the rounds by number."""
        states: dict[int, str] = {}
        for number in self.incarnations:
            for event in self.events(number, "round"):
                seen = states.setdefault(event["round"], event["state"])
                assert seen == event["state"], (number, event)
        return states

    def members(self):
        """Return who was in each round that was kept, by its number."""
        return {
            event["round"]: {int(n) for n in event["taken"]}
            for number in self.incarnations
            for event in self.events(number, "commit")
        }

    def wait_for_members(self, numbers, rounds=1, timeout=60.0):
        """Wait for so many further rounds that these have kept, and no others."""
        known = len(self.members())

        def held():
            kept = self.members()
            return sum(kept[index] == numbers for index in sorted(kept)[known:]) >= rounds

        self.until(held, timeout)

    def each_sample_once(self):
        """Check the ledger of the run, and that no two workers differed; return the epochs."""
        self.one_state_after_each_round()
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
    account = optimizer._sync.samples.account
    commit, begin = account.commit, account.begin

    def logged_commit(taken, own, step):
        # (a round is counted after its samples)
        log(
            "commit", round=optimizer.rounds + 1, epoch=account.ledger.epoch, taken=taken, step=step
        )
        commit(taken, own, step)

    def logged_begin(rules, ledger, step=0):
        log("begin", epoch=ledger.epoch, step=step)
        begin(rules, ledger, step)

    account.commit, account.begin = logged_commit, logged_begin
    if account.rules is not None:  # received while the optimizer was made
        log("begin", epoch=account.ledger.epoch, step=account.committed_at)
    cursor = mh.Cursor(torch.arange(SAMPLES), BATCH, optimizer=optimizer, **loader)
    log("in")
    rounds = -1
    while not end.exists() or cursor.epoch < int(end.read_text()):
        for batch in cursor:
            samples = batch.tolist()[: cursor.samples]
            log("step", samples=samples, epoch=cursor.epoch)
            optimizer.zero_grad()
            noise = torch.randn(()) * (crew.number + 1)
            cursor.mean((model(batch[:, None].float() / SAMPLES) - noise).square().sum()).backward()
            optimizer.step()
            if optimizer.rounds != rounds:
                rounds = optimizer.rounds
                dropped = optimizer.snapshot()["dropped"]
                log("round", round=rounds, state=common_state(optimizer), dropped=dropped)
            hook("step")
            time.sleep(pause)
        log("epoch", epoch=cursor.epoch - 1)
    optimizer.finish()
    log("done", dropped=optimizer.snapshot()["dropped"], own=optimizer.own_steps)


def common_state(optimizer):
    """Return a checksum of what all workers have in common."""
    state = hashlib.sha1()
    for bucket in optimizer._sync.anchor.buckets:
        for tensor in [bucket.anchor, *bucket.memories]:
            state.update(tensor.numpy().tobytes())
    return state.hexdigest()


def faults(store, folder, workers, events, seed, stops=0.0, members=None, **options):
    """Kill, stop and start workers at random; check that each sample was committed once.

    `stops` is the part of the faults in which a worker is stopped for some seconds, and `members`
    are options of the crew.
    """
    draw = random.Random(seed)
    # Long enough for a busy machine: workers that are all taken for lost would begin anew.
    crew = DataWorkers(store, folder, **{"expected": 2, "stall": 5.0, **(members or {})})
    with crew:
        crew.start(range(2), **options)
        done, away = 0, list(range(2, workers))
        while done < events:
            inside = crew.present(1)
            if inside and draw.random() < stops:
                number = draw.choice(inside)
                crew.stop(number)
                time.sleep(draw.choice([0.05, 0.5, 2.0, 4.0]))
                crew.wake(number)
            elif away and (len(inside) < 3 or draw.random() < 0.5):
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
