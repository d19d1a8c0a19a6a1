"""Newcomers of a crew get the common state from one of the others, and begin with that."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import Outcome
from manyhands.blocks.crew._membership import BackgroundSync, ElasticMembers

if TYPE_CHECKING:
    from manyhands.blocks._sync import Sync

PIECE = 1 << 26  # bytes of a message


def welcome(sync: Sync) -> None:
    """Bring newcomers the common state; all agree that they have it."""
    assert isinstance(sync.team, ElasticMembers)
    crew = sync.team.crew
    if not crew.newcomers:
        return
    arrived: list[bytearray] = []

    def bring(_: RankGroup) -> Outcome:
        if crew.rank == crew.source:
            data = _packed(sync)
            for rank in crew.newcomers:
                _give(crew.group, data, rank)
        elif crew.rank in crew.newcomers:
            arrived.append(_take(crew.group, crew.source))
        return Outcome()

    errand = BackgroundSync(bring, sync.team.workers, None)
    errand.start()
    if sync.settle(errand, sync_round=False) is not None and arrived:
        _unpack(sync, arrived[0])
        sync.agreed = not sync.local_warmup or sync.steps >= sync.warmup


def _packed(sync: Sync) -> bytes:
    """All that is common."""
    if sync.steps <= sync.warmup:
        sync.point.begin()
    file = io.BytesIO()
    state = {**sync.common_state(), "owed": sync.owed, "apart": sync.apart}
    buffers = [buffer.detach() for buffer in sync.buffer_tensors]
    torch.save({**state, "buffers": buffers}, file)
    return file.getvalue()


def _unpack(sync: Sync, data: bytearray) -> None:
    state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    sync.load_common(state)
    with torch.no_grad():
        for buffer, value in zip(sync.buffer_tensors, state["buffers"], strict=True):
            buffer.copy_(value)
    sync.point.go_back()
    sync.owed, sync.apart, sync.is_new = state["owed"], state["apart"], True
    sync.restart_clock()


def _give(group: Any, data: bytes, rank: int) -> None:
    group.send([torch.tensor([len(data)])], rank, 0).wait()
    for piece in torch.frombuffer(bytearray(data), dtype=torch.uint8).split(PIECE):
        group.send([piece], rank, 0).wait()


def _take(group: Any, rank: int) -> bytearray:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], rank, 0).wait()
    data = bytearray(int(size))
    for piece in torch.frombuffer(data, dtype=torch.uint8).split(PIECE):
        group.recv([piece], rank, 0).wait()
    return data
