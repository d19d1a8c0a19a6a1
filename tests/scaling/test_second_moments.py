"""Adam divides by the roots of second moments that belong to the present batch."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import manyhands as mh
from helpers.ranks import on_ranks
from manyhands.ramp import _decision, _ramp
from manyhands.scaling import LoopPort
from manyhands.scaling._noise import ratio_of_squares
from manyhands.scaling._preconditioned import rescale_second_moments

NOISE = 8.0


def gradients(passes, generator):
    """Return a step's gradients: 1 and noise, for 1,000 weights."""
    return 1.0 + NOISE * torch.randn(passes, 1000, generator=generator)


def second_moments(passes_of_steps):
    """Return Adam's mean second moment after steps of so many passes."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(1000))
    optimizer = Adam([param], lr=1e-6)
    for passes in passes_of_steps:
        param.grad = gradients(passes, generator).mean(dim=0)
        optimizer.step()
    return optimizer, float(optimizer.state[param]["exp_avg_sq"].mean())


@pytest.mark.quick
def test_they_become_those_of_a_run_that_had_the_batch_all_along():
    _, small = second_moments([1] * 200)
    _, large = second_moments([16] * 200)
    ratio = ratio_of_squares(1.0, NOISE**2, 1.0, 16.0)
    assert large / small == pytest.approx(ratio, rel=0.02)
    optimizer, _ = second_moments([1] * 200)
    assert rescale_second_moments(optimizer, ratio)
    (state,) = optimizer.state.values()
    assert float(state["exp_avg_sq"].mean()) == pytest.approx(large, rel=0.02)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (lambda p: AdamW(p, amsgrad=True), {"exp_avg_sq", "max_exp_avg_sq"}),
        (RMSprop, {"square_avg"}),
        (lambda p: RMSprop(p, centered=True), set()),  # may not fall below the mean's square
        (lambda p: SGD(p, lr=0.1, momentum=0.9), set()),
    ],
)
def test_running_means_of_squares_are_changed_and_means_by_the_root(make, changed):
    param = nn.Parameter(torch.ones(3))
    optimizer = make([param])
    param.grad = torch.ones(3)
    optimizer.step()
    before = {
        k: torch.as_tensor(v).clone() for k, v in optimizer.state[param].items() if v is not None
    }
    assert rescale_second_moments(optimizer, 0.25) is bool(changed)
    for name, was in before.items():
        now = torch.as_tensor(optimizer.state[param][name])
        factor = 0.25 if name in changed else 0.5 if name == "exp_avg" else 1.0
        assert torch.equal(now, was * factor), name


@pytest.mark.quick
def test_a_batch_that_grows_does_not_enlarge_the_noise_that_the_mean_remembers():
    """The update m / sqrt(v) is as large after the change as before it."""
    optimizer, _ = second_moments([1] * 200)
    (state,) = optimizer.state.values()
    before = state["exp_avg"] / state["exp_avg_sq"].sqrt()
    rescale_second_moments(optimizer, 1 / 16)
    torch.testing.assert_close(state["exp_avg"] / state["exp_avg_sq"].sqrt(), before)


def ramped(rule, inner, **options):
    """Train with a batch of 1 pass, then of 16; return Adam's mean second moment."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(1000))
    optimizer = rule(inner([param], lr=1e-6))
    ramp = mh.Ramp(optimizer, 16, goal="steps", **options)
    for _ in range(80):
        passes = ramp.passes
        for grad in gradients(passes, generator):
            (param * grad / passes).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ramp.passes == 16
    (state,) = optimizer.optimizer.state.values()
    return float(state["exp_avg_sq"].mean() / (1.0 - 0.999**80))


@pytest.mark.parametrize("rule", [mh.AdamScale, mh.SqrtScale])
def test_a_ramp_lets_them_follow_the_batch(rule, monkeypatch):
    monkeypatch.setattr(_ramp, "EVERY", 40)
    monkeypatch.setattr(_ramp, "GROWTH", 16.0)
    monkeypatch.setattr(_decision, "GROWTH", 16.0)
    expected = 1.0 + NOISE**2 / 16
    assert ramped(rule, AdamW) == pytest.approx(expected, rel=0.15)
    monkeypatch.setattr(LoopPort, "follow_batch", lambda *batch: True)
    assert ramped(rule, AdamW) > 5 * expected  # so it makes a difference


@on_ranks(2)
def test_a_rank_with_an_empty_shard_waits_for_nobody():
    """A model of one element, which only one of two ranks holds the moments of."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    shards = mh.OSS(model.parameters(), optim=AdamW, lr=1e-3)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = mh.AdamScale(shards)
    ramp = mh.Ramp(optimizer, 8, goal="steps", model=parallel)
    for micro_batches in ramp.over(torch.randn(40, 4, 1)):
        for x in micro_batches:
            (parallel(x).square().mean() / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ramp.passes == 4
