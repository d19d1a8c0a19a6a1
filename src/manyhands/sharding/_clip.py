"""The norm of sharded gradients, and their clipping.

Each rank computes the norms n_i of its slices; with p = `norm_type` the norm of the whole is

    (sum of n_i^p over the slices of all ranks)^(1 / p)        their maximum, if p is infinite

One number per rank is all_reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands._core.flat import norm
from manyhands._core.ranks import RankGroup
from manyhands.sharding.zero._flat_params import Shards


@torch.no_grad()
def clip_grad_norm(
    shards: Shards, params: Sequence[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """Scale the gradients of `params` to a norm of at most `max_norm`; return their norm."""
    chosen = {id(param) for param in params}
    clipped = [i for i, param in enumerate(shards.params) if id(param) in chosen]
    lengths = [
        _norm_of_shard(grad, norm_type)
        for i in clipped
        for owned in shards.slices[i]
        if (grad := shards.gradient(owned)) is not None and grad.numel()
    ]
    total = _combine_norms(lengths, norm_type, shards.workers, shards.params[0].device)
    factor = _clip_factor(max_norm, total)
    for i in clipped:
        grad = shards.params[i].grad
        if grad is not None:
            grad.mul_(factor.to(grad.device))
    return total


@torch.no_grad()
def clip_slices(
    grads: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    ranks: RankGroup,
    device: torch.device,
) -> Tensor:
    """Scale gradients, of which these are this rank's slices, likewise; return their norm."""
    # A rank's slice of a small parameter may be empty, and has no maximum norm.
    norms = [_norm_of_shard(grad, norm_type) for grad in grads if grad.numel()]
    total = _combine_norms(norms, norm_type, ranks, device)
    factor = _clip_factor(max_norm, total)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    return total


def _clip_factor(max_norm: float, total: Tensor) -> Tensor:
    return (max_norm / (total + 1e-6)).clamp(max=1.0)  # a tensor: no wait for the device


def _combine_norms(
    lengths: Sequence[Tensor], norm_type: float, workers: RankGroup, device: torch.device
) -> Tensor:
    """Return the norm of gradients, given the norms of this rank's slices of them."""
    there = [length.to(device) for length in lengths]
    values = torch.stack(there) if there else torch.zeros(1, device=device)
    if math.isinf(norm_type):
        unknown = values.isnan().any().to(values.dtype)  # MAX may drop a NaN: send it as a flag
        both = torch.stack([values.nan_to_num(nan=0.0, posinf=torch.inf).max(), unknown])
        most = workers.all_reduce(both, largest=True)
        return torch.where(most[1] > 0, torch.nan, most[0])
    # float64, because a power of a large float32 norm overflows. MPS has no float64.
    power = values.double() if device.type != "mps" else values
    return workers.all_reduce(power.pow(norm_type).sum()).pow(1.0 / norm_type).to(values.dtype)


def _norm_of_shard(grad: Tensor, norm_type: float) -> Tensor:
    """Return the norm of one slice."""
    if norm_type == 2.0:
        return norm(grad)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return torch.linalg.vector_norm(grad, norm_type, dtype=wide)
