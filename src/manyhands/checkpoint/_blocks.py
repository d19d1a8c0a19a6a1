"""Blocks in a checkpoint: the outer state, which all replicas have alike.

It consists of the anchor and the memories, which are laid out like the parameters: a rank has all
of them, those of its shards, or its slices within an inner group. They are saved as slices of whole
tensors, so that any number of replicas, under any sharding, can load its own slices. Each slice is
written once.

    optimizer.0/blocks.anchor/NAME
    optimizer.0/blocks.memory.0/NAME
    optimizer.0/replica.1/blocks.residual/NAME    a codec's rounding error; each replica has its own

A residual belongs to ranks that round and average together, and means nothing to others. It is
loaded if every rank has the slices that it had, and begins at zero otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from manyhands._core.state_parts import BlocksParts, StatePart
from manyhands.checkpoint import _index
from manyhands.checkpoint._ranks import Replica
from manyhands.checkpoint._slices import Parts, TensorParts
from manyhands.checkpoint._values import GetTensor, Json, decode, encode

OWN = "residual"  # the entry that each replica has of its own


def _tensors_by_key(part: StatePart, name: str, key: str, replica: Replica) -> dict[str, Tensor]:
    """Return the outer state of one parameter by key; `key` is the optimizer's prefix."""
    return {
        f"{replica.key_prefix(key) if entry == OWN else key}/blocks.{entry}/{name}": values
        for entry, values in part.entries.items()
    }


def collect_blocks(
    blocks: BlocksParts, names: Mapping[int, str], key: str, replica: Replica
) -> tuple[Json, dict[str, Parts]]:
    """Return what all replicas have alike, as JSON, and this rank's slices of tensors by key."""
    meta = {**blocks.save_counters(), "memories": blocks.memories, "layouts": replica.layouts}
    tensors: dict[str, Parts] = {
        path: TensorParts.from_flat(values, part.param, part.start or 0)
        for part in blocks.outer_parts()
        for path, values in _tensors_by_key(part, names[id(part.param)], key, replica).items()
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
        blocks: BlocksParts,
        meta: Json,
        saved_names: Mapping[int, str],
        tensors: Mapping[str, _index.StoredTensor],
        get: GetTensor,
        key: str,
        replica: Replica,
        saved_replica: Replica,
    ) -> None:
        self.targets: dict[str, Parts] = {}
        self._blocks = blocks
        # Without a saved anchor: frozen in the saved run, or all of them if one worker saved it.
        self._unsaved: list[Tensor] = []
        self._meta = blocks.check_counters(decode(meta, get))
        if self._meta is None:  # saved without blocks
            return
        memories = self._meta["memories"]
        if memories != blocks.memories:
            raise ValueError(
                f"the checkpoint has {memories} memories of its outer step, and the one here has "
                f"{blocks.memories}. Continue with an outer step of the same kind."
            )
        self._load_residuals = self._meta["layouts"] == replica.layouts
        for part in blocks.outer_parts():
            name = saved_names[id(part.param)]
            if f"{key}/blocks.anchor/{name}" not in tensors:
                self._unsaved.append(part.param)
                continue
            residual = part.entries.get(OWN)
            for path, values in _tensors_by_key(part, name, key, saved_replica).items():
                if values is residual and not self._load_residuals:
                    continue
                parts = TensorParts.from_flat(values, part.param, part.start or 0)
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
        if self._meta is None:
            # The anchor begins at the parameters, without outer momentum.
            self._blocks.begin()
        else:
            residuals = self._load_residuals
            self._blocks.load_counters(self._meta, self._unsaved, residuals=residuals)
