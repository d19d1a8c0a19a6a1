"""A short training with `measure_every`, whose averages are settled after ten steps."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import manyhands as mh
from helpers import scaling_oracle
from helpers.scaling_oracle import (
    OPTIMIZERS,
    adamscale,
    linear,
    loss_of,
    make_batches,
    make_model,
    two_groups,
)
from manyhands.scaling import _noise

K = 3
SMOOTHING = 0.9  # a memory of ten steps
SETTLED = 9  # the step after which averages hold as many: K steps later the next one is measured
STEPS = 20


def settle_soon(monkeypatch):
    """Let averages of ten steps rest on three measured ones."""
    monkeypatch.setattr(_noise, "LEAST", 6)
    monkeypatch.setattr(_noise, "LEAST_STEPS", 3)


def is_measured(step, settled=SETTLED):
    return step <= settled or (step - settled) % K == 0


RULES = {
    "AdaScale": (mh.AdaScale, scaling_oracle.adascale, "SGD momentum", SETTLED),
    # averages restart when it begins to divide, after five steps
    "AdamScale": (mh.AdamScale, adamscale, "AdamW", SETTLED + 5),
    "LinearScale": (mh.LinearScale, linear, "SGD", SETTLED),
}


def adascale(model, passes, **options):
    """AdaScale around SGD, which measures one step in K."""
    options = {"smoothing": SMOOTHING, "measure_every": K, **options}
    inner = OPTIMIZERS["SGD"](two_groups(model))
    return mh.AdaScale(inner, num_gradients_to_accumulate=passes, **options)


def train(rule, passes, steps=STEPS, load=None, **options):
    """Train in this process's place among the workers; yields after every step."""
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = make_model(torch.float64)
    optimizer = RULES[rule][0](
        OPTIMIZERS[RULES[rule][2]](two_groups(model)),
        num_gradients_to_accumulate=passes,
        **{"smoothing": SMOOTHING, "measure_every": K, **options},
    )
    wrapped = DDP(model) if workers > 1 else model
    x, y = make_batches(STEPS, workers * passes, dtype=torch.float64)
    first = 0
    if load is not None:
        model.load_state_dict(load["model"])
        optimizer.load_state_dict(load["optimizer"])
        first = optimizer.snapshot()["step"]
    for step in range(first, steps):
        optimizer.zero_grad()
        for a in range(passes):
            quiet = workers > 1 and a < passes - 1
            with wrapped.no_sync() if quiet else contextlib.nullcontext():
                i = rank * passes + a
                (loss_of(wrapped, x[step, i], y[step, i]) / passes).backward()
        optimizer.step()
        yield model, optimizer
