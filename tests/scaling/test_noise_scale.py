"""NoiseScale measures a loop and changes nothing in it."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks
from helpers.scaling_oracle import OPTIMIZERS, TrunkAndExtra, loss_of, make_batches, make_model


class Known(nn.Module):
    """Gradients of |true gradient|^2 = 1 with noise of trace 36 per sample."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(25))

    def forward(self, samples):
        noise = torch.randn(samples, 25) * math.sqrt(36 / 25)
        return ((noise + 0.2) * self.weight).sum(dim=1).mean()


def train(model, optimizer, steps, passes=1):
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            (model(9) / passes).backward()
        optimizer.step()


def measure(model, steps, passes=1, **options):
    """A NoiseScale after some steps at learning rate 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=passes, **options)
    train(model, optimizer, steps, passes)
    return noise


@pytest.mark.parametrize("passes", [2, 4])
def test_the_noise_scale_is_the_ratio_of_noise_and_signal_in_samples(passes):
    noise = measure(Known(), 1500, passes, batch_size=9, smoothing=0.999)
    assert noise.noise_scale == pytest.approx(36.0, abs=4 * noise.standard_error)
    assert 0.5 < noise.standard_error < 5.0
    assert noise.variance == pytest.approx(4.0, rel=0.05)
    assert noise.squared_norm == pytest.approx(1.0, rel=0.15)
    assert noise.steps == 1500
    assert "samples" in repr(noise)


@pytest.mark.long
def test_the_standard_error_is_that_of_repeated_measurements():
    measured, claimed = [], []
    for seed in range(16):
        torch.manual_seed(seed)
        noise = measure(Known(), 250, 4, batch_size=9, smoothing=0.999)
        measured.append(noise.noise_scale)
        claimed.append(noise.standard_error)
    spread = float(torch.tensor(measured).std())
    assert spread / 1.6 < sum(claimed) / len(claimed) < spread * 1.6


def test_consecutive_gradients_are_compared_where_a_step_has_one():
    noise = measure(Known(), 3000, batch_size=9, smoothing=0.999)
    assert noise.steps == 2999
    assert noise.noise_scale == pytest.approx(36.0, abs=5 * noise.standard_error)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_changes_nothing(name):
    """With it, training is bitwise the same; and it lives beside a scaling rule."""
    models = make_model(), make_model()
    x, y = make_batches(5, 2)
    for model, watched in zip(models, (True, False), strict=True):
        inner = OPTIMIZERS[name](model.parameters())
        optimizer = mh.LinearScale(inner, num_gradients_to_accumulate=2)
        noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=2) if watched else None
        for step in range(5):
            optimizer.zero_grad()
            for a in range(2):
                (loss_of(model, x[step, a], y[step, a]) / 2).backward()
            optimizer.step()
    assert noise is None
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_every_worker_reads_the_same():
    def measured():
        model = make_model()
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        noise = mh.NoiseScale(optimizer, batch_size=4)
        x, y = make_batches(6, 2)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(wrapped, x[step, dist.get_rank()], y[step, dist.get_rank()]).backward()
            optimizer.step()
        assert noise._steps == 5  # the last one is read when asked for
        return [noise.noise_scale, noise.standard_error, noise.steps]

    first, second = run_ranks(2, measured)
    assert first == second
    assert first[2] == 6


def test_results_before_any_step_and_without_a_signal():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=2)
    assert math.isnan(noise.noise_scale)
    assert math.isnan(noise.standard_error)
    assert noise.snapshot() == {"simple_noise_scale": None, "simple_noise_scale_error": None}
    for sign in (1.0, -1.0) * 3:
        (model.weight.sum() * sign).backward()
        if sign < 0:
            optimizer.step()
            model.zero_grad()
    assert noise.noise_scale == math.inf
    assert noise.standard_error == math.inf


def test_non_finite_gradients_are_left_out():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=2)
    for step in range(4):
        model.zero_grad()
        for _ in range(2):
            (model(400) * (math.nan if step == 1 else 1.0)).backward()
        optimizer.step()
        model.weight.detach().zero_()
    assert math.isfinite(noise.noise_scale)
    assert (noise.steps, noise.nonfinite) == (3, 1)


def test_undeclared_accumulation_warns_once():
    """It measures: it must not stop a training run."""
    model = Known()
    noise = mh.NoiseScale(torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.warns(UserWarning, match="num_gradients_to_accumulate=1") as warned:
        for _ in range(5):
            model(4).backward()
    assert len(warned) == 1
    noise.unhook()
    model(4).backward()


def test_with_an_optimizer_a_backward_without_a_step_is_ignored():
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


@pytest.mark.parametrize("what", ["passes", "parameters"])
@on_ranks(2, raises=ValueError, match="have different num", timeout=10)
def test_workers_that_measure_different_things(what):
    model = make_model()
    rank = dist.get_rank()
    if what == "passes":
        mh.NoiseScale(torch.optim.SGD(model.parameters()), num_gradients_to_accumulate=1 + rank)
    else:
        mh.NoiseScale(torch.optim.SGD(list(model.parameters())[rank:]))


def steps_too_early():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=2)
    x, y = make_batches(1, 2)
    loss_of(wrapped, x[0, dist.get_rank()], y[0, dist.get_rank()]).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"skips a step: step\(\) after 1 of 2 backward"):
        return noise.steps


def test_a_step_before_all_passes_is_left_out_with_a_warning():
    assert run_ranks(2, steps_too_early) == [0, 0]
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=4)
    with pytest.warns(UserWarning, match=r"skips a step: step\(\) after 3 of 4") as warned:
        for _ in range(3):
            for _ in range(3):
                model(4).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(warned) == 1
    assert noise.steps == 0


def test_converted_parameters_are_no_longer_measured_and_warned_about():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = mh.NoiseScale(optimizer)
    model.double()
    model.weight.sum().backward()
    with pytest.warns(UserWarning, match="moved or converted"):
        optimizer.step()
    assert noise.steps == 0
    noise.unhook()
    optimizer.step()


@on_ranks(2)
def test_a_rank_that_does_not_use_the_parameters():
    model = TrunkAndExtra()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.extra.parameters(), lr=0.1)
    noise = mh.NoiseScale(optimizer)
    for _ in range(3):
        model.zero_grad()
        wrapped(torch.ones(2, 3), extra=dist.get_rank() == 0).backward()
        optimizer.step()
    assert noise.steps == 3


@pytest.mark.parametrize(
    "arguments",
    [{"batch_size": 0}, {"smoothing": 1.0}, {"num_gradients_to_accumulate": 0}],
)
def test_arguments_that_make_no_sense(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        mh.NoiseScale(torch.optim.SGD(Known().parameters()), **arguments)


# -- closures ----------------------------------------------------------------------------------


def measured(passes, closure, wrapped=None, steps=6, kind=torch.optim.SGD, **options):
    """A loop with all backward passes before `step`, or, as Lightning, the last one inside it."""
    ranked = dist.is_initialized()
    rank, workers = (dist.get_rank(), dist.get_world_size()) if ranked else (0, 1)
    model = make_model(torch.float64)
    network = DistributedDataParallel(model) if ranked else model
    inner = kind(model.parameters(), lr=0.01)
    optimizer = inner if wrapped is None else wrapped(inner, num_gradients_to_accumulate=passes)
    noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=passes, **options)
    x, y = make_batches(steps, workers * passes, dtype=torch.float64)
    for step in range(steps):

        def backward(a, step=step):
            if a == 0:
                optimizer.zero_grad()
            i = rank * passes + a
            loss = loss_of(network, x[step, i], y[step, i]) / passes
            loss.backward()
            return loss

        for a in range(passes - 1):
            backward(a)
        if closure == "by name":
            loss = optimizer.step(closure=lambda: backward(passes - 1))
        elif closure:
            loss = optimizer.step(lambda: backward(passes - 1))
        else:
            backward(passes - 1)
            optimizer.step()
        assert not closure or loss > 0
    seen = [noise.steps, noise.noise_scale, noise.standard_error, noise.variance]
    return seen, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("wrapped", [None, mh.AdaScale])
@pytest.mark.parametrize("closure", ["by place", "by name"])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_made_inside_step_by_a_closure_are_measured(passes, closure, wrapped):
    seen, params = measured(passes, closure, wrapped)
    same, plain = measured(passes, "", wrapped)
    assert seen == same
    assert seen[0] == (5 if passes == 1 else 6)
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(p, q)


def test_an_optimizer_that_evaluates_the_closure_often_is_measured_once_a_step():
    def run(watched):
        model = make_model(torch.float64)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
        noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=2) if watched else None
        x, y = make_batches(4, 2, dtype=torch.float64)
        calls = 0
        for step in range(4):

            def closure(step=step):
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                for a in range(2):
                    loss = loss_of(model, x[step, a], y[step, a]) / 2
                    loss.backward()
                return loss

            optimizer.step(closure)
        assert calls > 8
        return noise, [p.detach() for p in model.parameters()]

    noise, params = run(True)
    assert (noise.steps, noise.nonfinite) == (4, 0)
    for p, q in zip(params, run(False)[1], strict=True):
        assert torch.equal(p, q)


def test_a_closure_that_raises_leaves_no_trace():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = mh.NoiseScale(optimizer, num_gradients_to_accumulate=2)

    def wrong():
        model(4).backward()
        raise KeyError("data")

    with pytest.raises(KeyError):
        optimizer.step(wrong)
    optimizer.zero_grad()
    for _ in range(2):
        model(4).backward()
    optimizer.step()
    assert noise.steps == 1


# -- accumulation that changes, and runs that continue ----------------------------------------


def test_the_accumulation_can_change():
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = mh.NoiseScale(optimizer, batch_size=9, smoothing=0.999)
    for passes in (1, 2, 4):
        noise.set_num_gradients_to_accumulate(passes)
        train(model, optimizer, 600, passes)
    assert noise.steps == 1200  # those that compared consecutive gradients were left behind
    assert noise.noise_scale == pytest.approx(36.0, abs=4 * noise.standard_error)
    assert noise.variance == pytest.approx(4.0, rel=0.05)
    with pytest.raises(ValueError, match="num_gradients_to_accumulate must be a whole number"):
        noise.set_num_gradients_to_accumulate(0)
    model(9).backward()
    with pytest.raises(RuntimeError, match="in the middle of a step, after 1 of its"):
        noise.set_num_gradients_to_accumulate(2)


@on_ranks(2, raises=ValueError, match="different calls: rank 0: set_num_grad.*; rank 1: step")
def test_an_accumulation_that_changes_on_one_rank_only():
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = mh.NoiseScale(optimizer)
    x, y = make_batches(1, 2)
    if dist.get_rank() == 0:
        noise.set_num_gradients_to_accumulate(2)
        with wrapped.no_sync():
            loss_of(wrapped, x[0, 0], y[0, 0]).backward()
    loss_of(wrapped, x[0, 1], y[0, 1]).backward()
    optimizer.step()
    _ = noise.steps


def observed(noise):
    return [
        noise.steps, noise.nonfinite, noise.noise_scale, noise.standard_error, noise.variance,
        noise.squared_norm,
    ]  # fmt: skip


@pytest.mark.parametrize("passes", [1, 2])
def test_a_measurement_continues_bitwise(passes, tmp_path):
    def run(start, stop, noise, model, optimizer):
        for step in range(start, stop):
            optimizer.zero_grad()
            for a in range(passes):
                torch.manual_seed(10 * step + a)
                (model(9) * (math.nan if step == 2 else 1.0) / passes).backward()
            optimizer.step()

    def made():
        model = Known()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def no_step_along_nan(*_):
            model.weight.grad.nan_to_num_()

        optimizer.register_step_pre_hook(no_step_along_nan)
        options = {"batch_size": 9, "smoothing": 0.9, "num_gradients_to_accumulate": passes}
        return mh.NoiseScale(optimizer, **options), model, optimizer

    whole = made()
    run(0, 10, *whole)
    begun = made()
    run(0, 6, *begun)
    torch.save([begun[0].state_dict(), begun[1].state_dict()], tmp_path / "state")
    mine, of_model = torch.load(tmp_path / "state", weights_only=True)
    again = made()
    again[1].load_state_dict(of_model)
    again[0].load_state_dict(mine)
    assert observed(again[0]) == observed(begun[0])
    run(6, 10, *again)
    assert observed(again[0]) == observed(whole[0])
    assert repr(again[0]) == repr(whole[0])


def test_a_checkpoint_takes_the_measurement(tmp_path):
    model = Known()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noise = mh.NoiseScale(optimizer, batch_size=9)
    train(model, optimizer, 4)
    mh.save(tmp_path, model=model, optimizer=optimizer, noise=noise)
    again = mh.NoiseScale(torch.optim.SGD(Known().parameters()), batch_size=9)
    mh.load(tmp_path, noise=again)
    assert observed(again) == observed(noise)


def test_a_measurement_is_converted_to_another_batch_size():
    model = Known()
    noise = measure(model, 4, 2, batch_size=9)
    other = mh.NoiseScale(torch.optim.SGD(model.parameters()), batch_size=18, smoothing=0.5)
    other.load_state_dict(noise.state_dict())
    assert other.variance == pytest.approx(noise.variance / 2)  # of batches twice as large
    assert other.noise_scale == pytest.approx(noise.noise_scale)
    assert other.standard_error == pytest.approx(noise.standard_error)
    unknown = mh.NoiseScale(torch.optim.SGD(model.parameters()))
    unknown.load_state_dict(noise.state_dict())
    assert unknown.variance == noise.variance  # of unchanged batches
    again = mh.NoiseScale(torch.optim.SGD(model.parameters()), batch_size=16)
    again.load_state_dict(unknown.state_dict())
    assert again.variance == noise.variance


def test_a_state_that_does_not_fit_changes_nothing():
    noise = measure(Known(), 0, 2)
    state = measure(make_model(), 0).state_dict()
    with pytest.raises(ValueError, match="shapes must be"):
        noise.load_state_dict(state)
    good = noise.state_dict()
    for name in good:
        with pytest.raises(ValueError, match=f"{name} must be there"):
            noise.load_state_dict({k: v for k, v in good.items() if k != name})
    with pytest.raises(ValueError, match="batch_size must be a finite number above 0"):
        noise.load_state_dict({**good, "batch_size": 0.0})
    assert noise.state_dict() == good


def test_numbers_that_are_far_apart_have_an_error_without_one_being_raised():
    noise = measure(Known(), 0, 2)
    state = noise.state_dict()
    moments = dict.fromkeys(state["moments"], 1.0) | {"var": 1e160, "var_var": 1e300}
    noise.load_state_dict({**state, "moments": moments, "steps": 2})
    assert (noise.steps, noise.noise_scale) == (2, 1e160)
    assert noise.snapshot() == {"simple_noise_scale": 1e160, "simple_noise_scale_error": None}
