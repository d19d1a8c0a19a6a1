"""What a step's time goes into: that each second is counted once, and where."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import run_ranks

PAUSE = 0.05


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def seconds(timing):
    return {key.removesuffix("_seconds"): value for key, value in timing.snapshot().items()}


@pytest.mark.parametrize("wrap", [lambda o: o, mh.AdaScale, lambda o: mh.LocalSGD(o, every=2)])
def test_each_second_is_counted_once(clock, wrap):
    model = torch.nn.Linear(4, 1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.register_step_pre_hook(lambda *_: None)
    timing = mh.StepTiming(optimizer)
    inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
    timing.snapshot()

    def batches():
        for _ in range(3):
            clock.pass_by(1.0)
            yield torch.ones(2, 4)

    for batch in timing.loading(batches()):
        clock.pass_by(2.0)
        model(batch).mean().backward()
        clock.pass_by(4.0)  # clipping, or waiting for other ranks
        handle = inner.register_step_pre_hook(lambda *_: clock.pass_by(8.0))
        optimizer.step()
        handle.remove()
        optimizer.zero_grad()
        clock.pass_by(16.0)  # an evaluation
        assert seconds(timing) == {"loading": 1.0, "compute": 2.0, "sync": 4.0, "update": 8.0}


def test_the_steps_between_two_lines_are_summed(clock):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timing = mh.StepTiming(optimizer)
    for _ in range(5):
        for _ in range(2):  # passes
            clock.pass_by(1.0)
            model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    assert seconds(timing) == {"loading": 0.0, "compute": 10.0, "sync": 0.0, "update": 0.0}


def test_a_closure_is_part_of_the_update(clock):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    timing = mh.StepTiming(optimizer)

    def closure():
        clock.pass_by(1.0)
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert seconds(timing) == {"loading": 0.0, "compute": 0.0, "sync": 0.0, "update": 1.0}


def test_waiting_for_a_late_rank_is_not_compute():
    def train():
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        timing = mh.StepTiming(optimizer)
        for step in range(3):  # in its second DDP agrees on its buckets
            timing.snapshot()
            if step == 2 and dist.get_rank() == 1:
                time.sleep(1.0)
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            found = seconds(timing)
        return found["compute"], found["sync"]

    (early, waited), (late, _) = run_ranks(2, train)
    assert waited > 0.8 > early
    assert late > 0.8


def test_it_goes_with_its_last_reference():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timing = mh.StepTiming(optimizer)
    del timing
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()


def test_an_optimizer_that_trains_nothing_is_refused():
    frozen = torch.nn.Linear(4, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        mh.StepTiming(torch.optim.SGD(frozen.parameters(), lr=0.1))
