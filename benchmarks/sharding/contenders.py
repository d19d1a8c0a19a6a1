"""The contenders: ways to train one model with AdamW on several ranks.

`make(model)` wraps the model and makes its optimizer. `clear` is how gradients are cleared after a
step: fairscale's buckets are right only where they are set to zero, and not to None.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peers import installed
from team import tell_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
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
    backward: Callable[[Tensor], object] = Tensor.backward

    def step(self, batch: Tensor) -> None:
        self.backward(self.model(batch))
        self.optimizer.step()
        self.clear()

    def choose(self, choice: str) -> None:
        """Let AdamW be computed in the way of that name from now on."""
        for group in self.optimizer.param_groups:
            group["fused"] = CHOICES[choice]


@dataclass(frozen=True)
class Contender:
    name: str
    make: Callable[[nn.Module], Trained]
    needs: str | None = None  # the peer that must be installed

    @property
    def present(self) -> bool:
        return installed(self.needs)

    @property
    def ours(self) -> bool:
        return self.name.startswith("manyhands")


def under_ddp(optimizer: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        made = optimizer(model.parameters(), **options, **OPTIONS)
        return Trained(DistributedDataParallel(model), made, made.zero_grad)

    return make


ddp = under_ddp(AdamW)
oss_and_ddp = under_ddp(mh.OSS, optim=AdamW)
zero_redundancy = under_ddp(ZeroRedundancyOptimizer, optimizer_class=AdamW)


def sharded(shared_memory: bool = False, **options: Any) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        optimizer = mh.OSS(model.parameters(), optim=AdamW, shared_memory=shared_memory, **OPTIONS)
        wrapped = mh.ShardedDataParallel(model, optimizer, **options)
        return Trained(wrapped, optimizer, optimizer.zero_grad)

    return make


def fairscale(**options: Any) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fairscale.nn.data_parallel import ShardedDataParallel
            from fairscale.optim.oss import OSS
        optimizer = OSS(model.parameters(), optim=AdamW, **OPTIONS)
        wrapped = ShardedDataParallel(model, optimizer, **options)
        # Its own zero_grad keeps the gradients and sets them to zero; the model's drops them.
        return Trained(wrapped, optimizer, model.zero_grad if options else wrapped.zero_grad)

    return make


def deepspeed_zero(stage: int, **options: Any) -> Callable[[nn.Module], Trained]:
    """DeepSpeed's engine at a stage, with the same AdamW; `options` are of "zero_optimization"."""

    def make(model: nn.Module) -> Trained:
        import deepspeed

        warnings.simplefilter("ignore")  # of deprecated collectives, in each step
        tell_ranks()
        optimizer = AdamW(model.parameters(), fused=True, **OPTIONS)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, **options},
            "zero_allow_untested_optimizer": True,
        }
        with redirect_stdout(io.StringIO()):
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )

        def state() -> dict[str, Any]:
            whole = {}
            for name, param in engine.module.named_parameters():
                with deepspeed.zero.GatheredParameters(param, enabled=stage == 3):
                    whole[name] = param.detach().clone()
            return whole

        # The engine clears gradients by itself, and wants to be asked for backward and step.
        return Trained(engine, _Engine(engine, optimizer), lambda: None, state, engine.backward)

    return make


def import_early() -> None:
    """Import, before ranks are forked, what would be counted as a contender's own."""
    if installed("deepspeed"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            import deepspeed

            deepspeed.logger.setLevel("ERROR")


class _Engine:
    def __init__(self, engine: Any, optimizer: AdamW) -> None:
        self.step = engine.step
        self.param_groups = optimizer.param_groups


SMALL = 2_000_000  # elements of a bucket; DeepSpeed's default is 500 million, the whole model here


def zeros(stage: int) -> tuple[Contender, ...]:
    """As it comes, and with settings that could be faster. Only stage 3 overlaps by itself."""
    small = {"reduce_bucket_size": SMALL, "allgather_bucket_size": SMALL}
    overlap = stage < 3
    settings: dict[str, dict[str, Any]] = {
        "": {},
        ", small buckets": small,
        f", small buckets, overlap_comm={overlap}": {**small, "overlap_comm": overlap},
    }
    return tuple(
        Contender(f"DeepSpeed ZeRO-{stage}{more}", deepspeed_zero(stage, **given), "deepspeed")
        for more, given in settings.items()
    )


OURS = "manyhands OSS + ShardedDataParallel"
SHARED = "manyhands, shared_memory=True"
WHOLE_GRADIENTS = "manyhands OSS + DDP"
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(DDP, ddp),
        Contender(CONTROL, ddp),
        Contender(OURS, sharded()),
        Contender(SHARED, sharded(shared_memory=True)),
        Contender(WHOLE_GRADIENTS, oss_and_ddp),
        Contender("torch ZeroRedundancyOptimizer + DDP", zero_redundancy),
        Contender("fairscale, buffer 0", fairscale(reduce_buffer_size=0), "fairscale"),
        Contender("fairscale, default buffer", fairscale(), "fairscale"),
        *zeros(1),
        *zeros(2),
    )
}


# -- sharded parameters ----------------------------------------------------------------------------
# Each is wrapped alike: the embedding, every block and the logits by themselves, and the rest with
# the whole model. (DeepSpeed gathers each layer's parameters by hooks of its own.)


def nested(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The decoder of `models.py` with a wrap around each of its layers, and one around it."""
    model.tokens = wrap(model.tokens)
    model.logits = wrap(model.logits)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = wrap(block)
    return wrap(model)


def fully_sharded(wrap: Callable[..., nn.Module], **options: Any) -> Callable[[Any], Trained]:
    def make(model: nn.Module) -> Trained:
        wrapped = nested(model, lambda module: wrap(module, **options))
        optimizer = AdamW(wrapped.parameters(), **OPTIONS)
        return Trained(wrapped, optimizer, optimizer.zero_grad)

    return make


def bare(module: nn.Module, **options: Any) -> nn.Module:
    fully_shard(module, **options)
    return module


def theirs(**options: Any) -> Callable[[Any], Trained]:
    """fairscale's; on a CPU it is made to run as the tests make it, for good in this process."""

    def make(model: nn.Module) -> Trained:
        warnings.simplefilter("ignore")
        if next(model.parameters()).is_cuda:
            from fairscale.nn import FullyShardedDataParallel

            return fully_sharded(FullyShardedDataParallel, **options)(model)
        sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
        from helpers.fairscale_on_cpu import fairscale_on_cpu

        patched = fairscale_on_cpu()
        wrapper = patched.__enter__()
        on_cpu = {"compute_device": torch.device("cpu"), **options}
        trained = fully_sharded(wrapper, **on_cpu)(model)
        _kept.append(patched)
        return replace(trained, state=trained.model.state_dict)

    return make


_kept: list[Any] = []  # to be left when the process ends
BARE = "fully_shard"
BARE_KEPT = "fully_shard, reshard_after_forward=False"
FSDP = "manyhands FSDP"
FSDP_KEPT = "manyhands FSDP, reshard_after_forward=False"
FSDP_LEAN = "manyhands FSDP, overlap=False"
FAIRSCALE = "fairscale FSDP"
FAIRSCALE_KEPT = "fairscale FSDP, reshard_after_forward=False"
ZERO3 = zeros(3)
FSDP_CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(DDP, ddp),
        Contender(CONTROL, ddp),
        Contender(BARE, fully_sharded(bare)),
        Contender(BARE_KEPT, fully_sharded(bare, reshard_after_forward=False)),
        Contender(FSDP, fully_sharded(mh.FSDP)),
        Contender(FSDP_KEPT, fully_sharded(mh.FSDP, reshard_after_forward=False)),
        Contender(FSDP_LEAN, fully_sharded(mh.FSDP, overlap=False)),
        Contender(OURS, sharded()),
        Contender(FAIRSCALE, theirs(), "fairscale"),
        Contender(FAIRSCALE_KEPT, theirs(reshard_after_forward=False), "fairscale"),
        *ZERO3,
    )
}
