"""The contenders: ways to train one model with AdamW on several ranks.

`make(model)` wraps the model and makes its optimizer. `clear` is how gradients are cleared after a
step: fairscale's buckets are right only where they are set to zero, and not to None.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import manyhands as mh

DDP = "DDP"
CONTROL = "DDP again (A/A)"
OPTIONS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
# What `fused` is while a contender is measured; torch's default loops over tensors on a CPU.
CHOICES = {"fused": True, "default": None}


@dataclass(frozen=True)
class Trained:
    """A wrapped model, its optimizer, and how gradients are cleared."""

    model: nn.Module
    optimizer: Any
    clear: Callable[[], object]
    state: Callable[[], dict[str, Any]] | None = None  # where parameters are not tensors of theirs

    def finish(self) -> None:
        """Wait for what the last step has left under way."""
        if isinstance(self.optimizer, mh.OSS):
            self.optimizer.wait()

    def choose(self, choice: str) -> None:
        """Let AdamW be computed in the way of that name from now on."""
        for group in self.optimizer.param_groups:
            group["fused"] = CHOICES[choice]


@dataclass(frozen=True)
class Contender:
    """One way to train."""

    name: str
    make: Callable[[nn.Module], Trained]
    needs: str | None = None  # the peer that must be installed

    @property
    def present(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    @property
    def ours(self) -> bool:
        return self.name.startswith("manyhands")


def ddp(model: nn.Module) -> Trained:
    optimizer = AdamW(model.parameters(), **OPTIONS)
    return Trained(DistributedDataParallel(model), optimizer, optimizer.zero_grad)


def sharded(shared_memory: bool = False, **options: Any) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        optimizer = mh.OSS(model.parameters(), optim=AdamW, shared_memory=shared_memory, **OPTIONS)
        wrapped = mh.ShardedDataParallel(model, optimizer, **options)
        return Trained(wrapped, optimizer, optimizer.zero_grad)

    return make


def oss_and_ddp(model: nn.Module) -> Trained:
    optimizer = mh.OSS(model.parameters(), optim=AdamW, **OPTIONS)
    return Trained(DistributedDataParallel(model), optimizer, optimizer.zero_grad)


def zero_redundancy(model: nn.Module) -> Trained:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, **OPTIONS)
    return Trained(DistributedDataParallel(model), optimizer, optimizer.zero_grad)


def fairscale(**options: Any) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fairscale.nn.data_parallel import ShardedDataParallel
            from fairscale.optim.oss import OSS
        optimizer = OSS(model.parameters(), optim=AdamW, **OPTIONS)
        wrapped = ShardedDataParallel(model, optimizer, **options)
        return Trained(wrapped, optimizer, wrapped.zero_grad if not options else none(optimizer))

    return make


def none(optimizer: Any) -> Callable[[], object]:
    """fairscale's own zero_grad sets gradients to zero; it does not know of set_to_none."""

    def clear() -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = None

    return clear


OURS = "manyhands OSS + ShardedDataParallel"
OVERLAP = "manyhands, overlap_gather=True"
SHARED = "manyhands, shared_memory=True"
WHOLE_GRADIENTS = "manyhands OSS + DDP"
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(DDP, ddp),
        Contender(CONTROL, ddp),
        Contender(OURS, sharded()),
        Contender(OVERLAP, sharded(overlap_gather=True)),
        Contender(SHARED, sharded(shared_memory=True)),
        Contender(WHOLE_GRADIENTS, oss_and_ddp),
        Contender("torch ZeroRedundancyOptimizer + DDP", zero_redundancy),
        Contender("fairscale, buffer 0", fairscale(reduce_buffer_size=0), "fairscale"),
        Contender("fairscale, default buffer", fairscale(), "fairscale"),
    )
}
