"""The synchronisation of workers that step on their own: when they meet, and what comes of it.

send      the schedule says that a fragment is due: its difference from the anchor goes to a
          meeting, which takes place at once or, with overlap, while training goes on
settle    all agree that the meeting has taken place (`_team.py`)
merge     the outer step moves the common point, and the parameters with it
undo      it has not: parameters go back to the anchor, and the workers find together again
"""

from __future__ import annotations

import copy
import io
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._comm import Workers
from manyhands._dtensors import local
from manyhands._host import summed_in
from manyhands._norms import norm
from manyhands.blocks._drift import Drift
from manyhands.blocks._extras import (
    MOMENTS,
    Buffers,
    HeldValues,
    Values,
    rows_of,
    state_of,
    trained,
)
from manyhands.blocks._meeting import LARGEST, meet
from manyhands.blocks._point import CommonPoint, Difference, HeldDifference, StagedDifference
from manyhands.blocks._rows import Note, Outcome, Row
from manyhands.blocks._schedule import Every, Schedule
from manyhands.blocks._team import Errand, Team

PIECE = 1 << 26  # bytes of a message that brings a newcomer the state


@dataclass
class Pending:
    """Fragments under way."""

    fragments: Sequence[int]
    merge_at: int
    rows: Sequence[Any]
    more: Sequence[HeldValues]
    note: Note
    errand: Errand

    def saved(self) -> dict[str, Any]:
        """In plain values, once it has arrived."""
        self.errand.finished()
        if self.errand.outcome is None:
            raise RuntimeError("a meeting failed while it was under way") from self.errand.error
        outcome = self.errand.outcome
        return {
            "fragments": list(self.fragments),
            "merge_at": self.merge_at,
            "held": [row.held for row in self.rows],
            "arrived": [row.arrived for row in self.rows],
            "note": astuple(self.note),
            "notes": [astuple(note) for note in outcome.notes],
            "squares": [*outcome.squares, outcome.square_of_mean],
        }


@dataclass
class News:
    """What the last meetings have shown, for `snapshot`."""

    drift: Drift = field(default_factory=Drift)
    left_out: list[int] = field(default_factory=list)  # ranks whose numbers were not finite
    left_out_ever: int = 0
    undone: int = 0
    waited: float = 0.0  # seconds in which steps waited for meetings
    seconds: float = 0.0  # of a step on the slowest worker


class Sync:
    """Keeps this worker's parameters and the others' together."""

    def __init__(
        self,
        optimizer: Optimizer,
        team: Team,
        point: CommonPoint,
        every: Every,
        schedule: Schedule,
        *,
        warmup: int,
        local_warmup: bool,
        state: str,
        buffers: Buffers | None,
        first_buffers_only: bool,
        fingerprint: float,
    ) -> None:
        self.optimizer, self.team, self.point = optimizer, team, point
        self.every, self.schedule = every, schedule
        self.warmup, self.local_warmup = warmup, local_warmup
        self.state, self.fingerprint = state, fingerprint
        self.buffers, self.first_buffers_only = buffers, first_buffers_only
        self.steps = 0
        self.meetings = 0
        self.agreed = not (local_warmup and warmup)  # whether there is a common point
        self.news = News()
        self.pending: deque[Pending] = deque()
        self._last: Errand | None = None
        self._since = (time.perf_counter(), 0)
        self._regroups = 0
        self.owed: list[int] = []  # fragments of a meeting that has to be held again
        self.is_new = False  # whether nothing was done since the common state came
        self._fresh = copy.deepcopy(optimizer.state_dict()["state"]) if optimizer.state else {}

    # -- the life of a block -------------------------------------------------------------------

    def after_step(self) -> None:
        """Send and merge what is due after a step."""
        step, regroups = self.steps, self._regroups
        if step <= self.warmup:
            self.come_together()
            if step == self.warmup:
                self._end_warmup()
            return
        due = self.schedule.due(step)
        if self.schedule.ends(step):
            length = self.every.next(self.schedule.length, self.news.seconds, self.news.drift)
            self.schedule.begin(step, length)
        while self.pending and self.pending[0].merge_at <= step:
            self._merge(self.pending.popleft())
        if due and self._regroups == regroups:  # newcomers do not know what was due before
            self._send(due, step + self.schedule.overlap)
            if not self.schedule.overlap:
                self._merge(self.pending.popleft())

    def count_from(self, step: int) -> None:
        """Say how many steps have been taken."""
        self.land()
        self.steps = step
        self.agreed = self.agreed or step >= self.warmup  # on where all have begun
        self.schedule.begin(self.every.first_start(max(step, self.warmup)), self.schedule.length)

    def meet_now(self) -> None:
        """Merge all that is under way, and then meet about everything."""
        self.land()
        self._send(range(self.schedule.fragments), self.steps)
        self._merge(self.pending.popleft())

    def land(self) -> None:
        """Merge all that is under way."""
        while self.pending:
            self._merge(self.pending.popleft())

    def _send(self, fragments: Sequence[int], merge_at: int) -> None:
        rows: Sequence[Difference] = [r for f in fragments for r in self.point.differences(f)]
        if merge_at > self.steps:
            rows = [HeldDifference.now(row) for row in rows]
        elif self.team.elastic:
            rows = [StagedDifference(row) for row in rows]
        more = self._more() if self.schedule.fragments - 1 in fragments else []
        held = self._held(more) if merge_at > self.steps or self.team.elastic else []
        note = self._note(more)
        errand = self._errand(rows, held or more, note)
        self.pending.append(Pending(fragments, merge_at, rows, held, note, errand))

    def _merge(self, pending: Pending) -> None:
        outcome = self._settle(pending.errand)
        if outcome is None:
            self.news.undone += 1
            under_way = isinstance(pending.rows[0], HeldDifference)
            self.come_together([] if under_way else pending.fragments)
            return
        self._hear(outcome)
        self.schedule.length = int(outcome.first.length)
        finite = bool(pending.note.finite)
        for row in pending.rows:
            row.merge(outcome, finite)
        for more in pending.more if outcome.more else []:
            more.put(outcome)
        self.point.share()
        if not finite:
            drop_what_is_not_finite(self.optimizer)
        if self.state == "reset" and self.schedule.fragments - 1 in pending.fragments:
            self.reset_state()
        self.meetings += 1
        self.is_new = False
        self.come_together()

    def _end_warmup(self) -> None:
        """Everybody has the common point from here on: what all have, or the first worker's."""
        if self.local_warmup:
            rows = rows_of([*trained(self.optimizer)], first_only=True)
            if self.buffers is not None:
                rows += rows_of(self.buffers.tensors(), first_only=True)
            averaged = self.state.startswith("average")
            self.hold(rows, self._more() if averaged else [])
            if not averaged:
                self.reset_state()
        self.agreed = True
        self.point.begin()
        self._since = (time.perf_counter(), self.steps)
        self.come_together()

    # -- meetings ------------------------------------------------------------------------------

    def hold(self, rows: Sequence[Any], more: Sequence[Any] = ()) -> Outcome | None:
        """A meeting about other things than blocks, now.

        None: it is undone, and the team is another. (If it is kept, `come_together` is the
        caller's: first what it was held for has to be done.)
        """
        note = self._note(more, finite=all(map(is_finite, rows)))
        if self.team.elastic:
            rows, more = self._held(rows), self._held(more)
        outcome = self._settle(self._errand(rows, more, note))
        if outcome is None:
            self.news.undone += 1
            self.come_together()
        elif self.team.elastic:
            for row in [*rows, *(more if outcome.more else [])]:
                row.put(outcome)
        return outcome

    def _held(self, rows: Sequence[Values]) -> list[HeldValues]:
        return [HeldValues(row) for row in rows]

    def _errand(self, rows: Sequence[Row], more: Sequence[Row], note: Note) -> Errand:
        def meeting(workers: Workers) -> Outcome:
            return meet(workers, rows, more, note)

        errand = Errand(meeting, self.team.workers, self._last)
        if self.team.elastic or self.schedule.overlap:
            errand.start()
            self._last = errand
        else:
            errand.run()
        return errand

    def _settle(self, errand: Errand) -> Outcome | None:
        begin = time.perf_counter()
        outcome = self.team.settle(errand)
        self.news.waited += time.perf_counter() - begin
        return outcome

    def _note(self, more: Sequence[Row], finite: bool | None = None) -> Note:
        now, (then, step) = time.perf_counter(), self._since
        if finite is None:  # a newcomer has nothing to bring
            finite = not self.is_new and are_finite(trained(self.optimizer))
        return Note(
            step=float(self.steps),
            finite=float(finite),
            options=self.fingerprint,
            more=float(sum(row.length for row in more)),
            seconds=(now - then) / max(self.steps - step, 1),
            lr=float(self.optimizer.param_groups[0].get("lr", 1.0)),
            length=float(self.schedule.length),
        )

    def _more(self) -> list[Values]:
        """Buffers and optimizer state that are averaged with the last fragment."""
        rows: list[Values] = []
        if self.buffers is not None:
            rows += rows_of(self.buffers.tensors(), self.first_buffers_only)
        if self.state in ("average", "average_moments"):
            only = MOMENTS if self.state == "average_moments" else None
            rows += rows_of(state_of(self.optimizer, only))
        return rows

    def _hear(self, outcome: Outcome) -> None:
        news, counted = self.news, outcome.counted
        news.drift = Drift.of([outcome.squares[rank] for rank in counted], outcome.square_of_mean)
        news.left_out = [rank for rank, note in enumerate(outcome.notes) if not note.finite]
        news.left_out_ever += len(news.left_out)
        news.seconds = max(note.seconds for note in outcome.notes)
        self._since = (time.perf_counter(), self.steps)

    # -- those who come and go -----------------------------------------------------------------

    def come_together(self, owed: Sequence[int] = ()) -> None:
        """After a meeting: let those go who have left, and take in those who wait.

        `owed` are the fragments of a meeting that was undone: it is held again with those who are
        there now, so that no work of theirs is lost.
        """
        self.owed = list(owed)
        while self.team.regroup_due:
            self.pending.clear()  # they have changed nothing, and are sent again when due
            self._last = None
            self._regroups += 1
            self.team.regroup(self.version)
            self.point.forget_residuals()
            self.welcome()
        if self.owed:
            fragments, self.owed = self.owed, []
            self._send(fragments, self.steps)
            self._merge(self.pending.popleft())

    @property
    def version(self) -> int:
        """Grows with all that workers may have ahead of each other."""
        return (self.meetings << 32) + self.steps if self.agreed else -1

    def welcome(self) -> None:
        """Bring newcomers the common state; all agree that they have it."""
        crew = self.team.crew  # type: ignore[attr-defined]
        if not crew.newcomers:
            return
        arrived: list[bytearray] = []

        def bring(_: Workers) -> Outcome:
            if crew.rank == crew.source:
                data = self._packed()
                for rank in crew.newcomers:
                    _give(crew.group, data, rank)
            elif crew.rank in crew.newcomers:
                arrived.append(_take(crew.group, crew.source))
            return Outcome()

        errand = Errand(bring, self.team.workers, None)
        errand.start()
        if self._settle(errand) is not None and arrived:
            self._unpack(arrived[0])
            self.agreed = not self.local_warmup or self.steps >= self.warmup

    def _packed(self) -> bytes:
        """All that is common."""
        if self.steps <= self.warmup:
            self.point.begin()
        file = io.BytesIO()
        buffers = [] if self.buffers is None else self.buffers.tensors()
        state = {**self.common_state(), "owed": self.owed}
        torch.save({**state, "buffers": [buffer.detach() for buffer in buffers]}, file)
        return file.getvalue()

    def _unpack(self, data: bytearray) -> None:
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        self.load_common(state)
        buffers = [] if self.buffers is None else self.buffers.tensors()
        with torch.no_grad():
            for buffer, value in zip(buffers, state["buffers"], strict=True):
                buffer.copy_(value)
        self.point.go_back()
        self.owed, self.is_new = state["owed"], True
        self._since = (time.perf_counter(), self.steps)

    # -- state ---------------------------------------------------------------------------------

    def common_state(self) -> dict[str, Any]:
        """What every worker has alike."""
        return {
            "steps": self.steps,
            "meetings": self.meetings,
            "block": [self.schedule.start, self.schedule.length],
            "anchor": [segment.anchor for segment in self.point.segments],
            "memories": [segment.memories for segment in self.point.segments],
            "news": [*astuple(self.news.drift), self.news.seconds],
        }

    def load_common(self, state: dict[str, Any]) -> None:
        for segment, anchor, memories in zip(
            self.point.segments, state["anchor"], state["memories"], strict=True
        ):
            segment.anchor.copy_(anchor)
            for memory, value in zip(segment.memories, memories, strict=True):
                memory.copy_(value)
        self.steps, self.meetings = state["steps"], state["meetings"]
        self.schedule.begin(*state["block"])
        *drift, self.news.seconds = state["news"]
        self.news.drift = Drift(*drift)

    def take_up(self, saved: dict[str, Any]) -> None:
        """Have under way what had arrived, and was not merged, when it was saved."""
        if self.team.elastic:
            return  # its differences are sent again when they are due
        rows = [
            HeldDifference(row) for f in saved["fragments"] for row in self.point.differences(f)
        ]
        for row, held, arrived in zip(rows, saved["held"], saved["arrived"], strict=True):
            row.held.copy_(held)
            row.arrived.copy_(arrived)
        *squares, of_mean = saved["squares"]
        outcome = Outcome([Note(*note) for note in saved["notes"]], squares, of_mean)
        note, errand = Note(*saved["note"]), Errand.come_back(outcome)
        pending = Pending(saved["fragments"], saved["merge_at"], rows, [], note, errand)
        self.pending.append(pending)

    def reset_state(self) -> None:
        """The inner optimizer's state as it was before its first step; its options stay."""
        self.optimizer.state.clear()
        if self._fresh:
            groups = self.optimizer.state_dict()["param_groups"]
            state = {"state": copy.deepcopy(self._fresh), "param_groups": groups}
            self.optimizer.load_state_dict(state)


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers are: their lengths are, in one read."""
    parts = [local(tensor).detach() for tensor in tensors if tensor.numel()]
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    lengths = [_length(part) for part in parts if part.numel()]
    return not lengths or bool(torch.isfinite(torch.stack(lengths)).all())


def _length(part: Tensor) -> Tensor:
    """Not finite if a number is not. (A product is the fastest read of large tensors.)"""
    if part.is_contiguous() and part.dtype == torch.float32:
        return torch.dot(part.view(-1), part.view(-1))
    return torch.linalg.vector_norm(part, dtype=summed_in(part.dtype)).float()


def is_finite(row: Row) -> bool:
    """Whether all its numbers are."""
    part = torch.empty(min(LARGEST, row.length), dtype=row.dtype, device=row.device)
    for start in range(0, row.length, LARGEST):
        chosen = part[: row.length - start]
        row.read(start, chosen)
        if not torch.isfinite(norm(chosen)):
            return False
    return True


def drop_what_is_not_finite(optimizer: Optimizer) -> None:
    """Begin anew with the state of parameters whose state holds numbers that are not finite."""
    for param in [p for p in optimizer.state if isinstance(p, Tensor)]:
        values = [v for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        if not are_finite([value for value in values if value.is_floating_point()]):
            del optimizer.state[param]


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
