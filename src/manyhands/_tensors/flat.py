"""Treat tensors as flat ranges of elements, in the order in which the elements lie in memory.

One rule of order serves everybody, so that an element has the same place in a bucket, in a saved
file and in a block's chunk:

    dense tensor      the order of its memory (a transposed weight is not copied)
    any other tensor  row by row, which needs a copy

    flatten      tensor -> its elements in one dimension; a view wherever that is possible
    unflatten    the way back: elements -> a tensor of the shape and strides of another
    FlatTensors  many tensors, one after the other, to be read and written by range
    norm         the norm of a tensor, in one read of its memory
    local_shard  what this rank holds of a tensor

**DTensors** are torch's, as `fully_shard` makes parameters. A DTensor has the whole tensor's shape;
`to_local()` is this rank's shard. Its *mesh* arranges the ranks in one dimension, or in two (HSDP:
shards and their replicas). For each dimension of the mesh a *placement* says what its ranks do with
the tensor: `Shard(dim)` cuts it, `Replicate()` gives every rank the same. Importing
torch.distributed.tensor takes half a second. So it is looked up in `sys.modules` and not imported:
as long as it is not imported, there are no DTensors.

Gradients that are sharded by `ShardedDataParallel` are in `sharded_gradient.py`.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
from torch import Tensor

from manyhands._tensors.trees import tensors_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Item = TypeVar("Item")


def flatten(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the elements in one dimension, in the memory order of `like` (default: the tensor)."""
    # Both have the same shape. The result is detached. It is a view where the order allows it.
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if like is None:
        like = tensor
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
    """Return the dimensions from the slowest to the fastest, as `like` lies in memory."""
    if _is_row_by_row(like):
        return list(range(like.dim()))
    return sorted(range(like.dim()), key=like.stride, reverse=True)


def _is_row_by_row(like: Tensor) -> bool:
    """Return whether the flat order is the logical one: contiguous, or with gaps or overlaps."""
    return like.is_contiguous() or not _is_dense(like)


def _is_dense(tensor: Tensor) -> bool:
    # Without gaps or overlaps. `empty_like` uses this operator, too.
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def in_groups(
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """Yield consecutive items together, of `limit` in all at most, or one larger item alone.

    >>> list(in_groups([3, 4, 2, 9, 1], int, limit=7))
    [[3, 4], [2], [9], [1]]
    """
    group: list[Item] = []
    total = 0
    for item in items:
        own = size(item)
        if group and total + own > limit:
            yield group
            group = []
            total = 0
        group.append(item)
        total += own
    if group:
        yield group


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
        self._starts = [0, *accumulate([tensor.numel() for tensor in self._tensors])]

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
        index = bisect_right(self._starts, start) - 1
        done = 0
        while done < length:
            first = start + done - self._starts[index]
            size = min(length - done, self._starts[index + 1] - self._starts[index] - first)
            if size > 0:  # tensors without elements are passed over
                yield self._tensors[index], slice(first, first + size), slice(done, done + size)
            done += size
            index += 1


def _flat_view(tensor: Tensor) -> Tensor:
    """Return a view in one dimension, for writing; a tensor with gaps stays as it is."""
    # Complex numbers become pairs. A tensor with gaps or overlaps has no flat view: `read_range`
    # and `put_` reach its elements by index.
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous() or _is_dense(tensor):
        return flatten(tensor)
    # Two dimensions or more mark a tensor that is reached by index.
    return torch.atleast_2d(tensor)


def read_range(tensor: Tensor, chosen: slice) -> Tensor:
    """Return some elements of a tensor that `FlatTensors.ranges` yields; a view if possible."""
    if tensor.dim() == 1:
        return tensor[chosen]
    return tensor.take(_indices(chosen, tensor))


def _indices(chosen: slice, tensor: Tensor) -> Tensor:
    return torch.arange(chosen.start, chosen.stop, device=tensor.device)


ROW = 32_768  # elements of a row of `norm`
SHORT = 2 * ROW  # elements that may be summed at once


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place, as torch counts (not through `.data`)."""
    return [tensor._version for tensor in tensors]


def norm(grad: Tensor) -> Tensor:
    """Return |grad| as a tensor without dimensions, in float32 or wider."""
    # A CPU adds the squares of a tensor one after the other, and a float32 norm over ten million
    # elements comes out 7e-4 too small. So the norms of rows of 32,768 elements are taken first, at
    # the same speed, with an error of 1e-7. Half-precision gradients are summed in float32.
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    elif grad.layout != torch.strided:
        grad = grad.to_dense()
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    dtype = accumulation_dtype(grad.dtype)
    if grad.numel() <= SHORT or grad.device.type != "cpu":
        return torch.linalg.vector_norm(grad, dtype=dtype)
    flat = flatten(grad)
    end = flat.numel() - flat.numel() % ROW
    parts = torch.linalg.vector_norm(flat[:end].view(-1, ROW), dim=1, dtype=dtype)
    if end < flat.numel():
        rest = torch.linalg.vector_norm(flat[end:], dtype=dtype)
        parts = torch.cat([parts, rest.view(1)])
    return torch.linalg.vector_norm(parts)


@cache  # torch's answer costs an operation
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of this type are summed."""
    return torch.promote_types(dtype, torch.float32)


# -- DTensors --------------------------------------------------------------------------------------


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor, without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return what this rank holds: a DTensor's shard, or the whole of any other tensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # or else to_local() is recorded by autograd
        return tensor.to_local()


def check_own_shards(state: object, params: Iterable[Tensor]) -> None:
    """Raise a ValueError if a state of these parameters has shards that another rank has saved."""
    own = _placements(params)
    for saved in _placements(tensors_in(state)):
        if saved not in own:
            here = "These parameters are whole"
            if own:
                here = f"This one has {' or '.join(own)}"
            raise ValueError(
                f"this optimizer state is {saved}, as torch.save on a single rank leaves it. "
                f"{here}. Save with mh.save(folder, model=model, optimizer=optimizer) on every "
                "rank: mh.load gives every rank its part, on any number of ranks."
            )


def _placements(tensors: Iterable[Tensor]) -> dict[str, None]:
    """Name the parts of the DTensors that the rank holds, or held that has pickled them."""
    found: dict[str, None] = {}
    for tensor in tensors:
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            rank = ", ".join(map(str, mesh.get_coordinate() or ()))
            found[f"the shard of rank {rank} of {' x '.join(map(str, mesh.shape))}"] = None
    return found


@dataclass(frozen=True)
class DimRange:
    """Indices `start` to `start + length` of one dimension of a tensor."""

    dim: int
    start: int
    length: int

    def narrow(self, whole: Tensor) -> Tensor:
        """Return a view of this range of the whole tensor."""
        return whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class DTensorShards:
    """Which rank holds what of a DTensor that is sharded in one dimension at most."""

    mesh: DeviceMesh
    mesh_dim: int | None  # the dimension whose ranks hold different shards; None: nothing is cut
    ranges: tuple[DimRange, ...]  # by rank in that dimension of the mesh
    rank: int
    first_replica: bool  # True on exactly one of the ranks that hold the same shard

    @classmethod
    def of(cls, tensor: DTensor) -> DTensorShards:
        """Read a DTensor's placements; raise a ValueError if they are not of the known kinds."""
        from torch.distributed.tensor import Replicate, Shard

        mesh = tensor.device_mesh
        placements = tensor.placements
        # `type(...) is`: strided shards, of tensor parallelism, are a class derived from Shard.
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # a rank outside of the mesh has none, and no DTensor of it
        cutting = []
        first = True
        known = True
        for mesh_dim, placement in enumerate(placements):
            if type(placement) is Shard:
                cutting.append((mesh_dim, placement.dim))
            else:
                known = known and type(placement) is Replicate
                first = first and coordinate[mesh_dim] == 0
        if len(cutting) > 1 or not known:
            raise ValueError(
                f"gradients placed as {placements} are not measured. A rule needs parameters cut "
                "by one Shard placement, as by fully_shard, without tensor parallelism."
            )
        if not cutting:
            everything = DimRange(0, 0, tensor.size(0) if tensor.dim() else 1)
            return cls(mesh, None, (everything,), 0, first)
        mesh_dim, dim = cutting[0]
        workers = mesh.size(mesh_dim)
        size = tensor.size(dim)
        step = -(-size // workers)  # as torch.chunk: the last shards are shorter, or empty
        ranges = []
        for rank in range(workers):
            start = min(rank * step, size)
            ranges.append(DimRange(dim, start, min(step, size - start)))
        return cls(mesh, mesh_dim, tuple(ranges), coordinate[mesh_dim], first)

    @property
    def own(self) -> DimRange:
        """This rank's range."""
        return self.ranges[self.rank]
