"""What a ShardedDataParallel is given: is it right, and is it the same on every rank?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer, SparseAdam

from manyhands._core.agreement import Describer
from manyhands._core.codec import Codec
from manyhands._core.encoded_slices import find_gradient_codec
from manyhands._core.modules import check_not_averaged_inside
from manyhands._core.ranks import RankGroup
from manyhands._core.wrappers import find_layer
from manyhands.sharding._agreement import Facts, GroupLike, facts_of_groups
from manyhands.sharding.zero._oss import OSS


def find_oss(optimizer: Optimizer) -> OSS:
    """Return the OSS inside scaling rules and proxies; raise a TypeError if there is none."""
    inner = find_layer(optimizer, OSS)
    if inner is None:
        raise TypeError(
            f"ShardedDataParallel needs the model's manyhands.OSS, got {type(optimizer).__name__}: "
            "it sends each gradient to the worker that keeps the parameter up to date. Write "
            "OSS(model.parameters(), optim=..., ...)."
        )
    return inner


def check_optimizers(module: nn.Module, optimizers: Sequence[OSS], group: GroupLike | None) -> None:
    """Raise unless these optimizers hold what the module trains, and nothing else."""
    if not optimizers:
        raise ValueError("ShardedDataParallel needs at least one optimizer, got an empty list.")
    check_not_averaged_inside(module)
    for one in optimizers:
        if isinstance(one.optim, SparseAdam) and one._workers.size > 1:
            raise TypeError(
                "SparseAdam takes sparse gradients only, and sharded gradients are dense. Use Adam "
                "or Adagrad, or keep SparseAdam in an OSS under DistributedDataParallel."
            )
        if one._reducer is not None:
            raise RuntimeError(
                "this OSS belongs to another ShardedDataParallel already. Give each module an "
                "optimizer of its own."
            )
        given = optimizers[0].group if group is None else group
        if (given or dist.group.WORLD) is not (one.group or dist.group.WORLD):
            raise ValueError(
                "the process group is not the optimizer's (or not that of each of them). Make "
                "all with the same one: OSS(..., group=group)."
            )
    held = {id(p) for one in optimizers for g in one.param_groups for p in g["params"]}
    named = dict(module.named_parameters())
    left_out = [n for n, p in named.items() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ValueError(
            f"{len(left_out)} parameter(s) of the module are in no optimizer: "
            f"{', '.join(left_out[:4])}{', ...' if len(left_out) > 4 else ''}. Make the OSS from "
            "module.parameters(), or freeze them with requires_grad_(False)."
        )
    if foreign := len(held - {id(p) for p in named.values()}):
        raise ValueError(
            f"the optimizer holds {foreign} parameter(s) that are not in the module, and whose "
            "gradients nobody would average. Make the OSS from module.parameters()."
        )


def check_overlap(overlap_gather: bool, workers: RankGroup) -> None:
    """Raise a ValueError if there is nothing to overlap."""
    if overlap_gather and workers.shared_memory is not None:
        raise ValueError(
            "overlap_gather=True has nothing to overlap with shared_memory=True: nothing "
            "travels. Leave one of them out."
        )


def check_gradient_codec(
    name: str | None, wire: torch.dtype | None, workers: RankGroup
) -> Codec | None:
    """Return the codec of this name, or raise a ValueError if another option contradicts it."""
    codec = find_gradient_codec(name)
    if codec is not None and wire is not None:
        raise ValueError(
            f"codec={name!r} and {wire} both say how gradients travel. Leave out the codec, or "
            "reduce_dtype (and reduce_fp16)."
        )
    if codec is not None and workers.shared_memory is not None:
        raise ValueError(
            f"codec={name!r} has no effect with shared_memory=True: nothing is sent. Leave one of "
            "them out."
        )
    return codec


def facts_of_model(module: nn.Module, optimizers: Sequence[OSS], with_buffers: bool) -> Facts:
    """Return what ranks must have in common: the model, and its order in the optimizers."""
    describer = Describer()
    names = {id(param): name for name, param in module.named_parameters()}
    buffers = dict(module.named_buffers()) if with_buffers else {}
    facts: Facts = {
        "parameters in the module": [
            describer.describe(p, name, frozen=True) for name, p in module.named_parameters()
        ],
        "buffers in the module": [describer.describe(b, name) for name, b in buffers.items()],
    }
    for number, one in enumerate(optimizers):
        for title, value in facts_of_groups(one.param_groups, names).items():
            facts[f"{title} of optimizer {number}"] = value
    return facts


def check_size(elements: int | None) -> None:
    """Raise a ValueError if the size of buckets is negative."""
    if elements is not None and elements < 0:
        raise ValueError(
            f"reduce_buffer_size must not be negative, got {elements}. It is the number of "
            "elements that travel together; 0 sends each parameter alone."
        )
