"""The outer state of blocks under the parameters' names: out of one layout, and into any other.

Anchor and memories are laid out like the parameters: each rank has all of them, its shards', or
its share in an inner group. They are saved as the parts of whole tensors that they are, so that
any number of replicas and any sharding takes its own parts out. All replicas have the same: a part
is written once.

    optimizer.0/blocks.anchor/NAME
    optimizer.0/blocks.memory.0/NAME
    optimizer.0/replica.1/blocks.residual/NAME    what a codec has left: each replica has its own

A residual is of those who round and average together, and means nothing to others: it is taken
up where every rank has the parts that it had, and begins at zero elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from manyhands.blocks import _state
from manyhands.blocks._anchor import OuterState
from manyhands.blocks._optimizer import Blocks
from manyhands.checkpoint import _index
from manyhands.checkpoint._parts import TensorParts
from manyhands.checkpoint._replicas import Replica
from manyhands.checkpoint._values import decoded, encoded


def _parts(each: OuterState, name: str, key: str, replica: Replica) -> dict[str, Tensor]:
    """What there is of a parameter by key."""
    found = {f"{key}/blocks.anchor/{name}": each.anchor}
    for number, memory in enumerate(each.memories):
        found[f"{key}/blocks.memory.{number}/{name}"] = memory
    if each.residual is not None:
        found[f"{replica.within(key)}/blocks.residual/{name}"] = each.residual
    return found


def saved_blocks(
    blocks: Blocks, names: Mapping[int, str], key: str, replica: Replica
) -> tuple[Any, dict[str, Any]]:
    """What all replicas have alike, as JSON, and this rank's parts of tensors by key."""
    sync = blocks._sync
    counters = _state.save_counters(sync, blocks._options)
    told = {**counters, "memories": sync.anchor.outer.memories, "layouts": replica.layouts}
    tensors = {
        path: TensorParts.cut(values, each.param, each.start)
        for each in sync.anchor.outer_state()
        for path, values in _parts(each, names[id(each.param)], key, replica).items()
    }
    return encoded(told, f"{key}/blocks", lambda path, _: path), tensors


class BlocksLoading:
    """A saved outer state on its way into blocks; making one checks that it fits.

    The targets are views of anchor and memories themselves, which nothing else writes to between
    two steps.
    """

    def __init__(
        self,
        blocks: Blocks,
        told: Any,
        saved_names: Mapping[int, str],
        tensors: Mapping[str, _index.Tensor],
        get: Callable[[str], Tensor],
        key: str,
        replica: Replica,
        saved_replica: Replica,
    ) -> None:
        self.targets: dict[str, Any] = {}
        self._blocks = blocks
        self._unsaved: list[OuterState] = []
        self._told = _state.check_saved(decoded(told, get), blocks._options, {})
        if self._told is None:
            return
        anchor = blocks._sync.anchor
        memories = self._told["memories"]
        if memories != anchor.outer.memories:
            raise ValueError(
                f"the checkpoint has {memories} memories of its outer step, and the one here has "
                f"{anchor.outer.memories}. Continue with an outer step of the same kind."
            )
        self._residuals = self._told["layouts"] == replica.layouts
        for each in anchor.outer_state():
            name = saved_names[id(each.param)]
            found = _parts(each, name, key, saved_replica)
            if f"{key}/blocks.anchor/{name}" not in tensors:
                self._unsaved.append(each)
                continue
            for path, values in found.items():
                if values is each.residual and not self._residuals:
                    continue
                part = TensorParts.cut(values, each.param, each.start)
                self._check(path, part, tensors)
                self.targets[path] = part

    def _check(self, path: str, part: TensorParts, tensors: Mapping[str, _index.Tensor]) -> None:
        there = tensors.get(path)
        if there is None or there.shape != part.shape:
            found = "not there" if there is None else f"of the shape {there.shape}"
            raise ValueError(
                f"{path!r} is {found} in the checkpoint, and {part.shape} here. Is it another "
                "model's?"
            )

    def finish(self) -> None:
        """The targets are filled, and so are the parameters."""
        sync = self._blocks._sync
        if self._told is None:
            self._blocks.load_common_state(None)
            return
        if not self._residuals:
            sync.anchor.reset_residuals()
        _state.load_counters(self._told, sync, self._unsaved)
