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

import ctypes
import json
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.optim import Optimizer

from manyhands._core.ranks import RankGroup
from manyhands._core.state_parts import OptimizerLayers
from manyhands.checkpoint import _index

Result = TypeVar("Result")
DISK_TIMEOUT = timedelta(hours=2)  # for the slowest rank's disk
CALL_TIMEOUT = timedelta(minutes=30)  # for all ranks to call, if the group has no timeout
FIRST_ROUND = 512  # bytes of a text that travel in the first all_gather
Layout = Sequence[object] | None  # how a rank's outer state is laid out; None without blocks
# An error of another rank is raised as the first of these that it was.
ERROR_TYPES = (FileNotFoundError, TypeError, ValueError, OSError, RuntimeError)

# Making a group costs a rendezvous, so a run keeps one. Weak: it ends with its last user.
_groups: weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup] = (
    weakref.WeakValueDictionary()
)


@dataclass(frozen=True)
class CheckpointRanks:
    """The ranks that save or load together, and this rank's number among them."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None  # torch's own backend object, None for a single rank

    @classmethod
    def join(cls, process_group: dist.ProcessGroup | None, caller: str) -> CheckpointRanks:
        """Return the ranks of a process group (by default all) once each has called `caller`."""
        workers = RankGroup.of(process_group)
        if workers.size == 1:
            return cls()
        timeout = workers._timeout or CALL_TIMEOUT
        ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        try:
            group = _groups.get(ranks)
            if group is None:
                # Local synchronization: ranks outside of this group need not call.
                group = dist.new_group(
                    list(ranks), timeout, backend="gloo", use_local_synchronization=True
                )
                _groups[ranks] = group
            joined = cls(workers.size, workers.rank, group)
            called = joined.all_gather_text(caller, timeout)
        except RuntimeError as error:
            # After a timeout, messages of this attempt may still arrive: use a new group next time.
            _groups.pop(ranks, None)
            raise RuntimeError(
                f"rank {workers.rank} has called {caller}, and not every one of the {workers.size} "
                f"ranks has within {timeout.total_seconds():g} s, the process group's timeout, or "
                f"one has ended. Call it on every rank. ({error})"
            ) from error
        if len(set(called)) > 1:
            calls = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(called[:8]))
            raise RuntimeError(
                f"ranks call different functions at the same time: {calls}. Call each of them on "
                "every rank, in the same order."
            )
        return joined

    def all_gather_text(self, text: str, timeout: timedelta = DISK_TIMEOUT) -> list[str]:
        """Return every rank's text, in rank order."""
        if self.size == 1:
            return [text]
        sent = zlib.compress(text.encode(), 1)
        # All-gathered rows have one length. The first round carries each text's length, and the
        # text if it is short; a second round follows only if some text is longer.
        rows = self._all_gather_bytes(len(sent).to_bytes(8, "little") + sent, FIRST_ROUND, timeout)
        sizes = [int.from_bytes(row[:8], "little") for row in rows]
        rest = max(sizes) + 8 - FIRST_ROUND
        if rest > 0:
            more = self._all_gather_bytes(sent[FIRST_ROUND - 8 :], rest, timeout)
            rows = [row + other for row, other in zip(rows, more, strict=True)]
        return [
            zlib.decompress(row[8 : 8 + size]).decode()
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _all_gather_bytes(self, sent: bytes, size: int, timeout: timedelta) -> list[bytes]:
        """Return every rank's first `size` bytes, padded with zeros."""
        own = torch.frombuffer(bytearray(sent[:size].ljust(size, b"\0")), dtype=torch.uint8)
        assert self.group is not None
        rows = [torch.empty_like(own) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = timeout
        # The group's method, not `dist.all_gather`: it takes a timeout for this one call, and still
        # works after `destroy_process_group`, when an asynchronous save may not have ended.
        self.group.allgather([rows], [own], options).wait()
        return [ctypes.string_at(row.data_ptr(), size) for row in rows]

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        return self.all_gather_text(text if self.rank == 0 else "")[0]

    def run_on_all(self, action: Callable[[], Result]) -> Result:
        """Run something on every rank. If it raises on one rank, raise on all."""
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = error
        self.raise_together(problem)
        return result  # type: ignore[return-value]

    def raise_together(self, problem: Exception | None) -> None:
        """Raise on every rank if any rank has a problem: its own, or the first one of the others'.

        All ranks must call this at the same point; it is one all_gather.
        """
        text = "" if problem is None else json.dumps([_error_type(problem), str(problem)])
        everyone = self.all_gather_text(text)
        if problem is not None:
            raise problem
        failed = [(rank, *json.loads(text)) for rank, text in enumerate(everyone) if text]
        if failed:
            first, name, message = failed[0]
            ranks = ", ".join(str(rank) for rank, _, _ in failed[:8]) if failed[1:] else first
            error = next((e for e in ERROR_TYPES if e.__name__ == name), RuntimeError)
            raise error(f"rank {ranks}: {message}")


def _error_type(problem: Exception) -> str:
    types = (each.__name__ for each in ERROR_TYPES if isinstance(problem, each))
    return next(types, "RuntimeError")


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
