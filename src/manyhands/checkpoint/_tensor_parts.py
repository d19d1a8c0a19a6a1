"""Find the slices of tensors on this rank and in the files of a checkpoint.

A *slice* is rectangular, with an offset and a size per dimension. A plain tensor, or a shard of a
DTensor, is a single slice. A flat range of a parameter (`_optimizers/state_parts.py`) is split into
slices: the end of a row, full rows, then the beginning of a row. Incomplete rows are again ranges
with one dimension less. So there are up to 2 * dimensions - 1 slices, each contiguous in memory.

**Which rank writes** a shared slice follows from placements, without messages: tensors with equal
holders are laid end to end, and each holder writes the tensors that start in its part of the
length. A reader combines all stored slices that overlap the requested slice.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import is_dtensor, local_shard, order_of_dims

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
DTYPE_TEXTS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
PRIME = 2**61 - 1
MOST = 2**63  # torch counts elements and bytes in 64 bits
MOST_DIMENSIONS = 64  # the maximum of torch's operations
# Bytes per writing rank of tensors that several ranks have: fewer ranks write small models.
LEAST = 2**22

Bounds = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a slice


def slices_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Bounds]:
    """Yield the slices of elements `start` to `stop`, in order.

    >>> list(slices_of_range((4, 5), 3, 16))
    [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]
    """
    if not shape and start < stop:
        yield (), ()
        return
    row_size = math.prod(shape[1:])
    while start < stop:
        row, skipped = divmod(start, row_size)
        rows = (stop - start) // row_size
        if rows and not skipped:  # full rows
            yield (row,) + (0,) * len(shape[1:]), (rows, *shape[1:])
            start += rows * row_size
            continue
        # The end of the first row, the beginning of the last row, or a part of the only row.
        end = min(row_size, skipped + stop - start)
        for offsets, sizes in slices_of_range(shape[1:], skipped, end):
            yield (row, *offsets), (1, *sizes)
        start += end - skipped


@dataclass(frozen=True)
class Holders:
    """Ranks with equal slices, and this rank's place among the ranks."""

    count: int = 1
    place: int = 0
    kind: str = ""  # holders of a kind have the same list of tensors

    def times(self, outer: Holders) -> Holders:
        """Return the combined holders of a number of such groups, which `outer` counts."""
        place = outer.place * self.count + self.place
        return Holders(outer.count * self.count, place, self.kind + outer.kind)


@dataclass(frozen=True)
class Savers:
    """The ranks that save together: global ranks, and this rank's place."""

    size: int = 1
    rank: int = 0
    ranks: Sequence[int] = (0,)
    kind: str = ""

    @classmethod
    def of(cls, ranks: RankGroup) -> Savers:
        if ranks.size == 1:
            return cls()
        return cls(ranks.size, ranks.rank, tuple(ranks.ranks), "all")

    @property
    def everyone(self) -> Holders:
        return Holders(self.size, self.rank, self.kind)

    def copies(self, members: Sequence[int]) -> Savers:
        """Return the ranks with the same slices as this rank, in groups such as `members`."""
        # The groups are rows or columns of a grid of ranks, as in a device mesh.
        members = sorted(members)
        if not set(members) <= set(self.ranks) or self.size % len(members):
            raise ValueError(
                f"the run is sharded over ranks {members}, but ranks {list(self.ranks)} save. Call "
                "mh.save on all ranks of one or more such groups, with process_group= if needed."
            )
        first = self.ranks.index(members[0])
        step = 1
        if len(members) > 1:
            step = self.ranks.index(members[1]) - first
        row, column = divmod(first, step * len(members))
        return Savers(self.size // len(members), row * step + column % step, kind="copies")


ALONE = Savers()


@dataclass(eq=False)
class TensorParts:
    """This rank's slices of a tensor: offsets and views of the elements."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    slices: list[tuple[tuple[int, ...], Tensor]]
    holders: Holders = Holders()
    grid: tuple[int, int, int] | None = None  # dimension, number of pieces, this piece

    @classmethod
    def whole(cls, tensor: Tensor, savers: Savers = ALONE) -> TensorParts:
        tensor = tensor.detach()
        offsets = (0,) * tensor.dim()
        return cls(tuple(tensor.shape), tensor.dtype, [(offsets, tensor)], savers.everyone)

    @classmethod
    def of_dtensor(cls, tensor: DTensor, savers: Savers = ALONE) -> TensorParts:
        """Return this rank's shard. Ranks along a replicated mesh dimension have equal shards."""
        shape, corner, here = _locate_local(tensor)
        mesh = tensor.device_mesh
        own = mesh.get_coordinate()
        assert own is not None
        holders = Holders(kind="mesh")
        grids = []
        placements: Any = tensor.placements
        for dim, placement in enumerate(placements):
            if placement.is_replicate():
                holders = holders.times(Holders(mesh.size(dim), own[dim]))
            else:
                grids.append((placement.dim, mesh.size(dim), own[dim]))
        if 1 < savers.size != mesh.size():
            holders = holders.times(savers.copies(mesh.mesh.flatten().tolist()).everyone)
        result = cls(shape, here.dtype, [(corner, here)], holders)
        if len(grids) == 1:
            (result.grid,) = grids
        return result

    @classmethod
    def from_flat(
        cls, flat: Tensor, like: Tensor, start: int, holders: Holders = Holders()
    ) -> TensorParts:
        """Return the slices of the elements `flat`, from `start` on in the memory order of `like`.

        For a DTensor, this is the order of the local tensor. Complex numbers may be pairs.
        """
        flat = flat.detach().view(-1)
        shape, corner, like = _locate_local(like)
        if like.is_complex() and not flat.is_complex():
            shape = (*shape, 2)
            corner = (*corner, 0)
            like = torch.view_as_real(like)
        # Memory order may differ from the order of dimensions (channels_last, transposed tensors):
        # split the permuted shape, then permute each slice back.
        order = order_of_dims(like)
        back = [order.index(dim) for dim in range(like.dim())]
        permuted = tuple(like.shape[dim] for dim in order)
        slices = []
        rest = flat
        for offsets, sizes in slices_of_range(permuted, start, start + flat.numel()):
            count = math.prod(sizes)
            begin = tuple(offsets[i] + first for i, first in zip(back, corner, strict=True))
            slices.append((begin, rest[:count].view(sizes).permute(back)))
            rest = rest[count:]
        return cls(shape, flat.dtype, slices, holders)

    @property
    def nbytes(self) -> int:
        """The bytes of the full tensor, which are equal on all holders."""
        return math.prod(self.shape) * self.dtype.itemsize

    def merge(self, before: TensorParts | None) -> TensorParts:
        """Return the slices of both. A rank may have several ranges of a tensor."""
        if before is None:
            return self
        return replace(self, slices=[*before.slices, *self.slices])


def _locate_local(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    here = local_shard(tensor).detach()
    # The local tensor may be the result of a pending collective.
    if hasattr(here, "wait"):
        here = here.wait()
    corner = (0,) * tensor.dim()
    if is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, corner = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if tuple(sizes) != tuple(here.shape):
            raise ValueError(f"a shard must have the shape {sizes}, got {tuple(here.shape)}.")
    return tuple(tensor.shape), tuple(corner), here


def own_share(tensors: Mapping[str, TensorParts]) -> dict[str, TensorParts]:
    totals: dict[Holders, int] = defaultdict(int)
    for parts in tensors.values():
        totals[parts.holders] += parts.nbytes
    result = {}
    done: dict[Holders, int] = defaultdict(int)
    for key, parts in tensors.items():
        holders = parts.holders
        total = max(1, totals[holders])
        writers = min(holders.count, -(-total // LEAST))
        writer = done[holders] * writers // total
        if holders.place == min(writer, writers - 1):  # empty tensors may follow the last byte
            result[key] = parts
        done[holders] += parts.nbytes
    return result


def stored_slices(parts: TensorParts) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    for offsets, elements in parts.slices:
        # A rank without rows of a tensor has an empty slice, which is not written.
        if elements.numel() or 0 in parts.shape:
            yield offsets, elements


def find_reads(
    key: str, target: TensorParts, stored: StoredTensor
) -> list[tuple[StoredSlice, tuple[int, ...], Tensor]]:
    """Return the reads that fill a target: stored slices, offsets inside the slices, and memory."""
    if target.shape != stored.shape:
        raise ValueError(f"{key!r} is {stored.shape} in the checkpoint and {target.shape} here.")
    reads = []
    for start, elements in target.slices:
        for each in stored.overlapping(start, elements.shape):
            view = elements
            inside = []
            for dim, begin in enumerate(start):
                first = max(begin, each.offsets[dim])
                last = min(begin + elements.shape[dim], each.offsets[dim] + each.sizes[dim])
                view = view.narrow(dim, first - begin, last - first)
                inside.append(first - each.offsets[dim])
            reads.append((each, tuple(inside), view))
    return reads  # `find_tensors` ensures that all elements are covered


# -- where tensors are ----------------------------------------------------------------------------


class Table(TypedDict):
    """The locations of tensors in files. A rank describes file 0, the commit all files."""

    # For each grid: the number of pieces, the file of each piece, and by key the shape, dtype and
    # split dimension. A rank's own table has the number of the rank's piece instead of the files.
    grids: list[list[Any]]
    # By key: shape, dtype, and a list of (file, offsets, sizes).
    slices: dict[str, list[Any]]


def table_of(tensors: Mapping[str, TensorParts]) -> Table:
    slices: dict[str, list[Any]] = {}
    grids: dict[tuple[int, int], dict[str, list[Any]]] = {}
    for key, parts in tensors.items():
        described: list[Any] = [list(parts.shape), str(parts.dtype).removeprefix("torch.")]
        if parts.grid is not None:
            dim, count, piece = parts.grid
            grids.setdefault((count, piece), {})[key] = [*described, dim]
            continue
        stored = [[0, list(start), list(each.shape)] for start, each in stored_slices(parts)]
        if stored:
            slices[key] = [*described, stored]
    table = Table(grids=[], slices=slices)
    for (count, piece), members in grids.items():
        # Only piece 0 lists the tensors of a grid; other pieces refer to the list by checksum.
        spelled: object = members
        if piece > 0:
            spelled = checksum(members)
        table["grids"].append([count, piece, spelled])
    return table


def checksum(members: object) -> int:
    return zlib.crc32(json.dumps(members).encode())


def merge_tables(tables: Sequence[Table]) -> Table:
    grids: dict[tuple[int, int], list[Any]] = {}
    all_slices: dict[str, list[Any]] = {}
    for file, table in enumerate(tables):
        for count, piece, members in table["grids"]:
            crc32 = members
            if piece == 0:
                crc32 = checksum(members)
            grid = grids.setdefault((count, crc32), [count, [None] * count, {}])
            grid[1][piece] = file
            if piece == 0:
                grid[2] = members
        for key, (shape, dtype, slices) in table["slices"].items():
            known = all_slices.setdefault(key, [shape, dtype, []])
            if known[:2] != [shape, dtype]:
                raise ValueError(
                    f"ranks have different tensors for {key!r}: {known[:2]} and {[shape, dtype]}."
                )
            known[2] += [[file, offsets, sizes] for _, offsets, sizes in slices]
    return Table(grids=list(grids.values()), slices=all_slices)


@dataclass(frozen=True)
class StoredSlice:
    """A rectangular slice of a tensor in file number `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint: full shape and stored slices."""

    shape: tuple[int, ...]
    dtype: str
    cut: int = 0  # the split dimension of a grid
    holders: Sequence[int] = ()  # the file of each piece of a grid
    listed: Sequence[StoredSlice] = ()  # the slices outside of grids

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPE_TEXTS[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def slices(self) -> Iterator[StoredSlice]:
        return self.overlapping((0,) * len(self.shape), self.shape)

    @property
    def slice_count(self) -> int:
        return len(list(self.slices))

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[StoredSlice]:
        candidates = self.listed
        if self.holders:
            start = offsets[self.cut]
            each = max(1, self._piece_size)
            end = min(len(self.holders), -(-(start + sizes[self.cut]) // each))
            candidates = list(map(self._piece, range(start // each, end)))
        for found in candidates:
            bounds = zip(offsets, sizes, found.offsets, found.sizes, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in bounds):
                yield found

    @property
    def _piece_size(self) -> int:
        """The size of a piece, as in `torch.chunk`: the last pieces may be smaller or empty."""
        return -(-self.shape[self.cut] // len(self.holders))

    def _piece(self, number: int) -> StoredSlice:
        offsets = [0] * len(self.shape)
        sizes = list(self.shape)
        start = min(sizes[self.cut], number * self._piece_size)
        offsets[self.cut] = start
        sizes[self.cut] = min(sizes[self.cut] - start, self._piece_size)
        return StoredSlice(tuple(offsets), tuple(sizes), self.holders[number])


def find_tensors(table: Table, files: int) -> dict[str, StoredTensor]:
    """Return all tensors of a table. Raise ValueError unless each element occurs exactly once."""
    _check_counts([table["grids"], table["slices"]])
    tensors: dict[str, StoredTensor] = {}
    for count, holders, members in table["grids"]:
        # Checked before allocating: a damaged count may be any number.
        if count != len(set(holders)) or max(holders) >= files:
            raise ValueError(f"each of the {count} pieces of a grid must occur once")
        for key, (shape, dtype, dim) in members.items():
            _check_shape(key, shape, dtype)
            if dim >= len(shape) or key in tensors:
                raise ValueError(f"tensor {key!r} is split in an impossible way")
            tensors[key] = StoredTensor(tuple(shape), dtype, dim, holders)
    for key, (shape, dtype, several) in table["slices"].items():
        _check_shape(key, shape, dtype)
        slices = [StoredSlice(tuple(o), tuple(s), file) for file, o, s in several]
        bounds = [(each.offsets, each.sizes) for each in slices]
        once = covers_once(shape, bounds) and key not in tensors
        if not once or any(each.file >= files for each in slices):
            raise ValueError(f"the slices of tensor {key!r} do not cover each element exactly once")
        tensors[key] = StoredTensor(tuple(shape), dtype, listed=slices)
    return tensors


def _check_counts(value: object) -> None:
    children: Iterable[object] = ()
    if isinstance(value, list):
        children = value
    elif isinstance(value, dict):
        children = value.values()
    # The exact type: in Python, True is an int.
    elif type(value) is not str and not (type(value) is int and 0 <= value < MOST):
        raise ValueError(f"{value!r:.80} is not a number of elements, pieces or files")
    for each in children:
        _check_counts(each)


def _check_shape(key: str, shape: Sequence[int], dtype: str) -> None:
    # Strides are computed as if no dimension were empty.
    elements = math.prod(max(1, size) for size in shape)
    known = dtype in DTYPE_TEXTS and len(shape) <= MOST_DIMENSIONS
    if not known or elements * DTYPE_TEXTS[dtype].itemsize >= MOST:
        raise ValueError(f"tensor {key!r} has an impossible shape or type")


def covers_once(
    shape: Sequence[int], slices: Collection[tuple[Sequence[int], Sequence[int]]]
) -> bool:
    """Return whether slices (offsets and sizes) fill a shape without gap or overlap.

    Slices fill the shape exactly if

        sum over slices of  prod_i (f_i[start] - f_i[stop])  =  prod_i (f_i[0] - f_i[size])

    as polynomials in the unknowns f_i[x], one for each dimension i and coordinate x. (Each side is
    the mixed difference of an indicator function.) Both sides are evaluated at random values modulo
    a prime of 61 bits. The cost is linear in the number of slices.
    """
    draw = random.SystemRandom().randrange
    values: dict[tuple[int, int], int] = defaultdict(partial(draw, PRIME))

    def product(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        result = 1
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            result = result * (values[dim, start] - values[dim, start + size]) % PRIME
        return result

    total = 0
    for offsets, sizes in slices:
        ends = zip(offsets, sizes, shape, strict=True)
        if any(start + size > whole for start, size, whole in ends):
            return False
        total += product(offsets, sizes)
    return total % PRIME == product([0] * len(shape), shape)


def check_can_hold(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError if safetensors files do not support this type of tensor."""
    if dtype not in DTYPE_NAMES:
        raise TypeError(
            f"{name} is a tensor of {dtype}, which safetensors files do not support. Convert it."
        )


def to_parts(tensor: Tensor, savers: Savers = ALONE) -> TensorParts:
    if is_dtensor(tensor):
        return TensorParts.of_dtensor(tensor, savers)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be saved. Convert it to dense.")
    if is_traceable_wrapper_subclass(tensor):  # without memory: reading it would crash
        raise TypeError(
            f"a checkpoint needs tensors with memory, got a {type(tensor).__name__}. Convert it to "
            "a dense tensor. For 8-bit optimizer state, use an optimizer of bitsandbytes."
        )
    return TensorParts.whole(tensor, savers)
