"""Workers of different speed: each takes steps of its own in a block, and none waits for another.

A clock that only steps advance stands for the speeds, so that all numbers are known.
"""

import io
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

import manyhands as mh
from helpers.blocks_plain import gradient, train_own
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from manyhands.blocks._schedule import Schedule, Seconds
from manyhands.blocks.averaging import _round
from manyhands.blocks.averaging._round import Drift
from manyhands.errors import RanksDisagree

LR, SIZE = 0.1, 50
OUTER = {
    "LocalSGD": {},
    "BMUF": {"block_lr": 0.9, "block_momentum": 0.6},
    "DiLoCo": {"lr": 0.7, "momentum": 0.9},
    "SlowMo": {"slow_lr": 0.8, "slow_momentum": 0.5, "inner_lr": LR},
}
SPEEDS = [1.0, 2.0, 4.0]  # seconds of a step on each rank
EVERY = Seconds(8.0, first=4, least=2, own_steps=True)  # 8, 4 and 2 steps at these speeds


def start():
    return torch.linspace(-1, 1, SIZE, dtype=torch.float64)


def samples(rank, step):
    return 3 + rank + step % 3


def own_schedule(length, start=0):
    return Schedule(Seconds(8.0, first=length, own_steps=True), warmup=start)


class Clock:
    """The time that blocks see. Ranks are processes: each has its own."""

    def __init__(self):
        self.now = 100.0
        _round.time = SimpleNamespace(perf_counter=lambda: self.now)


class Run:
    """One rank that trains a vector, and logs what a user sees after each step."""

    def __init__(self, name="DiLoCo", every=EVERY, speeds=SPEEDS, counted=False, **more):
        self.clock, self.counted = Clock(), counted
        self.rank = dist.get_rank()
        self.seconds = lambda step: speeds[self.rank]
        self.param = nn.Parameter(start())
        options = dict(OUTER[name])
        options["global_sync_iter" if name == "BMUF" else "every"] = every
        if name == "BMUF":
            options["warmup_iterations"] = 0
        self.optimizer = getattr(mh, name)(SGD([self.param], lr=LR), **options, **more)
        self.log = []  # (common count, own steps of the block, rounds) after each step
        self.seen = []
        self.blocks = []  # own steps of each block that has ended

    def step(self):
        optimizer = self.optimizer
        number = optimizer.own_steps + 1
        self.clock.now += self.seconds(number)
        self.param.grad = gradient(self.param.detach(), self.rank, number)
        if self.counted:
            optimizer.count_samples(samples(self.rank, number))
        optimizer.step()
        shown = optimizer.snapshot()
        self.log.append((shown["step"], shown["own_every"], shown["rounds"]))
        self.seen.append(self.param.detach().clone())
        schedule = optimizer._sync.schedule
        if schedule.every.own_steps and schedule.taken == 0:
            self.blocks.append(optimizer.own_steps - sum(self.blocks))

    def train(self, steps):
        while self.optimizer.steps < steps:
            self.step()
        return self

    def finish(self):
        self.optimizer.synchronize()
        if (left := self.optimizer.own_steps - sum(self.blocks)) > 0:
            self.blocks.append(left)
        self.seen[-1] = self.param.detach().clone()
        return self


# -- the plain loop is the oracle ------------------------------------------------------------------

CARRIERS = [{"shared_memory": False}, {"shared_memory": True}, {"codec": "int8"}]


@pytest.mark.sample(
    "LocalSGD-{'shared_memory': False}",
    "BMUF-{'shared_memory': False}",
    "DiLoCo-{'shared_memory': False}",
    "DiLoCo-{'codec': 'int8'}",
    "SlowMo-{'codec': 'int8'}",
)
@pytest.mark.parametrize("more", CARRIERS, ids=str)
@pytest.mark.parametrize("name", OUTER)
def test_steps_of_ones_own_equal_the_plain_loop(name, more):
    def all_cases():
        found = []
        for counted in (False, True):
            run = Run(name, counted=counted, **more).train(24).finish()
            found.append((torch.stack(run.seen), run.blocks))
        return found

    results = run_ranks(3, all_cases)
    for case, counted in enumerate((False, True)):
        rounds = list(zip(*(results[rank][case][1] for rank in range(3)), strict=True))
        assert rounds[0] == (4, 4, 4) and set(rounds[1:-1]) == {(8, 4, 2)}
        weights = {"samples": samples if counted else None}
        plain = train_own(start(), gradient, rounds, LR, name, OUTER[name], **weights)
        near = 0.05 if "codec" in more else 1e-11
        for rank in range(3):
            torch.testing.assert_close(results[rank][case][0], plain[rank], rtol=near, atol=near)


@pytest.mark.parametrize("name", OUTER)
def test_training_goes_on_while_a_mean_of_unequal_workers_is_in_flight(name):
    def blocks():
        run = Run(name, overlap=1, shared_memory=False)
        while run.optimizer.rounds < 5:
            run.step()
        run.optimizer._sync.merge_pending()
        return torch.stack(run.seen), [*run.blocks, run.optimizer.own_steps - sum(run.blocks)]

    results = run_ranks(3, blocks)
    rounds = list(zip(*(blocks for _, blocks in results), strict=True))
    assert rounds[1:] == [(8, 4, 2)] * 4 + [(1, 1, 1)]
    plain = train_own(start(), gradient, rounds, LR, name, OUTER[name], overlap=1)
    for rank in range(3):
        # (the oracle merges its last block)
        torch.testing.assert_close(results[rank][0][:-1], plain[rank][:-1], rtol=1e-11, atol=1e-11)


@on_ranks(3)
def test_equal_workers_get_the_plain_mean_bit_for_bit():
    every = Seconds(8.0, first=8, own_steps=True)
    own = Run(speeds=[1.0, 1.0, 1.0], every=every, shared_memory=False).train(30)
    plain = Run(speeds=[1.0, 1.0, 1.0], every=8, shared_memory=False).train(30)
    assert all(map(torch.equal, own.seen, plain.seen))


# -- what all agree on -----------------------------------------------------------------------------


def test_all_know_all_numbers_before_the_block_begins_and_count_the_same_steps():
    def blocks():
        run = Run(shared_memory=False)
        plans = []
        while run.optimizer.rounds < 4:
            run.step()
            if run.optimizer._sync.schedule.taken == 0:
                plan = list(run.optimizer._sync.schedule.plan.values())
                plans.append((run.optimizer.steps, plan))
        return plans, run.log

    first, second, third = run_ranks(3, blocks)
    assert first[0] == second[0] == third[0]
    assert [plan for _, plan in first[0]] == [[8, 4, 2]] * 4
    # 4 steps each, and then (8 + 4 + 2) / 3 in the mean, to the nearest whole step in all
    assert [steps for steps, _ in first[0]] == [4, 9, 13, 18]
    assert [count for count, _, _ in first[1]][4:12] == [4, 5, 5, 6, 7, 7, 8, 9]
    assert [count for count, _, _ in third[1]][4:6] == [6, 9]


@pytest.mark.sample("18-0", "19-0", "20-0", "21-1", "22-1", "23-1")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("end", range(18, 24))
def test_training_until_any_count_ends_in_the_same_round_for_all(end, overlap):
    def blocks():
        run = Run(overlap=overlap, shared_memory=False).train(end)
        own = run.optimizer.own_steps
        run.optimizer.synchronize()
        shown = run.optimizer.snapshot()
        run.optimizer.synchronize()  # of no effect
        return run.param.detach(), shown["rounds"], shown["step"], run.optimizer.rounds, own

    results = run_ranks(3, blocks)
    for param, *counts, _ in results:
        assert torch.equal(param, results[0][0]) and tuple(counts) == results[0][1:-1]
        assert counts[0] == counts[2]
    mean = sum(result[-1] for result in results) / 3
    assert abs(mean - end) <= 2.5  # as many samples as with equal steps


def test_numbers_follow_the_speeds_and_a_worker_that_slows_down_ends_its_block_early():
    def blocks():
        run = Run(shared_memory=False)
        while run.optimizer.rounds < 3:
            run.step()
        if run.rank == 0:  # three times as slow: 8 steps would take 24 s, and 8.8 are waited for
            run.seconds = lambda step: 3.0
        while run.optimizer.rounds < 5:
            run.step()
        plan = list(run.optimizer._sync.schedule.plan.values())
        return run.blocks, plan, run.optimizer.steps

    results = run_ranks(3, blocks)
    assert [blocks[3:] for blocks, _, _ in results] == [[3, 3], [4, 4], [2, 2]]
    assert {tuple(plan) for _, plan, _ in results} == {(3, 4, 2)}
    trained = sum(sum(blocks) for blocks, _, _ in results) / 3
    assert all(abs(steps - trained) <= 2 for _, _, steps in results)


def test_drift_of_weighted_workers_is_that_of_the_vectors():
    moved = torch.tensor([[3.0, 1.0], [1.0, 2.0], [-1.0, 4.0]], dtype=torch.float64)
    weights = [4.0, 2.0, 1.0]
    p = torch.tensor(weights, dtype=torch.float64) / 7
    mean = p @ moved
    drift = Drift.of(moved.square().sum(1).tolist(), float(mean @ mean), weights)
    spread = float((p @ (moved - mean).square().sum(1)).sqrt())
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    dots = sum(float(p[i] * p[j] * (moved[i] @ moved[j])) for i, j in pairs)
    cosine = dots / sum(float(p[i] * p[j]) for i, j in pairs) / float(p @ moved.square().sum(1))
    assert (drift.spread, drift.cosine) == (pytest.approx(spread), pytest.approx(cosine))
    assert Drift.of([1.0, 2.0], 1.0, [3.0, 3.0]) == Drift.of([1.0, 2.0], 1.0)


# -- saved and resumed -----------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 1])
@on_ranks(2)
def test_a_run_that_is_interrupted_at_every_step_is_the_run_that_is_not(overlap):
    def wavy(step):
        return SPEEDS[dist.get_rank()] * (1 + 0.2 * math.sin(step))

    def run(interruptions):
        # Made beforehand, because that is collective, and ranks take different numbers of steps.
        runs = [Run(overlap=overlap, counted=True, shared_memory=False) for _ in range(13)]
        for other in runs:  # one group for all: ranks are in different ones of these runs
            other.optimizer._sync.members.workers = runs[0].optimizer._sync.members.workers
        run, seen = runs.pop(), []
        while run.optimizer.rounds < 5:
            if interruptions and runs and not run.optimizer._sync.pending:
                file = io.BytesIO()
                torch.save([run.param.detach(), run.optimizer.state_dict()], file)
                run = runs.pop()
                param, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                with torch.no_grad():
                    run.param.copy_(param)
                run.clock.__init__()
                run.optimizer.load_state_dict(state)
            run.seconds = wavy
            run.step()
            shown = run.optimizer.snapshot()
            names = ("step", "own_steps", "own_every", "every", "rounds", "distance", "cosine")
            seen.append((run.param.detach().clone(), [repr(shown[name]) for name in names]))
        return seen

    through, resumed = run(False), run(True)
    for (param, shown), (same, again) in zip(through, resumed, strict=True):
        assert torch.equal(param, same) and shown == again


def test_all_may_continue_from_one_workers_state_and_from_a_checkpoint(tmp_path):
    def blocks():
        run = Run(shared_memory=False).train(15)
        states = [None] * 3
        dist.all_gather_object(states, run.optimizer.state_dict())
        other = Run(shared_memory=False)
        other.optimizer.load_state_dict(states[0])
        other.train(30).finish()
        run.finish()
        mh.save(tmp_path / "run", model=nn.ParameterList([run.param]), optimizer=run.optimizer)
        third = Run(shared_memory=False)
        mh.load(tmp_path / "run", model=nn.ParameterList([third.param]), optimizer=third.optimizer)
        steps, own = third.optimizer.steps, third.optimizer.snapshot()["own_every"]
        third.train(40).finish()
        return other.param.detach(), third.param.detach(), steps, own, run.optimizer.steps

    results = run_ranks(3, blocks)
    for other, third, steps, _, before in results:
        assert torch.equal(other, results[0][0]) and torch.equal(third, results[0][1])
        assert steps == before
    assert [own for *_, own, _ in results] == [8, 4, 2]


# -- weights of samples ----------------------------------------------------------------------------


@on_ranks(2)
def test_samples_weigh_workers_that_take_equal_steps_too():
    """By hand: -1 on a worker with 30 samples, 1 on one with 10."""
    param = nn.Parameter(torch.zeros(3))
    optimizer = mh.LocalSGD(SGD([param], lr=1.0), every=2)
    for _ in range(2):
        param.grad = torch.full((3,), 0.5 if dist.get_rank() == 0 else -0.5)
        optimizer.count_samples(10)
        optimizer.count_samples(5 if dist.get_rank() == 0 else -5 + 5)
        optimizer.step()
    assert param.tolist() == pytest.approx([-0.2] * 3)


def test_samples_that_only_some_have_counted_are_an_error_on_all():
    def one_of_two(forgotten):
        param = nn.Parameter(torch.zeros(3))
        optimizer = mh.LocalSGD(SGD([param], lr=1.0), every=2)
        for step in range(2):
            param.grad = torch.ones(3) * (1 + dist.get_rank())
            if dist.get_rank() == 0 or (forgotten and step == 0):
                optimizer.count_samples(10)
            optimizer.step()

    for forgotten, message in ((False, "rank 1: none"), (True, "rank 1: of some steps")):
        raises_on_ranks(2, RanksDisagree, one_of_two, forgotten, match=message)


def test_a_worker_that_is_not_finite_is_left_out_with_its_steps():
    def blocks():
        run = Run(shared_memory=False)
        while run.optimizer.rounds < 2:
            run.step()
        if run.rank == 0:
            with torch.no_grad():
                run.param[0] = math.nan
        while run.optimizer.rounds < 4:
            run.step()
        shown = run.optimizer.snapshot()
        return run.param.detach(), shown["left_out"], shown["step"], shown["dropped"]

    results = run_ranks(3, blocks)
    for param, left_out, steps, _ in results:
        assert torch.equal(param, results[0][0]) and param.isfinite().all()
        assert (left_out, steps) == (1, results[0][2])

    assert [rank for rank in range(3) if results[rank][3]] == [0]  # its steps are dropped
    assert results[0][3] == 8


# -- samples ---------------------------------------------------------------------------------------


def test_a_run_that_is_loaded_hands_out_samples_for_the_steps_of_its_block(tmp_path):
    """In every order of loading, and also where each worker loads its own state in mid-block."""

    def train(run, cursor, epochs):
        seen = []
        while cursor.epoch < epochs:
            for batch in cursor:
                run.clock.now += run.seconds(0)
                run.param.grad = torch.zeros_like(run.param)
                seen += batch.tolist()[: cursor.samples]
                run.optimizer.step()
                if run.optimizer.steps >= 20 and epochs == 1:
                    return seen
        return seen

    def make():
        run = Run(shared_memory=False)
        return run, mh.Cursor(torch.arange(700), 4, optimizer=run.optimizer)

    def blocks():
        run, cursor = make()
        train(run, cursor, 1)
        own = run.optimizer.state_dict()
        run.optimizer.synchronize()
        model = nn.ParameterList([run.param])
        mh.save(tmp_path / "run", model=model, optimizer=run.optimizer, cursor=cursor)
        position = cursor.state_dict()
        found = []
        for how in ("together", "cursor first", "optimizer first", "own"):
            other, cursor = make()
            if how == "together":
                model = nn.ParameterList([other.param])
                mh.load(tmp_path / "run", model=model, optimizer=other.optimizer, cursor=cursor)
            elif how == "cursor first":
                cursor.load_state_dict(position)
                other.optimizer.load_state_dict(run.optimizer.state_dict())
            elif how == "optimizer first":
                other.optimizer.load_state_dict(run.optimizer.state_dict())
                cursor.load_state_dict(position)
            else:
                cursor.load_state_dict(position)
                other.optimizer.load_state_dict(own)
            found.append((cursor.position, train(other, cursor, 2)))
        return found

    results = run_ranks(3, blocks)
    for case in range(4):
        before = results[0][case][0]
        assert 0 < before < 700
        seen = [sample for rank in range(3) for sample in results[rank][case][1]]
        assert len(seen) == 700 - before + 700
        assert set(seen) == set(range(700))


def test_a_joiner_gets_samples_for_a_block_longer_than_every_workers():
    """The slow ones were lost, and the next block makes up for what the fast one took more."""
    schedule = own_schedule(5)
    schedule.begin_next(0, 0.0)
    schedule.follow({0: 8}, 0, taken=8.0, seconds=8.0)
    assert (schedule.length, schedule.own) == (11, 8)
    joiner = own_schedule(5)
    joiner.begin(schedule.start, schedule.length)
    joiner.load_state(schedule.to_state(), 1)
    assert schedule.steps_of([0, 1]) == joiner.steps_of([0, 1]) == {0: 8, 1: joiner.own}


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda inner: mh.LocalSGD(inner, every=EVERY, fragments=2), "the model at the end"),
        (lambda inner: mh.LocalSGD(inner, every=EVERY, overlap=2), "overlap must be less than"),
        (lambda _: Seconds(8, own_steps="yes"), "own_steps must be True or False"),
        (lambda inner: mh.LocalSGD(inner).count_samples(1.5), "samples must be a whole number"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make(SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def test_a_crew_of_one_has_blocks_of_the_stated_time():
    clock = Clock()
    try:
        param = nn.Parameter(torch.zeros(3))
        optimizer = mh.DiLoCo(SGD([param], lr=1.0), every=EVERY, crew=mh.Crew())
        rounds = []
        for _ in range(28):
            clock.now += 1.0
            param.grad = torch.ones(3)
            optimizer.step()
            rounds.append(optimizer.rounds)
        optimizer.finish()
    finally:
        import time

        _round.time = time
    assert [rounds.index(number) + 1 for number in (1, 2, 3, 4)] == [4, 12, 20, 28]
    assert optimizer.steps == 28


def test_a_round_that_is_repeated_is_merged_at_once(monkeypatch):
    monkeypatch.setattr(_round, "time", _round.time)  # restores it
    clock, crew = Clock(), mh.Crew()
    settle, answers = crew.settle, iter([True, True, False])
    monkeypatch.setattr(crew, "settle", lambda arrived, _: settle(arrived and next(answers, True)))
    param = nn.Parameter(torch.zeros(3))
    optimizer = mh.LocalSGD(SGD([param], lr=1.0), every=EVERY, crew=crew)
    for seconds in [1.0] * 4 + [100.0] * 3:  # the second block ends early: 1 step of 8
        clock.now += seconds
        param.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.snapshot()["undone"] == 1
    assert optimizer.own_steps < optimizer.steps
    assert not optimizer._sync.state.diverged and not optimizer._sync.pending


# -- the schedule by itself ------------------------------------------------------------------------


def test_the_table_of_the_docstring():
    schedule = own_schedule(4)
    schedule.plan = {0: 6}
    assert [schedule.count(0, in_flight=False, elapsed=0.0) for _ in range(6)] == [0, 1, 2, 2, 3, 4]
    assert schedule.ends(4) and schedule.due(4) == [0]


@given(
    length=st.integers(1, 60),
    plan=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    begin=st.integers(0, 1000),
)
def test_all_workers_count_to_the_same_number_and_get_there_with_their_last_step(
    length, plan, begin
):
    ends = set()
    for rank in range(len(plan)):
        schedule = own_schedule(length, start=begin)
        schedule.follow(dict(enumerate(plan)), rank, taken=0.0, seconds=1.0)
        count = begin
        for number in range(1, plan[rank] + 1):
            before, count = count, schedule.count(count, in_flight=False, elapsed=0.0)
            assert before <= count <= begin + schedule.length
            assert schedule.ends(count) == (number == plan[rank])
            assert (count == begin + schedule.length) == (number == plan[rank])
        ends.add(count)
    assert len(ends) == 1


@given(
    blocks=st.lists(
        st.tuples(st.lists(st.integers(1, 40), min_size=3, max_size=3), st.integers(0, 5)),
        min_size=1,
        max_size=30,
    )
)
def test_the_common_count_is_the_mean_of_the_steps_whatever_the_workers_do(blocks):
    """Some end a block early: the count makes up for it in the next one."""
    schedule, trained, plan = own_schedule(10), 0.0, [10, 10, 10]
    for wanted, missing in blocks:
        taken = [max(1, n - missing) for n in plan]
        trained += sum(taken) / 3
        schedule.begin_next(0, 0.0)
        plan = wanted
        schedule.follow(dict(enumerate(plan)), 0, sum(taken) / 3, 1.0)
        assert schedule.ahead == pytest.approx(trained - schedule.start)
        # A block has at least one step, so the count may stay ahead for some blocks.
        assert trained - schedule.start > -5 * len(blocks) - 1
    for _ in range(40):
        schedule.begin_next(0, 0.0)
        trained += sum(plan) / 3
        schedule.follow(dict(enumerate(plan)), 0, sum(plan) / 3, 1.0)
    if sum(plan) / 3 >= 8:
        assert abs(trained - schedule.start) <= 40
    assert schedule.start <= trained + 5 * len(blocks) + 1
