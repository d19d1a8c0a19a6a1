"""Whether numbers are finite, and what to do about optimizer state that is not.

A length is one read of the memory, and it is finite only if all numbers are. The reverse does not
hold: in float32 the square of 3e19 is infinite, and the number is not. So where a length is not
finite the numbers themselves are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.dtensor import local
from manyhands._core.flat import group_by_type
from manyhands._core.norms import accumulation_dtype, norm
from manyhands.blocks.averaging._payload import LARGEST, Row


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers are."""
    for same in group_by_type([local(tensor).detach() for tensor in tensors]):
        parts = [torch.view_as_real(part) if part.is_complex() else part for part in same]
        lengths = torch._foreach_norm(parts, dtype=accumulation_dtype(parts[0].dtype))
        if torch.stack(lengths).isfinite().all():
            continue
        doubtful = [p for p, size in zip(parts, lengths, strict=True) if not size.isfinite()]
        if not all(map(_each_is_finite, doubtful)):
            return False
    return True


def _each_is_finite(values: Tensor) -> bool:
    """Whether each number is. The largest one tells, without a second tensor of this size."""
    return bool(torch.linalg.vector_norm(values, float("inf")).isfinite())


def is_finite(row: Row) -> bool:
    """Whether all its numbers are."""
    part = torch.empty(min(LARGEST, row.length), dtype=row.dtype, device=row.device)
    for start in range(0, row.length, LARGEST):
        chosen = part[: row.length - start]
        row.read(start, chosen)
        if not torch.isfinite(norm(chosen)) and not _each_is_finite(chosen):
            return False
    return True


def drop_what_is_not_finite(optimizer: Optimizer) -> None:
    """Begin anew with the state of parameters whose state holds numbers that are not finite."""
    for param in [p for p in optimizer.state if isinstance(p, Tensor)]:
        values = [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        numbers = [v for v in values if v.is_floating_point() or v.is_complex()]
        if not are_finite(numbers):
            del optimizer.state[param]
