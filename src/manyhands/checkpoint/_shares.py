"""Which part of each parameter's state this worker has, and as what it is saved and filled.

A *share* is a parameter with its state here: all of it (a plain optimizer, or one owner of the
whole), a DTensor's local part, or a flat run of it (`OSS` with the even layout).
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

EXACT = "manyhands.exact"  # what OSS(broadcast_fp16=True) keeps beside rounded parameters


@dataclass
class Share:
    """A parameter, what this worker keeps of its state, and where in the optimizer's own dict."""

    name: str
    param: Tensor
    entries: Mapping[str, Any]  # as they are now
    number: int | None  # in the state dict of the optimizer that holds it; None: kept for later
    param_number: int | None = None  # among an OSS's parameters
    piece: ParamSlice | None = None  # the run, if it is one of several workers'

    @property
    def exact(self) -> Tensor | None:
        piece = self.piece
        return None if piece is None or piece.rounded is None else piece.data

    @property
    def like(self) -> Tensor:
        """What an entry that has a number for each element looks like here."""
        return self.param if self.piece is None else self.piece.data

    def to_save(self, entry: str, value: Tensor) -> Any:
        """An entry as the planner takes it."""
        shaped = value.shape == self.like.shape and (value.dim() > 0 or entry != "step")
        if self.piece is not None and not self.piece.whole and shaped:
            return TensorParts.cut(value, self.param, self.piece.start)
        return part_to_save(value)


def part_to_save(tensor: Tensor) -> Any:
    """A tensor as the planner takes it: a DTensor as it is."""
    if is_dtensor(tensor):
        return tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be saved: make it dense.")
    return TensorParts.whole(tensor)


def is_cut(part: Any) -> bool:
    """Whether it is less than the whole tensor."""
    if is_dtensor(part):
        return True
    return [tuple(piece.shape) for _, piece in part.parts] != [part.shape]


def sharded(optimizer: Optimizer) -> bool:
    """Whether it is an OSS whose workers have different parts."""
    return isinstance(optimizer, OSS) and optimizer._workers.size > 1


def shares_of(
    optimizer: Optimizer, groups: Sequence[Sequence[str]], *, places_only: bool = False
) -> tuple[list[Share], dict[str, Any]]:
    """This worker's shares, and the state dict (of the optimizer that holds them) they are in.

    With `places_only` for every parameter, also those that have no state yet.
    """
    if isinstance(optimizer, OSS):
        optimizer.wait()
    if isinstance(optimizer, OSS) and optimizer._workers.size > 1:
        return _pieces_of(optimizer, groups, places_only)
    packed = optimizer.state_dict()
    shares = []
    for group, given, names in zip(
        optimizer.param_groups, packed["param_groups"], groups, strict=True
    ):
        for param, number, name in zip(group["params"], given["params"], names, strict=True):
            entries = packed["state"].get(number, {})
            if entries or places_only:
                shares.append(Share(name, param, entries, number))
    return shares, packed


def _pieces_of(
    oss: OSS, groups: Sequence[Sequence[str]], places_only: bool
) -> tuple[list[Share], dict[str, Any]]:
    packed = oss.optim.state_dict()
    names = [name for group in groups for name in group]
    shares, shards = [], oss._shards
    for index, given in enumerate(packed["param_groups"]):
        pieces = [piece for i in oss._param_indices(index) for piece in shards.slices[i]]
        for piece, number in zip(pieces, given["params"], strict=True):
            entries = dict(packed["state"].get(number, {}))
            if piece.rounded is not None:
                entries[EXACT] = piece.data
            if entries or places_only:
                param = shards.params[piece.param]
                shares.append(Share(names[piece.param], param, entries, number, piece.param, piece))
    for i in shards.without_slices:
        entries = oss._pending_state.get(i, {})
        if entries or places_only:
            shares.append(Share(names[i], shards.params[i], entries, None, i))
    return shares, packed


def target_for(
    share: Share, entry: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Any]:
    """A tensor for a saved entry to be filled into, and the boxes of it.

    The one that the optimizer has already, if it is such a one.
    """
    param, piece = share.param, share.piece
    shaped = tuple(shape) == tuple(param.shape) and (len(shape) > 0 or entry != "step")
    if not shaped and torch.Size(shape).numel() == param.numel() > 1:
        raise ValueError(
            f"the state {entry!r} of {share.name!r} has the shape {tuple(shape)} in the "
            f"checkpoint, and the parameter {tuple(param.shape)}. Is it another model's?"
        )
    now = share.entries.get(entry)
    if not shaped:
        if _fits(now, torch.Size(shape), dtype):
            return now, part_to_save(now)
        device = "cpu" if entry == "step" else param.device
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        return tensor, part_to_save(tensor)
    like = share.like
    if _fits(now, like.shape, dtype) and _same_order(now, like):
        tensor = now
    else:
        tensor = torch.empty_like(like, dtype=dtype, requires_grad=False).detach()
    if piece is not None and not piece.whole:
        return tensor, TensorParts.cut(tensor, param, piece.start)
    return tensor, part_to_save(tensor)


def _fits(now: Any, shape: torch.Size, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(now, Tensor) and now.shape == shape and now.dtype == dtype


def _same_order(now: Tensor, like: Tensor) -> bool:
    if is_dtensor(now) != is_dtensor(like):
        return False
    if is_dtensor(now):
        return now.placements == like.placements  # type: ignore[attr-defined]
    return now.device == like.device and order_of_dims(now) == order_of_dims(like)
