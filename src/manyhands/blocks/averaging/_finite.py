"""Are all numbers finite? And what becomes of optimizer state that is not.

A norm reads the memory once, and it is finite only if all numbers are. The reverse does not hold:
in float32 the square of 3e19 is infinite, and 3e19 is not. So where a norm is not finite, the
largest absolute value decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.dtensor import local_shard
from manyhands._core.flat import group_by_type
from manyhands._core.norms import accumulation_dtype, norm
from manyhands.blocks.averaging._payload import LARGEST, Payload


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers in these tensors are finite."""
    for same in group_by_type([local_shard(tensor).detach() for tensor in tensors]):
        parts = [torch.view_as_real(part) if part.is_complex() else part for part in same]
        # One fused kernel and one wait for the device, instead of one for each tensor.
        lengths = torch._foreach_norm(parts, dtype=accumulation_dtype(parts[0].dtype))
        if torch.stack(lengths).isfinite().all():
            continue
        doubtful = [p for p, size in zip(parts, lengths, strict=True) if not size.isfinite()]
        if not all(map(_has_finite_maximum, doubtful)):
            return False
    return True


def _has_finite_maximum(values: Tensor) -> bool:
    # The maximum norm needs no second tensor of this size, as `isfinite()` would.
    return bool(torch.linalg.vector_norm(values, float("inf")).isfinite())


def is_payload_finite(payload: Payload) -> bool:
    """Return whether all numbers in a payload are finite, read chunk by chunk."""
    memory = torch.empty(min(LARGEST, payload.length), dtype=payload.dtype, device=payload.device)
    for start in range(0, payload.length, LARGEST):
        chunk = memory[: payload.length - start]
        payload.read(start, chunk)
        if not torch.isfinite(norm(chunk)) and not _has_finite_maximum(chunk):
            return False
    return True


def drop_nonfinite_state(optimizer: Optimizer) -> None:
    """Delete the state of each parameter whose state holds a number that is not finite."""
    for param in [p for p in optimizer.state if isinstance(p, Tensor)]:
        values = [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        numeric = [v for v in values if v.is_floating_point() or v.is_complex()]
        if not are_finite(numeric):
            del optimizer.state[param]
