"""The slices of tensors that this rank holds, and which rank writes and reads which slice.

A model's tensor is a plain one or a DTensor. An entry of an optimizer's state is one of these too,
or a flat range of its parameter's elements (`_core/state_parts.py`).

A *slice* is rectangular: offsets and sizes, one for each dimension. torch plans with the three
methods in double underscores, and never needs the whole tensor. A plain tensor is one slice. A flat
range of a parameter is a few slices:

The elements `start` to `stop` of a tensor, in the order of memory, are the end of one row, some
whole rows, and the beginning of another. The incomplete rows are again such ranges, with one
dimension less. So there are at most 2 * dimensions - 1 slices. Each is contiguous in memory, and
the next one begins where it ends.

A slice that several ranks hold alike is written by one of them. A rank that needs a slice reads it
from whichever stored slices overlap it. Both are planned by torch's planners. Ranks exchange their
plans as JSON, because torch would exchange pickles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from manyhands._core.flat import is_dtensor, local_shard, order_of_dims
from manyhands._core.state_parts import OptimizerStatePart
from manyhands.checkpoint import _index

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
        shape, corner, like = _locate_local(like)
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
    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return what torch's planner has to write for this tensor: an item for each slice."""
        return [
            write_item(fqn, offsets, elements.shape, self.shape, self.dtype)
            for offsets, elements in self.slices
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return where this rank's slices lie, so that torch's planner reads what they need."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), elements.shape)
            for offsets, elements in self.slices
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a slice, to be written from or read into."""
        for offsets, elements in self.slices:
            if index.offset is not None and tuple(index.offset) == offsets:
                return elements
        raise ValueError(f"no slice of {index.fqn} begins at {index.offset}")


# What torch's planners take for a tensor. A Tensor here is a DTensor, which knows its own slices.
Parts: TypeAlias = TensorParts | Tensor


def merge_parts(before: Parts | None, more: Parts) -> Parts:
    """Return the slices of both; `before` is None for a tensor that is new."""
    if before is None:
        return more
    # A parameter with several ranges is a flat one; DTensors never come twice.
    assert isinstance(before, TensorParts) and isinstance(more, TensorParts)
    return before.merge(more)


def _locate_local(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Return the whole tensor's shape, the offsets of the local tensor in it, and the latter."""
    here, corner = local_shard(tensor).detach(), (0,) * tensor.dim()
    if is_dtensor(tensor):
        (chunk,) = tensor.__create_chunk_list__()
        corner = tuple(chunk.offsets)
    return tuple(tensor.shape), corner, here


def write_item(
    fqn: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> WriteItem:
    """Return torch's description of one slice to be written."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    # SHARD even for a whole tensor: torch accepts a key from several ranks only with this type.
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


# -- entries of an optimizer's state ---------------------------------------------------------------


def entries_of(part: OptimizerStatePart) -> dict[str, object]:
    """Return the entries to save: the optimizer's, and the exact parameters."""
    return {**part.entries, **({} if part.exact is None else {_index.EXACT_ENTRY: part.exact})}


def entry_parts(part: OptimizerStatePart, entry: str, value: Tensor) -> Parts:
    """Return an optimizer's entry as torch's planner takes it: whole, or the slice held here."""
    # `step` is one number, and must not be taken for the state of a parameter with one element.
    elementwise = value.shape == part.like.shape and (value.dim() > 0 or entry != "step")
    if part.start is not None and elementwise:
        return TensorParts.from_flat(value, part.param, part.start)
    return to_parts(value)


def to_parts(tensor: Tensor) -> Parts:
    """Return a tensor as the planner takes it: a DTensor as it is, any other as TensorParts."""
    if is_dtensor(tensor):
        return tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be saved: make it dense.")
    return TensorParts.whole(tensor)


def is_partial(parts: Parts) -> bool:
    """Return whether it is less than the whole tensor. A DTensor counts as less."""
    if not isinstance(parts, TensorParts):
        return True
    return [tuple(elements.shape) for _, elements in parts.slices] != [parts.shape]


def count_elements(parts: Parts) -> int:
    """Return how many elements of the tensor this rank holds."""
    assert hasattr(parts, "__create_chunk_list__")
    return sum(math.prod(chunk.sizes) for chunk in parts.__create_chunk_list__())


def allocate_target(
    part: OptimizerStatePart, name: str, entry: str, shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Parts]:
    """Return a tensor to fill with a saved entry, and what the planner takes for it.

    `shape` is the saved entry's whole shape. If the optimizer has a tensor that fits already, that
    one is returned, and filled in place.
    """
    param, like = part.param, part.like
    elementwise = tuple(shape) == tuple(param.shape) and (len(shape) > 0 or entry != "step")
    # As many elements as the parameter in another shape: surely another model's.
    if not elementwise and torch.Size(shape).numel() == param.numel() > 1:
        raise ValueError(
            f"the state {entry!r} of {name!r} has the shape {tuple(shape)} in the checkpoint, and "
            f"the parameter {tuple(param.shape)}."
        )
    now = part.entries.get(entry)
    if not elementwise:
        if _has_shape_and_type(now, torch.Size(shape), dtype):
            return now, to_parts(now)
        # torch's optimizers keep `step` on the CPU: reading it must not wait for the GPU.
        device = "cpu" if entry == "step" else param.device
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
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


def put_new(tensors: dict[str, Parts], key: str, tensor: Parts) -> None:
    """Add a tensor. Raise ValueError if there is one with that key."""
    if key in tensors:
        raise ValueError(
            f"two tensors of this checkpoint would be called {key!r}. Rename one of them."
        )
    tensors[key] = tensor


# -- plans -----------------------------------------------------------------------------------------


class SavePlanner(DefaultSavePlanner):
    """torch's planner, which also finds slices in TensorParts."""

    def __init__(self, tensors: Mapping[str, Parts]) -> None:
        # No flattening: our keys are flat already.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(tensors))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return find_slice(self.state_dict, index)


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner, which also finds slices in TensorParts."""

    def __init__(
        self, tensors: Mapping[str, Parts], stored: Mapping[str, _index.StoredTensor]
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Set here: torch's `set_up_planner` looks into the values, and expects tensors there.
        self.state_dict = self.original_state_dict = dict(tensors)
        self.metadata = to_torch_metadata(stored)
        self.is_coordinator = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return find_slice(self.state_dict, index)


def find_slice(tensors: Mapping[str, Parts], index: MetadataIndex) -> Tensor:
    """Return the slice of a tensor that this rank holds at an offset."""
    found = tensors[index.fqn]
    assert isinstance(found, TensorParts) or hasattr(found, "__get_tensor_shard__")
    elements = found.__get_tensor_shard__(index)
    # A DTensor's local tensor may be the result of a collective that is still under way.
    wait = getattr(elements, "wait", None)
    return wait() if wait is not None else elements


def plan_to_text(plan: SavePlan) -> str:
    """Return a rank's plan as JSON, to be sent to the others."""
    return json.dumps([_item_to_list(item) for item in plan.items], separators=(",", ":"))


def _item_to_list(item: WriteItem) -> list[object]:
    """Return an item of a plan as JSON, to be sent to the other ranks."""
    data = item.tensor_data
    assert data is not None and item.index.offset is not None
    dtype = str(data.properties.dtype).removeprefix("torch.")
    shape, sizes = list(data.size), list(data.chunk.sizes)
    return [item.index.fqn, dtype, shape, list(item.index.offset), sizes]


def plan_from_text(text: str) -> SavePlan:
    """Return a rank's plan from the text that it has sent: a list of `_item_to_list`."""
    items = [
        write_item(fqn, offsets, sizes, shape, getattr(torch, dtype))
        for fqn, dtype, shape, offsets, sizes in json.loads(text)
    ]
    return SavePlan(items)


def merge_plans(texts: Sequence[str]) -> tuple[list[SavePlan], Metadata]:
    """Return each rank's final plan, without duplicates, and the metadata of all tensors."""
    # Every rank computes the same from the same texts, so nothing has to be sent back.
    plans = [plan_from_text(text) for text in texts]
    _check_same_tensors(plans)
    return SavePlanner({}).create_global_plan(plans)


def _check_same_tensors(plans: Sequence[SavePlan]) -> None:
    """Raise ValueError if ranks have tensors of different shapes or types under one key."""
    seen: dict[str, tuple[int, tuple[tuple[int, ...], str]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            described = (tuple(data.size), str(data.properties.dtype))
            first, expected = seen.setdefault(item.index.fqn, (rank, described))
            if described != expected:
                raise ValueError(
                    f"ranks have different tensors for {item.index.fqn!r}: rank {first} "
                    f"{expected}, rank {rank} {described}."
                )


def to_torch_metadata(tensors: Mapping[str, _index.StoredTensor]) -> Metadata:
    """Return the index's tensors as torch's planner expects them; torch calls slices chunks."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(tensor.torch_dtype),
                torch.Size(tensor.shape),
                [
                    ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
                    for each in tensor.slices
                ],
            )
            for key, tensor in tensors.items()
        }
    )
