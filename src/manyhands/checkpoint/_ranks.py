"""The ranks that save or load together, and how they agree that all goes well.

They have a process group of their own, on gloo. So a message of a checkpoint can never be taken for
a collective of the training: an asynchronous save sends messages from another thread.

There are two kinds of waiting. Until every rank has called the same function, ranks wait as long as
the training's group waits for anything, and then raise. From then on no rank is late by mistake:
the slowest disk has hours, and a worker that dies is noticed when its connections close.
"""

from __future__ import annotations

import ctypes
import json
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from manyhands._core.ranks import RankGroup

Result = TypeVar("Result")
DISK_TIMEOUT = timedelta(hours=2)  # for the slowest rank's disk
CALL_TIMEOUT = timedelta(minutes=30)  # for all ranks to call, if the group has no timeout
FIRST_ROUND = 512  # bytes of a text that travel in the first all_gather
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
