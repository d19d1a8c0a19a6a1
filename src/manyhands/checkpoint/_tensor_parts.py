"""The slices of tensors that this rank holds, and where slices are stored.

A *slice* is rectangular: offsets and sizes, one for each dimension. A plain tensor is one slice,
and so is a shard of a DTensor. A flat range of a parameter (`_optimizers/state_parts.py`) is a few:

The elements `start` to `stop` of a tensor, in the order of memory, are the end of one row, some
whole rows, and the beginning of another. The incomplete rows are again such ranges, with one
dimension less. So there are at most 2 * dimensions - 1 slices. Each is contiguous in memory, and
the next one begins where it ends.

**Who writes** a slice that several ranks hold alike follows from the rank's own placements, so no
rank asks another: the tensors that the same ranks hold are laid end to end, and each of these ranks
writes those that begin in its part of the length. A rank that needs a slice reads it from whichever
stored slices overlap it.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from manyhands._optimizers.state_parts import OptimizerStatePart
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
MOST_DIMENSIONS = 64  # that torch's operations take
# Bytes that a rank writes of what others hold as well: fewer ranks write small models.
LEAST = 2**22
# The entry for the exact parameters that an optimizer keeps beside the rounded ones.
EXACT_ENTRY = "manyhands.exact"


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
    row_shape = shape[1:]
    row_size = math.prod(shape[1:])
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


@dataclass(frozen=True)
class Holders:
    """Ranks that hold the same slices, and this rank's place among them."""

    count: int = 1
    place: int = 0
    kind: str = ""  # ranks that hold tensors of one kind alike have the same list of them

    def times(self, outer: Holders) -> Holders:
        """Return the holders if there are several of such groups, and this one has a place too."""
        place = outer.place * self.count + self.place
        return Holders(outer.count * self.count, place, self.kind + outer.kind)


@dataclass(eq=False)
class Savers:
    """The ranks that save together: their ranks among all processes, and this rank's place."""

    size: int = 1
    rank: int = 0
    ranks: Sequence[int] = (0,)
    kind: str = "all"
    _copies: dict[tuple[int, ...], Savers] = field(default_factory=dict)  # by the members

    @classmethod
    def of(cls, ranks: RankGroup) -> Savers:
        return cls(ranks.size, ranks.rank, tuple(ranks.ranks)) if ranks.size > 1 else cls()

    @property
    def everyone(self) -> Holders:
        """The holders of what every rank has alike."""
        return Holders(self.size, self.rank, self.kind if self.size > 1 else "")

    def copies(self, members: Sequence[int]) -> Savers:
        """Return the ranks with this one's place in groups that hold the same, as `members`."""
        # The groups are the rows of a grid of ranks, or its columns, as in a mesh of ranks.
        key = tuple(sorted(members))
        if key not in self._copies:
            if not set(key) <= set(self.ranks) or self.size % len(key):
                raise ValueError(
                    f"the run is sharded over ranks {list(key)}, and {list(self.ranks)} save. Call "
                    "mh.save on all ranks of one or more such groups: give process_group= for that."
                )
            places = [self.ranks.index(rank) for rank in key]
            step = places[1] - places[0] if len(places) > 1 else 1
            row, column = divmod(places[0], step * len(places))
            count = self.size // len(places)
            self._copies[key] = Savers(count, row * step + column % step, kind="copies")
        return self._copies[key]


ALONE = Savers()


@dataclass(eq=False)
class TensorParts:
    """The slices of one tensor that this rank holds: offsets and elements (a view of them)."""

    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    slices: list[tuple[tuple[int, ...], Tensor]]
    holders: Holders = Holders()
    grid: tuple[int, int, int] | None = None  # dimension, pieces along it, and which this is

    @classmethod
    def whole(cls, tensor: Tensor, savers: Savers = ALONE) -> TensorParts:
        tensor = tensor.detach()
        offsets = (0,) * tensor.dim()
        return cls(tuple(tensor.shape), tensor.dtype, [(offsets, tensor)], savers.everyone)

    @classmethod
    def of_dtensor(cls, tensor: DTensor, savers: Savers = ALONE) -> TensorParts:
        """Return this rank's shard. Ranks along a dimension that is not sharded hold the same."""
        shape, corner, here = _locate_local(tensor)
        mesh = tensor.device_mesh
        own = tensor.device_mesh.get_coordinate()
        assert own is not None
        holders = Holders(kind="mesh")
        grid = None
        placements: Any = tensor.placements
        for dim, placement in enumerate(placements):
            if not placement.is_shard():
                holders = holders.times(Holders(mesh.size(dim), own[dim]))
            elif _is_cut(here, shape, corner, placement.dim, mesh.size(dim), own[dim]):
                grid = (placement.dim, mesh.size(dim), own[dim])
        if 1 < savers.size != mesh.size():
            holders = holders.times(savers.copies(mesh.mesh.flatten().tolist()).everyone)
        return cls(shape, here.dtype, [(corner, here)], holders, grid)

    @classmethod
    def from_flat(
        cls, flat: Tensor, like: Tensor, start: int, holders: Holders = Holders()
    ) -> TensorParts:
        """Return the slices that a flat range holds of a tensor like `like`.

        `flat` has the elements from `start` on, in the order of `like`'s memory; of a DTensor, they
        are counted in its local tensor. Complex numbers may come as pairs of real ones.
        """
        flat = flat.detach().view(-1)
        shape, corner, like = _locate_local(like)
        if like.is_complex() and not flat.is_complex():
            shape = (*shape, 2)
            corner = (*corner, 0)
            like = torch.view_as_real(like)
        # Memory order may differ from the order of dimensions (channels_last, a transpose): cut the
        # permuted shape, and permute each slice back.
        order = order_of_dims(like)
        back = [order.index(dim) for dim in range(like.dim())]
        slices = []
        done = 0
        permuted = tuple(like.shape[dim] for dim in order)
        for offsets, sizes in slices_of_range(permuted, start, start + flat.numel()):
            elements = flat[done : (done := done + torch.Size(sizes).numel())].view(sizes)
            begin = tuple(offsets[i] + first for i, first in zip(back, corner, strict=True))
            slices.append((begin, elements.permute(back)))
        return cls(shape, flat.dtype, slices, holders)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor, which all holders know."""
        return math.prod(self.shape) * self.dtype.itemsize

    def merge(self, before: TensorParts | None) -> TensorParts:
        """Return the slices of both, for a rank that holds several ranges of one tensor."""
        slices = self.slices if before is None else [*before.slices, *self.slices]
        return replace(self, slices=slices)


def _locate_local(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Return the whole tensor's shape, the offsets of the local tensor in it, and the latter."""
    here = local_shard(tensor).detach()
    corner = (0,) * tensor.dim()
    # The local tensor may be the result of a collective that is still under way.
    here = here.wait() if hasattr(here, "wait") else here
    if is_dtensor(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        placed = tensor.device_mesh, tensor.placements
        _, corner = compute_local_shape_and_global_offset(tensor.shape, *placed)
    return tuple(tensor.shape), tuple(corner), here


def _is_cut(
    here: Tensor, shape: Sequence[int], corner: Sequence[int], dim: int, pieces: int, piece: int
) -> bool:
    """Return whether a shard is one piece of the tensor, cut along `dim` only."""
    start, stop = piece_range(shape[dim], pieces, piece)
    cut = (*shape[:dim], stop - start, *shape[dim + 1 :])
    return tuple(here.shape) == cut and (start == stop or corner[dim] == start)


def own_share(tensors: Mapping[str, TensorParts]) -> dict[str, TensorParts]:
    """Return what this rank writes, of all that it holds."""
    totals: dict[Holders, int] = defaultdict(int)
    for parts in tensors.values():
        totals[parts.holders] += parts.nbytes
    result = {}
    done = dict.fromkeys(totals, 0)
    for key, parts in tensors.items():
        holders = parts.holders
        total = max(1, totals[parts.holders])
        writers = min(holders.count, -(-total // LEAST))
        if done[holders] * writers // total == holders.place or holders.count == 1:
            result[key] = parts
        done[holders] += parts.nbytes
    return result


def table_of(tensors: Mapping[str, TensorParts]) -> Table:
    """Return where these tensors are, as the table of one file."""
    table = Table(pieces=[[]])
    grids: dict[tuple[int, int], dict[str, list[object]]] = {}
    for key, parts in tensors.items():
        shape = list(parts.shape)
        dtype = str(parts.dtype).removeprefix("torch.")
        if parts.grid is None:
            slices = [[0, list(offsets), list(e.shape)] for offsets, e in stored_slices(parts)]
            if slices:
                table.slices[key] = [shape, dtype, slices]
            continue
        dim, pieces, piece = parts.grid
        grids.setdefault((pieces, piece), {})[key] = [shape, dtype, dim]
    for number, ((pieces, piece), members) in enumerate(grids.items()):
        table.grids.append([pieces, members])
        table.pieces[0].append([number, piece])
    return table


def stored_slices(parts: TensorParts) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield the slices that are worth an entry in a file."""
    for offsets, elements in parts.slices:
        # A rank that owns no rows of a tensor has an empty slice: nothing to write.
        if elements.numel() or 0 in parts.shape:
            yield offsets, elements


def find_reads(
    key: str, target: TensorParts, stored: StoredTensor
) -> list[tuple[StoredSlice, tuple[int, ...], Tensor]]:
    """Return what to read to fill a target: stored slices, offsets in them, and the memory."""
    # Raise ValueError unless that is all of it.
    reads = []
    found = 0
    for start, elements in target.slices:
        sizes = tuple(elements.shape)
        for each in stored.overlapping(start, sizes):
            # From the beginning to the end that both have, in each dimension.
            first = tuple(map(max, start, each.offsets))
            last = tuple(map(min, map(add, start, sizes), map(add, each.offsets, each.sizes)))
            view = elements
            for dim, (a, b, begin) in enumerate(zip(first, last, start, strict=True)):
                view = view.narrow(dim, a - begin, b - a)
            inside = tuple(a - b for a, b in zip(first, each.offsets, strict=True))
            reads.append((each, inside, view))
            found += view.numel()
    needed = sum(elements.numel() for _, elements in target.slices)
    # Counting is enough: stored slices do not overlap.
    if found != needed:
        raise ValueError(f"the checkpoint has {found:,} of {needed:,} elements of {key!r}.")
    return reads


# -- where tensors are ----------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredSlice:
    """A rectangular slice of a tensor, in file number `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int


@dataclass
class Table:
    """Where tensors are: those in grids, and the slices of all others.

    A rank describes its own file so, with itself as file 0, and the commit all files.
    """

    # For each grid how many pieces it has and, by key, shape, dtype and the dimension that is cut.
    grids: list[list[Any]] = field(default_factory=list)
    # For each file the pieces that it has: pairs of a grid's number and a piece's.
    pieces: list[list[list[int]]] = field(default_factory=list)
    # By key: shape, dtype, and a list of (file, offsets, sizes).
    slices: dict[str, list[Any]] = field(default_factory=dict)


def piece_range(size: int, pieces: int, piece: int) -> tuple[int, int]:
    """Return where a piece of a dimension begins and ends, cut as `torch.chunk` does."""
    each = -(-size // pieces)
    return min(size, each * piece), min(size, each * (piece + 1))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint: its whole shape, and the slices that make it up."""

    shape: tuple[int, ...]
    dtype: str
    cut: int = 0  # the dimension that is cut in pieces, if it is
    holders: Sequence[int] = ()  # the file that has each piece
    listed: Sequence[StoredSlice] = ()  # the slices, if it is not cut in pieces

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPE_TEXTS[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def slices(self) -> Iterator[StoredSlice]:
        """All slices that are not empty."""
        return self.overlapping((0,) * len(self.shape), self.shape)

    @property
    def slice_count(self) -> int:
        """The number of slices that are not empty."""
        if 0 in self.shape:
            return 0
        if not self.holders:
            return sum(1 for each in self.listed if 0 not in each.sizes)
        size = self.shape[self.cut]
        return -(-size // -(-size // len(self.holders)))

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[StoredSlice]:
        """Yield the slices that have elements of this one."""
        candidates: Iterable[StoredSlice] = self.listed
        if count := len(self.holders):
            each = max(1, -(-self.shape[self.cut] // count))
            start = offsets[self.cut]
            size = sizes[self.cut]
            candidates = map(
                self.piece, range(start // each, min(count, -(-(start + size) // each)))
            )
        for found in candidates:
            bounds = zip(offsets, sizes, found.offsets, found.sizes, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in bounds):
                yield found

    def piece(self, piece: int) -> StoredSlice:
        """Return a piece of a tensor that is cut; it may be empty."""
        start, stop = piece_range(self.shape[self.cut], len(self.holders), piece)
        offsets = [0] * len(self.shape)
        sizes = list(self.shape)
        offsets[self.cut] = start
        sizes[self.cut] = stop - start
        return StoredSlice(tuple(offsets), tuple(sizes), self.holders[piece])


def find_tensors(table: Table, files: int) -> dict[str, StoredTensor]:
    """Return all tensors of a table. Raise ValueError unless each element is in it exactly once."""
    tensors: dict[str, StoredTensor] = {}
    for (_, members), holders in zip(table.grids, _find_holders(table, files), strict=True):
        for key, (shape, dtype, dim) in members.items():
            _check_numbers(key, dtype, shape, [dim])
            if dim >= len(shape) or key in tensors:
                raise ValueError(f"tensor {key!r} is cut in an impossible way")
            tensors[key] = StoredTensor(tuple(shape), dtype, dim, holders)
    for key, (shape, dtype, several) in table.slices.items():
        slices = [StoredSlice(tuple(o), tuple(s), file) for file, o, s in several]
        _check_numbers(
            key, dtype, shape, [n for s in slices for n in (*s.offsets, *s.sizes, s.file)]
        )
        bounds = [(each.offsets, each.sizes) for each in slices]
        once = covers_once(shape, bounds) and key not in tensors
        if not once or any(each.file >= files for each in slices):
            raise ValueError(f"the slices of tensor {key!r} do not cover each element exactly once")
        tensors[key] = StoredTensor(tuple(shape), dtype, listed=slices)
    return tensors


def _find_holders(table: Table, files: int) -> list[list[int]]:
    """Return for each grid the file of each piece. Raise ValueError unless each is there once."""
    found: list[dict[int, int]] = [{} for _ in table.grids]
    if len(table.pieces) != files:
        raise ValueError(f"there are the pieces of {len(table.pieces)} files, and {files} files")
    for file, pieces in enumerate(table.pieces):
        for grid, piece in pieces:
            if not (_is_count(grid) and _is_count(piece) and grid < len(found)):
                raise ValueError(f"file {file} has an impossible piece of a grid")
            if found[grid].setdefault(piece, file) != file:
                raise ValueError(f"files {found[grid][piece]} and {file} have the same piece")
    result = []
    for number, ((count, _), holders) in enumerate(zip(table.grids, found, strict=True)):
        # Counted before anything of that size is made: a damaged count may be any number.
        if not _is_count(count) or count != len(holders) or max(holders, default=-1) >= count:
            raise ValueError(f"of grid {number}, {len(holders)} of {count} pieces are there")
        result.append([holders[piece] for piece in range(count)])
    return result


def _is_count(value: object) -> bool:
    # The exact type: True is an int to Python.
    return type(value) is int and 0 <= value < MOST


def _check_numbers(key: str, dtype: Any, shape: Sequence[Any], numbers: Sequence[Any]) -> None:
    """Raise ValueError unless numbers are counts, and a shape is one that torch can have."""
    counts = all(map(_is_count, shape)) and all(map(_is_count, numbers))
    if not counts or len(shape) > MOST_DIMENSIONS or dtype not in DTYPE_TEXTS:
        raise ValueError(f"tensor {key!r} has an impossible shape, type or place")
    # Strides are computed as if no dimension were empty.
    elements = math.prod(max(1, size) for size in shape)
    if elements * DTYPE_TEXTS[dtype].itemsize >= MOST:
        raise ValueError(f"tensor {key!r} has an impossible shape")


def covers_once(
    shape: Sequence[int], slices: Collection[tuple[Sequence[int], Sequence[int]]]
) -> bool:
    """Return whether slices (offsets and sizes) fill a shape without gap or overlap.

    They do, inside the shape, exactly if

        sum over slices of  prod_i (f_i[start] - f_i[stop])  =  prod_i (f_i[0] - f_i[size])

    as polynomials in the unknowns f_i[x], one for each dimension and coordinate. (Each side is the
    mixed difference of an indicator function, and differences of equal functions are equal.) Both
    sides are compared at random values modulo a prime of 61 bits: one step for each slice and
    dimension, where comparing slices in pairs takes the square.
    """
    for offsets, sizes in slices:
        ends = zip(offsets, sizes, shape, strict=True)
        if any(start + size > whole for start, size, whole in ends):
            return False
    # Its own generator: the program's are saved and restored, and must not advance.
    draw = random.SystemRandom().randrange
    values: dict[tuple[int, int], int] = {}

    def product(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        result = 1
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            for x in (start, start + size):
                if (dim, x) not in values:
                    values[dim, x] = draw(PRIME)
            result = result * (values[dim, start] - values[dim, start + size]) % PRIME
        return result

    total = sum(product(offsets, sizes) for offsets, sizes in slices)
    return total % PRIME == product([0] * len(shape), shape)


def check_can_hold(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError if a safetensors file has no name for this type of tensor."""
    if dtype not in DTYPE_NAMES:
        raise TypeError(
            f"{name} is a tensor of {dtype}, which safetensors files cannot hold. Convert it."
        )


# -- entries of an optimizer's state ---------------------------------------------------------------


def is_elementwise(part: OptimizerStatePart, entry: str, value: Tensor) -> bool:
    """Return whether an entry has one number for each element that this rank holds."""
    # `step` is one number, and must not be taken for the state of a parameter with one element.
    return value.shape == part.like.shape and (value.dim() > 0 or entry != "step")


def entry_parts(
    part: OptimizerStatePart, entry: str, value: Tensor, savers: Savers = ALONE
) -> TensorParts:
    """Return the slices of an entry; `savers` have the same."""
    if part.start is not None and is_elementwise(part, entry, value):
        return TensorParts.from_flat(value, part.param, part.start, savers.everyone)
    return to_parts(value, savers)


def to_parts(tensor: Tensor, savers: Savers = ALONE) -> TensorParts:
    """Return the slices of a tensor that all savers have, whole or as DTensors of them."""
    if is_dtensor(tensor):
        return TensorParts.of_dtensor(tensor, savers)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be saved: make it dense.")
    return TensorParts.whole(tensor, savers)


def allocate_target(
    part: OptimizerStatePart, name: str, entry: str, stored: StoredTensor, own: StoredTensor | None
) -> tuple[Tensor, TensorParts]:
    """Return a tensor to fill with a saved entry, and its slices.

    `own` is the parameter in the checkpoint. If the optimizer has a tensor that fits already,
    that one is returned, and filled in place.
    """
    param = part.param
    like = part.like
    shape = stored.shape
    dtype = stored.torch_dtype
    elementwise = shape == tuple(param.shape) and (len(shape) > 0 or entry != "step")
    # State in the parameter's type follows it into another, as torch's loading does.
    if elementwise and own is not None and dtype == own.torch_dtype:
        dtype = like.dtype
    same = own is not None and own.shape == tuple(param.shape) and part.start is None
    # As many elements as a parameter that may be another model's: surely it is.
    if not (elementwise or same) and torch.Size(shape).numel() == param.numel() > 1:
        raise ValueError(
            f"the state {entry!r} of {name!r} has the shape {shape} in the checkpoint, and "
            f"the parameter {tuple(param.shape)}."
        )
    now = part.entries.get(entry)
    if not elementwise:
        if _has_shape_and_type(now, torch.Size(shape), dtype):
            return now, to_parts(now)
        # torch's optimizers keep `step` on the CPU: reading it must not wait for the GPU.
        device = "cpu" if entry == "step" else param.device
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor, to_parts(tensor)
    if _has_shape_and_type(now, like.shape, dtype) and _has_same_layout(now, like):
        tensor = now
    else:
        tensor = torch.empty_like(like, dtype=dtype, requires_grad=False).detach()
    if part.start is not None:
        return tensor, TensorParts.from_flat(tensor, param, part.start)
    return tensor, to_parts(tensor)


def _has_shape_and_type(now: object, shape: torch.Size, dtype: torch.dtype) -> TypeGuard[Tensor]:
    return isinstance(now, Tensor) and now.shape == shape and now.dtype == dtype


def _has_same_layout(now: Tensor, like: Tensor) -> bool:
    """Return whether one tensor can be filled in place of another: device, strides, sharding."""
    if is_dtensor(now) != is_dtensor(like):
        return False
    if is_dtensor(now):
        return now.placements == like.placements  # type: ignore[attr-defined]
    return now.device == like.device and order_of_dims(now) == order_of_dims(like)
