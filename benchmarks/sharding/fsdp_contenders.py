"""The contenders with sharded parameters: DDP, `fully_shard`, ours, fairscale's, DeepSpeed's.

Each is wrapped alike: the embedding, every block and the logits by themselves, and the rest with
the whole model. (DeepSpeed gathers each layer's parameters by hooks of its own.)
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

import manyhands as mh
from sharding.contenders import CONTROL, DDP, OPTIONS, Contender, Trained, ddp, sharded, zeros

Wrap = Callable[[nn.Module], nn.Module]


def nested(model: Any, wrap: Wrap) -> nn.Module:
    """The decoder of `models.py` with a wrap around each of its layers, and one around it."""
    model.tokens, model.logits = wrap(model.tokens), wrap(model.logits)
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
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, **options)


def theirs(**options: Any) -> Callable[[Any], Trained]:
    """fairscale's, made to run on a CPU as the tests make it; for good in this process."""

    def make(model: nn.Module) -> Trained:
        warnings.simplefilter("ignore")
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
SDP = "manyhands OSS + ShardedDataParallel"
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
        Contender(SDP, sharded()),
        Contender(FAIRSCALE, theirs(), "fairscale"),
        Contender(FAIRSCALE_KEPT, theirs(reshard_after_forward=False), "fairscale"),
        *ZERO3,
    )
}
RIVAL = {FSDP: BARE, FSDP_KEPT: BARE_KEPT, FSDP_LEAN: BARE}  # the same with torch alone
PEER = {FSDP: FAIRSCALE, FSDP_KEPT: FAIRSCALE_KEPT}  # with the original
