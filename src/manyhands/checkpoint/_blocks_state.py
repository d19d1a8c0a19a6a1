"""The outer state of blocks under the parameters' names: saved from one layout, loaded into any.

Anchor and memories are laid out like the parameters: a rank has all of them, those of its shards,
or its slices within an inner group. They are saved as slices of whole tensors, so that any number
of replicas, under any sharding, can load its own slices. All replicas have the same outer state,
and each slice is written once.

    optimizer.0/blocks.anchor/NAME
    optimizer.0/blocks.memory.0/NAME
    optimizer.0/replica.1/blocks.residual/NAME    a codec's rounding error; each replica has its own

A residual belongs to ranks that round and average together, and means nothing to others. It is
loaded if every rank has the slices that it had, and begins at zero otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from manyhands.blocks import _state
from manyhands.blocks._anchor import OuterState
from manyhands.blocks._optimizer import Blocks
from manyhands.checkpoint import _index
from manyhands.checkpoint._parts import TensorParts
from manyhands.checkpoint._replicas import Replica
from manyhands.checkpoint._values import GetTensor, decode, encode


def _tensors_by_key(each: OuterState, name: str, key: str, replica: Replica) -> dict[str, Tensor]:
    """Return the outer state of one parameter by key; `key` is the optimizer's prefix."""
    found = {f"{key}/blocks.anchor/{name}": each.anchor}
    for number, memory in enumerate(each.memories):
        found[f"{key}/blocks.memory.{number}/{name}"] = memory
    if each.residual is not None:
        found[f"{replica.key_prefix(key)}/blocks.residual/{name}"] = each.residual
    return found


def collect_blocks(
    blocks: Blocks, names: Mapping[int, str], key: str, replica: Replica
) -> tuple[Any, dict[str, Any]]:
    """Return what all replicas have alike, as JSON, and this rank's slices of tensors by key."""
    sync = blocks._sync
    counters = _state.save_counters(sync, blocks._options)
    meta = {**counters, "memories": sync.anchor.outer.memories, "layouts": replica.layouts}
    tensors = {
        path: TensorParts.from_flat(values, each.param, each.start)
        for each in sync.anchor.outer_state()
        for path, values in _tensors_by_key(each, names[id(each.param)], key, replica).items()
    }
    # `put` stores nothing: the counters contain no tensors.
    return encode(meta, f"{key}/blocks", lambda path, _: path), tensors


class BlocksLoader:
    """Loads a saved outer state into blocks. Creating a loader checks that it fits.

    `targets` are views of anchor and memories themselves. Nothing else writes to these between two
    steps, so they need no second copy in memory.
    """

    def __init__(
        self,
        blocks: Blocks,
        meta: Any,
        saved_names: Mapping[int, str],
        tensors: Mapping[str, _index.StoredTensor],
        get: GetTensor,
        key: str,
        replica: Replica,
        saved_replica: Replica,
    ) -> None:
        self.targets: dict[str, Any] = {}
        self._blocks = blocks
        # Without a saved anchor: frozen in the saved run, or all of them if one worker saved it.
        self._unsaved: list[OuterState] = []
        self._meta = _state.check_saved(decode(meta, get), blocks._options, {})
        if self._meta is None:  # saved without blocks
            return
        anchor = blocks._sync.anchor
        memories = self._meta["memories"]
        if memories != anchor.outer.memories:
            raise ValueError(
                f"the checkpoint has {memories} memories of its outer step, and the one here has "
                f"{anchor.outer.memories}. Continue with an outer step of the same kind."
            )
        self._load_residuals = self._meta["layouts"] == replica.layouts
        for each in anchor.outer_state():
            name = saved_names[id(each.param)]
            found = _tensors_by_key(each, name, key, saved_replica)
            if f"{key}/blocks.anchor/{name}" not in tensors:
                self._unsaved.append(each)
                continue
            for path, values in found.items():
                if values is each.residual and not self._load_residuals:
                    continue
                parts = TensorParts.from_flat(values, each.param, each.start)
                self._check_shape(path, parts, tensors)
                self.targets[path] = parts

    def _check_shape(
        self, path: str, parts: TensorParts, tensors: Mapping[str, _index.StoredTensor]
    ) -> None:
        stored = tensors.get(path)
        if stored is None or stored.shape != parts.shape:
            found = "missing" if stored is None else f"of the shape {stored.shape}"
            raise ValueError(
                f"{path!r} is {found} in the checkpoint, and of the shape {parts.shape} here. Is "
                "it another model's?"
            )

    def finish(self) -> None:
        """Continue from the filled targets. The parameters must be filled as well by now."""
        sync = self._blocks._sync
        if self._meta is None:
            # The anchor begins at the parameters, without outer momentum.
            self._blocks.load_common_state(None)
            return
        if not self._load_residuals:
            sync.anchor.reset_residuals()
        _state.load_counters(self._meta, sync, self._unsaved)
