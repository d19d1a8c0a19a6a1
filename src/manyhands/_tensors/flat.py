"""Access tensors as flat ranges of elements, in memory order.

Buckets, saved files and chunks of blocks have the same order:

    dense tensor      the order in memory (a transposed weight is not copied)
    any other tensor  row by row, which requires a copy

    flatten      tensor -> flat tensor of the elements; a view if possible
    unflatten    the inverse: elements -> a tensor with the shape and strides of another
    FlatTensors  concatenated tensors, read and written by range
    norm         the norm of a tensor, in a single read
    local_shard  this rank's part of a tensor

A DTensor is torch's sharded tensor, such as a parameter of `fully_shard`. The shape is the
full tensor's; `to_local()` is this rank's shard. A *mesh* arranges the ranks in one or two
dimensions (HSDP: shards and replicas). A *placement* per mesh dimension defines the distribution:
`Shard(dim)` cuts the tensor, `Replicate()` copies it. Importing torch.distributed.tensor takes half
a second, so it is only looked up in `sys.modules`: without it, no DTensors exist.
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
    # The result is detached; a view, if the order allows.
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if like is None:
        like = tensor
    if _is_row_by_row(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride():
        # A gradient's strides can differ from the parameter's.
        tensor = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def unflatten(flat: Tensor, like: Tensor) -> Tensor:
    """Return a view of flat elements with the shape of `like`, and the strides if dense."""
    if _is_row_by_row(like):
        return flat.view(like.shape)
    return flat.as_strided(like.size(), like.stride())


def order_of_dims(like: Tensor) -> list[int]:
    """Return the dimensions from the slowest to the fastest in memory."""
    if _is_row_by_row(like):
        return list(range(like.dim()))
    return sorted(range(like.dim()), key=like.stride, reverse=True)


def _is_row_by_row(like: Tensor) -> bool:
    """Return whether the flat order is row by row: contiguous, or with gaps or overlaps."""
    return like.is_contiguous() or not _is_dense(like)


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def in_groups(
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """Yield lists of consecutive items with a total size up to `limit`; larger items separately.

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


def deal_out(sizes: Sequence[tuple[int, int]], load: list[int]) -> dict[int, int]:
    """Return an owner for each index, and update `load`, the elements per rank.

    >>> deal_out([(0, 5), (1, 9), (2, 4)], load=[0, 0])
    {1: 0, 0: 1, 2: 1}
    """
    owner: dict[int, int] = {}
    # Greedy: the largest item goes to the rank with the smallest load.
    for index, size in sorted(sizes, key=lambda entry: (-entry[1], entry[0])):
        owner[index] = load.index(min(load))
        load[owner[index]] += size
    return owner


def group_by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(kinds.values())


class FlatTensors:
    """Tensors of equal type, accessed like a single flat tensor.

    A DTensor contributes this rank's shard. Reads and writes access the tensors' memory. Create an
    object for each use, because a parameter's memory may be replaced (`param.data = ...`).
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [_flat_view(local_shard(tensor).detach()) for tensor in tensors]
        self._starts = [0, *accumulate([tensor.numel() for tensor in self._tensors])]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(pairwise(self._starts))

    def read(self, start: int, out: Tensor) -> None:
        """Fill the flat tensor `out` with the elements from `start` on, with a dtype conversion."""
        for tensor, inner, outer in self.ranges(start, out.numel()):
            out[outer].copy_(read_range(tensor, inner))

    def write(self, start: int, values: Tensor) -> None:
        for tensor, inner, outer in self.ranges(start, values.numel()):
            if tensor.dim() == 1:
                tensor[inner].copy_(values[outer])
            else:
                # put_ requires values of the tensor's dtype.
                tensor.put_(_indices(inner, tensor), values[outer].to(tensor.device, tensor.dtype))

    def add(self, start: int, values: Tensor) -> None:
        for tensor, inner, outer in self.ranges(start, values.numel()):
            if tensor.dim() == 1:
                tensor[inner].add_(values[outer].to(tensor.device))
            else:
                more = values[outer].to(tensor.device, tensor.dtype)
                tensor.put_(_indices(inner, tensor), more, accumulate=True)

    def ranges(self, start: int, length: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield each tensor in a range, with slices of the tensor and of the range."""
        index = bisect_right(self._starts, start) - 1
        done = 0
        while done < length:
            first = start + done - self._starts[index]
            size = min(length - done, self._starts[index + 1] - self._starts[index] - first)
            if size > 0:  # skip empty tensors
                yield self._tensors[index], slice(first, first + size), slice(done, done + size)
            done += size
            index += 1


def _flat_view(tensor: Tensor) -> Tensor:
    """Return a flat view for writing, or two or more dimensions for a tensor with gaps."""
    # Complex numbers become pairs. `read_range` and `put_` access tensors with gaps or overlaps by
    # index.
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous() or _is_dense(tensor):
        return flatten(tensor)
    return torch.atleast_2d(tensor)


def read_range(tensor: Tensor, chosen: slice) -> Tensor:
    """Return some elements of a tensor from `FlatTensors.ranges`; a view if possible."""
    if tensor.dim() == 1:
        return tensor[chosen]
    return tensor.take(_indices(chosen, tensor))


def _indices(chosen: slice, tensor: Tensor) -> Tensor:
    return torch.arange(chosen.start, chosen.stop, device=tensor.device)


ROW = 32_768  # elements per row in `norm`
SHORT = 2 * ROW  # elements that are summed directly


def norm(grad: Tensor) -> Tensor:
    """Return |grad| as a tensor without dimensions, in float32 or wider."""
    # A CPU adds squares sequentially; a float32 norm over ten million elements is 7e-4 too small.
    # The norms of rows of 32,768 elements are equally fast, with an error of 1e-7.
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


@cache  # promote_types costs an operation
def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# -- DTensors --------------------------------------------------------------------------------------


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return a DTensor's shard on this rank, or any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # autograd would record to_local()
        return tensor.to_local()


def check_own_shards(state: object, params: Iterable[Tensor]) -> None:
    """Raise a ValueError if a state contains shards that another rank has saved."""
    own = _placements(params)
    for saved in _placements(tensors_in(state)):
        if saved not in own:
            here = "These parameters are not sharded"
            if own:
                here = f"This rank has {' or '.join(own)}"
            raise ValueError(
                f"this optimizer state contains {saved}, as saved by torch.save on a single rank. "
                f"{here}. Save with mh.save(folder, model=model, optimizer=optimizer) on every "
                "rank: mh.load gives every rank its part, on any number of ranks."
            )


def _placements(tensors: Iterable[Tensor]) -> dict[str, None]:
    """Name the DTensor shards of the current rank, or of the rank that pickled the tensors."""
    found: dict[str, None] = {}
    for tensor in tensors:
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            rank = ", ".join(map(str, mesh.get_coordinate() or ()))
            found[f"the shard of rank {rank} of {' x '.join(map(str, mesh.shape))}"] = None
    return found


@dataclass(frozen=True)
class DimRange:
    dim: int
    start: int
    length: int

    def narrow(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class DTensorShards:
    """The distribution of a DTensor with up to one sharded dimension."""

    mesh: DeviceMesh
    mesh_dim: int | None  # the sharded mesh dimension; None without sharding
    dim: int  # the sharded dimension of the tensor
    size: int  # of this dimension
    workers: int  # ranks in the sharded mesh dimension
    rank: int  # in the sharded mesh dimension
    first_replica: bool  # True on a single rank of those with equal shards

    @classmethod
    def of(cls, tensor: DTensor) -> DTensorShards:
        """Read a DTensor's placements; raise a ValueError for unsupported placements."""
        from torch.distributed.tensor import Replicate, Shard

        mesh = tensor.device_mesh
        placements = tensor.placements
        # `type(...) is` excludes strided shards of tensor parallelism, a subclass of Shard.
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # ranks outside of the mesh have no DTensor
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
                f"gradients placed as {placements} are not supported. A rule requires parameters "
                "with a single Shard placement, as from fully_shard, without tensor parallelism."
            )
        if not cutting:
            return cls(mesh, None, 0, tensor.size(0) if tensor.dim() else 1, 1, 0, first)
        mesh_dim, dim = cutting[0]
        workers = mesh.size(mesh_dim)
        rank = coordinate[mesh_dim]
        return cls(mesh, mesh_dim, dim, tensor.size(dim), workers, rank, first)

    @property
    def own(self) -> DimRange:
        return self.of_rank(self.rank)

    def of_rank(self, rank: int) -> DimRange:
        """Return the shard of a rank in the sharded mesh dimension."""
        step = -(-self.size // self.workers)  # as in torch.chunk: the last shards are shorter
        start = min(rank * step, self.size)
        return DimRange(self.dim, start, min(step, self.size - start))
