"""Tensors as flat ranges of elements, in the order in which the elements lie in memory.

One rule of order serves everybody, so that an element has the same place in a bucket, in a saved
file and in a block's chunk:

    dense tensor      the order of its memory (a transposed weight is not copied)
    any other tensor  row by row, which needs a copy

    flatten      tensor -> its elements in one dimension; a view wherever that is possible
    unflatten    the way back: elements -> a tensor of the shape and strides of another
    FlatTensors  many tensors, one after the other, to be read and written by range
    norm         the norm of a tensor, in one read of its memory
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from manyhands._core.sharded import local_shard


def flatten(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the elements in one dimension, in the memory order of `like` (default: the tensor).

    Both have the same shape. The result is detached. It is a view where the order allows it.
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    like = tensor if like is None else like
    if _is_row_by_row(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        # A gradient need not have its parameter's strides: bring it into the parameter's order.
        tensor = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def unflatten(flat: Tensor, like: Tensor) -> Tensor:
    """Return a view of flat elements with the shape of `like`, and its strides if it is dense."""
    if _is_row_by_row(like):
        return flat.view(like.shape)
    return flat.as_strided(like.size(), like.stride())


def order_of_dims(like: Tensor) -> list[int]:
    """Return the dimensions from the slowest to the fastest in `flatten(..., like)`."""
    if _is_row_by_row(like):
        return list(range(like.dim()))
    return sorted(range(like.dim()), key=like.stride, reverse=True)


def _is_row_by_row(like: Tensor) -> bool:
    """Return whether the flat order is the logical one: contiguous, or with gaps or overlaps."""
    return like.is_contiguous() or not _is_dense(like)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps."""
    # The private operator is what torch's own `empty_like` asks to preserve strides.
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def group_by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return lists of tensors of one dtype on one device, each in the given order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


class FlatTensors:
    """Tensors of one type, one after the other, as if they were one flat tensor.

    Of a DTensor only this rank's shard counts. Nothing is copied: reads and writes go to the
    tensors' own memory. Make a new object for each use, because a parameter's memory may have been
    replaced since (`param.data = ...`).
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [_flat_view(local_shard(tensor).detach()) for tensor in tensors]
        self._starts = [0, *accumulate(tensor.numel() for tensor in self._tensors)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where the elements of each tensor begin and end."""
        return list(pairwise(self._starts))

    def read(self, start: int, out: Tensor) -> None:
        """Fill the flat tensor `out` with the elements from `start` on, converted to its dtype."""
        for tensor, inner, outer in self.ranges(start, out.numel()):
            out[outer].copy_(read_range(tensor, inner))

    def write(self, start: int, values: Tensor) -> None:
        """Set the elements from `start` on."""
        for tensor, inner, outer in self.ranges(start, values.numel()):
            if tensor.dim() == 1:
                tensor[inner].copy_(values[outer])
            else:
                # put_ converts nothing by itself: values have to come as the tensor's type.
                tensor.put_(_indices(inner, tensor), values[outer].to(tensor.device, tensor.dtype))

    def add(self, start: int, values: Tensor) -> None:
        """Add to the elements from `start` on."""
        for tensor, inner, outer in self.ranges(start, values.numel()):
            if tensor.dim() == 1:
                tensor[inner].add_(values[outer].to(tensor.device))
            else:
                more = values[outer].to(tensor.device, tensor.dtype)
                tensor.put_(_indices(inner, tensor), more, accumulate=True)

    def ranges(self, start: int, length: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield each tensor in a range, its elements in the range, and their place in the range."""
        index, done = bisect_right(self._starts, start) - 1, 0
        while done < length:
            first = start + done - self._starts[index]
            size = min(length - done, self._starts[index + 1] - self._starts[index] - first)
            if size > 0:  # tensors without elements are passed over
                yield self._tensors[index], slice(first, first + size), slice(done, done + size)
            done += size
            index += 1


def _flat_view(tensor: Tensor) -> Tensor:
    """Return a view in one dimension, for writing; a tensor with gaps stays as it is.

    Complex numbers become pairs. A tensor with gaps or overlaps has no flat view: `read_range`
    and `put_` reach its elements by index.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous() or _is_dense(tensor):
        return flatten(tensor)
    # Two dimensions or more mark a tensor that is reached by index.
    return tensor if tensor.dim() > 1 else tensor.unsqueeze(0)


def read_range(tensor: Tensor, chosen: slice) -> Tensor:
    """Return some elements of a tensor that `FlatTensors.ranges` yields; a view if possible."""
    return tensor[chosen] if tensor.dim() == 1 else tensor.take(_indices(chosen, tensor))


def _indices(chosen: slice, tensor: Tensor) -> Tensor:
    return torch.arange(chosen.start, chosen.stop, device=tensor.device)


ROW = 32_768  # elements of a row of `norm`
SHORT = 2 * ROW  # elements that may be summed at once


def norm(grad: Tensor) -> Tensor:
    """Return |grad| as a tensor without dimensions, in float32 or wider.

    A CPU adds the squares of a tensor one after the other, and a float32 norm over ten million
    elements comes out 7e-4 too small. So the norms of rows of 32,768 elements are taken first, at
    the same speed, with an error of 1e-7. Half-precision gradients are summed in float32.
    """
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


@cache  # torch's answer costs an operation
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of this type are summed."""
    return torch.promote_types(dtype, torch.float32)
