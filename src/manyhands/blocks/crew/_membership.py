"""Who meets: the workers of a process group, which is fixed, or a crew, whose members come and go.

A meeting may run in a thread of its own (an *errand*), so that training goes on meanwhile and so
that a worker that is gone can be noticed while others wait for its messages. Errands of a group
follow each other: their messages must not mix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import Any, Protocol

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import Outcome
from manyhands.blocks.crew._terms import Terms
from manyhands.errors import RanksDisagree

PERSISTENT = 5  # failures without anybody's coming or going: it is not for want of a worker

Meeting = Callable[[RankGroup], Outcome]


class BackgroundSync(threading.Thread):
    """A meeting on its way."""

    def __init__(self, meeting: Meeting, workers: RankGroup, before: BackgroundSync | None) -> None:
        super().__init__(name="manyhands meeting", daemon=True)
        self._meeting, self._workers, self._before = meeting, workers, before
        self._done = threading.Event()
        self.outcome: Outcome | None = None
        self.error: BaseException | None = None

    @classmethod
    def come_back(cls, outcome: Outcome) -> BackgroundSync:
        """One that is over, with this outcome."""
        errand = cls(lambda _: outcome, RankGroup(), None)
        errand.run()
        return errand

    def run(self) -> None:
        before, self._before = self._before, None
        try:
            if before is not None:
                before.finished()
                if before.error is not None:
                    raise before.error
            self.outcome = self._meeting(self._workers)
        except BaseException as error:
            clear_frames(error.__traceback__)  # which hold the workers' group
            self.error = error
        finally:
            del self._meeting, self._workers
            self._done.set()

    def finished(self, seconds: float | None = None) -> bool:
        """Wait (up to so many seconds) for its end; whether it is over."""
        return self._done.wait(seconds)


class Team(Protocol):
    """What the synchronisation needs of those who meet."""

    workers: RankGroup
    inner: RankGroup  # the processes that are one of them, as far as the team knows
    elastic: bool

    @property
    def numbers(self) -> Sequence[int]:
        """By which users know the workers, in rank order."""

    @property
    def regroup_due(self) -> bool:
        """Whether the workers have to find together again before they go on."""

    def settle(self, errand: BackgroundSync, sync_round: bool = True) -> Outcome | None:
        """Wait for a meeting, and agree that it has taken place; None: it has not, on anybody.

        `sync_round` is whether it moves the common point, and does not only bring joiners there.
        """

    def close(self, steps: int) -> bool:
        """Whether all others are done after as many steps, so that there is a last meeting."""

    def regroup(self, version: int) -> None:
        """Find together again. Afterwards the workers may be others."""


class FixedMembers:
    """The workers of a process group."""

    elastic = False
    regroup_due = False
    inner = RankGroup()

    def __init__(self, workers: RankGroup) -> None:
        self.workers = workers

    @property
    def numbers(self) -> Sequence[int]:
        return range(self.workers.size)

    def settle(self, errand: BackgroundSync, sync_round: bool = True) -> Outcome | None:
        errand.finished()
        if errand.error is not None:
            raise errand.error
        return errand.outcome

    def close(self, steps: int) -> bool:
        return True

    def regroup(self, version: int) -> None:
        raise AssertionError("a process group is fixed")


class ElasticMembers:
    """The members of a crew."""

    elastic = True

    def __init__(self, crew: Any) -> None:
        self.crew = crew
        self.inner: RankGroup = crew.inner
        self.workers = RankGroup()
        self._failures = 0  # meetings undone one after the other among the same members

    @property
    def numbers(self) -> Sequence[int]:
        return self.crew.members

    @property
    def regroup_due(self) -> bool:
        return self.crew.regroup_due

    def settle(self, errand: BackgroundSync, sync_round: bool = True) -> Outcome | None:
        try:
            self.crew.wait(errand.finished)
        except RuntimeError:  # somebody is lost: WorkerLost, or a lost store, which settle repeats
            self.crew.abort()
        if isinstance(errand.error, RanksDisagree) and self.workers.rank in errand.error.odd:
            self.crew.drop_out()  # alone: the others meet again without us
            raise errand.error
        arrived = errand.finished(0) and errand.error is None
        kept = self.crew.settle(arrived, sync_round)
        self._failures = 0 if kept else self._failures + 1
        if errand.error is not None and self._is_ours(errand.error):
            raise errand.error
        return errand.outcome if kept else None

    def _is_ours(self, error: BaseException) -> bool:
        """Whether a failure is this worker's own, and would only repeat itself."""
        others = isinstance(error, RuntimeError | RanksDisagree) and self.crew.size > 1
        return not others or self._failures >= PERSISTENT

    def close(self, steps: int) -> bool:
        return bool(self.crew.close(steps))

    def join(self, version: int, terms: Terms) -> None:
        self.crew.join(version, terms)
        self._take_workers()

    def regroup(self, version: int) -> None:
        before = self.crew.members
        self.crew.abort()
        self.crew.regroup(version)
        if self.crew.members != before:
            self._failures = 0
        self._take_workers()

    def leave(self) -> None:
        self.crew.leave()
        self.workers = RankGroup()

    def _take_workers(self) -> None:
        crew = self.crew
        self.workers = RankGroup(crew.size, crew.rank, crew.group, own_group=True)
