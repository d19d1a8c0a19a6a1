"""torch's planners, which decide which rank writes and reads which slice of which tensor.

A slice that several ranks hold alike is written by one of them. A rank that needs a slice reads it
from whichever stored slices overlap it. Ranks exchange their plans as JSON, because torch would
exchange pickles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from manyhands.checkpoint._parts import TensorParts, write_item

PartsByKey = Mapping[str, Any]  # each value is a TensorParts or a DTensor


class SavePlanner(DefaultSavePlanner):
    """torch's planner, which also finds slices in TensorParts."""

    def __init__(self, tensors: PartsByKey) -> None:
        # No flattening: our keys are flat already.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(tensors))

    def lookup_object(self, index: MetadataIndex) -> Any:
        return find_slice(self.state_dict, index)


class LoadPlanner(DefaultLoadPlanner):
    """torch's planner, which also finds slices in TensorParts."""

    def __init__(self, tensors: PartsByKey, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Set here: torch's `set_up_planner` looks into the values, and expects tensors there.
        self.state_dict = self.original_state_dict = dict(tensors)
        self.metadata = metadata
        self.is_coordinator = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return find_slice(self.state_dict, index)


def find_slice(tensors: PartsByKey, index: MetadataIndex) -> Tensor:
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


def _item_to_list(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None and item.index.offset is not None
    dtype = str(data.properties.dtype).removeprefix("torch.")
    shape, sizes = list(data.size), list(data.chunk.sizes)
    return [item.index.fqn, dtype, shape, list(item.index.offset), sizes]


def plan_from_text(text: str) -> SavePlan:
    items = [
        write_item(fqn, offsets, sizes, shape, getattr(torch, dtype))
        for fqn, dtype, shape, offsets, sizes in json.loads(text)
    ]
    return SavePlan(items)


def merge_plans(texts: Sequence[str]) -> tuple[list[SavePlan], Metadata]:
    """Return each rank's final plan, without duplicates, and the metadata of all tensors.

    Every rank computes the same from the same texts, so nothing has to be sent back.
    """
    plans = [plan_from_text(text) for text in texts]
    _check_same_tensors(plans)
    return SavePlanner({}).create_global_plan(plans)


def _check_same_tensors(plans: Sequence[SavePlan]) -> None:
    """Raise ValueError if ranks have tensors of different shapes or types under one key."""
    seen: dict[str, tuple[int, Any]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            described = (tuple(data.size), str(data.properties.dtype))
            first, expected = seen.setdefault(item.index.fqn, (rank, described))
            if described != expected:
                raise ValueError(
                    f"ranks have different tensors for {item.index.fqn!r}: rank {first} one of "
                    f"{expected[0]} {expected[1]}, rank {rank} one of {described[0]} "
                    f"{described[1]}. Build the same model and optimizer on every rank."
                )
