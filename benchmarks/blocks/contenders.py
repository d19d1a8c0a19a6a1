"""The contenders: ways to synchronise parameters once in a block of steps.

`make(optimizer, every)` gives what takes the optimizer's place: `step` and `zero_grad`.
Contenders of one formula end at the same parameters; `about` is how far those that send rounded
values may be from the others, over how far the parameters have moved.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from blocks import installed, ours
from blocks.recurrence import PerTensor

BLOCK: dict[str, Any] = {"lr": 1.0, "momentum": 0.875}  # fairseq's
DILOCO: dict[str, Any] = {"lr": 0.7, "momentum": 0.9}  # the paper's
EXACT = 1e-4
ROUNDED = {"bfloat16": 0.01, "int8": 0.02, "int4": 0.2}


@dataclass(frozen=True)
class Contender:
    """One way to synchronise."""

    name: str
    formula: str
    make: Callable[[Optimizer, int, nn.Module | None], Any]
    about: float = EXACT
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    ours: bool = False
    needs: str | None = None  # the peer that must be installed
    elsewhere: bool = False  # it works in other processes: its bytes and memory are not seen

    @property
    def present(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


class Every:
    """An optimizer after whose every H-th step something is called."""

    def __init__(self, optimizer: Optimizer, every: int, sync: Callable[[], object]) -> None:
        self.optimizer, self.every, self.sync, self.count = optimizer, every, sync, 0

    def step(self) -> None:
        self.optimizer.step()
        self.count += 1
        if self.count % self.every == 0:
            self.sync()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def per_tensor(lr: float, momentum: float, nesterov: bool = False) -> ours.Make:
    return lambda optimizer, every, model: Every(
        optimizer, every, PerTensor(params_of(optimizer), lr, momentum, nesterov)
    )


def periodic(optimizer: Optimizer, every: int, model: nn.Module | None) -> PostLocalSGDOptimizer:
    """torch's own; it averages in the first step of a block, and not in the last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that averaging after every step is not worth it
        return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(every))


def flat(optimizer: Optimizer, every: int, model: nn.Module | None) -> Every:
    """All parameters in one tensor, summed in one all-reduce, and copied back."""
    params = params_of(optimizer)

    @torch.no_grad()
    def average() -> None:
        whole = torch.cat([param.reshape(-1) for param in params])
        dist.all_reduce(whole)
        whole.div_(dist.get_world_size())
        parts = whole.split([param.numel() for param in params])
        torch._foreach_copy_(
            params, [part.view_as(param) for part, param in zip(parts, params, strict=True)]
        )

    return Every(optimizer, every, average)


def nothing(optimizer: Optimizer, every: int, model: nn.Module | None) -> Optimizer:
    return optimizer


def ddp_in_halves(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def _ours(name: str, formula: str, make: ours.Make, codec: str = "float32") -> Contender:
    return Contender(f"manyhands {name}", formula, make, ROUNDED.get(codec, EXACT), ours=True)


def _bmuf(codec: str) -> Contender:
    make = ours.bmuf(**BLOCK, codec=codec)
    return _ours(f"BMUF, {codec}", MOMENTUM, make, codec)


def diloco(codec: str, **options: int) -> Contender:
    more = "".join(f", {key}={value}" for key, value in options.items())
    make = ours.diloco(**DILOCO, codec=codec, **options)
    return _ours(f"DiLoCo, {codec}{more}", NESTEROV, make, codec)


AVERAGE, MOMENTUM, NESTEROV = "average", "momentum", "Nesterov momentum"
REFERENCES = {  # what each formula is, written out
    AVERAGE: per_tensor(lr=1, momentum=0),
    MOMENTUM: per_tensor(**BLOCK),
    NESTEROV: per_tensor(**DILOCO, nesterov=True),
}
PER_TENSOR = Contender("per tensor, momentum (as fairseq)", MOMENTUM, REFERENCES[MOMENTUM])
CONTROL = Contender("per tensor, momentum again (A/A)", MOMENTUM, REFERENCES[MOMENTUM])
PLAIN = Contender("per tensor, average", AVERAGE, REFERENCES[AVERAGE])
PERIODIC = Contender("torch PeriodicModelAverager", AVERAGE, periodic)
FLAT = Contender("one flat all-reduce, average", AVERAGE, flat)
LOCAL_SGD = _ours("LocalSGD, float32", AVERAGE, ours.local_sgd())
BMUF, BMUF_HALF = _bmuf("float32"), _bmuf("bfloat16")
LOCAL_SGD_SHARED = _ours("LocalSGD, as it comes", AVERAGE, ours.local_sgd(shared_memory=None))
BMUF_SHARED = _ours("BMUF, as it comes", MOMENTUM, ours.bmuf(**BLOCK, shared_memory=None))
DILOCO_PLAIN = diloco("float32")
HIVEMIND = "hivemind averager"
INSTALLED = tuple(
    Contender(name, formula, make, needs=name.split()[0], elsewhere=name == HIVEMIND)
    for name, formula, make in (
        ("torchft LocalSGD", AVERAGE, installed.torchft_local_sgd),
        ("torchft DiLoCo", NESTEROV, installed.torchft_diloco(**DILOCO)),
        (
            "torchft DiLoCo, one bucket",
            NESTEROV,
            installed.torchft_diloco(**DILOCO, use_bucketization=True),
        ),
        ("accelerate LocalSGD", AVERAGE, installed.AccelerateLocalSGD),
        (HIVEMIND, AVERAGE, installed.HivemindAverage),
    )
)
SYNCS = {
    contender.name: contender
    for contender in (
        PER_TENSOR,
        CONTROL,
        PLAIN,
        PERIODIC,
        FLAT,
        LOCAL_SGD_SHARED,
        LOCAL_SGD,
        BMUF_SHARED,
        BMUF,
        DILOCO_PLAIN,
        BMUF_HALF,
        _bmuf("int8"),
        _bmuf("int4"),
        *INSTALLED,
    )
}

RIVALS = {  # what of ours does the same, through sockets as well
    PER_TENSOR.name: BMUF.name,
    PERIODIC.name: LOCAL_SGD.name,
    **{c.name: (DILOCO_PLAIN if c.formula == NESTEROV else LOCAL_SGD).name for c in INSTALLED},
}

ALONE = Contender("no communication", "", nothing)
ALONE_AGAIN = Contender("no communication again (A/A)", "", nothing)
DDP = Contender("DDP", "", nothing, wrap=DistributedDataParallel)
DDP_HALVES = Contender("DDP, fp16 hook", "", nothing, wrap=ddp_in_halves)
POST_LOCAL = Contender("torch PostLocalSGDOptimizer", AVERAGE, periodic)
OVERLAPPED = (
    diloco("int8", overlap=8),
    diloco("int4", overlap=8),
    diloco("int4", overlap=8, fragments=4),
)
SLOW = {
    contender.name: contender
    for contender in (
        ALONE,
        DDP,
        DDP_HALVES,
        POST_LOCAL,
        PER_TENSOR,
        BMUF,
        BMUF_HALF,
        DILOCO_PLAIN,
        diloco("bfloat16"),
        diloco("int8"),
        diloco("int4"),
        *OVERLAPPED,
        ALONE_AGAIN,
    )
}
HIDDEN = (ALONE, *OVERLAPPED, ALONE_AGAIN)  # whose communication is to cost no time
INT4 = diloco("int4")
BYTES = {contender.name: contender for contender in (DDP, DDP_HALVES, BMUF, INT4)}
