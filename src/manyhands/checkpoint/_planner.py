"""torch's planners, who decide which worker writes what and who reads which part of what.

A tensor that several workers hold alike is written by one of them; one that is cut is read by
whoever needs a part of it. Workers tell each other their plans as JSON.
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

from manyhands.checkpoint._parts import TensorParts, item

Parts = Mapping[str, Any]  # by key: Boxes, or a DTensor


class SavePlanner(DefaultSavePlanner):
    """torch's own, for tensors of which there are boxes."""

    def __init__(self, tensors: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(tensors))

    def lookup_object(self, index: MetadataIndex) -> Any:
        return part_of(self.state_dict, index)


class LoadPlanner(DefaultLoadPlanner):
    """torch's own, for tensors of which there are boxes."""

    def __init__(self, tensors: Parts, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict = self.original_state_dict = dict(tensors)
        self.metadata = metadata
        self.is_coordinator = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return part_of(self.state_dict, index)


def part_of(tensors: Parts, index: MetadataIndex) -> Tensor:
    """What a worker holds of a tensor from some offset on."""
    found = tensors[index.fqn]
    assert isinstance(found, TensorParts) or hasattr(found, "__get_tensor_shard__")
    part = found.__get_tensor_shard__(index)
    wait = getattr(part, "wait", None)  # of a DTensor's, if a collective for it is under way
    return wait() if wait is not None else part


def as_text(plan: SavePlan) -> str:
    """A worker's plan, to be told to the others."""
    return json.dumps([_told(each) for each in plan.items], separators=(",", ":"))


def _told(each: WriteItem) -> list[Any]:
    data = each.tensor_data
    assert data is not None and each.index.offset is not None
    dtype = str(data.properties.dtype).removeprefix("torch.")
    shape, sizes = list(data.size), list(data.chunk.sizes)
    return [each.index.fqn, dtype, shape, list(each.index.offset), sizes]


def from_text(text: str) -> SavePlan:
    items = [
        item(fqn, offsets, sizes, shape, getattr(torch, dtype))
        for fqn, dtype, shape, offsets, sizes in json.loads(text)
    ]
    return SavePlan(items)


def agreed(texts: Sequence[str]) -> tuple[list[SavePlan], Metadata]:
    """Every worker's part of the whole, none of it twice."""
    plans = [from_text(text) for text in texts]
    _check_alike(plans)
    return SavePlanner({}).create_global_plan(plans)


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """Workers must mean the same tensor by a name."""
    seen: dict[str, tuple[int, Any]] = {}
    for rank, plan in enumerate(plans):
        for each in plan.items:
            data = each.tensor_data
            assert data is not None
            mine = (tuple(data.size), str(data.properties.dtype))
            first, theirs = seen.setdefault(each.index.fqn, (rank, mine))
            if mine != theirs:
                raise ValueError(
                    f"workers have different tensors for {each.index.fqn!r}: rank {first} one of "
                    f"{theirs[0]} {theirs[1]}, rank {rank} one of {mine[0]} {mine[1]}. Build the "
                    "same model and optimizer on every worker."
                )
