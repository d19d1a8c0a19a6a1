"""`measure_every=k`, saved and changed between two measured steps.

The oracle is the run that goes on, or that measures in the same steps without the change.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

import manyhands as mh
from helpers.measured_steps import (
    SETTLED,
    SMOOTHING,
    STEPS,
    K,
    adascale,
    is_measured,
    settle_soon,
    train,
)
from helpers.ranks import on_ranks, run_ranks
from helpers.scaling_oracle import loss_of, make_batches, make_model


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    settle_soon(monkeypatch)


# -- saving and loading -------------------------------------------------------------------------


def params_of(model):
    return [p.detach().clone() for p in model.parameters()]


def saved_and_continued(rule, passes, stop):
    whole, state = [], None
    for model, optimizer in train(rule, passes):
        whole.append(params_of(model))
        if optimizer.snapshot()["step"] == stop:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state = copy.deepcopy(state)
    # the option comes from the state dict
    continued = train(rule, passes, load=state, measure_every=None, smoothing=None)
    parts = [params_of(model) for model, _ in continued]
    torch.testing.assert_close(parts, whole[stop:], rtol=0, atol=0)


@pytest.mark.sample("AdaScale-1-9", "AdaScale-2-10", "AdamScale-1-12", "AdamScale-2-16")
@pytest.mark.parametrize("stop", [SETTLED, SETTLED + 1, SETTLED + 2, SETTLED + 3, SETTLED + 7])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rule", ["AdaScale", "AdamScale"])
@on_ranks("workers")
def test_a_run_that_was_saved_between_two_measured_steps_continues_bitwise(rule, workers, stop):
    saved_and_continued(rule, 3 - workers, stop)


@on_ranks(2)
def test_a_state_saved_in_the_middle_of_a_step_is_that_before_it():
    *_, (model, optimizer) = train("AdaScale", 1, steps=SETTLED + 2)
    before = optimizer.scaling_state_dict()["schedule"]
    optimizer.zero_grad()
    wrapped = DDP(model)
    wrapped(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
    during = optimizer.scaling_state_dict()["schedule"]
    optimizer.step()
    assert list(before) == list(during) == [1, 1]
    assert list(optimizer.scaling_state_dict()["schedule"]) == [0, 2]


def test_a_state_from_between_is_loaded_where_every_step_is_measured():
    *_, (model, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.unhook()
    optimizer = mh.AdaScale(optimizer.optimizer)
    optimizer.load_state_dict(state)
    idle = []
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(optimizer.passes):
            (model(torch.randn(4, 3, dtype=torch.float64)).square().mean() / 2).backward()
        optimizer.step()
        idle.append(optimizer._core.measurement.hooks.idle)
    assert idle == [True, False, False, False]


def test_another_number_of_workers_goes_on_from_the_same_position():
    *_, (model, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def go():
        return [
            optimizer._core.measurement.hooks.idle
            for _, optimizer in train("AdaScale", 1, load=state, measure_every=None)
        ]

    expected = [not is_measured(step) for step in range(SETTLED + 2, STEPS)]
    assert run_ranks(3, go) == [expected] * 3


# -- changes in the middle ----------------------------------------------------------------------


def test_passes_that_change_between_two_measured_steps():
    def go():
        model = make_model()
        wrapped = DDP(model)
        optimizer = adascale(model, 1)
        x, y = make_batches(STEPS, 4)
        idle = []
        for step in range(STEPS):
            optimizer.zero_grad()
            passes = 1 if step < SETTLED + 2 else 2
            if step == SETTLED + 2:
                optimizer.set_num_gradients_to_accumulate(2, update_smoothing=False)
            for a in range(passes):
                with wrapped.no_sync() if a < passes - 1 else contextlib.nullcontext():
                    i = 2 * dist.get_rank() + a
                    (loss_of(wrapped, x[step, i], y[step, i]) / passes).backward()
            optimizer.step()
            idle.append(optimizer._core.measurement.hooks.idle)
        return idle

    assert run_ranks(2, go) == [[not is_measured(step) for step in range(STEPS)]] * 2


def with_bad_step(bad, scaler=None):
    """Which steps are idle, if the gradients of step `bad` are not finite; and the snapshots."""
    model = make_model()
    optimizer = mh.AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.0),  # parameters stay as they are
        num_gradients_to_accumulate=2,
        smoothing=SMOOTHING,
        measure_every=K,
        grad_scaler=scaler,
    )
    x, y = make_batches(STEPS + 6, 2)
    idle, seen = [], []
    for step in range(STEPS + 6):
        optimizer.zero_grad()
        for a in range(2):
            loss = loss_of(model, x[step, a], y[step, a]) / 2
            loss = loss * (float("nan") if step == bad else 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
            for p in model.parameters():
                p.data.nan_to_num_()
        else:
            scaler.step(optimizer)
            scaler.update()
        idle.append(optimizer._core.measurement.hooks.idle)
        seen.append(optimizer.snapshot())
    return idle, seen


def test_a_non_finite_gradient_in_a_step_that_is_not_measured_is_not_seen():
    idle, seen = with_bad_step(SETTLED + 1)
    assert idle == [not is_measured(step) for step in range(STEPS + 6)]
    assert seen[-1]["nonfinite"] == 0
    assert 1.0 <= seen[-1]["gain"] <= 2.0


def test_after_a_non_finite_gradient_in_a_measured_step_each_is_measured_until_one_is_finite():
    bad = SETTLED + K
    idle, seen = with_bad_step(bad)
    expected = [not is_measured(step) for step in range(bad + 1)]
    expected += [False, True, True, False]
    assert idle[: len(expected)] == expected
    assert seen[bad]["nonfinite"] == 1 and seen[-1]["nonfinite"] == 1
    assert seen[bad]["gain"] == seen[bad - 1]["gain"]


@pytest.mark.parametrize("bad", [SETTLED + 1, SETTLED + K])
def test_a_scaler_skips_a_step_that_is_not_measured_too(bad):
    scaler = GradScaler("cpu", init_scale=8.0)
    _, seen = with_bad_step(bad, scaler)
    assert seen[bad]["skipped"] == seen[bad]["nonfinite"] == 1
    assert seen[bad]["progress"] == seen[bad - 1]["progress"]
    assert seen[-1]["skipped"] == 1


def test_an_added_group_is_measured_from_the_next_measured_step_on():
    *_, (model, optimizer) = train("AdaScale", 2, steps=SETTLED + 2)
    more = torch.nn.Linear(3, 2).double()
    optimizer.add_param_group({"params": list(more.parameters())})
    idle = []
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(4, 3, dtype=torch.float64)
            ((model(x) + more(x)).square().mean() / 2).backward()
        optimizer.step()
        idle.append(optimizer._core.measurement.hooks.idle)
    assert idle == [True, False, False, False, False, False]  # it holds few steps
    assert optimizer.gain(2) > 1.0
