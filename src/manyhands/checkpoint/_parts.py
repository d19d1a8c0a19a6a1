"""A tensor of which this worker has some boxes: what torch.distributed.checkpoint asks of it.

It plans with the three methods in double underscores, and never sees the tensor whole. A plain
tensor is one box, a flat range of a parameter (`sharding/zero/_layout.py`) a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from manyhands._core.dtensor import is_dtensor, local
from manyhands._core.flat import order_of_dims

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements `start` to `stop`, in order.

    >>> list(boxes_of((4, 5), 3, 16))
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rows, inner = shape[1:], math.prod(shape[1:])
    first, skipped = divmod(start, inner)
    last, rest = divmod(stop, inner)
    if first == last:
        yield from _within(first, rows, skipped, rest)
        return
    if skipped:
        yield from _within(first, rows, skipped, inner)
        first += 1
    if first < last:
        yield (first, *(0 for _ in rows)), (last - first, *rows)
    if rest:
        yield from _within(last, rows, 0, rest)


def _within(row: int, rows: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of(rows, start, stop):
        yield (row, *offsets), (1, *sizes)


@dataclass(eq=False)
class TensorParts:
    """Parts of a tensor of some shape: where each begins, and its elements (a view of them)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[tuple[int, ...], Tensor]]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorParts:
        tensor = tensor.detach()
        return cls(tuple(tensor.shape), tensor.dtype, [((0,) * tensor.dim(), tensor)])

    @classmethod
    def cut(cls, flat: Tensor, like: Tensor, start: int) -> TensorParts:
        """Of a tensor like `like`, the elements from `start` on, in the order of its memory.

        Of a DTensor they are counted in what this rank has of it. Complex numbers may come as
        real ones, in pairs.
        """
        flat = flat.detach().view(-1)
        shape, corner, like = _place_of(like)
        if like.is_complex() and not flat.is_complex():
            shape, corner, like = (*shape, 2), (*corner, 0), torch.view_as_real(like)
        order = order_of_dims(like)
        back = [order.index(dim) for dim in range(like.dim())]
        parts, done = [], 0
        ordered = tuple(like.shape[dim] for dim in order)
        for offsets, sizes in boxes_of(ordered, start, start + flat.numel()):
            part = flat[done : (done := done + _volume(sizes))].view(sizes)
            at = tuple(offsets[i] + first for i, first in zip(back, corner, strict=True))
            parts.append((at, part.permute(back)))
        return cls(shape, flat.dtype, parts)

    def size(self) -> torch.Size:
        """The whole tensor's shape."""
        return torch.Size(self.shape)

    def with_parts_of(self, other: TensorParts) -> TensorParts:
        """One worker may have several runs of a tensor (what they have alike counts once)."""
        known = {offsets for offsets, _ in self.parts}
        more = [(offsets, part) for offsets, part in other.parts if offsets not in known]
        return TensorParts(self.shape, self.dtype, [*self.parts, *more])

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            item(fqn, offsets, part.shape, self.shape, self.dtype) for offsets, part in self.parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), part.shape) for at, part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, part in self.parts:
            if index.offset is not None and tuple(index.offset) == offsets:
                return part
        raise ValueError(f"no part of {index.fqn} begins at {index.offset}")


def _place_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """The whole tensor's shape, where in it what is here begins, and that."""
    here, corner = local(tensor).detach(), (0,) * tensor.dim()
    if is_dtensor(tensor):
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        corner = tuple(chunk.offsets)
    return tuple(tensor.shape), corner, here


def item(
    fqn: str,
    offsets: Sequence[int],
    sizes: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> WriteItem:
    """One box to be written."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def _volume(sizes: Sequence[int]) -> int:
    return torch.Size(sizes).numel()
