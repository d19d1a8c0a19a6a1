"""Tensors as one row of numbers, read and written in ranges, without a copy of the whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from manyhands._dtensors import local


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
