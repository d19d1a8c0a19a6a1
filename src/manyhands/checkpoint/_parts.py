"""The slices of a tensor that this rank holds, as torch.distributed.checkpoint asks for them.

A *slice* is rectangular: offsets and sizes, one for each dimension. torch plans with the three
methods in double underscores, and never needs the whole tensor. A plain tensor is one slice. A flat
range of a parameter (`sharding/zero/_layout.py`) is a few slices:

The elements `start` to `stop` of a tensor, in the order of memory, are the end of one row, some
whole rows, and the beginning of another. The incomplete rows are again such ranges, with one
dimension less. So there are at most 2 * dimensions - 1 slices. Each is contiguous in memory, and
the next one begins where it ends.
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

from manyhands._core.dtensor import is_dtensor, local_shard
from manyhands._core.flat import order_of_dims

Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a slice


def slices_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Bounds]:
    """Yield the slices that make up elements `start` to `stop`, in order.

    >>> list(slices_of_range((4, 5), 3, 16))
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row_shape, row_size = shape[1:], math.prod(shape[1:])
    first, skipped = divmod(start, row_size)
    last, rest = divmod(stop, row_size)
    if first == last:  # begins and ends within one row
        yield from _slices_of_row(first, row_shape, skipped, rest)
        return
    if skipped:  # the end of the first row
        yield from _slices_of_row(first, row_shape, skipped, row_size)
        first += 1
    if first < last:  # whole rows
        yield (first, *(0 for _ in row_shape)), (last - first, *row_shape)
    if rest:  # the beginning of the last row
        yield from _slices_of_row(last, row_shape, 0, rest)


def _slices_of_row(row: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Bounds]:
    for offsets, sizes in slices_of_range(shape, start, stop):
        yield (row, *offsets), (1, *sizes)


@dataclass(eq=False)
class TensorParts:
    """The slices of one tensor that this rank holds: offsets and elements (a view of them)."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    slices: list[tuple[tuple[int, ...], Tensor]]

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorParts:
        tensor = tensor.detach()
        return cls(tuple(tensor.shape), tensor.dtype, [((0,) * tensor.dim(), tensor)])

    @classmethod
    def from_flat(cls, flat: Tensor, like: Tensor, start: int) -> TensorParts:
        """Return the slices that a flat range holds of a tensor like `like`.

        `flat` has the elements from `start` on, in the order of `like`'s memory; of a DTensor, they
        are counted in its local tensor. Complex numbers may come as pairs of real ones.
        """
        flat = flat.detach().view(-1)
        shape, corner, like = _locate(like)
        if like.is_complex() and not flat.is_complex():
            shape, corner, like = (*shape, 2), (*corner, 0), torch.view_as_real(like)
        # Memory order may differ from the order of dimensions (channels_last, a transpose): cut the
        # permuted shape, and permute each slice back.
        order = order_of_dims(like)
        back = [order.index(dim) for dim in range(like.dim())]
        slices, done = [], 0
        permuted = tuple(like.shape[dim] for dim in order)
        for offsets, sizes in slices_of_range(permuted, start, start + flat.numel()):
            elements = flat[done : (done := done + torch.Size(sizes).numel())].view(sizes)
            begin = tuple(offsets[i] + first for i, first in zip(back, corner, strict=True))
            slices.append((begin, elements.permute(back)))
        return cls(shape, flat.dtype, slices)

    def size(self) -> torch.Size:
        """Return the whole tensor's shape; torch's planner calls it as a tensor's method."""
        return torch.Size(self.shape)

    def merge(self, other: TensorParts) -> TensorParts:
        """Return the slices of both, for a rank that holds several ranges of one tensor."""
        # A slice that both have, such as a number of steps, counts once.
        known = {offsets for offsets, _ in self.slices}
        more = [(offsets, elements) for offsets, elements in other.slices if offsets not in known]
        return TensorParts(self.shape, self.dtype, [*self.slices, *more])

    # The next three are torch's `_Checkpointable` protocol, which DTensor implements as well.
    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            write_item(fqn, offsets, elements.shape, self.shape, self.dtype)
            for offsets, elements in self.slices
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), elements.shape)
            for offsets, elements in self.slices
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, elements in self.slices:
            if index.offset is not None and tuple(index.offset) == offsets:
                return elements
        raise ValueError(f"no slice of {index.fqn} begins at {index.offset}")


def _locate(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Return the whole tensor's shape, the offsets of the local tensor in it, and the latter."""
    here, corner = local_shard(tensor).detach(), (0,) * tensor.dim()
    if is_dtensor(tensor):
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        corner = tuple(chunk.offsets)
    return tuple(tensor.shape), corner, here


def write_item(
    fqn: str,
    offsets: Sequence[int],
    sizes: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> WriteItem:
    """Return torch's description of one slice to be written."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    # SHARD even for a whole tensor: torch accepts a key from several ranks only with this type.
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)
