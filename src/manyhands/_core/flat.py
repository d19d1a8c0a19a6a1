"""Tensors as flat runs of their elements, in the order in which these lie in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from manyhands._core.dtensor import local


def shaped(flat: Tensor, like: Tensor) -> Tensor:
    """These elements as a tensor of `like`'s shape, in its order of memory if it is dense."""
    if like.is_contiguous() or not _dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.size(), like.stride())


def flattened(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements in the order in which `shaped(..., like)` has them; a view if it can be."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if like.is_contiguous() or not _dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def order_of_dims(like: Tensor) -> list[int]:
    """The dimensions, from the slowest to the fastest, as `flattened(..., like)` goes through."""
    if like.is_contiguous() or not _dense(like):
        return list(range(like.dim()))
    return sorted(range(like.dim()), key=like.stride, reverse=True)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.size(), tensor.stride(), strict=True), key=lambda dim: dim[1]
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of one type on one device together, in the order in which they come."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


class Vector:
    """Tensors of one type one after the other. Of a DTensor it is this worker's part.

    Make it anew for each use: a parameter's memory may have been exchanged since.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._parts = [_flat(local(tensor).detach()) for tensor in tensors]
        self._starts = [0, *accumulate(part.numel() for part in self._parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each tensor's numbers begin and end."""
        return list(pairwise(self._starts))

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` with the numbers from `start` on, as its type."""
        for part, inner, outer in self.pieces(start, out.numel()):
            out[outer].copy_(values_of(part, inner))

    def write(self, start: int, values: Tensor) -> None:
        """Set the numbers from `start` on."""
        for part, inner, outer in self.pieces(start, values.numel()):
            if part.dim() == 1:
                part[inner].copy_(values[outer])
            else:
                part.put_(_indices(inner, part), values[outer].to(part.device, part.dtype))

    def add(self, start: int, values: Tensor) -> None:
        """Add to the numbers from `start` on."""
        for part, inner, outer in self.pieces(start, values.numel()):
            if part.dim() == 1:
                part[inner].add_(values[outer].to(part.device))
            else:
                more = values[outer].to(part.device, part.dtype)
                part.put_(_indices(inner, part), more, accumulate=True)

    def pieces(self, start: int, length: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """Each part in a range, with which of its numbers they are and where in the range."""
        index, done = bisect_right(self._starts, start) - 1, 0
        while done < length:
            first = start + done - self._starts[index]
            size = min(length - done, self._starts[index + 1] - self._starts[index] - first)
            if size > 0:
                yield self._parts[index], slice(first, first + size), slice(done, done + size)
            done += size
            index += 1


def _flat(tensor: Tensor) -> Tensor:
    """As one dimension, where its memory is in one piece; complex numbers as pairs."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))  # in the order of its memory
    return tensor if tensor.dim() > 1 else tensor.unsqueeze(0)


def values_of(part: Tensor, chosen: slice) -> Tensor:
    """Some numbers of a part: where they are, if its memory is in one piece."""
    return part[chosen] if part.dim() == 1 else part.take(_indices(chosen, part))


def _indices(chosen: slice, part: Tensor) -> Tensor:
    return torch.arange(chosen.start, chosen.stop, device=part.device)
