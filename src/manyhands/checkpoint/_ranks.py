"""The workers that save or load together, and how they agree that all goes well.

They have a process group of their own, on gloo, so that what is told here can never meet a
collective of the training's: an asynchronous save tells it from another thread.

Two kinds of waiting. That all call the same function is waited for as long as the training's group
waits for anything, and then said. Once all have come, nobody is late by mistake: the slowest disk
has hours, and a worker that dies is noticed by its connections.
"""

from __future__ import annotations

import ctypes
import json
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from manyhands._core.ranks import RankGroup

Made = TypeVar("Made")
PATIENCE = timedelta(hours=2)  # for the slowest worker's disk
SHORT = timedelta(minutes=30)  # for all to come, where the group does not say: torch's default
FIRST = 512  # bytes of a text that go in the first round
KINDS = (FileNotFoundError, TypeError, ValueError, OSError, RuntimeError)

_groups: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Team:
    """Some workers, and this one's place among them."""

    size: int = 1
    rank: int = 0
    group: Any = None

    @classmethod
    def of(cls, process_group: Any, what: str) -> Team:
        """Those of a process group, by default all, once each of them has called `what`."""
        workers = RankGroup.of(process_group)
        if workers.size == 1:
            return cls()
        limit = workers._timeout or SHORT
        ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        try:
            group = _groups.get(ranks)
            if group is None:
                group = dist.new_group(
                    list(ranks), limit, backend="gloo", use_local_synchronization=True
                )
                _groups[ranks] = group
            team = cls(workers.size, workers.rank, group)
            called = team.gather(what, limit)
        except RuntimeError as error:
            _groups.pop(ranks, None)
            raise RuntimeError(
                f"rank {workers.rank} has called {what}, and not every one of the {workers.size} "
                f"workers has within {limit.total_seconds():g} s, the process group's timeout, or "
                f"one has ended. Call it on every worker. ({error})"
            ) from error
        if len(set(called)) > 1:
            told = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(called[:8]))
            raise RuntimeError(
                f"workers call different functions at the same time: {told}. Call each of them on "
                "every worker, in the same order."
            )
        return team

    def gather(self, text: str, limit: timedelta = PATIENCE) -> list[str]:
        """Every worker's text, in rank order."""
        if self.size == 1:
            return [text]
        sent = zlib.compress(text.encode(), 1)
        # The length, and the text if it is short; else all of it in a second round.
        rows = self._gathered(len(sent).to_bytes(8, "little") + sent, FIRST, limit)
        sizes = [int.from_bytes(row[:8], "little") for row in rows]
        rest = max(sizes) + 8 - FIRST
        if rest > 0:
            more = self._gathered(sent[FIRST - 8 :], rest, limit)
            rows = [row + other for row, other in zip(rows, more, strict=True)]
        return [
            zlib.decompress(row[8 : 8 + size]).decode()
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _gathered(self, sent: bytes, size: int, limit: timedelta) -> list[bytes]:
        """Every worker's first `size` bytes, filled up with zeros."""
        own = torch.frombuffer(bytearray(sent[:size].ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = limit
        self.group.allgather(
            [rows], [own], options
        ).wait()  # works beside destroy_process_group, too
        return [ctypes.string_at(row.data_ptr(), size) for row in rows]

    def tell(self, text: str) -> str:
        """Rank 0's text, on every worker."""
        return self.gather(text if self.rank == 0 else "")[0]

    def together(self, do: Callable[[], Made]) -> Made:
        """Do something on every worker; where one cannot, all raise."""
        made, problem = None, None
        try:
            made = do()
        except Exception as error:
            problem = error
        self.settle(problem)
        return made  # type: ignore[return-value]

    def settle(self, problem: Exception | None) -> None:
        """Raise on every worker if any has a problem: its own, or what the others tell."""
        told = "" if problem is None else json.dumps([_kind(problem), str(problem)])
        everyone = self.gather(told)
        if problem is not None:
            raise problem
        failed = [(rank, *json.loads(text)) for rank, text in enumerate(everyone) if text]
        if failed:
            first, kind, text = failed[0]
            ranks = ", ".join(str(rank) for rank, _, _ in failed[:8])
            error = next((k for k in KINDS if k.__name__ == kind), RuntimeError)
            raise error(f"rank {ranks}: {text}" if len(failed) > 1 else f"rank {first}: {text}")


def _kind(problem: Exception) -> str:
    return next((kind.__name__ for kind in KINDS if isinstance(problem, kind)), "RuntimeError")
