"""The length of a gradient, exactly and in one read of the memory.

A CPU adds the squares of a tensor one after the other, so that a float32 norm over ten million
elements comes out 7e-4 too small. Long tensors are therefore taken in rows of 32,768: the same
speed, and 1e-7. Half-precision gradients are summed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands._core.flat import flatten

ROW = 32_768
SHORT = 2 * ROW  # elements that can be added up in one go


def norm(grad: Tensor) -> Tensor:
    """|grad|, as a tensor of no dimensions in float32 or better."""
    if grad.layout != torch.strided:
        grad = grad.coalesce().values() if grad.layout == torch.sparse_coo else grad.to_dense()
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    if grad.numel() <= SHORT or grad.device.type != "cpu":
        return torch.linalg.vector_norm(grad, dtype=accumulation_dtype(grad.dtype))
    flat = flatten(grad)
    rows = flat.numel() // ROW
    parts = torch.linalg.vector_norm(
        flat[: rows * ROW].view(rows, ROW), dim=1, dtype=accumulation_dtype(grad.dtype)
    )
    if rows * ROW < flat.numel():
        rest = torch.linalg.vector_norm(flat[rows * ROW :], dtype=parts.dtype)
        parts = torch.cat([parts, rest.view(1)])
    return torch.linalg.vector_norm(parts)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of this one are added up."""
    return torch.promote_types(dtype, torch.float32)
