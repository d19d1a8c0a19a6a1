"""The norm of gradients that are spread over the workers, and their clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands._norms import norm
from manyhands.sharding._shards import Shards


@torch.no_grad()
def clip_grad_norm(
    shards: Shards, params: Sequence[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """Each worker measures its pieces; one number is summed over the workers."""
    chosen = {id(param) for param in params}
    clipped = [i for i, param in enumerate(shards.params) if id(param) in chosen]
    device = shards.params[0].device
    lengths = [
        _length(grad, norm_type).to(device)
        for i in clipped
        for piece in shards.pieces[i]
        if (grad := shards.gradient(piece)) is not None and grad.numel()
    ]
    values = torch.stack(lengths) if lengths else torch.zeros(1, device=device)
    if math.isinf(norm_type):
        unknown = values.isnan().any().to(values.dtype)  # which a maximum may lose
        both = torch.stack([values.nan_to_num(nan=0.0, posinf=torch.inf).max(), unknown])
        most = shards.workers.reduced(both, largest=True)
        total = torch.where(most[1] > 0, torch.nan, most[0])
    else:
        power = values.double() if device.type != "mps" else values
        total = shards.workers.reduced(power.pow(norm_type).sum()).pow(1.0 / norm_type)
    total = total.to(values.dtype)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for i in clipped:
        grad = shards.params[i].grad
        if grad is not None:
            grad.mul_(factor.to(grad.device))
    return total


def _length(grad: Tensor, norm_type: float) -> Tensor:
    if norm_type == 2.0:
        return norm(grad)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return torch.linalg.vector_norm(grad, norm_type, dtype=wide)
