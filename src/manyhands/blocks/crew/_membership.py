"""The members of a crew, as the blocks see them.

ElasticMembers   a crew as the `Membership` that `Sync` works with (`averaging/_round.py`)
StateTransfer    one of the members sends the joiners the common state
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import RoundResult
from manyhands.blocks.averaging._round import BackgroundSync
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._enrollment import Terms
from manyhands.errors import RanksDisagree

MESSAGE = 1 << 26  # bytes in one message of a state transfer at most
PERSISTENT = 5  # failures among the same members: the cause is not a lost worker


class ElasticMembers:
    """The members of a crew."""

    elastic = True

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.inner: RankGroup = crew.inner
        self.workers = RankGroup()
        self._failures = 0  # rounds undone in a row among the same members

    @property
    def numbers(self) -> Sequence[int]:
        return self.crew.members

    @property
    def number(self) -> int:
        return self.crew.number

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

    def begin_blocks(self) -> None:
        self.crew.begin_blocks()

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
            self.received = _receive_state(crew.group, crew.source)
        return RoundResult()


def _send(group: dist.ProcessGroup | None, data: bytes, rank: int) -> None:
    assert group is not None  # where there is a joiner, there are two members
    group.send([torch.tensor([len(data)])], rank, 0).wait()
    # frombuffer() needs memory that may be written to, which bytes is not.
    for message in torch.frombuffer(bytearray(data), dtype=torch.uint8).split(MESSAGE):
        group.send([message], rank, 0).wait()


def _receive_state(group: dist.ProcessGroup | None, rank: int) -> bytearray:
    assert group is not None
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], rank, 0).wait()
    data = bytearray(int(size))
    for message in torch.frombuffer(data, dtype=torch.uint8).split(MESSAGE):
        group.recv([message], rank, 0).wait()
    return data
