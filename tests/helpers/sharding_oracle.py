"""The plain run: what the sharded ones must equal, with nothing of ours in it.

`build(model, make)` makes the optimizers of a run, by `make(params, kind, **options)`: with `plain`
torch's own, with `oss` the sharded ones. The plain run sees in one process what all workers see.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh

STEPS = 3
BUCKET = 64  # elements: the model has five times as many, and a layer of more than two buckets
AROUND_OSS = ("OSS + DDP", "OSS + ShardedDataParallel")


class Lamb(torch.optim.Optimizer):
    """You et al., 2020: Adam whose step is as long, for each tensor, as the tensor's norm says."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** state["step"])
                square = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * p
                trust = p.norm() / update.norm()
                p.sub_(update, alpha=float(group["lr"] * trust.nan_to_num(1.0, 1.0, 1.0)))


def muon_and_adamw(model, make):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon, adamw = torch.optim.Muon, torch.optim.AdamW
    return [make(matrices, muon, lr=0.05, weight_decay=0.1), make(rest, adamw, lr=0.02)]


def one(kind, **options):
    """Build a single optimizer of all parameters."""
    return lambda model, make: [make(model.parameters(), kind, **options)]


OPTIMIZERS = {
    "SGD": one(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": one(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "Adafactor": one(torch.optim.Adafactor, lr=0.02, weight_decay=0.1),
    "LAMB": one(Lamb, lr=0.02, weight_decay=0.1),
    "Muon and AdamW": muon_and_adamw,
}


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    layers = nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 3)
    return nn.Sequential(*layers).to(dtype)


def make_batches(steps, passes, workers, size=2, dtype=torch.float64):
    """x and y of [step][pass][worker][sample]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, passes, workers, size, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(steps, passes, workers, size, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), (y + x[..., :3] * 2).to(dtype)


def torch_version():
    return tuple(int(number) for number in torch.__version__.split(".")[:2])


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x).to(y.dtype), y)  # torch 2.11 takes one type only


def plain(params, kind, **options):
    return kind(params, **options)


def oss(params, kind=torch.optim.SGD, **options):
    return mh.OSS(params, optim=kind, **{"bucket_size": BUCKET, **options})


def everyone():
    """This rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def copied(params):
    return [p.detach().clone(memory_format=torch.contiguous_format) for p in params]


def wrap(way, model, optimizers, **options):
    if way == "OSS + DDP":
        return DistributedDataParallel(model, **options)
    return mh.ShardedDataParallel(
        model, optimizers if len(optimizers) > 1 else optimizers[0], **options
    )


def train(
    build, way, passes=1, no_sync=True, *, model=make_model, loss=loss_of, steps=STEPS, **options
):
    """Train as one of the workers; returns the optimizers and the wrapped module."""
    rank, workers = everyone()
    module = model()
    optimizers = build(module, oss)
    wrapped = wrap(way, module, optimizers, **options)
    dtype = next(module.parameters()).dtype
    x, y = make_batches(steps, passes, workers, dtype=dtype)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for a in range(passes):
            silent = no_sync and a < passes - 1
            with wrapped.no_sync() if silent else contextlib.nullcontext():
                (loss(wrapped, x[step, a, rank], y[step, a, rank]) / passes).backward()
        for optimizer in optimizers:
            optimizer.step()
    return optimizers, wrapped


def train_alone(build, workers, passes=1, *, model=make_model, loss=loss_of, steps=STEPS):
    """The same in one process, on the batches of all workers."""
    module = model()
    optimizers = build(module, plain)
    x, y = make_batches(steps, passes, workers, dtype=next(module.parameters()).dtype)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for a in range(passes):
            (loss(module, x[step, a].flatten(0, 1), y[step, a].flatten(0, 1)) / passes).backward()
        for optimizer in optimizers:
            optimizer.step()
    return optimizers, module


def train_averaged(
    build, workers, *, model=make_model, loss=loss_of, wire=None, wide=torch.float32, steps=STEPS
):
    """In one process, too: gradients of the workers one at a time, rounded, averaged, stepped."""
    module = model()
    optimizers = build(module, plain)
    params = list(module.parameters())
    x, y = make_batches(steps, 1, workers, dtype=params[0].dtype)
    for step in range(steps):
        each = [
            torch.autograd.grad(loss(module, x[step, 0, w], y[step, 0, w]), params)
            for w in range(workers)
        ]
        for param, grads in zip(params, zip(*each, strict=True), strict=True):
            total = sum(grad.to(wire or grad.dtype).to(wide) for grad in grads)
            param.grad = (total / workers).to(param.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return optimizers, module


def assert_same(results, expected, what="", rtol=1e-9, atol=1e-11):
    """Lists of tensors: those of all ranks equal bit for bit, and near what was expected."""
    for rank, result in enumerate(results):
        assert len(result) == len(expected)
        for i, (p, q) in enumerate(zip(result, results[0], strict=True)):
            equal = torch.equal(p, q) or torch.equal(p.nan_to_num(), q.nan_to_num())
            assert equal, f"{what}: tensor {i} on rank {rank} is not rank 0's"
    for i, (p, q) in enumerate(zip(results[0], expected, strict=True)):
        try:
            torch.testing.assert_close(p, q.detach(), rtol=rtol, atol=atol)
        except AssertionError as error:
            raise AssertionError(f"{what}: tensor {i}: {error}") from None
