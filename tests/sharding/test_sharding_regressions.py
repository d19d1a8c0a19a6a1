"""Cases that were wrong once, found by reading the code."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import (
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    make_model,
    oss,
    plain,
)


def sharded(module, kind=SGD, **options):
    optimizer = oss(module.parameters(), kind, **options)
    return mh.ShardedDataParallel(
        module, optimizer, warn_on_trainable_params_changed=False
    ), optimizer


def steps(model, optimizer, batches, rank=None):
    """Train on these batches: those of one worker, or of all."""
    for x, y in zip(*batches, strict=True):
        optimizer.zero_grad()
        own = slice(None) if rank is None else rank
        x, y = x[0][own], y[0][own]
        if rank is None:
            x, y = x.flatten(0, 1), y.flatten(0, 1)
        loss_of(model, x, y).backward()
        optimizer.step()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_state_of_a_parameter_that_is_frozen_while_it_is_loaded_is_kept(workers):
    """Trained, saved, frozen, loaded, saved again, thawed: its moments go on where they were."""

    def phases(wrap, rank):
        x, y = make_batches(6, 1, workers)
        first = make_model()
        model, optimizer = wrap(first)
        steps(model, optimizer, (x[:2], y[:2]), rank)
        state = saved(optimizer)
        second = make_model()
        second.load_state_dict(first.state_dict())
        second[0].requires_grad_(False)
        model, optimizer = wrap(second)
        optimizer.load_state_dict(state)
        steps(model, optimizer, (x[2:4], y[2:4]), rank)
        assert list(saved(optimizer)["state"]) == list(range(6))
        second[0].requires_grad_(True)
        steps(model, optimizer, (x[4:], y[4:]), rank)
        return copied(second.parameters())

    def saved(optimizer):
        sharding = isinstance(optimizer, mh.OSS)
        return optimizer.state_dict(all_ranks=True) if sharding else optimizer.state_dict()

    def alone(module):
        return module, plain(module.parameters(), AdamW, lr=0.02)

    expected = phases(alone, None)
    ranks = run_ranks(workers, lambda: phases(lambda m: sharded(m, AdamW, lr=0.02), everyone()[0]))
    assert_same(ranks, expected)


@on_ranks(2, raises=RuntimeError, match="use_reentrant=False")
def test_a_parameter_inside_and_outside_of_a_reentrant_checkpoint_is_an_error():
    inner = nn.Linear(5, 5)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(checkpoint(self.inner, x, use_reentrant=True))

    model, _ = sharded(Twice())
    model(torch.ones(2, 5, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("workers", [1, 2])
@on_ranks("workers", raises=RuntimeError, match="modified by an inplace operation")
def test_a_backward_through_parameters_that_a_step_has_changed_is_an_error(workers):
    module = make_model(torch.float32)
    model, optimizer = sharded(module, lr=0.1)
    x = torch.ones(2, 5)
    first, second = model(x).sum(), model(x).sum()
    first.backward()
    optimizer.step()
    second.backward()


def test_a_rule_takes_the_optimizers_group():
    def run():
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rank = dist.get_rank()
        module = make_model()
        optimizer = mh.AdaScale(oss(module.parameters(), lr=0.05, group=groups[rank // 2]))
        model = mh.ShardedDataParallel(module, optimizer)
        noise = mh.NoiseScale(optimizer.optimizer)
        x, y = make_batches(3, 1, 4)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, x[step, 0, rank % 2], y[step, 0, rank % 2]).backward()
            optimizer.step()
        return optimizer.scale, optimizer.gain(), noise.squared_norm

    results = run_ranks(4, run)
    assert all(result[0] == 2.0 for result in results)
    assert len(set(results)) == 1  # both groups saw the same


def test_a_worker_without_data_has_the_others_buffers():
    def run():
        rank = dist.get_rank()
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        model, optimizer = sharded(module, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            if (rank, step) != (1, 1):
                model(torch.randn(6, 5) + rank).sum().backward()
            optimizer.step()
        return copied(module.state_dict().values())

    ranks = run_ranks(2, run)
    assert_same(ranks, ranks[0])


@on_ranks(2, raises=ValueError, match=r"does not take|2D")
def test_parameters_that_one_workers_optimizer_does_not_take_are_an_error_everywhere():
    oss(nn.Linear(30, 30).parameters(), Muon, lr=0.1)


class Lists(SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["history"] = [torch.ones(2)]


@on_ranks(2, raises=TypeError, match="in Lists has a list as 'history'")
def test_state_that_cannot_be_collected_is_an_error_everywhere():
    module = nn.Linear(3, 3)  # the bias has another owner than the weight
    optimizer = oss(module.parameters(), Lists, lr=0.1)
    model = mh.ShardedDataParallel(module, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict()


@pytest.mark.parametrize("option", ["layout", "bucket_size", "reduce_dtype"])
def test_options_that_differ_between_workers_are_an_error(option):
    values = {
        "layout": ["even", "whole"],
        "bucket_size": [64, 128],
        "reduce_dtype": [None, torch.bfloat16],
    }[option]

    def run():
        given = {option: values[dist.get_rank()]}
        module = make_model()
        if option == "reduce_dtype":
            mh.ShardedDataParallel(module, oss(module.parameters()), **given)
        else:
            oss(module.parameters(), lr=0.1, **given)

    raises_on_ranks(2, ValueError, run, match=f"different values of {option}")


def test_a_module_may_be_converted_while_it_has_sharded_gradients():
    def run():
        rank = dist.get_rank()
        module = make_model(torch.float32)
        model, optimizer = sharded(module, lr=0.1)
        x, y = make_batches(1, 1, 2, dtype=torch.float32)
        loss_of(model, x[0, 0, rank], y[0, 0, rank]).backward()
        model.double()
        optimizer.step()
        return copied(module.parameters())

    module = make_model(torch.float32)
    optimizer = SGD(module.parameters(), lr=0.1)
    x, y = make_batches(1, 1, 2, dtype=torch.float32)
    loss_of(module, x[0, 0].flatten(0, 1), y[0, 0].flatten(0, 1)).backward()
    module.double()
    optimizer.step()
    assert_same(run_ranks(2, run), list(module.parameters()), rtol=1e-5, atol=1e-6)


def test_two_modules_in_one_backward_are_not_mistaken_for_each_other():
    """Two towers of equal buckets, whose gradients come in turns."""

    def loss(first, second):
        x = torch.ones(2, 5, dtype=torch.float64)
        return first(x).sum() + 3.0 * second(2 * x).sum() + (first(x) * second(x)).sum()

    def run():
        towers = [make_model(), make_model()]
        wrapped = [sharded(tower, lr=0.1) for tower in towers]
        (loss(*(model for model, _ in wrapped)) * (1 + dist.get_rank())).backward()
        for _, optimizer in wrapped:
            optimizer.step()
        return copied(p for tower in towers for p in tower.parameters())

    towers = [make_model(), make_model()]
    (loss(*towers) * 1.5).backward()
    for tower in towers:
        SGD(tower.parameters(), lr=0.1).step()
    assert_same(run_ranks(2, run), [p for tower in towers for p in tower.parameters()])


def test_an_optimizer_is_free_again_when_its_module_is_gone():
    def run():
        module = make_model()
        model, optimizer = sharded(module, lr=0.1)
        del model
        gc.collect()
        model = mh.ShardedDataParallel(module, optimizer)
        x, y = make_batches(1, 1, 2)
        loss_of(model, x[0, 0, dist.get_rank()], y[0, 0, dist.get_rank()]).backward()
        optimizer.step()
        return copied(module.parameters())

    ranks = run_ranks(2, run)
    assert_same(ranks, ranks[0])


def test_a_learning_rate_given_for_a_group_says_what_it_is():
    with pytest.raises(TypeError, match=r"group must be a process group, got 0\.1"):
        mh.OSS(make_model().parameters(), SGD, 0.1)
