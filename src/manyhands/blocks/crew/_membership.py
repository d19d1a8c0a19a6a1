"""Membership: fixed (a process group) or elastic (a crew, where workers come and go).

A sync round may run in a thread of its own (`BackgroundSync`): so that training goes on meanwhile,
and so that a lost worker is noticed while others still wait for its messages. Rounds of one group
run one after the other, because their messages must not mix.

A crew's joiners receive the common state from one of the members (`StateTransfer`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import Protocol

import torch
import torch.distributed as dist

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import RoundResult
from manyhands.blocks.crew._terms import Terms
from manyhands.blocks.crew._transport import CrewBase
from manyhands.errors import RanksDisagree

MESSAGE = 1 << 26  # bytes in one message of a state transfer at most
PERSISTENT = 5  # failures among the same members: the cause is not a lost worker

SyncRound = Callable[[RankGroup], RoundResult]


class BackgroundSync(threading.Thread):
    """A sync round in a thread of its own. `run` instead of `start` holds it at once."""

    def __init__(
        self, sync_round: SyncRound, workers: RankGroup, before: BackgroundSync | None
    ) -> None:
        super().__init__(name="manyhands sync round", daemon=True)
        self._sync_round, self._workers, self._before = sync_round, workers, before
        self._done = threading.Event()
        self.result: RoundResult | None = None
        self.error: BaseException | None = None

    @classmethod
    def already_done(cls, result: RoundResult) -> BackgroundSync:
        """Return one that has ended with this result."""
        background = cls(lambda _: result, RankGroup(), None)
        background.run()
        return background

    def run(self) -> None:
        before, self._before = self._before, None
        try:
            if before is not None:  # an earlier round of the same group, which may have failed
                before.finished()
                if before.error is not None:
                    raise before.error
            self.result = self._sync_round(self._workers)
        except BaseException as error:
            clear_frames(error.__traceback__)  # frames hold the process group, which has to end
            self.error = error
        finally:
            del self._sync_round, self._workers
            self._done.set()

    def finished(self, seconds: float | None = None) -> bool:
        """Wait for the end, for `seconds` at most; return whether it has ended."""
        return self._done.wait(seconds)


class Membership(Protocol):
    """What `Sync` needs to know of the workers."""

    workers: RankGroup
    inner: RankGroup  # the ranks that make up this worker in a crew; one rank otherwise
    elastic: bool

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers by which users know the workers, in rank order."""

    @property
    def regroup_due(self) -> bool:
        """Whether membership changes before training continues."""

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        """Wait for a sync round, and agree that it took place. None: it is undone, on every worker.

        `moves_anchor` is False for a state transfer, which only brings joiners to the anchor.
        """

    def close(self, steps: int) -> bool:
        """Return whether all others are done after as many steps: then a last round is held."""

    def regroup(self, version: int) -> None:
        """Agree on the next members. `workers` may be others afterwards."""


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

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        background.finished()
        if background.error is not None:
            raise background.error
        return background.result

    def close(self, steps: int) -> bool:
        return True

    def regroup(self, version: int) -> None:
        raise AssertionError("a process group is fixed")


class ElasticMembers:
    """The members of a crew."""

    elastic = True

    def __init__(self, crew: CrewBase) -> None:
        self.crew = crew
        self.inner: RankGroup = crew.inner
        self.workers = RankGroup()
        self._failures = 0  # rounds undone in a row among the same members

    @property
    def numbers(self) -> Sequence[int]:
        return self.crew.members

    @property
    def regroup_due(self) -> bool:
        return self.crew.regroup_due

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        try:
            self.crew.wait(background.finished)
        except RuntimeError:  # WorkerLost, or a lost store: `settle` raises it again
            self.crew.abort()
        if (
            isinstance(background.error, RanksDisagree)
            and self.workers.rank in background.error.odd
        ):
            self.crew.drop_out()  # only this worker differs: the others repeat the round
            raise background.error
        arrived = background.finished(0) and background.error is None
        kept = self.crew.settle(arrived, moves_anchor)
        self._failures = 0 if kept else self._failures + 1
        if background.error is not None and self._is_ours(background.error):
            raise background.error
        return background.result if kept else None

    def _is_ours(self, error: BaseException) -> bool:
        """Return whether a failure is this worker's own, so that repeating the round is no use."""
        # torch.distributed raises RuntimeError when another worker's connection breaks.
        of_others = isinstance(error, RuntimeError | RanksDisagree) and self.crew.size > 1
        return not of_others or self._failures >= PERSISTENT

    def close(self, steps: int) -> bool:
        return self.crew.close(steps)

    def join(self, version: int, terms: Terms) -> None:
        self.crew.join(version, terms)
        self._adopt_crew_group()

    def regroup(self, version: int) -> None:
        before = self.crew.members
        self.crew.abort()
        self.crew.regroup(version)
        if self.crew.members != before:
            self._failures = 0
        self._adopt_crew_group()

    def leave(self) -> None:
        self.crew.leave()
        self.workers = RankGroup()

    def _adopt_crew_group(self) -> None:
        crew = self.crew
        self.workers = RankGroup(crew.size, crew.rank, crew.group, own_group=True)


class StateTransfer:
    """One member packs the state and sends it to every joiner; the others only wait.

    It runs in the background like a sync round, so that a member that dies meanwhile is noticed.
    `received` is the state on a joiner, and None elsewhere.
    """

    def __init__(self, members: ElasticMembers, pack: Callable[[], bytes]) -> None:
        self._crew, self._pack = members.crew, pack
        self.received: bytearray | None = None
        self.background = BackgroundSync(self._run, members.workers, None)
        self.background.start()

    def _run(self, workers: RankGroup) -> RoundResult:
        crew = self._crew
        if crew.rank == crew.source:
            data = self._pack()
            for rank in crew.joiners:
                _send(crew.group, data, rank)
        elif crew.rank in crew.joiners:
            self.received = _receive(crew.group, crew.source)
        return RoundResult()


def _send(group: dist.ProcessGroup, data: bytes, rank: int) -> None:
    group.send([torch.tensor([len(data)])], rank, 0).wait()
    # frombuffer() needs memory that may be written to, which bytes is not.
    for message in torch.frombuffer(bytearray(data), dtype=torch.uint8).split(MESSAGE):
        group.send([message], rank, 0).wait()


def _receive(group: dist.ProcessGroup, rank: int) -> bytearray:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], rank, 0).wait()
    data = bytearray(int(size))
    for message in torch.frombuffer(data, dtype=torch.uint8).split(MESSAGE):
        group.recv([message], rank, 0).wait()
    return data
