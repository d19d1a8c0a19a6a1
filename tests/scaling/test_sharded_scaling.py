"""Scaling over sharding: the statistics are those of plain DDP on the same data.

The oracle is the same loop with the bare optimizer under DistributedDataParallel, whose own
statistics are checked elsewhere.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, RMSprop

import manyhands as mh
from helpers.ranks import run_ranks
from helpers.scaling_oracle import trained_as_under_ddp

SIZES = 640  # elements of a bucket: parameters are cut, and share buckets
SGD_OPTIONS = {"lr": 0.05, "momentum": 0.9}
PLAIN, OSS_DDP, RULE_FIRST, MODULE_FIRST = "DDP", "OSS + DDP", "rule, then module", "module first"


def make_model():
    torch.manual_seed(0)
    layers = nn.Linear(7, 133), nn.ReLU(), nn.Linear(133, 50), nn.ReLU(), nn.Linear(50, 5)
    return nn.Sequential(*layers)


def make_batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(24, 7, generator=generator) for _ in range(steps)]


def wrapped(how, rule, optim, **options):
    """A model and its optimizer under a rule."""
    model = make_model()
    if how == PLAIN:
        optimizer = optim(model.parameters(), **options)
    else:
        optimizer = mh.OSS(model.parameters(), optim=optim, bucket_size=SIZES, **options)
    if how == MODULE_FIRST:
        model = mh.ShardedDataParallel(model, optimizer)
        return model, rule(optimizer)
    optimizer = rule(optimizer)
    if how == RULE_FIRST:
        return mh.ShardedDataParallel(model, optimizer), optimizer
    return DDP(model), optimizer


def train(how, rule, optim, options, passes=1, sync_all=False, scaler=None, steps=6):
    """Every step's gain, noise and factor, and the parameters."""
    model, optimizer = wrapped(
        how, lambda o: rule(o, num_gradients_to_accumulate=passes), optim, **options
    )
    noise = mh.NoiseScale(optimizer.optimizer, num_gradients_to_accumulate=passes)
    rank, size = dist.get_rank(), dist.get_world_size()
    scaler = scaler() if scaler else mh.ShardedGradScaler(enabled=False)
    seen = []
    for step, batch in enumerate(make_batches(steps)):
        (optimizer if step % 2 else model).zero_grad(set_to_none=step % 3 != 0)
        for number, part in enumerate(batch.chunk(passes)):
            last = sync_all or number == passes - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(part.chunk(size)[rank]).square().mean() / passes
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        shown = optimizer.snapshot()
        measured = [0.0 if value is None else value for value in (*shown["sqr"], *shown["var"])]
        seen += [shown["gain"], *shown["factor"], *measured]
    if scaler.is_enabled():
        seen.append(scaler.get_scale())
    else:
        seen += [noise.noise_scale, noise.squared_norm, noise.variance]
    return torch.tensor(seen, dtype=torch.float64), [p.detach().clone() for p in model.parameters()]


def check_equal_to_ddp(world, how, *args, **kwargs):
    everyone = trained_as_under_ddp(world, train, PLAIN, how, *args, **kwargs)
    for _, params in everyone:
        torch.testing.assert_close(params, everyone[0][1], rtol=0, atol=0)


RULES = [
    pytest.param(mh.AdaScale, SGD, SGD_OPTIONS, id="AdaScale"),
    pytest.param(mh.AdamScale, AdamW, {"lr": 0.005}, id="AdamScale"),
    pytest.param(mh.LinearScale, AdamW, {"lr": 0.001, "amsgrad": True}, id="LinearScale"),
]


@pytest.mark.sample("AdaScale-OSS + DDP", "AdamScale-rule, then module", "LinearScale-module first")
@pytest.mark.parametrize("how", [OSS_DDP, RULE_FIRST, MODULE_FIRST])
@pytest.mark.parametrize(("rule", "optim", "options"), RULES)
def test_statistics_and_training_are_those_of_ddp(how, rule, optim, options):
    check_equal_to_ddp(2, how, rule, optim, options)


@pytest.mark.sample("AdaScale-False", "AdamScale-True")
@pytest.mark.parametrize("sync_all", [False, True])
@pytest.mark.parametrize(("rule", "optim", "options"), RULES[:2])
def test_accumulated_passes_are_measured_as_under_ddp(rule, optim, options, sync_all):
    check_equal_to_ddp(3, RULE_FIRST, rule, optim, options, passes=2, sync_all=sync_all)


@pytest.mark.parametrize(
    "options", [{"lr": 0.001}, {"lr": 0.001, "centered": True}], ids=["plain", "centered"]
)
def test_adam_scale_divides_by_rmsprops_moments_of_all_workers(options):
    check_equal_to_ddp(2, RULE_FIRST, mh.AdamScale, RMSprop, options)


def test_adam_scale_divides_by_amsgrads_largest_moments():
    options = {"lr": 0.001, "amsgrad": True}
    check_equal_to_ddp(2, RULE_FIRST, mh.AdamScale, AdamW, options)


@pytest.mark.parametrize("how", [OSS_DDP, RULE_FIRST])
def test_loss_scaling_is_divided_out(how):
    def scaler():
        return mh.ShardedGradScaler(device="cpu", init_scale=2.0**120, growth_interval=3)

    check_equal_to_ddp(2, how, mh.AdaScale, SGD, SGD_OPTIONS, scaler=scaler, steps=12)


def train_without_data(how):
    """In the second step only rank 0 has samples, with twice the loss to make up for it."""
    model, optimizer = wrapped(how, mh.AdaScale, SGD, **SGD_OPTIONS)
    rank = dist.get_rank()
    for step, batch in enumerate(make_batches(3)):
        optimizer.zero_grad()
        if step != 1:
            model(batch.chunk(2)[rank]).square().mean().backward()
        elif how == PLAIN:  # the other's gradient is zero
            (model(batch).square().mean() * (2.0 if rank == 0 else 0.0)).backward()
        elif rank == 0:
            (model(batch).square().mean() * 2.0).backward()
        optimizer.step()
    return optimizer.gain(), [p.detach().clone() for p in model.parameters()]


def test_a_worker_without_data_joins_in_with_zeros():
    (gain, params), _ = run_ranks(2, train_without_data, PLAIN)
    for got, others in run_ranks(2, train_without_data, RULE_FIRST):
        assert got == pytest.approx(gain, rel=1e-5)
        torch.testing.assert_close(others, params, rtol=1e-4, atol=1e-6)


def measure_without_data():
    """NoiseScale alone; in the second step only rank 0 has samples."""
    model = make_model()
    optimizer = mh.OSS(model.parameters(), optim=SGD, lr=0.01)
    model = mh.ShardedDataParallel(model, optimizer)
    noise = mh.NoiseScale(optimizer)
    rank = dist.get_rank()
    for step, batch in enumerate(make_batches(3)):
        optimizer.zero_grad()
        if step != 1 or rank == 0:
            model(batch.chunk(2)[rank]).square().mean().backward()
        optimizer.step()
    return noise.steps, noise.variance


def test_a_noise_scale_on_a_worker_without_data_joins_in():
    first, second = run_ranks(2, measure_without_data)
    assert first == second and first[0] == 3


def interrupted(how, saved_how, rule, optim, options):
    """Three steps, a checkpoint, and three more in new objects; perhaps sharded otherwise."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def some_steps(model, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            model(batch.chunk(size)[rank]).square().mean().backward()
            optimizer.step()

    batches = make_batches(12)
    model, optimizer = wrapped(saved_how, rule, optim, **options)
    some_steps(model, optimizer, batches[:6])
    if saved_how != PLAIN:
        optimizer.consolidate_state_dict(recipient_rank=-1)
    weights = {
        key.removeprefix("module."): value.clone() for key, value in model.state_dict().items()
    }
    state = optimizer.state_dict()
    model, optimizer = wrapped(how, rule, optim, **options)
    model.load_state_dict(
        {f"module.{k}": v for k, v in weights.items()} if isinstance(model, DDP) else weights
    )
    optimizer.load_state_dict(state)
    some_steps(model, optimizer, batches[6:])
    return optimizer.progress, [p.detach().clone() for p in model.parameters()]


@pytest.mark.sample(
    "AdaScale-rule, then module-rule, then module",
    "AdaScale-DDP-OSS + DDP",
    "AdamScale-DDP-OSS + DDP",
)
@pytest.mark.parametrize(
    ("saved_how", "how"),
    [(RULE_FIRST, RULE_FIRST), (RULE_FIRST, PLAIN), (PLAIN, OSS_DDP)],
)
@pytest.mark.parametrize(("rule", "optim", "options"), RULES[:2])
def test_a_checkpoint_continues_sharded_or_plain(saved_how, how, rule, optim, options):
    progress, params = run_ranks(2, interrupted, PLAIN, PLAIN, rule, optim, options)[0]
    for got, others in run_ranks(2, interrupted, how, saved_how, rule, optim, options):
        assert got == pytest.approx(progress, rel=1e-5)
        torch.testing.assert_close(others, params, rtol=1e-4, atol=1e-6)
