"""Whether numbers are finite, and what to do about optimizer state that is not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._dtensors import local
from manyhands._norms import norm, summed_in
from manyhands.blocks._rows import LARGEST, Row
from manyhands.blocks._vector import by_type


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers are: their lengths are, in one read."""
    for same in by_type([local(tensor).detach() for tensor in tensors]):
        parts = [torch.view_as_real(part) if part.is_complex() else part for part in same]
        lengths = torch._foreach_norm(parts, dtype=summed_in(parts[0].dtype))
        if not torch.stack(lengths).isfinite().all():
            return False
    return True


def is_finite(row: Row) -> bool:
    """Whether all its numbers are."""
    part = torch.empty(min(LARGEST, row.length), dtype=row.dtype, device=row.device)
    for start in range(0, row.length, LARGEST):
        chosen = part[: row.length - start]
        row.read(start, chosen)
        if not torch.isfinite(norm(chosen)):
            return False
    return True


def drop_what_is_not_finite(optimizer: Optimizer) -> None:
    """Begin anew with the state of parameters whose state holds numbers that are not finite."""
    for param in [p for p in optimizer.state if isinstance(p, Tensor)]:
        values = [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        numbers = [v for v in values if v.is_floating_point() or v.is_complex()]
        if not are_finite(numbers):
            del optimizer.state[param]
