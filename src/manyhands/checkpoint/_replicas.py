"""The replicas of a run: each has an optimizer state of its own.

Under data parallelism all ranks have one optimizer state, whole or in shards: they are one replica.
In blocks each replica (a rank, or the ranks of a machine) steps with its own optimizer state and
scaling rule, so a checkpoint stores one for each. If N replicas were saved, replica r of a later
run continues from the saved replica r modulo N.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from manyhands._core.state_parts import OptimizerLayers
from manyhands.checkpoint._ranks import CheckpointRanks


@dataclass(frozen=True)
class Replica:
    """The replica that this rank belongs to, among all ranks that save or load together."""

    number: int = 0
    leads: bool = True  # whether this rank describes what all ranks of the replica have alike
    layouts: list[Any] = field(default_factory=list)  # by rank: how its outer state is laid out

    def key_prefix(self, key: str) -> str:
        """Return the prefix of this replica's own tensors.

        The first replica's are where those of a run without blocks are, so that such a run can load
        them, and the other way round.
        """
        return key if self.number == 0 else f"{key}/replica.{self.number}"

    def meta_to_load(self, meta: Mapping[str, Any]) -> tuple[Mapping[str, Any], Replica]:
        """Return what was saved of the replica that this one continues from, and that replica."""
        # The first replica is described by `meta` itself: nothing to override.
        saved: list[Mapping[str, Any]] = [{}, *meta.get("replicas", [])]
        number = self.number % len(saved)
        return {**meta, **saved[number]}, Replica(number)


def find_replicas(optimizers: Sequence[Any], ranks: CheckpointRanks) -> list[Replica]:
    """Return this rank's replica for each optimizer. Every rank must call this."""

    def locate_all() -> list[Any]:
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


def _locate_replica(optimizer: Any) -> tuple[int, Any]:
    """Return the replica's number, and the layout of this rank's outer state."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Save any "
            "other object that has a state_dict under a name of yours: mh.save(path, "
            "scaler=scaler)."
        )
    blocks = OptimizerLayers.of(optimizer).blocks
    return (0, None) if blocks is None else (blocks.replica, blocks.layout)


def merge_replicas(everyone: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge what all ranks say of their optimizers; return one description for each optimizer.

    The first replica's becomes the optimizer's. What the other replicas have of their own is in its
    list `replicas`.
    """
    result = []
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
        common = ("class", "blocks")
        first["replicas"] = [
            {k: v for k, v in other.items() if k not in common} for other in others
        ]
        result.append(first)
    return result
