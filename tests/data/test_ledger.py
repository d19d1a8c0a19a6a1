"""The ledger: whatever workers do, every sample is committed once."""

from collections import Counter
from random import Random

import hypothesis
import hypothesis.strategies as st
import pytest

from manyhands.data._account import Account
from manyhands.data._ledger import Ledger, Spans, count, divide, take, union

pytestmark = pytest.mark.quick


def positions(spans: Spans) -> list[int]:
    return [p for start, stop in spans for p in range(start, stop)]


def check(ledger: Ledger, committed: set[int]) -> None:
    """Every position is in one state, and the ledger knows in which."""
    held = [p for _, spans in ledger.held for p in positions(spans)]
    free = [*positions(ledger.returned), *range(ledger.fresh, ledger.samples)]
    assert Counter([*held, *free, *committed]) == Counter(range(ledger.samples))
    assert ledger.committed == len(committed)
    assert ledger.left == len(held) + len(free)
    assert ledger.returned == union(ledger.returned)


@hypothesis.given(st.integers(0, 200), st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_what_is_there_is_divided_by_what_is_wanted(available, amounts):
    wanted = dict(enumerate(amounts))
    shares = divide(available, wanted)
    assert sum(shares.values()) == min(available, sum(amounts))
    assert all(shares[number] <= amount for number, amount in wanted.items())
    if len(set(amounts)) == 1:
        assert max(shares.values()) - min(shares.values()) <= 1


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["commit", "keep", "hand out", "hand out"]),
        st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), max_size=8),
        st.integers(0, 10),
    ),
    max_size=30,
)


@hypothesis.given(st.integers(1, 300), MOVES)
def test_every_position_is_in_one_state(samples, moves):
    ledger, committed = Ledger(samples), set()
    for move, numbers, pinned in moves:
        given_to = dict(numbers)
        if move == "commit":
            taken = {n: min(a, count(ledger.held_by(n))) for n, a in given_to.items()}
            for number, amount in taken.items():
                committed.update(positions(take(ledger.held_by(number), amount)[0]))
            ledger = ledger.commit(taken)
        elif move == "keep":
            ledger = ledger.keep_only(given_to)
            assert {n for n, _ in ledger.held} <= given_to.keys()
        else:
            before, shares = ledger, divide(ledger.left, given_to)
            ledger = ledger.hand_out(given_to, pinned)
            for number, share in shares.items():
                own, kept = ledger.held_by(number), before.held_by(number)
                stays = min(count(kept), max(share, pinned))
                assert union(take(own, stays)[0]) == union(take(kept, stays)[0])
                if pinned == 0:
                    assert count(own) == share
        check(ledger, committed)
        assert Ledger.of(ledger.state()) == ledger
        assert Ledger.of_saved(samples, ledger.saved()) == ledger.keep_only({})


# -- a crew, without the crew ----------------------------------------------------------------------


class Simulated:
    """A worker: an account, and what a loop has trained on since the last commit."""

    def __init__(self) -> None:
        self.account = Account()
        self.trained: list[int] = []

    def step(self, number: int, batch: int) -> bool:
        """Take a step, if there is one to take."""
        account = self.account
        spans, steps = account.to_plan(number)
        if steps == 0:
            return False
        assert steps is not None or count(spans) >= batch, "a worker has run dry in a block"
        step = take(spans, batch)[0]
        account.add_to_step(count(step))
        account.step()
        self.trained += positions(step)
        return True


class SimulatedCrew:
    """Workers that train in blocks of `every` steps, as `Blocks` does; `seen` is the oracle."""

    def __init__(self, samples, batch, every, ahead, overlap, drop_last=False):
        rules = {"samples": samples, "batch": batch, "ahead": ahead, "drop_last": drop_last}
        self.rules, self.every, self.overlap = rules, every, overlap
        self.workers: dict[int, Simulated] = {}
        self.steps = 0
        self.in_flight: dict[int, int] | None = None  # what each said when the round was sent
        self.sent_at = 0
        self.seen: Counter[tuple[int, int]] = Counter()  # (epoch, position): how often committed

    @property
    def any(self) -> Simulated:
        return next(iter(self.workers.values()))

    def start(self, number: int) -> None:
        """Join, with the state of a member if there is one."""
        worker = Simulated()
        if self.workers:
            worker.account.load(self.any.account.saved())
        else:
            worker.account.begin(self.rules, Ledger(self.rules["samples"]), self.steps)
        self.workers[number] = worker
        self.workers = dict(sorted(self.workers.items()))

    def kill(self, number: int) -> None:
        del self.workers[number]

    def hand_out(self) -> None:
        steps = self.every + (self.every + self.overlap if self.overlap else 0)
        for worker in self.workers.values():
            since = self.steps - worker.account.committed_at
            worker.account.hand_out(dict.fromkeys(self.workers, steps), since)
        self.check_agreement()

    def check_agreement(self) -> None:
        assert len({worker.account.checksum() for worker in self.workers.values()}) == 1

    def send(self) -> None:
        self.check_agreement()
        self.in_flight = {n: w.account.taken for n, w in self.workers.items()}
        self.sent_at = self.steps

    def settle(self, killed, joining) -> None:
        """End the round in flight: kept if nobody died in it; else undone."""
        assert self.in_flight is not None
        said, self.in_flight = self.in_flight, None
        for number in killed:
            self.kill(number)
        if killed and not self.overlap and self.workers:  # repeated by those who are left
            self.regroup(joining)
            joining = ()
            said = {n: w.account.taken for n, w in self.workers.items()}
            killed = ()
        if not killed:
            epoch = self.any.account.ledger.epoch
            for number, worker in self.workers.items():
                done, worker.trained = (
                    worker.trained[: said.get(number, 0)],
                    worker.trained[said.get(number, 0) :],
                )
                self.seen.update((epoch, p) for p in done)
            for number, worker in self.workers.items():
                worker.account.commit(dict(said), number, self.sent_at)
        if killed or joining:
            self.regroup(joining)
        self.hand_out()

    def regroup(self, joining) -> None:
        for worker in self.workers.values():
            worker.account.due = True
        for number in joining:
            if number not in self.workers:
                self.start(number)

    def block(self, draw) -> bool:
        """Take a block's steps and its round; return whether anything of the epoch is left."""
        members = list(self.workers)
        killed, joining = draw(members)
        for _ in range(self.every):
            stepped = [w.step(n, self.rules["batch"]) for n, w in self.workers.items()]
            assert len(set(stepped)) == 1, "workers take different numbers of steps"
            if not stepped[0]:
                break
            self.steps += 1
            if self.in_flight is not None and self.steps == self.sent_at + self.overlap:
                self.settle(killed, joining)
                killed = joining = ()
        if self.in_flight is not None:
            self.settle((), ())
        if all(not worker.account.taken for worker in self.workers.values()):
            self.regroup(joining)
            self.hand_out()
            return False
        self.send()
        if not self.overlap or not stepped[0]:
            self.settle(killed, joining)
        return self.any.account.ledger.left > 0

    def next_epoch(self) -> None:
        for worker in self.workers.values():
            worker.account.next_epoch(self.steps)
        self.hand_out()


def train(crew: SimulatedCrew, random, epochs: int, faults: int) -> int:
    """Train through the epochs; return how many kills and joins there were."""
    for number in range(random.randrange(1, 9)):
        crew.start(number)
    crew.hand_out()
    events = 0

    def draw(members):
        nonlocal events
        if events >= faults or random.random() < 0.3:
            return (), ()
        killed = random.sample(members, random.randrange(len(members)))
        away = sorted({*range(8)} - {*members} | {*killed})  # a killed one may be back at once
        joining = random.sample(away, random.randrange(min(3, len(away) + 1)))
        events += len(killed) + len(joining)
        return killed, joining

    for epoch in range(epochs):
        while crew.block(draw) or crew.any.account.ledger.left:
            pass
        samples = crew.rules["samples"]
        committed = {key: times for key, times in crew.seen.items() if key[0] == epoch}
        assert committed == {(epoch, position): 1 for position in range(samples)}
        crew.next_epoch()
    return events


@hypothesis.given(
    samples=st.integers(1, 400),
    batch=st.integers(1, 7),
    every=st.integers(2, 6),
    ahead=st.integers(0, 5),
    overlap=st.integers(0, 1),
    random=st.randoms(use_true_random=False),
)
@hypothesis.settings(max_examples=60)
def test_a_crew_loses_no_sample_and_repeats_none(samples, batch, every, ahead, overlap, random):
    crew = SimulatedCrew(samples, batch, every, ahead, overlap)
    train(crew, random, epochs=2, faults=100)


@pytest.mark.sample("0-0", "1-0", "2-0", "3-2", "4-2")
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_kills_and_joins_lose_no_sample(seed, overlap):
    crew = SimulatedCrew(samples=20_000, batch=8, every=5, ahead=4, overlap=overlap)
    assert train(crew, Random(seed), epochs=2, faults=100) >= 100
