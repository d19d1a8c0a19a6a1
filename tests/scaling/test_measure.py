"""NoiseScale measures a loop and changes nothing in it."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from oracle import OPTIMIZERS, TrunkAndExtra, loss_of, make_batches, make_model
from ranks import raises_on_ranks, run_ranks


class Known(nn.Module):
    """Gradients of |true gradient|^2 = 1 with noise of trace 36 per sample."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(25))

    def forward(self, samples):
        noise = torch.randn(samples, 25) * math.sqrt(36 / 25)
        return ((noise + 0.2) * self.weight).sum(dim=1).mean()


@pytest.mark.parametrize("passes", [2, 4])
def test_the_noise_scale_is_the_ratio_of_noise_and_signal_in_samples(passes):
    model = Known()
    noise = mh.NoiseScale(
        model.parameters(), batch_size=9, num_gradients_to_accumulate=passes, smoothing=0.999
    )
    for _ in range(1500):
        model.zero_grad()
        for _ in range(passes):
            (model(9) / passes).backward()
    assert noise.noise_scale == pytest.approx(36.0, abs=4 * noise.standard_error)
    assert 0.5 < noise.standard_error < 5.0
    assert noise.variance == pytest.approx(4.0, rel=0.05)
    assert noise.squared_norm == pytest.approx(1.0, rel=0.15)
    assert noise.steps == 1500
    assert "samples" in repr(noise)


def test_the_standard_error_is_that_of_repeated_measurements():
    measured, claimed = [], []
    for seed in range(16):
        torch.manual_seed(seed)
        model = Known()
        noise = mh.NoiseScale(
            model.parameters(), batch_size=9, num_gradients_to_accumulate=4, smoothing=0.999
        )
        for _ in range(250):
            model.zero_grad()
            for _ in range(4):
                (model(9) / 4).backward()
        measured.append(noise.noise_scale)
        claimed.append(noise.standard_error)
    spread = float(torch.tensor(measured).std())
    assert spread / 1.6 < sum(claimed) / len(claimed) < spread * 1.6


def test_consecutive_gradients_are_compared_where_a_step_has_one():
    model = Known()
    noise = mh.NoiseScale(model.parameters(), batch_size=9, smoothing=0.999)
    for _ in range(3000):
        model.zero_grad()
        model(9).backward()
    assert noise.steps == 2999
    assert noise.noise_scale == pytest.approx(36.0, abs=5 * noise.standard_error)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_changes_nothing(name):
    """With it, training is bitwise the same; and it lives beside a scaling rule."""
    models = make_model(), make_model()
    x, y = make_batches(5, 2)
    for model, watched in zip(models, (True, False), strict=True):
        optimizer = mh.LinearScale(
            OPTIMIZERS[name](model.parameters()), num_gradients_to_accumulate=2
        )
        noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=2) if watched else None
        for step in range(5):
            optimizer.zero_grad()
            for a in range(2):
                (loss_of(model, x[step, a], y[step, a]) / 2).backward()
            optimizer.step()
    assert noise is None
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


def on_two_workers():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    noise = mh.NoiseScale(optimizer, batch_size=4)
    scaled = copy.deepcopy(model)
    x, y = make_batches(6, 2)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(wrapped, x[step, dist.get_rank()], y[step, dist.get_rank()]).backward()
        optimizer.step()
    assert scaled is not None
    assert noise._steps == 5  # the last one is read when asked for
    return [noise.noise_scale, noise.standard_error, noise.steps]


def test_every_worker_reads_the_same():
    first, second = run_ranks(2, on_two_workers)
    assert first == second
    assert first[2] == 6


def test_before_and_without_a_signal():
    model = Known()
    noise = mh.NoiseScale(model.parameters(), num_gradients_to_accumulate=2)
    assert math.isnan(noise.noise_scale)
    assert math.isnan(noise.standard_error)
    assert noise.snapshot() == {"noise_scale": None, "noise_scale_error": None}
    for sign in (1.0, -1.0) * 3:
        (model.weight.sum() * sign).backward()
        if sign < 0:
            model.zero_grad()
    assert noise.noise_scale == math.inf
    assert noise.standard_error == math.inf


def test_non_finite_gradients_are_left_out():
    model = Known()
    noise = mh.NoiseScale(model.parameters(), num_gradients_to_accumulate=2)
    for step in range(4):
        model.zero_grad()
        for _ in range(2):
            (model(400) * (math.nan if step == 1 else 1.0)).backward()
    assert math.isfinite(noise.noise_scale)
    assert (noise.steps, noise.nonfinite) == (3, 1)


def test_accumulation_that_was_not_declared_is_warned_of_once():
    """It measures: it must not stop a training run."""
    model = Known()
    noise = mh.NoiseScale(model.parameters())
    with pytest.warns(UserWarning, match="num_gradients_to_accumulate=1") as warned:
        for _ in range(5):
            model(4).backward()
    assert len(warned) == 1
    noise.unhook()
    model(4).backward()


def test_with_an_optimizer_a_backward_that_no_step_follows_leaves_no_trace():
    readings = []
    for abandoned in (False, True):
        torch.manual_seed(0)
        model = Known()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        noise = mh.NoiseScale(optimizer)
        for _ in range(8):
            optimizer.zero_grad()
            if abandoned:
                state = torch.get_rng_state()
                (model(4) * 100).backward()
                model.zero_grad()
                torch.set_rng_state(state)
            model(4).backward()
            optimizer.step()
        readings.append((noise.steps, noise.variance, noise.squared_norm))
    assert readings[0] == readings[1]
    assert readings[0][0] == 7


def disagreeing(what):
    model = make_model()
    rank = dist.get_rank()
    if what == "passes":
        mh.NoiseScale(model.parameters(), num_gradients_to_accumulate=1 + rank)
    else:
        mh.NoiseScale(list(model.parameters())[rank:])


@pytest.mark.parametrize("what", ["passes", "parameters"])
def test_workers_that_measure_different_things(what):
    raises_on_ranks(2, ValueError, disagreeing, what, match="disagree on the num", timeout=10)


def measures_what_one_rank_does_not_use():
    model = TrunkAndExtra()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.extra.parameters(), lr=0.1)
    noise = mh.NoiseScale(optimizer)
    for _ in range(3):
        model.zero_grad()
        wrapped(torch.ones(2, 3), extra=dist.get_rank() == 0).backward()
        optimizer.step()
    return noise.steps


def steps_too_early():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=2)
    x, y = make_batches(1, 2)
    loss_of(wrapped, x[0, dist.get_rank()], y[0, dist.get_rank()]).backward()
    optimizer.step()
    return noise.steps


def test_a_step_before_all_passes_is_left_out():
    assert run_ranks(2, steps_too_early) == [0, 0]


def test_a_rank_that_does_not_use_the_parameters():
    assert run_ranks(2, measures_what_one_rank_does_not_use) == [3, 3]


@pytest.mark.parametrize(
    "arguments",
    [{"batch_size": 0}, {"smoothing": 1.0}, {"num_gradients_to_accumulate": 0}],
)
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        mh.NoiseScale(Known().parameters(), **arguments)
    with pytest.raises(ValueError, match="no parameters"):
        mh.NoiseScale([])
