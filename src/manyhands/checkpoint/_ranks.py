"""The ranks that save or load together: how they agree that all goes well, and their replicas.

They have a process group of their own, on gloo. So a message of a checkpoint can never be taken for
a collective of the training: an asynchronous save sends messages from another thread.

There are two kinds of waiting. Until every rank has called the same function, ranks wait as long as
the training's group waits for anything, and then raise. From then on no rank is late by mistake:
the slowest disk has hours, and a worker that dies is noticed when its connections close.

**Replicas.** Under data parallelism all ranks have one optimizer state, whole or in shards: they
are one replica. In blocks each replica (a rank, or the ranks of a machine) steps with its own
optimizer state and scaling rule, so a checkpoint stores one for each. If N replicas were saved,
replica r of a later run continues from the saved replica r modulo N.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from manyhands._core.agreement import raise_if_different, run_on_all
from manyhands._core.ranks import RankGroup
from manyhands._core.state_parts import OptimizerLayers
from manyhands.checkpoint import _index

DISK_TIMEOUT = timedelta(hours=2)  # for the slowest rank's disk
CALL_TIMEOUT = timedelta(minutes=30)  # for all ranks to call, if the group has no timeout
Layout = Sequence[object] | None  # how a rank's outer state is laid out; None without blocks

# Making a group costs a rendezvous, so a run keeps one. Weak: it ends with its last user.
_groups: weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = (
    weakref.WeakValueDictionary()
)


def join_ranks(process_group: dist.ProcessGroup | None, caller: str) -> RankGroup:
    """Return the ranks of a process group (by default all) once each has called `caller`."""
    workers = RankGroup.of(process_group)
    if workers.size == 1:
        return workers
    timeout = workers._timeout or CALL_TIMEOUT
    ranks = tuple(workers.ranks)
    try:
        group = _groups.get(ranks)
        if group is None:
            # Local synchronization: ranks outside of this group need not call.
            group = dist.new_group(list(ranks), timeout, "gloo", use_local_synchronization=True)
            _groups[ranks] = group
        joined = RankGroup(workers.size, workers.rank, group, patience=DISK_TIMEOUT)
        called = joined.all_gather_text(caller, timeout)
    except RuntimeError as error:
        # After a timeout, messages of this attempt may still arrive: use a new group next time.
        _groups.pop(ranks, None)
        raise RuntimeError(
            f"rank {workers.rank} has called {caller}, and not every rank has within "
            f"{timeout.total_seconds():g} s. Call it on every rank. ({error})"
        ) from error
    raise_if_different([{"calls": each} for each in called], "Call the same on all of them.")
    return joined


# -- replicas -------------------------------------------------------------------------------------


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


def find_replicas(optimizers: Sequence[object], ranks: RankGroup) -> list[Replica]:
    """Return this rank's replica for each optimizer. Every rank must call this."""

    def locate_all() -> list[tuple[int, Layout]]:
        return [_locate_replica(optimizer) for optimizer in optimizers]

    # `run_on_all`, because an optimizer of a wrong type must be an error on every rank.
    own = run_on_all(ranks, locate_all)
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
    """Return which replica this rank holds a part of, and which elements of its outer state."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Give "
            "other objects a name of yours: mh.save(path, scaler=scaler)."
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
    """Return what a replica has of its own in a merged description."""
    return {
        "groups": merged["groups"],
        "state": merged["state"],
        "other": merged["other"],
        "rule": merged["rule"],
    }
