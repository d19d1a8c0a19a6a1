"""Means over tokens where micro-batches differ in size, against the whole batch in one backward."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import run_ranks
from manyhands import adaptdl
from manyhands.scaling import ScalingRuleBase

COUNTS = ([5, 1, 9], [2, 12, 3])  # tokens by rank and pass


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def tokens(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    for count in counts:
        x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        yield x, torch.randint(4, (count,), generator=generator)


def whole_batch(steps, counts=COUNTS):
    """Train in one process on all tokens of all ranks at once; return the weights."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        batches = [b for rank, own in enumerate(counts) for b in tokens(own, 10 * step + rank)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def wrapped(way, model):
    """Return (model, optimizer, plain optimizer) in one of the ways to train on two ranks."""
    sgd = {"lr": 0.5, "momentum": 0.9}
    if way == "OSS":
        optimizer = mh.OSS(model.parameters(), torch.optim.SGD, **sgd)
        return mh.ShardedDataParallel(model, optimizer), optimizer
    wrap = {"DDP": DistributedDataParallel, "FSDP": mh.FSDP, "fully_shard": fully_shard}[way]
    model = wrap(model)
    return model, torch.optim.SGD(model.parameters(), **sgd)


def train(way, rule, steps=3, counts=COUNTS):
    rank = dist.get_rank()
    model, optimizer = wrapped(way, make_model())
    if rule is not None:
        optimizer = rule(optimizer, num_gradients_to_accumulate=len(counts[rank]))
    for step in range(steps):
        optimizer.zero_grad()
        batches = list(tokens(counts[rank], 10 * step + rank))
        mean = mh.WeightedMean([len(y) for _, y in batches], optimizer)
        losses = []
        for x, y in batches:
            loss = mean(cross_entropy(model(x), y, reduction="sum"))
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
    if way == "FSDP":
        with model.summon_full_params():
            return mean.total, [p.detach().clone() for p in model.parameters()]
    params = [p.full_tensor() if way == "fully_shard" else p for p in model.parameters()]
    return mean.total, [p.detach().clone() for p in params]


class Unscaled(ScalingRuleBase):
    def scale_lr(self, scale):
        return 1.0


@pytest.mark.sample("None-DDP", "None-FSDP", "Unscaled-DDP", "Unscaled-OSS", "Unscaled-fully_shard")
@pytest.mark.parametrize("way", ["DDP", "OSS", "FSDP", "fully_shard"])
@pytest.mark.parametrize("rule", [None, Unscaled])
def test_the_gradient_is_that_of_the_whole_batch_in_one_backward(way, rule):
    expected = whole_batch(steps=3)
    for total, params in run_ranks(2, train, way, rule):
        assert total == 32.0
        torch.testing.assert_close(params, expected, rtol=1e-12, atol=1e-14)


def test_on_one_worker_with_passes_that_are_counted():
    """`AdaptiveDataParallel` divides by the passes itself."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wrapped = adaptdl.AdaptiveDataParallel(model, optimizer, scaling_rule=Unscaled())
    for step in range(3):
        batches = list(tokens(COUNTS[0], 10 * step))
        mean = mh.WeightedMean([len(y) for _, y in batches], optimizer)
        for x, y in batches[:-1]:
            with wrapped.no_sync():
                mean(cross_entropy(wrapped(x), y, reduction="sum")).backward()
        x, y = batches[-1]
        mean(cross_entropy(wrapped(x), y, reduction="sum")).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = whole_batch(3, counts=[COUNTS[0]])
    torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-12, atol=1e-14)


def by_hand(counts, gradients):
    """The noise of the mean micro-batch and |true gradient|^2, from gradients of loss sums."""
    total, parts = sum(counts), [(n, s) for n, s in zip(counts, gradients, strict=True) if n]
    mean = sum(gradients) / total
    spread = sum(float(s @ s) / n for n, s in parts) - total * float(mean @ mean)
    per_token = spread / (len(parts) - 1)
    return float(mean @ mean) - per_token / total, per_token * len(counts) / total


@pytest.mark.parametrize("counts", [[5, 1, 9], [4, 4, 4], [7, 0, 2]])
def test_the_noise_is_weighted_by_the_numbers_of_tokens(counts):
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = mh.AdaScale(sgd, num_gradients_to_accumulate=3, smoothing=0.0)
    batches = list(tokens(counts, 0))
    gradients = []
    for x, y in batches:
        loss = cross_entropy(model(x), y, reduction="sum")
        grads = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    mean = mh.WeightedMean(torch.tensor(counts), rule)
    for x, y in batches:
        mean(cross_entropy(model(x), y, reduction="sum")).backward()
    rule.step()
    sqr, var = by_hand(counts, gradients)
    assert rule.noise.raw_sqr == pytest.approx((sqr,), rel=1e-10)
    assert rule.noise.raw_var == pytest.approx((var,), rel=1e-10)


def test_workers_in_blocks_count_their_own_tokens():
    """Their gradients are not averaged, so each worker's loss is the mean over its own tokens."""

    def on_rank():
        rank = dist.get_rank()
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        optimizer = mh.LocalSGD(sgd, every=4)
        batches = list(tokens(COUNTS[rank], rank))
        mean = mh.WeightedMean([len(y) for _, y in batches], optimizer)
        for x, y in batches:
            mean(cross_entropy(model(x), y, reduction="sum")).backward()
        optimizer.step()
        return mean.total, [p.detach().clone() for p in model.parameters()]

    found = run_ranks(2, on_rank)
    assert [total for total, _ in found] == [15.0, 17.0]
    expected = whole_batch(1, counts=[COUNTS[0]])
    torch.testing.assert_close(found[0][1], expected, rtol=1e-12, atol=1e-14)


def test_equal_numbers_are_the_plain_mean():
    results = []
    for weighted in (False, True):
        model = make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = mh.AdaScale(sgd, num_gradients_to_accumulate=3)
        for step in range(4):
            batches = list(tokens([4, 4, 4], step))
            mean = mh.WeightedMean([4, 4, 4], rule)
            for x, y in batches:
                if weighted:
                    mean(cross_entropy(model(x), y, reduction="sum")).backward()
                else:
                    (cross_entropy(model(x), y) / 3).backward()
            rule.step()
            rule.zero_grad()
        results.append((rule.progress, rule.noise.var_of(), rule.noise.sqr_of()))
    assert results[0] == pytest.approx(results[1], rel=1e-10)


def test_the_noise_of_ranks_is_weighted_as_that_of_passes():
    """Two ranks of three passes, and one rank of the same six passes."""

    def noise(counts, seeds):
        model = make_model()
        parallel = DistributedDataParallel(model) if dist.is_initialized() else model
        sgd = torch.optim.SGD(parallel.parameters(), lr=0.1)
        rule = mh.AdaScale(sgd, num_gradients_to_accumulate=len(counts), smoothing=0.0)
        batches = [b for own, seed in seeds for b in tokens(own, seed)]
        mean = mh.WeightedMean(counts, rule)
        for x, y in batches:
            mean(cross_entropy(parallel(x), y, reduction="sum")).backward()
        rule.step()
        return rule.noise.raw_sqr, rule.noise.raw_var

    def on_rank():
        rank = dist.get_rank()
        return noise(COUNTS[rank], [(COUNTS[rank], rank)])

    alone = noise([*COUNTS[0], *COUNTS[1]], [(COUNTS[0], 0), (COUNTS[1], 1)])
    for found in run_ranks(2, on_rank):
        assert found[0] == pytest.approx(alone[0], rel=1e-9)
        assert found[1] == pytest.approx(alone[1], rel=1e-9)


def test_a_step_without_any_tokens_changes_nothing():
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    mean = mh.WeightedMean([0, 0], rule)
    for x, y in tokens([0, 0], 0):
        mean(cross_entropy(model(x), y, reduction="sum")).backward()
    rule.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_mistakes_are_errors_that_say_what_to_do():
    model = make_model()
    rule = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    for counts in ([], [1, -1], [1, float("nan")]):
        with pytest.raises(ValueError, match="at least 0 for each micro-batch"):
            mh.WeightedMean(counts, rule)
    with pytest.raises(ValueError, match=r"counts has 3 number\(s\), and a step has 2"):
        mh.WeightedMean([1, 2, 3], rule)
    mean = mh.WeightedMean([3], None)
    mean(torch.ones(3).sum())
    with pytest.raises(RuntimeError, match="called more often than it has counts"):
        mean(torch.ones(3).sum())


def wrong_counts_on_rank_1():
    rule = mh.AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.1))
    try:
        mh.WeightedMean([-1 if dist.get_rank() else 1], rule)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_a_mistake_of_one_rank_is_an_error_on_every_rank():
    first, second = run_ranks(2, wrong_counts_on_rank_1)
    assert first == "rank 1 has invalid counts; its error gives the reason."
    assert "at least 0 for each micro-batch, got [-1]" in second
