"""Workers of one host exchange through shared memory: the same numbers, and nothing is sent."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from helpers.ranks import on_ranks, raises_on_ranks, run_ranks
from helpers.sharding_oracle import (
    AROUND_OSS,
    OPTIMIZERS,
    assert_same,
    copied,
    everyone,
    loss_of,
    make_batches,
    make_model,
    oss,
    plain,
    train_alone,
)
from manyhands._ranks import slices as _host


def shared(params, kind, **options):
    return oss(params, kind, shared_memory=True, **options)


def train(build, way=AROUND_OSS[1], steps=3, delays=None, between=lambda *_: None, **options):
    """Train with shared memory; `between` is called after each step."""
    rank, workers = everyone()
    module = make_model()
    optimizers = build(module, shared)
    wrapped = (
        DistributedDataParallel(module)
        if way == AROUND_OSS[0]
        else mh.ShardedDataParallel(module, optimizers, **options)
    )
    x, y = make_batches(steps, 1, workers)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if delays:
            time.sleep(delays.random() / 200)
        loss_of(wrapped, x[step, 0, rank], y[step, 0, rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
        between(step, module, optimizers)
    return copied(wrapped.state_dict().values())  # which waits for what is under way


@pytest.mark.sample(
    "SGD-OSS + DDP", "Adafactor-OSS + DDP", "Muon and AdamW-OSS + ShardedDataParallel"
)
@pytest.mark.parametrize("way", AROUND_OSS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_those_of_the_plain_run(name, way):
    _, expected = train_alone(OPTIMIZERS[name], 3)
    assert_same(run_ranks(3, train, OPTIMIZERS[name], way), list(expected.parameters()))


def test_no_worker_reads_what_another_is_not_done_with():
    """Workers that come late at random, more buckets than places in the ring, many steps."""

    def late():
        delays = random.Random(dist.get_rank())
        return train(OPTIMIZERS["AdamW"], steps=12, delays=delays)

    _, expected = train_alone(OPTIMIZERS["AdamW"], 4, steps=12)
    assert_same(run_ranks(4, late), list(expected.parameters()))


def test_parameters_may_be_overwritten_as_soon_as_step_returns():
    """As for an evaluation with averaged weights: others may still be about to read them."""

    def swap(step, module, _):
        kept = copied(module.parameters())
        with torch.no_grad():
            for param in module.parameters():
                param.zero_()
        if dist.get_rank() == 0:
            time.sleep(0.02)
        with torch.no_grad():
            for param, value in zip(module.parameters(), kept, strict=True):
                param.copy_(value)

    _, expected = train_alone(OPTIMIZERS["SGD"], 3)
    ranks = run_ranks(3, train, OPTIMIZERS["SGD"], between=swap)
    assert_same(ranks, list(expected.parameters()))


def test_nothing_but_numbers_is_sent(monkeypatch):
    def run():
        sent = []
        for name in ("isend", "irecv", "broadcast", "all_to_all_single", "all_reduce"):
            call = getattr(dist, name)

            def counted(tensor, *args, call=call, **kwargs):
                sent.append(tensor.numel())
                return call(tensor, *args, **kwargs)

            monkeypatch.setattr(dist, name, counted)
        train(OPTIMIZERS["AdamW"], steps=1)  # the start, with rank 0's parameters
        sent.clear()
        train(OPTIMIZERS["AdamW"], steps=3, sync_models_at_startup=False)
        return max(sent)

    parameters = len(list(make_model().parameters()))
    assert max(run_ranks(2, run)) <= parameters + 20


def test_parameters_that_thaw_or_are_converted_move_into_new_memory():
    def changes(step, module, optimizers):
        if step == 0:
            module[0].requires_grad_(True)
        if step == 1:
            optimizers[0].zero_grad()
            module.to(torch.float32).to(torch.float64)

    def build(module, make):
        module[0].requires_grad_(False)
        return OPTIMIZERS["AdamW"](module, make)

    def run():
        return train(build, between=changes, warn_on_trainable_params_changed=False)

    module = make_model()
    optimizers = build(module, plain)
    x, y = make_batches(3, 1, 3)
    for step in range(3):
        optimizers[0].zero_grad()
        loss_of(module, x[step, 0].flatten(0, 1), y[step, 0].flatten(0, 1)).backward()
        optimizers[0].step()
        changes(step, module, optimizers)
    ranks = run_ranks(3, run)
    assert_same(ranks, list(module.parameters()), rtol=1e-5, atol=1e-6)


def test_one_worker_needs_no_other():
    module = make_model()
    (optimizer,) = OPTIMIZERS["SGD"](module, shared)
    loss_of(module, *(batch[0, 0, 0] for batch in make_batches(1, 1, 1))).backward()
    optimizer.step()
    _, expected = train_alone(OPTIMIZERS["SGD"], 1, steps=1)
    assert_same([copied(module.parameters())], list(expected.parameters()), rtol=0, atol=0)


@on_ranks(3, raises=ValueError, match="needs all workers on the same host.*rank 2: host 1")
def test_workers_of_several_hosts_cannot(monkeypatch):
    monkeypatch.setattr(_host, "_host_identity", lambda: f"host {dist.get_rank() // 2}")
    shared(make_model().parameters(), torch.optim.SGD)


def test_workers_that_cannot_read_each_others_memory_all_say_so(monkeypatch):
    def run():
        if dist.get_rank() == 1:
            monkeypatch.setattr(torch, "from_file", refuse)
        shared(make_model().parameters(), torch.optim.SGD)

    def refuse(*_, **__):
        raise RuntimeError("permission denied")

    raises_on_ranks(2, RuntimeError, run, match="cannot read each other's memory.*permission")


def test_gradients_may_be_wider_than_parameters_in_the_ring():
    def run():
        module = make_model(torch.bfloat16)
        optimizer = shared(module.parameters(), torch.optim.SGD, lr=0.1)
        model = mh.ShardedDataParallel(module, optimizer, reduce_dtype=torch.float32)
        x, y = make_batches(1, 1, 2, dtype=torch.bfloat16)
        loss_of(model, x[0, 0, dist.get_rank()], y[0, 0, dist.get_rank()]).backward()
        optimizer.step()
        return copied(module.parameters())

    first, second = run_ranks(2, run)
    assert_same([first, second], first)
    assert all(torch.isfinite(p).all() for p in first)
