"""The contenders: ways to synchronize parameters once in a block of steps.

`make(optimizer, every, model)` gives what takes the optimizer's place: `step` and `zero_grad`.
Contenders of one formula end at the same parameters; `about` is how far those that send rounded
values may be from the others, over how far the parameters have moved. manyhands goes through
sockets, as between hosts, unless it is named "as it comes".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peers import installed as is_installed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import manyhands as mh
from blocks import installed

BLOCK: dict[str, Any] = {"lr": 1.0, "momentum": 0.875}  # fairseq's
DILOCO: dict[str, Any] = {"lr": 0.7, "momentum": 0.9}  # the paper's
EXACT = 1e-4
ROUNDED = {"bfloat16": 0.01, "int8": 0.02, "int4": 0.2}
AVERAGE = "average"
MOMENTUM = "momentum"
NESTEROV = "Nesterov momentum"
Make = Callable[[Optimizer, int, nn.Module | None], Any]


@dataclass(frozen=True)
class Contender:
    name: str
    formula: str
    make: Make
    about: float = EXACT
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    needs: str | None = None  # the peer that must be installed

    @property
    def present(self) -> bool:
        return is_installed(self.needs)


class Every:
    """An optimizer after whose every H-th step something is called."""

    def __init__(self, optimizer: Optimizer, every: int, sync: Callable[[], object]) -> None:
        self.optimizer = optimizer
        self.every = every
        self.sync = sync
        self.count = 0

    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.every == 0:
            self.sync()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class PerTensor:
    """Block momentum as fairseq has it (Chen & Huo, 2016): one all-reduce for each tensor.

    With the anchor W, the momentum s, block_momentum η, block_lr ζ, and the parameters of N ranks,

        G = W - local                       on each rank
        G = sum of all G / N                one all-reduce for each tensor
        s = η s + ζ G
        W = W - s                           nesterov:  W - ζ G - η s
        local = W

    With η = 0 it is fairseq's plain average.
    """

    def __init__(
        self, params: Sequence[Tensor], lr: float, momentum: float, nesterov: bool = False
    ) -> None:
        self.params = params
        self.lr = lr
        self.momentum = momentum
        self.nesterov = nesterov
        if momentum:
            self.anchor = [p.detach().clone() for p in params]
            self.smoothed = [torch.zeros_like(p) for p in self.anchor]

    @torch.no_grad()
    def __call__(self) -> None:
        if not self.momentum:
            for param in self.params:
                param.div_(dist.get_world_size())
                dist.all_reduce(param)
            return
        for param, anchor, smoothed in zip(self.params, self.anchor, self.smoothed, strict=True):
            grad = anchor - param
            grad.div_(dist.get_world_size())
            dist.all_reduce(grad)
            smoothed.mul_(self.momentum).add_(grad, alpha=self.lr)
            if self.nesterov:
                anchor.sub_(grad, alpha=self.lr).sub_(smoothed, alpha=self.momentum)
            else:
                anchor.sub_(smoothed)
            param.copy_(anchor)


def per_tensor(lr: float, momentum: float, nesterov: bool = False) -> Make:
    def make(optimizer: Optimizer, every: int, model: nn.Module | None) -> Every:
        (group,) = optimizer.param_groups
        return Every(optimizer, every, PerTensor(group["params"], lr, momentum, nesterov))

    return make


def periodic(optimizer: Optimizer, every: int, model: nn.Module | None) -> Optimizer:
    """torch's own; it averages in the first step of a block, and not in the last."""
    with warnings.catch_warnings():
        # Of its import (torch.jit is deprecated), and that averaging every step is not worth it.
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(every))


def nothing(optimizer: Optimizer, every: int, model: nn.Module | None) -> Optimizer:
    return optimizer


def ddp_in_halves(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def local_sgd(shared_memory: bool = False) -> Make:
    return lambda optimizer, every, model: mh.LocalSGD(
        optimizer, every=every, model=model, shared_memory=shared_memory
    )


def diloco(lr: float, momentum: float, **options: Any) -> Make:
    more = {"lr": lr, "momentum": momentum, "shared_memory": False, **options}
    return lambda optimizer, every, model: mh.DiLoCo(optimizer, every=every, model=model, **more)


def _bmuf(codec: str, shared_memory: bool = False) -> Contender:
    def make(optimizer: Optimizer, every: int, model: nn.Module | None) -> mh.BMUF:
        return mh.BMUF(
            optimizer,
            block_lr=BLOCK["lr"],
            block_momentum=BLOCK["momentum"],
            global_sync_iter=every,
            warmup_iterations=0,
            model=model,
            shared_memory=shared_memory,
            codec=codec,
        )

    how = "as it comes" if shared_memory else codec
    return Contender(f"manyhands BMUF, {how}", MOMENTUM, make, ROUNDED.get(codec, EXACT))


def _diloco(codec: str, **options: int) -> Contender:
    name = f"manyhands DiLoCo, {codec}" + "".join(f", {k}={v}" for k, v in options.items())
    make = diloco(**DILOCO, codec=codec, **options)
    return Contender(name, NESTEROV, make, ROUNDED.get(codec, EXACT))


def _named(*contenders: Contender) -> dict[str, Contender]:
    return {contender.name: contender for contender in contenders}


REFERENCES = {  # what each formula is, written out
    AVERAGE: per_tensor(lr=1, momentum=0),
    MOMENTUM: per_tensor(**BLOCK),
    NESTEROV: per_tensor(**DILOCO, nesterov=True),
}
PER_TENSOR = Contender("per tensor, momentum (as fairseq)", MOMENTUM, REFERENCES[MOMENTUM])
CONTROL = Contender("per tensor, momentum again (A/A)", MOMENTUM, REFERENCES[MOMENTUM])
PERIODIC = Contender("torch PeriodicModelAverager", AVERAGE, periodic)
LOCAL_SGD = Contender("manyhands LocalSGD, float32", AVERAGE, local_sgd())
LOCAL_SGD_SHARED = Contender("manyhands LocalSGD, as it comes", AVERAGE, local_sgd(True))
BMUF = _bmuf("float32")
BMUF_SHARED = _bmuf("float32", shared_memory=True)
DILOCO_PLAIN = _diloco("float32")
ONE_BUCKET = installed.torchft_diloco(**DILOCO, use_bucketization=True)
INSTALLED = (
    Contender("torchft LocalSGD", AVERAGE, installed.torchft_local_sgd, needs="torchft"),
    Contender("torchft DiLoCo", NESTEROV, installed.torchft_diloco(**DILOCO), needs="torchft"),
    Contender("torchft DiLoCo, one bucket", NESTEROV, ONE_BUCKET, needs="torchft"),
    Contender("accelerate LocalSGD", AVERAGE, installed.AccelerateLocalSGD, needs="accelerate"),
)
SYNCS = _named(
    PER_TENSOR,
    CONTROL,
    Contender("per tensor, average", AVERAGE, REFERENCES[AVERAGE]),
    PERIODIC,
    LOCAL_SGD_SHARED,
    LOCAL_SGD,
    BMUF_SHARED,
    BMUF,
    DILOCO_PLAIN,
    *map(_bmuf, ROUNDED),
    *INSTALLED,
)
RIVALS = {  # what of ours does the same, through sockets as well
    PER_TENSOR.name: BMUF.name,
    PERIODIC.name: LOCAL_SGD.name,
    **{c.name: (DILOCO_PLAIN if c.formula == NESTEROV else LOCAL_SGD).name for c in INSTALLED},
}

ALONE = Contender("no communication", "", nothing)
ALONE_AGAIN = Contender("no communication again (A/A)", "", nothing)
DDP = Contender("DDP", "", nothing, wrap=DistributedDataParallel)
DDP_HALVES = Contender("DDP, fp16 hook", "", nothing, wrap=ddp_in_halves)
OVERLAPPED = (
    _diloco("int8", overlap=8),
    _diloco("int4", overlap=8),
    _diloco("int4", overlap=8, fragments=4),
)
SLOW = _named(
    ALONE,
    DDP,
    DDP_HALVES,
    Contender("torch PostLocalSGDOptimizer", AVERAGE, periodic),
    PER_TENSOR,
    BMUF,
    _bmuf("bfloat16"),
    DILOCO_PLAIN,
    *map(_diloco, ROUNDED),
    *OVERLAPPED,
    ALONE_AGAIN,
)
