"""How a part of an optimizer's state is stored: its entries as the planner takes them.

The entries of a `StatePart` are whole tensors (a plain optimizer, or a rank that owns the whole
parameter), the local tensors of DTensors, or a flat range of the parameter's elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from manyhands._core.dtensor import is_dtensor
from manyhands._core.flat import order_of_dims
from manyhands._core.state_parts import OptimizerStatePart
from manyhands.checkpoint._parts import TensorParts

# The entry for the exact parameters that an optimizer keeps beside the rounded ones.
EXACT_ENTRY = "manyhands.exact"


def entries_of(part: OptimizerStatePart) -> dict[str, Any]:
    """Return the entries to save: the optimizer's, and the exact parameters."""
    return {**part.entries, **({} if part.exact is None else {EXACT_ENTRY: part.exact})}


def entry_parts(part: OptimizerStatePart, entry: str, value: Tensor) -> Any:
    """Return an entry as the planner takes it."""
    # `step` is one number, and must not be taken for the state of a parameter with one element.
    elementwise = value.shape == part.like.shape and (value.dim() > 0 or entry != "step")
    if part.start is not None and elementwise:
        return TensorParts.from_flat(value, part.param, part.start)
    return to_parts(value)


def to_parts(tensor: Tensor) -> Any:
    """Return a tensor as the planner takes it: a DTensor as it is, any other as TensorParts."""
    if is_dtensor(tensor):
        return tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be saved: make it dense.")
    return TensorParts.whole(tensor)


def is_partial(parts: Any) -> bool:
    """Return whether it is less than the whole tensor. A DTensor counts as less."""
    if is_dtensor(parts):
        return True
    return [tuple(elements.shape) for _, elements in parts.slices] != [parts.shape]


def allocate_target(
    part: OptimizerStatePart, name: str, entry: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Any]:
    """Return a tensor to fill with a saved entry, and what the planner takes for it.

    `shape` is the saved entry's whole shape. If the optimizer has a tensor that fits already, that
    one is returned, and filled in place.
    """
    param, like = part.param, part.like
    elementwise = tuple(shape) == tuple(param.shape) and (len(shape) > 0 or entry != "step")
    # As many elements as the parameter in another shape: surely another model's.
    if not elementwise and torch.Size(shape).numel() == param.numel() > 1:
        raise ValueError(
            f"the state {entry!r} of {name!r} has the shape {tuple(shape)} in the "
            f"checkpoint, and the parameter {tuple(param.shape)}. Is it another model's?"
        )
    now = part.entries.get(entry)
    if not elementwise:
        if _has_shape_and_type(now, torch.Size(shape), dtype):
            return now, to_parts(now)
        # torch's optimizers keep `step` on the CPU: reading it must not wait for the GPU.
        device = "cpu" if entry == "step" else param.device
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        return tensor, to_parts(tensor)
    if _has_shape_and_type(now, like.shape, dtype) and _has_same_layout(now, like):
        tensor = now
    else:
        tensor = torch.empty_like(like, dtype=dtype, requires_grad=False).detach()
    if part.start is not None:
        return tensor, TensorParts.from_flat(tensor, param, part.start)
    return tensor, to_parts(tensor)


def _has_shape_and_type(now: Any, shape: torch.Size, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(now, Tensor) and now.shape == shape and now.dtype == dtype


def _has_same_layout(now: Tensor, like: Tensor) -> bool:
    if is_dtensor(now) != is_dtensor(like):
        return False
    if is_dtensor(now):
        return now.placements == like.placements  # type: ignore[attr-defined]
    return now.device == like.device and order_of_dims(now) == order_of_dims(like)
