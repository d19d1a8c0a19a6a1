"""The noise of the gradient from single examples: NoiseScale and the rules with `examples`."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import raises_on_ranks, run_ranks
from helpers.scaling_oracle import make_batches, make_model


class Known(nn.Module):
    """Gradients of |true gradient|^2 = 1 with noise of trace 36 per sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(25, 1, bias=False)

    def forward(self, x):
        return self.layer(x)


def known_batch(samples):
    return torch.randn(samples, 25) * math.sqrt(36 / 25) + 0.2


@pytest.mark.parametrize(
    ("passes", "sizes", "batch_size"), [(1, [9], None), (1, [9, 9, 4], 9), (2, [9, 4, 6, 3], 9)]
)
def test_the_estimate_is_unbiased(passes, sizes, batch_size):
    """Whatever the number of examples in a pass: results are in samples."""
    torch.manual_seed(0)
    model = Known()
    noise = mh.NoiseScale(
        model.parameters(), model=model, examples=True, batch_size=batch_size,
        num_gradients_to_accumulate=passes, smoothing=0.999,
    )  # fmt: skip
    for step in range(800):
        model.zero_grad()
        for a in range(passes):
            size = sizes[(step * passes + a) % len(sizes)]
            (model(known_batch(size)).mean() / passes).backward()
    assert noise.steps == 800
    assert noise.noise_scale == pytest.approx(36.0, abs=4 * noise.standard_error)
    assert noise.squared_norm == pytest.approx(1.0, rel=0.2)
    assert noise.variance == pytest.approx(36.0 / (batch_size or 1), rel=0.02)
    assert "samples" in repr(noise)


# -- by hand: single examples' gradients, one after the other ----------------------------------


def squared(grads):
    return sum(float(grad.double().square().sum()) for grad in grads)


def by_hand(model, batches, params):
    """Return (|true gradient|^2, noise of one example) from micro-batches of any sizes."""
    means, mean_squares = [], []
    for x, y in batches:
        each = [
            torch.autograd.grad(F.mse_loss(model(x[i : i + 1]), y[i : i + 1]), params)
            for i in range(len(x))
        ]
        means.append([sum(grads) / len(x) for grads in zip(*each, strict=True)])
        mean_squares.append(sum(map(squared, each)) / len(x))
    mean = squared([sum(grads) / len(batches) for grads in zip(*means, strict=True)])
    small = sum(mean_squares) / len(batches)
    n = len(batches) ** 2 / sum(1 / len(x) for x, _ in batches)
    return (n * mean - small) / (n - 1), (small - mean) * n / (n - 1)


def micro_batches(sizes, dtype=torch.float32):
    x, y = make_batches(1, len(sizes), max(sizes), dtype)
    return [(x[0, i, :size], y[0, i, :size]) for i, size in enumerate(sizes)]


def measured_once(wrap, sizes, passes):
    """Return what NoiseScale measures in one step over the ranks' micro-batches."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = make_model()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    noise = mh.NoiseScale(
        optimizer, model=wrapped, examples=True, num_gradients_to_accumulate=passes
    )
    for x, y in micro_batches(sizes)[rank * passes : (rank + 1) * passes]:
        (F.mse_loss(wrapped(x), y) / passes).backward()
    optimizer.step()
    return [noise.squared_norm, noise.variance, noise.coverage.share]


@pytest.mark.parametrize("sizes", [[5], [4, 7, 2]])
def test_one_worker_by_hand(sizes):
    model = make_model()
    expected = by_hand(model, micro_batches(sizes), list(model.parameters()))
    *measured, share = measured_once(lambda model: model, sizes, len(sizes))
    assert measured == pytest.approx(expected, rel=1e-4)
    assert share == 1.0


def with_ddp(model):
    return DistributedDataParallel(model)


def with_fsdp(model):
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def with_our_fsdp(model):
    return mh.FullyShardedDataParallel(model)


@pytest.mark.parametrize("wrap", [with_ddp, with_fsdp, with_our_fsdp])
def test_two_ranks_by_hand(wrap):
    """Micro-batches of other sizes on each rank; gradients whole or sharded."""
    sizes = [4, 7]
    model = make_model()
    expected = by_hand(model, micro_batches(sizes), list(model.parameters()))
    first, second = run_ranks(2, measured_once, wrap, sizes, 1)
    assert first == second
    assert first[:2] == pytest.approx(expected, rel=1e-4)
    assert first[2] == 1.0


def under_sharded_data_parallel(sizes):
    model = make_model()
    optimizer = mh.OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = mh.ShardedDataParallel(model, optimizer)
    noise = mh.NoiseScale(optimizer, model=model, examples=True)
    x, y = micro_batches(sizes)[dist.get_rank()]
    F.mse_loss(wrapped(x), y).backward()
    optimizer.step()
    return [noise.squared_norm, noise.variance]


def test_sharded_gradients_by_hand():
    model = make_model()
    expected = by_hand(model, micro_batches([4, 7]), list(model.parameters()))
    first, second = run_ranks(2, under_sharded_data_parallel, [4, 7])
    assert first == second
    assert first == pytest.approx(expected, rel=1e-4)


# -- the rules ---------------------------------------------------------------------------------


def test_adascale_with_one_worker_and_one_pass():
    """The gain of the first step, from one micro-batch that is four small batches."""
    model = make_model()
    (batch,) = micro_batches([12])
    sqr, var = by_hand(model, [batch], list(model.parameters()))
    small = var / 3  # a small batch has 3 of the 12 examples
    optimizer = mh.AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, model=model, examples=True
    )
    F.mse_loss(model(batch[0]), batch[1]).backward()
    assert optimizer.gain() == pytest.approx((sqr + small) / (sqr + small / 4), rel=1e-4)
    optimizer.step()
    assert optimizer.noise.measured
    assert optimizer.noise.var_of() == pytest.approx(small, rel=1e-4)
    assert optimizer.noise.norm_kind == "examples"
    assert optimizer.coverage.layers == ("0", "2")


def test_a_group_without_a_covered_layer_has_the_gain_of_all_covered_ones():
    model = make_model()
    model[2] = nn.Sequential(nn.BatchNorm1d(5).eval(), nn.Linear(5, 2))
    groups = [{"params": [*model[0].parameters(), *model[2][1].parameters()]}]
    groups += [{"params": list(model[2][0].parameters())}]
    optimizer = mh.AdaScale(torch.optim.SGD(groups, lr=0.1), scale=4.0, model=model, examples=True)
    (batch,) = micro_batches([12])
    F.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert 1.0 < optimizer.gain(0) == optimizer.gain(1) == pytest.approx(optimizer.gain())
    assert "mixes" in optimizer.coverage.left_out["2.0"]


def test_a_deep_copy_measures_its_own_model():
    model = make_model()
    optimizer = mh.AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, model=model, examples=True
    )
    twin, copied = copy.deepcopy((optimizer, model))
    (batch,) = micro_batches([12])
    for each, network in ((optimizer, model), (twin, copied)):
        F.mse_loss(network(batch[0]), batch[1]).backward()
        each.step()
    assert twin.gain() == optimizer.gain() > 1.0


def test_a_loss_scale_is_divided_out():
    readings = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = mh.AdaScale(inner, scale=4.0, model=model, examples=True, grad_scaler=scaler)
        for x, y in micro_batches([8, 8]):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        readings.append([optimizer.noise.sqr_of(), optimizer.noise.var_of()])
    assert readings[0] == pytest.approx(readings[1], rel=1e-4)


def test_it_changes_nothing():
    models = make_model(), make_model()
    for model, examples in zip(models, (False, True), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        noise = mh.NoiseScale(optimizer, model=model, examples=examples)
        for x, y in micro_batches([4] * 5):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        assert noise.steps == (5 if examples else 4)
        assert (noise.coverage is None) == (not examples)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


def test_an_optimizer_that_evaluates_the_closure_often_is_measured_once_a_step():
    model = make_model(torch.float64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    noise = mh.NoiseScale(optimizer, model=model, examples=True)
    batches = micro_batches([4] * 3, torch.float64)
    expected = by_hand(model, batches[:1], list(model.parameters()))
    for x, y in batches:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        if noise.steps == 1:
            assert [noise.squared_norm, noise.variance] == pytest.approx(expected)
    assert (noise.steps, noise.nonfinite) == (3, 0)


# -- state dicts -------------------------------------------------------------------------------


def train(noise, model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [noise.steps, noise.noise_scale, noise.variance, noise.squared_norm]


def make_noise(**options):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return mh.NoiseScale(optimizer, model=model, **options), model, optimizer


@pytest.mark.parametrize("batch_size", [None, 2.0])
def test_a_measurement_continues(batch_size):
    batches = micro_batches([4, 6, 4, 3])
    whole = train(*make_noise(examples=True, batch_size=batch_size), batches)
    first = make_noise(examples=True)
    train(*first, batches[:2])
    second = make_noise(examples=True, batch_size=batch_size)
    second[0].load_state_dict(first[0].state_dict())
    assert train(*second, batches[2:]) == pytest.approx(whole)


def test_a_measurement_of_another_kind_is_dropped():
    batches = micro_batches([4] * 4)
    for saved, loaded in ((False, True), (True, False)):
        first, second = make_noise(examples=saved), make_noise(examples=loaded)
        train(*first, batches[:3])
        second[0].load_state_dict(first[0].state_dict())
        assert second[0].steps == first[0].steps
        assert train(*second, batches)[0] == (4 if loaded else 3)


def test_a_rule_continues_with_another_kind_of_measurement():
    (batch,) = micro_batches([12])
    rules = []
    for examples in (False, True):
        model = make_model()
        rules.append(
            mh.AdaScale(
                torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, model=model,
                examples=examples,
            )
        )  # fmt: skip
        if examples:
            rules[1].load_state_dict(rules[0].state_dict())
        for _ in range(3):
            rules[-1].zero_grad()
            F.mse_loss(model(batch[0]), batch[1]).backward()
            rules[-1].step()
    assert not rules[1].noise.consecutive
    assert rules[0].noise.consecutive


# -- mistakes ----------------------------------------------------------------------------------


def test_mistakes_in_the_arguments():
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="needs the model"):
        mh.NoiseScale(sgd, examples=True)
    with pytest.raises(ValueError, match="needs the model"):
        mh.AdaScale(sgd, examples=True)
    with pytest.raises(TypeError, match="The model goes to model="):
        mh.NoiseScale(sgd, examples=model)
    with pytest.raises(ValueError, match="AdamScale measures gradients as the optimizer divides"):
        mh.AdamScale(adam, model=model, examples=True)
    with pytest.raises(ValueError, match="no layer can measure"):
        mh.NoiseScale(sgd, model=nn.Linear(2, 2), examples=True)
    with pytest.raises(ValueError, match="no layer can measure"):
        mh.NoiseScale(sgd, model=model, examples=mh.Examples(layers="norm"))


def test_batches_of_one_example():
    """The last batch may be as small; all of them may not."""
    noise, model, optimizer = make_noise(examples=True)
    batches = micro_batches([1, 4, 1, 4])
    with pytest.warns(UserWarning, match="one example, whose gradient cannot be compared"):
        train(noise, model, optimizer, batches[:1])
    assert train(noise, model, optimizer, batches[1:])[0] == 2
    rule = mh.AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, model=model, examples=True
    )
    F.mse_loss(model(batches[0][0]), batches[0][1]).backward()
    with pytest.raises(RuntimeError, match="one example, whose gradient cannot be compared"):
        rule.step()
    for x, y in batches[1:]:
        rule.zero_grad()
        F.mse_loss(model(x), y).backward()
        rule.step()


def test_a_model_whose_layers_are_not_called():
    noise, model, optimizer = make_noise(examples=True)
    x, y = micro_batches([4])[0]
    hidden = F.linear(x, model[0].weight, model[0].bias).tanh()
    F.mse_loss(F.linear(hidden, model[2].weight, model[2].bias), y).backward()
    with pytest.warns(UserWarning, match="no measured layer took part"):
        optimizer.step()
    assert noise.steps == 0


def test_one_sample_has_no_examples():
    noise, *_ = make_noise(examples=True)
    with pytest.raises(RuntimeError, match="does not work with one_sample"), noise.one_sample():
        pass


class Repeating(nn.Module):
    """Uses a layer twice on rank 1."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        for _ in range(1 + dist.get_rank()):
            x = self.first(x)
        return self.last(x)


def measures_other_layers():
    model = Repeating()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = mh.NoiseScale(optimizer, model=model, examples=True)
    x, y = micro_batches([4])[0]
    F.mse_loss(wrapped(x), y).backward()
    optimizer.step()
    return noise.steps


def test_ranks_that_cover_different_layers():
    raises_on_ranks(2, RuntimeError, measures_other_layers, match="examples of different layers")


def differing_options():
    model = make_model()
    layers = "linear" if dist.get_rank() else "all"
    mh.NoiseScale(model.parameters(), model=model, examples=mh.Examples(layers=layers))


def test_ranks_with_different_options():
    raises_on_ranks(2, ValueError, differing_options, match="have different examples")


def under_a_rule(delayed, counted):
    """Two steps of two passes; the statistics of the first are in the noise after the second."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    if counted:
        rule = mh.AdaScale(examples=True, delayed=delayed)
        network = mh.AdaptiveDataParallel(model, inner, rule)
    else:
        network = DistributedDataParallel(model)
        rule = mh.AdaScale(
            inner, model=model, examples=True, delayed=delayed, num_gradients_to_accumulate=2
        )
    batches = micro_batches([3, 5, 4, 6])[2 * rank : 2 * rank + 2]
    for _ in range(2):
        rule.zero_grad()
        for (x, y), last in zip(batches, (False, True), strict=True):
            with network.no_sync() if not last else contextlib.nullcontext():
                (F.mse_loss(network(x), y) / (1 if counted else 2)).backward()
        rule.step()
    return [rule.noise.sqr_of(), rule.noise.var_of(), float(rule.noise.measured)]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_rule_on_two_ranks_by_hand(delayed, counted):
    model = make_model()
    batches = micro_batches([3, 5, 4, 6])
    sqr, var = by_hand(model, batches, list(model.parameters()))
    examples = 16 / sum(1 / len(x) for x, _ in batches)
    first, second = run_ranks(2, under_a_rule, delayed, counted)
    assert first == second
    # a small batch is one of the four micro-batches
    assert first == pytest.approx([sqr, var * 4 / examples, 1.0], rel=1e-4)


def test_a_ramp_knows_the_noise_of_one_pass():
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = mh.AdaScale(inner, model=model, examples=True, smoothing=0.9)
    ramp = mh.Ramp(rule, max_scale=8, goal=None)
    for x, y in micro_batches([12] * 20):
        F.mse_loss(model(x), y).backward()
        rule.step()
        rule.zero_grad()
    # 20 steps of 12 examples: a small error, although each step had one pass of one worker
    assert 0.1 < ramp._noise.evidence.error < 1.0
    assert ramp._noise.measured().var == pytest.approx(rule.noise.var_of())
