"""Blocks in a checkpoint: replicas, and the outer state.

Under data parallelism all ranks have one optimizer state, whole or in shards: they are one replica.
In blocks each replica (a rank, or the ranks of a machine) steps with its own optimizer state and
scaling rule, so a checkpoint stores one for each. If N replicas were saved, replica r of a later
run continues from the saved replica r modulo N.

All replicas have the same outer state: anchor and memories. They are laid out like the parameters:
a rank has all of them, those of its shards, or its slices within an inner group. They are saved as
slices of whole tensors, so that any number of replicas, under any sharding, can load its own
slices. Each slice is written once.

    optimizer.0/blocks.anchor/NAME
    optimizer.0/blocks.memory.0/NAME
    optimizer.0/replica.1/blocks.residual/NAME    a codec's rounding error; each replica has its own

A residual belongs to ranks that round and average together, and means nothing to others. It is
loaded if every rank has the slices that it had, and begins at zero otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.state_parts import BlocksParts, OptimizerLayers, StatePart
from manyhands.checkpoint import _index
from manyhands.checkpoint._ranks import CheckpointRanks
from manyhands.checkpoint._slices import Parts, TensorParts
from manyhands.checkpoint._values import GetTensor, Json, decode, encode

Layout = Sequence[object] | None  # how a rank's outer state is laid out; None without blocks


@dataclass(frozen=True)
class Replica:
    """The replica that this rank belongs to, among all ranks that save or load together."""

    number: int = 0
    leads: bool = True  # whether this rank describes what all ranks of the replica have alike
    layouts: list[Layout] = field(default_factory=list)  # by rank: how its outer state is laid out

    def key_prefix(self, key: str) -> str:
        """Return the prefix of this replica's own tensors.

        The first replica's are where those of a run without blocks are, so that such a run can load
        them, and the other way round.
        """
        return key if self.number == 0 else f"{key}/replica.{self.number}"

    def meta_to_load(self, meta: _index.OptimizerMeta) -> tuple[_index.OptimizerMeta, Replica]:
        """Return what was saved of the replica that this one continues from, and that replica."""
        others = meta.get("replicas", [])
        number = self.number % (1 + len(others))
        # The first replica is described by `meta` itself: nothing to override.
        return (meta if number == 0 else {**meta, **others[number - 1]}), Replica(number)


def find_replicas(optimizers: Sequence[object], ranks: CheckpointRanks) -> list[Replica]:
    """Return this rank's replica for each optimizer. Every rank must call this."""

    def locate_all() -> list[tuple[int, Layout]]:
        return [_locate_replica(optimizer) for optimizer in optimizers]

    # `run_on_all`, because an optimizer of a wrong type must be an error on every rank.
    own = ranks.run_on_all(locate_all)
    everyone = [json.loads(text) for text in ranks.all_gather_text(json.dumps(own))]
    result = []
    for number, place in enumerate(own):
        # Ranks may have passed fewer optimizers; `begin_save` raises for that later.
        known = [places[number] for places in everyone if number < len(places)]
        numbers = [each[0] for each in known]
        result.append(
            Replica(
                # Numbered by rank within the blocks' group; a gap would be a missing replica.
                number=sorted(set(numbers)).index(place[0]),
                leads=ranks.rank == numbers.index(place[0]),
                layouts=[each[1] for each in known],
            )
        )
    return result


def _locate_replica(optimizer: object) -> tuple[int, Layout]:
    """Return the replica's number, and the layout of this rank's outer state."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Save any "
            "other object that has a state_dict under a name of yours: mh.save(path, "
            "scaler=scaler)."
        )
    blocks = OptimizerLayers.of(optimizer).blocks
    return (0, None) if blocks is None else (blocks.replica, blocks.layout)


def merge_replicas(everyone: Sequence[Sequence[Mapping[str, Any]]]) -> list[_index.OptimizerMeta]:
    """Merge what all ranks say of their optimizers; return one description for each optimizer.

    The first replica's becomes the optimizer's. What the other replicas have of their own is in its
    list `replicas`.
    """
    result: list[_index.OptimizerMeta] = []
    for by_rank in zip(*everyone, strict=True):
        replicas: dict[int, dict[str, Any]] = {}
        for meta in by_rank:
            merged = replicas.setdefault(meta["replica"], {"state": {}})
            state = merged["state"]
            # Ranks of one replica hold shards: several may describe one entry, and mean the same.
            for name, entries in meta["state"].items():
                known = state.setdefault(name, {})
                known.update({k: v for k, v in entries.items() if k not in known})
            # Only the leading rank has more than `replica` and `state`.
            merged.update({k: v for k, v in meta.items() if k not in ("replica", "state")})
        first, *others = (replicas[number] for number in sorted(replicas))
        result.append(
            {
                **_own_state(first),
                "class": first["class"],
                "blocks": first["blocks"],
                "replicas": [_own_state(other) for other in others],
            }
        )
    return result


def _own_state(merged: Mapping[str, Any]) -> _index.ReplicaMeta:
    return {
        "groups": merged["groups"],
        "state": merged["state"],
        "other": merged["other"],
        "rule": merged["rule"],
    }


# -- the outer state -------------------------------------------------------------------------------

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
