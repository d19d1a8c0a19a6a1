"""A loader whose micro-batches grow: every sample once, the right scale, adaptdl's loop."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh
from helpers.clocks import Clock
from helpers.ranks import run_ranks
from manyhands import adaptdl
from manyhands.adaptdl import _adaptive_loader
from manyhands.ramp import _observed
from manyhands.ramp._micro_batches import StepSize, sizes, step_size


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_observed.time, "perf_counter", clock.perf_counter)
    return clock


def noisy(samples=4000, spread=8.0):
    """Samples (number, target) with noisy targets around 1, and a model of one weight."""
    generator = torch.Generator().manual_seed(0)
    targets = 1.0 + spread * torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model, TensorDataset(torch.arange(samples), targets)


def loss_of(model, targets):
    return (model(torch.ones_like(targets)) - targets).square().mean() / 2


@pytest.mark.quick
def test_micro_batches_have_few_sizes():
    assert sizes(64) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    for most in range(1, 70):
        assert len(sizes(most)) <= 2 * most.bit_length() + 1
        for fewest in (1, 2):
            for units in range(1, 200):
                size = step_size(units, most, fewest)
                assert size.per_pass in sizes(most) and size.units <= units
                assert size.units > units / 2 and size.passes >= min(fewest, units)


def train(clock, model, loader, rule, ramp, steps=None):
    """Train as documented; return each step's (passes, samples) and the samples' numbers."""
    seen, numbers = [], []
    for micro_batches in ramp.over(loader):
        for index, targets in micro_batches:
            (loss_of(model, targets) / len(micro_batches)).backward()
            numbers += index.tolist()
        clock.step(loader.size.units)
        seen.append((len(micro_batches), loader.current_local_bsz, rule.scale))
        rule.step()
        rule.zero_grad()
        if len(seen) == steps:
            break
    return seen, numbers


def begin(max_local=64, spread=8.0, lr=1e-6, **options):
    model, data = noisy(spread=spread)
    loader = adaptdl.AdaptiveDataLoader(data, 4, True, max_local_batch_size=max_local, **options)
    rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=lr), smoothing=0.99)
    return model, loader, rule


def test_the_micro_batch_grows_to_its_bound_and_then_passes_do(clock):
    model, loader, rule = begin(max_local=16)
    seen, numbers = train(clock, model, loader, rule, mh.Ramp(rule, 64, goal="steps"))
    assert sorted(numbers) == list(range(4000)) != numbers
    assert seen[0] == (1, 4, 1.0)
    # one rank compares its own passes: at least two, once there is anything to divide
    assert [s for s in dict.fromkeys(seen[:-1]) if s[0] <= 2] == [
        (1, 4, 1.0), (2, 4, 2.0), (2, 8, 4.0), (2, 16, 8.0),
    ]  # fmt: skip
    assert max(seen[:-1]) == (16, 16, 64.0)


def test_the_batch_is_the_one_that_passes_alone_would_have_had(clock):
    """|g|^2 = 1 and noise 16 of a batch of 4: sqrt(4 x 16) = 8 units at a = 4 b."""
    model, loader, rule = begin()
    ramp = mh.Ramp(rule, 64)
    seen = []
    while len(seen) < 400:
        seen += train(clock, model, loader, rule, ramp)[0]
    scales = [scale for _, _, scale in seen[-100:]]
    assert 4 <= sum(scales) / len(scales) <= 16


def test_training_is_the_plain_loop_over_the_same_samples(clock):
    model, loader, rule = begin(lr=0.01)
    seen, numbers = train(clock, model, loader, rule, mh.Ramp(rule, 32, goal="steps"))
    plain, data = noisy()
    expected = mh.AdaScale(torch.optim.SGD(plain.parameters(), lr=0.01), smoothing=0.99)
    for passes, samples, scale in seen:
        expected.set_num_gradients_to_accumulate(passes, update_smoothing=False)
        expected.set_scale_per_pass(samples / 4)
        assert scale == passes * samples / 4
        for _ in range(passes):
            now, numbers = numbers[:samples], numbers[samples:]
            (loss_of(plain, data.tensors[1][now]) / passes).backward()
        expected.step()
        expected.zero_grad()
    assert not numbers
    torch.testing.assert_close(plain.weight, model.weight, rtol=1e-12, atol=0)
    assert rule.progress == pytest.approx(expected.progress, rel=1e-12)


def test_the_end_of_the_data():
    """Whole units come to the end; the last one takes missing samples from the beginning."""
    data = TensorDataset(torch.arange(22))
    plan = StepSize(1, 4)
    loader = adaptdl.AdaptiveDataLoader(data, 4, max_local_batch_size=16)
    assert [[b.tolist() for (b,) in step] for step in loader.steps(lambda: plan)] == [
        [list(range(16))], [[16, 17, 18, 19, 20, 21, 0, 1]],
    ]  # fmt: skip
    loader = adaptdl.AdaptiveDataLoader(data, 4, max_local_batch_size=16, drop_last=True)
    steps = [[b.tolist() for (b,) in step] for step in loader.steps(lambda: plan)]
    assert steps == [[list(range(16))], [[16, 17, 18, 19]]]
    loader = adaptdl.AdaptiveDataLoader(data, 4, drop_last=True)
    assert len(loader) == len(list(loader)) == 5


def test_each_pass_over_the_data_has_its_own_order_and_worker_processes_change_nothing():
    data = TensorDataset(torch.arange(40))

    def orders(**options):
        loader = adaptdl.AdaptiveDataLoader(data, 4, shuffle=True, **options)
        return [torch.cat([batch for (batch,) in loader]).tolist() for _ in range(2)]

    first, second = orders()
    assert sorted(first) == sorted(second) == list(range(40)) and first != second
    assert orders(num_workers=1) == [first, second] != orders(seed=1)


def run_of_a_cursor(samples, epoch=0):
    cursor = mh.Cursor(TensorDataset(torch.arange(samples)), batch_size=4)
    cursor.load_state_dict(cursor.state_dict() | {"epoch": epoch})
    return torch.cat([batch for (batch,) in cursor]).tolist()


def test_steps_of_any_size_have_the_samples_of_a_plain_run_in_their_order(tmp_path):
    data = TensorDataset(torch.arange(38))
    plans = itertools.cycle([StepSize(1, 2), StepSize(3, 1), StepSize(2, 2)])
    loader = adaptdl.AdaptiveDataLoader(data, 4, True, max_local_batch_size=8)
    for epoch in range(2):
        seen, expected = [], run_of_a_cursor(38, epoch)
        steps = loader.steps(lambda: next(plans))
        for _ in range(2):
            seen += [each for (batch,) in next(steps) for each in batch.tolist()]
        again = adaptdl.AdaptiveDataLoader(data, 4, True)  # with other sizes
        mh.save(tmp_path, loader=loader)
        mh.load(tmp_path, loader=again)
        rest = [each for step in again.steps(lambda: StepSize(1, 1)) for each in step]
        rest = torch.cat([batch for (batch,) in rest]).tolist()
        assert seen + rest == expected + expected[:2]  # the last unit is filled from the beginning
        for step in steps:
            seen += [each for (batch,) in step for each in batch.tolist()]
        assert seen == expected + expected[:2]


def test_a_cursor_continues_where_the_loader_was_and_the_other_way_round():
    data = TensorDataset(torch.arange(40))
    loader, cursor = adaptdl.AdaptiveDataLoader(data, 4, True), mh.Cursor(data, 4)
    next(loader.steps(lambda: StepSize(3, 1)))
    cursor.load_state_dict(loader.state_dict())
    seen = torch.cat([batch for (batch,) in cursor]).tolist()
    assert seen == run_of_a_cursor(40)[12:]


def test_no_data_is_no_step():
    loader = adaptdl.AdaptiveDataLoader([], 4)
    rule = mh.AdaScale(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    assert list(mh.Ramp(rule, 4).over(loader)) == [] == list(loader) and len(loader) == 0


def on_ranks(state=None, steps=None):
    clock = Clock()
    _observed.time = clock
    model, loader, rule = begin(lr=0.01)
    parallel = nn.parallel.DistributedDataParallel(model)
    rule = mh.AdaScale(torch.optim.SGD(parallel.parameters(), lr=0.01))
    ramp = mh.Ramp(rule, 32, goal="steps", model=parallel, loader=loader)
    if state is not None:
        for thing, saved in zip((loader, ramp), state, strict=True):
            thing.load_state_dict(saved)
    seen, numbers = train(clock, parallel, loader, rule, ramp, steps)
    return seen, numbers, (loader.state_dict(), ramp.state_dict()), model.weight.detach()


def test_a_run_goes_on_behind_its_last_samples_on_another_number_of_ranks():
    first = run_ranks(2, on_ranks, None, 30)
    assert first[0][0] == first[1][0] and torch.equal(first[0][3], first[1][3])
    assert first[0][0][0] == (1, 2, 1.0)  # the small batch is four samples on two ranks
    state = first[0][2]
    assert state == first[1][2]
    (rest,) = run_ranks(1, on_ranks, state)
    last_scale = first[0][0][-1][2]
    assert rest[0][0][2] >= last_scale  # the batch is kept
    assert sorted(first[0][1] + first[1][1] + rest[1]) == list(range(4000))


# -- adaptdl's loop ------------------------------------------------------------------------------


def adaptdl_loop(clock, clear, accumulate=True, epochs=2, samples=600):
    """adaptdl's documented loop; `clear` says where it calls zero_grad."""
    model, data = noisy(samples)
    clock.fixed = 100.0  # so that large batches pay
    loader = adaptdl.AdaptiveDataLoader(data, batch_size=4, shuffle=True)
    loader.autoscale_batch_size(64, local_bsz_bounds=(None, 16), gradient_accumulation=accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    wrapped = adaptdl.AdaptiveDataParallel(
        model, optimizer, scaling_rule=mh.AdaScale(smoothing=0.99)
    )
    rule = wrapped.scaling_rule
    passes = []
    for epoch in adaptdl.remaining_epochs_until(epochs):
        for numbers, targets in loader:
            if clear == "first":
                optimizer.zero_grad()
            loss = loss_of(wrapped, targets)
            if clear == "before backward":
                optimizer.zero_grad()
            loss.backward()
            passes.append((loader.current_local_bsz, loader.accumulation_steps, numbers))
            steps = rule._core.history.steps
            optimizer.step()
            if rule._core.history.steps > steps:
                clock.step(loader.size.units)
            if clear == "last":
                optimizer.zero_grad()
        assert rule.progress >= (epoch + 1) * samples / 4 - 64
    return model, rule, passes, loader


@pytest.mark.parametrize("clear", ["first", "before backward", "last"])
def test_adaptdls_loop_takes_a_step_after_the_last_pass_only(clock, clear):
    model, rule, passes, _ = adaptdl_loop(clock, clear)
    assert max(size for size, *_ in passes) == 16 and max(p for _, p, _ in passes) >= 2

    plain, data = noisy(600)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.002)
    wrapped = adaptdl.AdaptiveDataParallel(
        plain, optimizer, scaling_rule=mh.AdaScale(smoothing=0.99)
    )
    expected = wrapped.scaling_rule
    while passes:
        size, more, _ = passes[0]
        expected.set_scale_per_pass(size / 4)
        for _, _, numbers in passes[:more]:
            with wrapped.no_sync():
                loss_of(wrapped, data.tensors[1][numbers]).backward()
        loss_of(wrapped, data.tensors[1][passes[more][2]]).backward()
        optimizer.step()
        optimizer.zero_grad()
        passes = passes[more + 1 :]
    assert torch.equal(model.weight, plain.weight)
    assert rule.progress == expected.progress


@pytest.mark.sample("adaptive-True", "plain-False")
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("way", ["adaptive", "plain"])
def test_a_gradient_scaler_in_adaptdls_loop_changes_nothing(clock, monkeypatch, way, foreach):
    """The loop gives the scaler the bare optimizer, which cannot unscale gradients itself."""

    def run(enabled):
        monkeypatch.setattr(_adaptive_loader, "_epochs", _adaptive_loader._Epochs())
        clock.now = 0.0
        model, data = noisy(600)
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        if way == "adaptive":
            loader = adaptdl.AdaptiveDataLoader(data, batch_size=4)
            loader.autoscale_batch_size(64, (None, 16), gradient_accumulation=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.002, foreach=foreach)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=enabled)
        wrapped = adaptdl.AdaptiveDataParallel(model, optimizer, mp_scaler=scaler)
        most = 0
        for _ in adaptdl.remaining_epochs_until(2):
            for _, targets in loader:
                optimizer.zero_grad()
                scaler.scale(loss_of(wrapped, targets)).backward()
                scaler.step(optimizer)
                scaler.update()
                clock.now += 5.0
                most = max(most, getattr(loader, "accumulation_steps", 0))
        return most, wrapped.scaling_rule.progress, model.weight.item()

    (most, *scaled), (_, *plain) = run(True), run(False)
    assert scaled == pytest.approx(plain)
    assert most >= (2 if way == "adaptive" else 0)


def test_without_accumulation_every_micro_batch_is_a_step(clock):
    _, rule, passes, loader = adaptdl_loop(clock, "first", accumulate=False)
    assert {more for _, more, _ in passes} == {0}
    assert rule._core.history.steps == len(passes) and max(size for size, *_ in passes) == 16
    assert loader.training and loader.current_batch_size == loader.current_local_bsz


def test_an_epoch_is_worth_one_pass_over_the_data_at_the_small_batch(clock):
    _, rule, passes, _ = adaptdl_loop(clock, "first", epochs=3)
    assert 3 * 600 / 4 <= rule.progress <= 3 * 600 / 4 + 3 * 16
    samples = sum(size for size, *_ in passes)
    assert samples > 3 * 600  # larger batches see more samples for the same progress


def test_without_autoscaling_it_is_a_loader_of_the_small_batch():
    model, data = noisy(22)
    loader = adaptdl.AdaptiveDataLoader(data, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = adaptdl.AdaptiveDataParallel(model, optimizer)
    for _, targets in loader:
        optimizer.zero_grad()
        loss_of(wrapped, targets).backward()
        optimizer.step()
    assert wrapped.scaling_rule.progress == 6.0 == len(loader)
    assert not loader.training and loader.current_batch_size == 4


def adaptdl_on_ranks():
    clock = Clock()
    _observed.time = clock
    model, rule, passes, _ = adaptdl_loop(clock, "first")
    sizes_and_passes = [(size, more) for size, more, _ in passes]
    return dist.get_rank(), sizes_and_passes, model.weight.detach(), rule.progress


def test_adaptdls_loop_on_two_ranks():
    (_, sizes_0, weight_0, progress), (_, sizes_1, weight_1, _) = run_ranks(2, adaptdl_on_ranks)
    assert sizes_0 == sizes_1 and torch.equal(weight_0, weight_1)
    assert sizes_0[0] == (2, 0) and max(sizes_0)[0] == 16 and progress >= 300.0


def test_epochs_go_on_where_a_saved_run_stopped(clock):
    _, _, _, loader = adaptdl_loop(clock, "first", epochs=1)
    saved = loader.state_dict()
    _adaptive_loader._epochs.finished = 0
    again = adaptdl.AdaptiveDataLoader(noisy(600)[1], 4, True)
    again.load_state_dict(saved)
    assert list(adaptdl.remaining_epochs_until(3)) == [1, 2]
    assert list(adaptdl.remaining_epochs_until(4)) == [3]
    with pytest.raises(ValueError, match="version=None"):
        again.load_state_dict({})


def test_a_loop_that_is_left_ends_its_epoch():
    for epoch in adaptdl.remaining_epochs_until(3):
        if epoch == 1:
            break
    assert list(adaptdl.remaining_epochs_until(3)) == [2]
    epochs = adaptdl.remaining_epochs_until(5)
    next(epochs)
    with pytest.raises(RuntimeError, match="supports one loop at a time"):
        next(adaptdl.remaining_epochs_until(6))
    epochs.close()


# -- mistakes ------------------------------------------------------------------------------------


def test_mistakes_are_errors_that_say_what_to_do():
    model, data = noisy(64)
    with pytest.raises(ValueError, match="batch_size"):
        adaptdl.AdaptiveDataLoader(data, 0)
    for wrong in (4, 16.5):
        with pytest.raises(ValueError, match=f"at least 8, got {wrong}.*smaller batch_size"):
            adaptdl.AdaptiveDataLoader(data, 8, max_local_batch_size=wrong)
    loader = adaptdl.AdaptiveDataLoader(data, 8)
    for maximum, bounds, message in (
        (4, None, "at least 8, got 4.*small batch"),
        (64.0, None, "whole number"),
        (64, (16, 32), "must not exceed batch_size=8"),
        (64, (0, 32), "at least 1, got 0"),
        (64, (None, 4), "at least 8, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.autoscale_batch_size(maximum, bounds)
    with pytest.raises(RuntimeError, match="supports one loop at a time"):
        for _ in loader:
            next(iter(loader))
    rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    ramp = mh.Ramp(rule, 8, loader=loader)
    with pytest.raises(ValueError, match="already has an AdaptiveDataLoader"):
        next(ramp.over(adaptdl.AdaptiveDataLoader(data, 8)))
