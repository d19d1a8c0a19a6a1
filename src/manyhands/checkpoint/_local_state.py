"""Which slices of each parameter's optimizer state this rank holds, and how they are stored.

A *local state* is a parameter together with its entries on this rank: whole tensors (a plain
optimizer, or a rank that owns the whole parameter), the local tensors of DTensors, or a flat range
of the parameter's elements (`OSS` with the even layout).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.dtensor import is_dtensor
from manyhands._core.flat import order_of_dims
from manyhands.checkpoint._parts import TensorParts
from manyhands.sharding.zero._flat_params import ParamSlice
from manyhands.sharding.zero._oss import OSS

# The entry for the exact parameters that OSS(broadcast_fp16=True) keeps beside the rounded ones.
EXACT_ENTRY = "manyhands.exact"


@dataclass
class LocalState:
    """A parameter, its entries on this rank, and where they are in the optimizer's state dict."""

    name: str
    param: Tensor
    entries: Mapping[str, Any]  # as they are now
    number: int | None  # in the state dict of the optimizer that holds them; None: kept for later
    param_number: int | None = None  # among an OSS's parameters
    piece: ParamSlice | None = None  # OSS's flat range, if several ranks hold the parameter

    @property
    def exact(self) -> Tensor | None:
        piece = self.piece
        # The model sees `rounded`. Without it, `data` is the parameter.
        return None if piece is None or piece.rounded is None else piece.data

    @property
    def like(self) -> Tensor:
        """A tensor with the layout of an entry that has one number for each element."""
        return self.param if self.piece is None else self.piece.data

    def parts_of(self, entry: str, value: Tensor) -> Any:
        """Return an entry as the planner takes it."""
        # `step` is one number, and must not be taken for the state of a parameter with one element.
        elementwise = value.shape == self.like.shape and (value.dim() > 0 or entry != "step")
        if self.piece is not None and not self.piece.whole and elementwise:
            return TensorParts.from_flat(value, self.param, self.piece.start)
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


def is_sharded(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is an OSS whose ranks hold different slices."""
    return isinstance(optimizer, OSS) and optimizer._workers.size > 1


def find_local_states(
    optimizer: Optimizer, groups: Sequence[Sequence[str]], *, include_empty: bool = False
) -> tuple[list[LocalState], dict[str, Any]]:
    """Return this rank's local states, and the state dict that they are in.

    The state dict is that of the optimizer that holds them: of an OSS, the optimizer inside.
    `groups` has the parameters' names. With `include_empty`, parameters without state are included.
    """
    if isinstance(optimizer, OSS):
        optimizer.wait()
    # Asked by the class and its size, not by `is_sharded`: a type checker has to see the OSS.
    if isinstance(optimizer, OSS) and optimizer._workers.size > 1:
        return _find_in_oss(optimizer, groups, include_empty)
    packed = optimizer.state_dict()
    states = []
    for group, packed_group, names in zip(
        optimizer.param_groups, packed["param_groups"], groups, strict=True
    ):
        for param, number, name in zip(group["params"], packed_group["params"], names, strict=True):
            entries = packed["state"].get(number, {})
            if entries or include_empty:
                states.append(LocalState(name, param, entries, number))
    return states, packed


def _find_in_oss(
    oss: OSS, groups: Sequence[Sequence[str]], include_empty: bool
) -> tuple[list[LocalState], dict[str, Any]]:
    # Not `oss.state_dict()`, which is for the state of all ranks, gathered before.
    packed = oss.optim.state_dict()
    names = [name for group in groups for name in group]
    states, shards = [], oss._shards
    for index, packed_group in enumerate(packed["param_groups"]):
        pieces = [piece for i in oss._param_indices(index) for piece in shards.slices[i]]
        for piece, number in zip(pieces, packed_group["params"], strict=True):
            entries = dict(packed["state"].get(number, {}))
            if piece.rounded is not None:
                entries[EXACT_ENTRY] = piece.data
            if entries or include_empty:
                param = shards.params[piece.param]
                states.append(
                    LocalState(names[piece.param], param, entries, number, piece.param, piece)
                )
    # Frozen parameters have no place in a bucket. Loaded state waits until they are trained.
    for i in shards.without_slices:
        entries = oss._pending_state.get(i, {})
        if entries or include_empty:
            states.append(LocalState(names[i], shards.params[i], entries, None, i))
    return states, packed


def allocate_target(
    local: LocalState, entry: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Any]:
    """Return a tensor to fill with a saved entry, and its parts as the planner takes them.

    `shape` is the saved entry's whole shape. If the optimizer has a tensor that fits already, that
    one is returned, and filled in place.
    """
    param, piece = local.param, local.piece
    elementwise = tuple(shape) == tuple(param.shape) and (len(shape) > 0 or entry != "step")
    # As many elements as the parameter in another shape: surely another model's.
    if not elementwise and torch.Size(shape).numel() == param.numel() > 1:
        raise ValueError(
            f"the state {entry!r} of {local.name!r} has the shape {tuple(shape)} in the "
            f"checkpoint, and the parameter {tuple(param.shape)}. Is it another model's?"
        )
    now = local.entries.get(entry)
    if not elementwise:
        if _has_shape_and_type(now, torch.Size(shape), dtype):
            return now, to_parts(now)
        # torch's optimizers keep `step` on the CPU: reading it must not wait for the GPU.
        device = "cpu" if entry == "step" else param.device
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        return tensor, to_parts(tensor)
    like = local.like
    if _has_shape_and_type(now, like.shape, dtype) and _has_same_layout(now, like):
        tensor = now
    else:
        tensor = torch.empty_like(like, dtype=dtype, requires_grad=False).detach()
    if piece is not None and not piece.whole:
        return tensor, TensorParts.from_flat(tensor, param, piece.start)
    return tensor, to_parts(tensor)


def _has_shape_and_type(now: Any, shape: torch.Size, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(now, Tensor) and now.shape == shape and now.dtype == dtype


def _has_same_layout(now: Tensor, like: Tensor) -> bool:
    if is_dtensor(now) != is_dtensor(like):
        return False
    if is_dtensor(now):
        return now.placements == like.placements  # type: ignore[attr-defined]
    return now.device == like.device and order_of_dims(now) == order_of_dims(like)
