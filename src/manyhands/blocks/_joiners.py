"""State transfer: a crew's joiners receive the common state from one of the members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import RoundResult
from manyhands.blocks.crew._membership import BackgroundSync, ElasticMembers

MESSAGE = 1 << 26  # bytes in one message at most


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


def _send(group: Any, data: bytes, rank: int) -> None:
    group.send([torch.tensor([len(data)])], rank, 0).wait()
    # frombuffer() needs memory that may be written to, which bytes is not.
    for message in torch.frombuffer(bytearray(data), dtype=torch.uint8).split(MESSAGE):
        group.send([message], rank, 0).wait()


def _receive(group: Any, rank: int) -> bytearray:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], rank, 0).wait()
    data = bytearray(int(size))
    for message in torch.frombuffer(data, dtype=torch.uint8).split(MESSAGE):
        group.recv([message], rank, 0).wait()
    return data
