"""With a gradient scaler: the loss scale stays out of the statistics, overflows out of the run."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.scaling_oracle import OPTIMIZERS, loss_of, make_batches, make_model, two_groups

STEPS = 6


def scaler(**options):
    return GradScaler("cpu", init_scale=1024.0, growth_interval=2, **options)


INNERS = {
    **OPTIMIZERS,
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


def run(inner, way, overflow_at=(), scale=True, passes=2):
    """Train; `way` says how the scaler is used. Returns parameters, statistics, snapshot."""
    model = make_model()
    amp = scaler(enabled=scale)
    options = {"num_gradients_to_accumulate": passes}
    if way != "passed on by step":
        options["grad_scaler"] = amp
    optimizer = mh.AdaScale(INNERS[inner](two_groups(model)), **options)
    x, y = make_batches(STEPS, passes)
    gains = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for a in range(passes):
            loss = loss_of(model, x[step, a], y[step, a]) / passes
            if step in overflow_at and scale:
                loss = loss * torch.inf
            amp.scale(loss).backward()
        if way == "gain before step":
            gains.append(optimizer.gain())
        if way == "unscaled and clipped":
            amp.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        if step in overflow_at and not scale:
            continue  # what a scaler does with a step that overflowed
        amp.step(optimizer)
        amp.update()
    return model, optimizer, gains


@pytest.mark.parametrize("way", ["passed on by step", "gain before step", "unscaled and clipped"])
@pytest.mark.parametrize("inner", INNERS)
def test_a_loss_scale_changes_nothing(inner, way):
    """The scale grows every second step here, by a power of two."""
    model, optimizer, gains = run(inner, way)
    plain_model, plain, plain_gains = run(inner, way, scale=False)
    assert optimizer.noise.raw_sqr == pytest.approx(plain.noise.raw_sqr, rel=1e-12)
    assert optimizer.noise.raw_var == pytest.approx(plain.noise.raw_var, rel=1e-12)
    assert gains == pytest.approx(plain_gains, rel=1e-12)
    params = [list(each.parameters()) for each in (model, plain_model)]
    torch.testing.assert_close(*params, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ["passed on by step", "gain before step", "unscaled and clipped"])
@pytest.mark.parametrize("inner", INNERS)
def test_an_overflowed_step_is_skipped_by_the_optimizer_and_the_statistics(inner, way):
    model, optimizer, _ = run(inner, way, overflow_at=(1, 3))
    plain_model, plain, _ = run(inner, way, overflow_at=(1, 3), scale=False)
    state, expected = optimizer.state_dict()["manyhands"], plain.state_dict()["manyhands"]
    assert state["skipped"] == 2
    assert state["nonfinite"] == 2
    assert state["progress"] == pytest.approx(expected["progress"], rel=1e-9)
    assert optimizer.noise.raw_var == pytest.approx(plain.noise.raw_var, rel=1e-9)
    params = [list(each.parameters()) for each in (model, plain_model)]
    torch.testing.assert_close(*params, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("inner", INNERS)
def test_the_bare_optimizer_under_a_scaler_is_matched_bitwise(inner):
    bare = make_model()
    optimizer, amp = INNERS[inner](two_groups(bare)), scaler()
    x, y = make_batches(STEPS, 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(bare, x[step, 0], y[step, 0]) * (torch.inf if step == 2 else 1)
        amp.scale(loss).backward()
        amp.step(optimizer)
        amp.update()
    ours, _, _ = run(inner, "passed on by step", overflow_at=(2,), passes=1)
    assert all(map(torch.equal, ours.parameters(), bare.parameters()))


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (lambda amp, optimizer: amp.unscale_(optimizer), "grad_scaler=scaler"),
        (lambda amp, optimizer: optimizer.gain(), r"gain\(\) was read before scaler.step\(\)"),
    ],
    ids=["unscale_ before step", "gain before step"],
)
def test_a_scale_that_the_statistics_cannot_know_is_an_error(then, message):
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=2)
    amp = scaler()
    x, y = make_batches(1, 2)
    for a in range(2):
        amp.scale(loss_of(model, x[0, a], y[0, a]) / 2).backward()
    then(amp, optimizer)
    with pytest.raises(RuntimeError, match=message):
        amp.step(optimizer)


def test_consecutive_gradients_of_different_scales_are_not_compared_unless_the_scaler_is_known():
    for options in ({}, {"known": True}):
        model = make_model()
        amp = GradScaler("cpu", init_scale=1024.0, growth_interval=1)  # changes at every step
        known = {"grad_scaler": amp} if options else {}
        optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=2.0, **known)
        x, y = make_batches(4, 1)
        for step in range(4):
            optimizer.zero_grad()
            amp.scale(loss_of(model, x[step, 0], y[step, 0])).backward()
            amp.step(optimizer)
            amp.update()
        assert (optimizer.noise.raw_var != (0.0,)) == bool(options)


def test_workers_skip_together():
    def train():
        rank = torch.distributed.get_rank()
        model = make_model()
        wrapped = DistributedDataParallel(model)
        amp = scaler()
        optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = make_batches(4, 2)
        for step in range(4):
            optimizer.zero_grad()
            overflow = torch.inf if step == 1 and rank == 1 else 1.0  # on one rank only
            amp.scale(loss_of(wrapped, x[step, rank], y[step, rank]) * overflow).backward()
            amp.step(optimizer)
            amp.update()
        return [optimizer.snapshot()["skipped"], optimizer.progress, amp.get_scale()]

    first, second = run_ranks(2, train)
    assert first == second
    assert first[0] == 1


@pytest.mark.parametrize("where", ["alone", "on one of two workers"])
def test_without_a_scaler_a_non_finite_gradient_steps_but_leaves_the_statistics_alone(where):
    def train():
        ranked = torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if ranked else 0
        passes = 1 if ranked else 2
        model = make_model()
        wrapped = DistributedDataParallel(model) if ranked else model
        optimizer = mh.AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=passes
        )
        x, y = make_batches(14, 2)
        x[2, 1] = torch.nan
        before = None
        for step in range(14):
            optimizer.zero_grad()
            for a in range(passes):
                loss_of(wrapped, x[step, rank + a], y[step, rank + a]).backward()
            if step == 2:
                before = optimizer._core.history.average
            try:
                optimizer.step()
            except RuntimeError as error:
                assert "not finite" in str(error)
                return [step, optimizer.snapshot()["nonfinite"], optimizer.noise == before]
        return []

    results = [train()] if where == "alone" else run_ranks(2, train)
    for result in results:  # the parameters are NaN from step 2 on; the tenth such step is 11
        assert result == [11, 10, True]
