"""Who has an optimizer state of its own: the replicas of a run.

Under data parallelism all ranks have one optimizer state, whole or in shards. In blocks each
replica (a rank, or the ranks of a machine) steps with its own, and with its own scaling rule, so
a checkpoint holds one for each. Loaded by another number of replicas, replica r goes on from
r modulo those that were saved: the first ones, and then from the beginning again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.checkpoint._ranks import Team
from manyhands.checkpoint._unwrap import Parts


@dataclass(frozen=True)
class Replica:
    """Of which replica this rank is; all of them together are the ranks that save or load."""

    number: int = 0
    leads: bool = True  # whether it says what all ranks of the replica know
    layouts: list[Any] = field(default_factory=list)  # by rank: which part of the blocks is there

    def within(self, key: str) -> str:
        """Where the replica's own tensors are; the first one's are where anybody's would be."""
        return key if self.number == 0 else f"{key}/replica.{self.number}"

    def part_of(self, told: Mapping[str, Any]) -> tuple[Mapping[str, Any], Replica]:
        """What was saved of the replica that this one goes on from, and that replica."""
        saved: list[Mapping[str, Any]] = [{}, *told.get("replicas", [])]
        number = self.number % len(saved)
        return {**told, **saved[number]}, Replica(number)


def replicas_of(optimizers: Sequence[Any], team: Team) -> list[Replica]:
    """For each optimizer, of which replica this rank is; to be called on every rank."""

    def places() -> list[Any]:
        return [_place(Parts.of(optimizer)) for optimizer in optimizers]

    mine = team.together(places)
    everyone = [json.loads(text) for text in team.gather(json.dumps(mine))]
    result = []
    for number, place in enumerate(mine):
        known = [places[number] for places in everyone if number < len(places)]
        numbers = [each[0] for each in known]
        result.append(
            Replica(
                number=sorted(set(numbers)).index(place[0]),
                leads=team.rank == numbers.index(place[0]),
                layouts=[each[1] for each in known],
            )
        )
    return result


def _place(parts: Parts) -> tuple[int, Any]:
    """The replica's number, and what this rank has of the blocks."""
    if parts.blocks is None:
        return 0, None
    sync = parts.blocks._sync
    workers = sync.members.workers
    return workers.rank, [workers.size, workers.rank, *sync.anchor.layout()]


def joined(everyone: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What all ranks tell of their optimizers, put together: one for each optimizer.

    The first replica's is the optimizer's, and what the others have of their own is in a list.
    """
    result = []
    for ranks in zip(*everyone, strict=True):
        replicas: dict[int, dict[str, Any]] = {}
        for told in ranks:
            number = told["replica"]
            mine = replicas.setdefault(number, {"state": {}})
            state = mine["state"]
            for name, entries in told["state"].items():
                known = state.setdefault(name, {})
                known.update({k: v for k, v in entries.items() if k not in known})
            mine.update({k: v for k, v in told.items() if k not in ("replica", "state")})
        first, *others = (replicas[number] for number in sorted(replicas))
        alike = ("class", "blocks")
        first["replicas"] = [{k: v for k, v in other.items() if k not in alike} for other in others]
        result.append(first)
    return result
