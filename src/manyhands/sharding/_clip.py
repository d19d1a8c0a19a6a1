"""The norm of gradients that are spread over the workers, and their clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands._core.norms import norm
from manyhands._core.ranks import RankGroup
from manyhands.sharding.zero._flat_params import Shards


@torch.no_grad()
def clip_grad_norm(
    shards: Shards, params: Sequence[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """Each worker measures its pieces; one number is summed over the workers."""
    chosen = {id(param) for param in params}
    clipped = [i for i, param in enumerate(shards.params) if id(param) in chosen]
    lengths = [
        norm_of_shard(grad, norm_type)
        for i in clipped
        for piece in shards.slices[i]
        if (grad := shards.gradient(piece)) is not None and grad.numel()
    ]
    total = combine_norms(lengths, norm_type, shards.workers, shards.params[0].device)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for i in clipped:
        grad = shards.params[i].grad
        if grad is not None:
            grad.mul_(factor.to(grad.device))
    return total


def combine_norms(
    lengths: Sequence[Tensor], norm_type: float, workers: RankGroup, device: torch.device
) -> Tensor:
    """The norm of gradients of whose parts each worker has the lengths."""
    there = [length.to(device) for length in lengths]
    values = torch.stack(there) if there else torch.zeros(1, device=device)
    if math.isinf(norm_type):
        unknown = values.isnan().any().to(values.dtype)  # which a maximum may lose
        both = torch.stack([values.nan_to_num(nan=0.0, posinf=torch.inf).max(), unknown])
        most = workers.all_reduce(both, largest=True)
        return torch.where(most[1] > 0, torch.nan, most[0])
    power = values.double() if device.type != "mps" else values
    return workers.all_reduce(power.pow(norm_type).sum()).pow(1.0 / norm_type).to(values.dtype)


def norm_of_shard(grad: Tensor, norm_type: float) -> Tensor:
    """The norm of one part."""
    if norm_type == 2.0:
        return norm(grad)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return torch.linalg.vector_norm(grad, norm_type, dtype=wide)
