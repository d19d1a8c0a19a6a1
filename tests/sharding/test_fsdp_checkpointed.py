"""Activation checkpoints around, inside and between wraps: the numbers are the plain run's.

A reentrant checkpoint runs a backward of its own within the backward around it, once for each time
that its module ran in the forward. A wrap in it is gathered and reduced as often.
"""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from helpers.ranks import on_ranks, run_ranks

WORKERS = 2
REENTRANT = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
OTHER = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


class Repeated(nn.Module):
    """`middle` runs as often as asked, between two layers."""

    def __init__(self, times):
        super().__init__()
        torch.manual_seed(0)
        self.times = times
        self.first = nn.Linear(5, 5)
        self.middle = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = self.middle(x)
        return self.last(x)


def around(model, wrap, check):
    model.middle = check(wrap(model.middle))


def inside(model, wrap, check):
    model.middle = wrap(check(model.middle))


def around_two(model, wrap, check):
    model.middle[0], model.middle[2] = wrap(model.middle[0]), wrap(model.middle[2])
    model.middle = check(model.middle)


def around_nested(model, wrap, check):
    model.middle[0] = wrap(model.middle[0])
    model.middle = check(wrap(model.middle))


def each_of_nested(model, wrap, check):
    model.middle[0] = check(wrap(model.middle[0]))
    model.middle = check(wrap(model.middle))


LAYOUTS = {f.__name__: f for f in (around, inside, around_two, around_nested, each_of_nested)}


def build(layout, check, times, dtype=torch.float64, **options):
    model = Repeated(times).to(dtype)
    wrap = partial(mh.FSDP, **options)
    LAYOUTS[layout](model, wrap, check)
    return wrap(model)


def batches(steps, passes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(steps, passes, WORKERS, 3, 5, generator=generator, dtype=dtype)


def train(model, part, *, passes=1, no_sync=False, optimizer=None, dtype=torch.float64):
    """Three steps; returns the parameters of the plain model."""
    optimizer = optimizer or SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in batches(3, passes, dtype):
        optimizer.zero_grad()
        for number, batch in enumerate(step):
            quiet = model.no_sync() if no_sync and number < passes - 1 else contextlib.nullcontext()
            with quiet:
                model(part(batch)).float().square().mean().backward()
        optimizer.step()
    return [value.double() for value in model.state_dict().values()]


def own(batch):
    return batch[dist.get_rank()]


def compare(layout, check, times, *, rtol=1e-9, atol=1e-11, passes=1, **training):
    def run():
        options = training.pop("options", {})
        return train(build(layout, check, times, **options), own, passes=passes, **training)

    plain = train(Repeated(times).double(), lambda batch: batch.flatten(0, 1), passes=passes)
    for rank in run_ranks(WORKERS, run):
        for ours, theirs in zip(rank, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


EVERY = [
    pytest.param(
        layout,
        check,
        times,
        marks=[] if times == 2 and check is REENTRANT else pytest.mark.long,
        id=f"{layout}-{'reentrant' if check is REENTRANT else 'other'}-{times}",
    )
    for layout in LAYOUTS
    for check in (REENTRANT, OTHER)
    for times in (1, 2, 3)
]


@pytest.mark.sample("around-reentrant-2", "around_two-reentrant-2", "each_of_nested-reentrant-2")
@pytest.mark.parametrize(("layout", "check", "times"), EVERY)
def test_a_wrap_that_runs_several_times_under_checkpoints(layout, check, times):
    compare(layout, check, times)


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize(
    "layout", ["around", pytest.param("around_nested", marks=pytest.mark.long)]
)
def test_with_accumulated_gradients(layout, no_sync):
    compare(layout, REENTRANT, 2, passes=3, no_sync=no_sync)


@pytest.mark.sample("False-False", "True-True")
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("fp32", [False, True])
def test_with_mixed_precision(fp32, no_sync):
    options = dict(
        mixed_precision=True,
        compute_dtype=torch.bfloat16,
        fp32_reduce_scatter=fp32,
        dtype=torch.float32,
    )

    def run(check):
        model = build("around", check, 2, **options)
        return train(model, own, passes=2, no_sync=no_sync, dtype=torch.float32)

    reentrant, other = run_ranks(WORKERS, lambda: [run(REENTRANT), run(OTHER)])[0]
    plain = train(Repeated(2).double(), lambda batch: batch.flatten(0, 1), passes=2)
    for ours, theirs, exact in zip(reentrant, other, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=4e-3)
        torch.testing.assert_close(ours, exact, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize(
    "options",
    [
        dict(overlap=False),
        dict(reshard_after_forward=False),
        dict(disable_reshard_on_root=False, gradient_predivide_factor=2.0),
    ],
)
def test_with_other_options(options):
    compare("around_two", REENTRANT, 2, options=options)


@on_ranks(WORKERS, raises=RuntimeError, match="reentrant checkpoints share it")
def test_a_scaling_rule_refuses_parameters_that_reentrant_checkpoints_share():
    model = build("around", REENTRANT, 2)
    train(model, own, optimizer=mh.AdaScale(SGD(model.parameters(), lr=0.1)))


class InsideAndOutside(nn.Module):
    """One wrap, under checkpoints and without, in one forward; an input without a gradient."""

    def __init__(self, order, wrap=lambda module: module):
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.table = wrap(nn.Embedding(4, 5).double())
        self.layer = wrap(nn.Linear(5, 5).double())

    def once(self, x):
        return self.layer(x + self.table(torch.tensor([1, 2, 1]))).tanh()

    def forward(self, x):
        for checked in self.order:
            x = checkpoint(self.once, x, use_reentrant=True) if checked else self.once(x)
        return x


@pytest.mark.parametrize("order", [(True, False), (False, True, True), (True, False, True)])
def test_a_wrap_inside_and_outside_of_a_checkpoint(order):
    def steps(model, part):
        optimizer = SGD(model.parameters(), lr=0.1)
        for batch in batches(3, 1)[:, 0]:
            optimizer.zero_grad()
            model(part(batch).requires_grad_()).square().mean().backward()
            optimizer.step()
        return list(model.state_dict().values())

    def run():
        return steps(mh.FSDP(InsideAndOutside(order, mh.FSDP)), own)

    # The plain run averages what its replicas have: a model is not called with both parts at once.
    def replicas():
        model = DistributedDataParallel(InsideAndOutside(order), static_graph=True)
        return [v.clone() for v in steps(model, own)]

    for ours, theirs in zip(run_ranks(WORKERS, run), run_ranks(WORKERS, replicas), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_the_outermost_wrap_under_checkpoints():
    class Twice(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=True)
            return x

        def state_dict(self):
            return self.inner.state_dict()

    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()

    def wrapped():
        model = layers()
        model[0] = mh.FSDP(model[0])
        return mh.FSDP(model)

    def run():
        return train(Twice(wrapped()), lambda batch: own(batch).requires_grad_())

    plain = train(Twice(layers()), lambda batch: batch.flatten(0, 1).requires_grad_())
    for rank in run_ranks(WORKERS, run):
        torch.testing.assert_close(rank, plain, rtol=1e-9, atol=1e-11)


@on_ranks(WORKERS, raises=RuntimeError, match=r"middle.*use_reentrant=False")
def test_a_gradient_that_the_engine_has_left_behind_is_an_error_before_the_step(monkeypatch):
    """An engine that is not to be helped reduces the gradient of one run and keeps the other."""
    monkeypatch.setattr("manyhands.sharding.fsdp._engine._begin_another_run", lambda *_: None)
    model = build("around", REENTRANT, 2)
    model(own(batches(1, 1)[0, 0])).square().mean().backward()
