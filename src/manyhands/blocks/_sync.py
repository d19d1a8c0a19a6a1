"""The synchronisation of workers that step on their own: when they meet, and what comes of it.

send      the schedule says that a fragment is due: its difference from the anchor goes to a
          meeting, which takes place at once or, with overlap, while training goes on
settle    all agree that the meeting has taken place (`blocks/crew/_membership.py`)
merge     the outer step moves the common point, and the parameters with it
undo      it has not: parameters go back to the anchor, and the workers find together again
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.ranks import RankGroup
from manyhands._core.wrapper import unwrap
from manyhands.blocks._anchor import Anchor, Difference, HeldDifference, StagedDifference
from manyhands.blocks._checks import fingerprint, memory_order
from manyhands.blocks._drift import Drift
from manyhands.blocks._joiners import welcome
from manyhands.blocks._other_averaging import moved_alike, warn_that_workers_move_alike
from manyhands.blocks._schedule import Every, Schedule
from manyhands.blocks.averaging._average import meet
from manyhands.blocks.averaging._extras import (
    MOMENTS,
    ArrivedValues,
    Buffers,
    HeldValues,
    Values,
    numbered,
    rows_of,
    state_of,
    trained,
)
from manyhands.blocks.averaging._finite import are_finite, drop_what_is_not_finite, is_finite
from manyhands.blocks.averaging._payload import NOT_FINITE, NOTHING_YET, Note, Outcome, Row
from manyhands.blocks.crew._membership import BackgroundSync, Team


@dataclass
class Pending:
    """Fragments under way, and what goes with the last of a block."""

    fragments: Sequence[int]
    merge_at: int
    rows: Sequence[Any]
    beside: Sequence[ArrivedValues]  # buffers
    more: Sequence[ArrivedValues]  # optimizer state
    note: Note
    errand: BackgroundSync

    @property
    def under_way(self) -> bool:
        """Whether training goes on meanwhile."""
        return isinstance(self.rows[0], HeldDifference)

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
            "beside": [row.saved() for row in self.beside],
            "more": [row.saved() for row in self.more],
            "note": astuple(self.note),
            "notes": [astuple(note) for note in outcome.notes],
            "squares": [*outcome.squares, outcome.square_of_mean],
        }


@dataclass
class RoundStats:
    """What the last meetings have shown, for `snapshot`."""

    drift: Drift = field(default_factory=Drift)
    workers: int = 0  # who held it
    left_out: list[int] = field(default_factory=list)  # whose numbers were not finite
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
        point: Anchor,
        every: Every,
        schedule: Schedule,
        *,
        warmup: int,
        local_warmup: bool,
        state: str,
        buffers: Buffers | None,
        first_buffers_only: bool,
        options: Any,
    ) -> None:
        self.optimizer, self.team, self.point = optimizer, team, point
        self.every, self.schedule = every, schedule
        self.warmup, self.local_warmup = warmup, local_warmup
        self.state, self.fingerprint = state, fingerprint(options)
        self.buffers, self.first_buffers_only = buffers, first_buffers_only
        self.steps = 0
        self.rounds = 0
        self.agreed = not (local_warmup and warmup)  # whether there is a common point
        self.news = RoundStats()
        self.pending: deque[Pending] = deque()
        self._last: BackgroundSync | None = None
        self._since = (time.perf_counter(), 0)
        self._regroups = 0
        self._compared = False  # whether workers have been seen to go the same way, or not
        self.owed: list[int] = []  # fragments of a meeting that has to be held again
        self.is_new = False  # whether nothing was done since the common state came
        self.apart = False  # whether parameters are elsewhere than the common point
        resets = state == "reset" or (local_warmup and warmup > 0)
        bare = unwrap(optimizer)[-1]  # a rule around it has state of its own, which stays
        fresh = bare.state_dict()["state"] if resets and bare.state else {}
        self._fresh = copy.deepcopy(fresh)

    # -- the life of a block -------------------------------------------------------------------

    def after_step(self) -> None:
        """Send and merge what is due after a step."""
        step, regroups = self.steps, self._regroups
        if step <= self.warmup:
            self.apart = self.local_warmup
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
        nobody_new = self._regroups == regroups  # who would not know what was due before
        if due and nobody_new and self.point.segments:
            self._send(due, step + self.schedule.overlap)
            if not self.schedule.overlap:
                self._merge(self.pending.popleft())

    def count_from(self, step: int) -> None:
        """Say how many steps have been taken."""
        self.land()
        self.steps = step
        self.agreed = self.agreed or step >= self.warmup  # on where all have begun
        self.begin_block()
        self.restart_clock()

    def begin_block(self) -> None:
        """Be in the block that this step is in, of steps that were counted and not taken here."""
        start = self.every.first_start(max(self.steps, self.warmup))
        self.schedule.begin(start, self.schedule.length)

    def meet_now(self) -> None:
        """Merge all that is under way, and then meet about everything, if there is anything."""
        self.land()
        if not (self.apart and self.point.segments):
            return
        self._send(range(self.schedule.fragments), self.steps)
        self._merge(self.pending.popleft())

    def close(self) -> None:
        """Meet a crew's others a last time if they are done, too; leave without that if not.

        Then our block is lost, as if we had died, and parameters are the last common point.
        """
        self.land()
        if self.apart and self.point.segments:
            if self.team.close(self.steps):
                self.meet_now()
            elif self.agreed and self.steps >= self.warmup:
                self.point.go_back()
                self.apart = False

    def land(self) -> None:
        """Merge all that is under way."""
        while self.pending:
            self._merge(self.pending.popleft())

    def _send(self, fragments: Sequence[int], merge_at: int) -> None:
        self.point.hold_frozen()
        rows: Sequence[Difference] = [r for f in fragments for r in self.point.differences(f)]
        under_way = merge_at > self.steps
        if under_way:
            rows = [HeldDifference.now(row) for row in rows]
        elif self.team.elastic:
            rows = [StagedDifference(row) for row in rows]
        last = self.schedule.fragments - 1 in fragments
        beside, more = (self._buffers(), self._state()) if last else ([], [])
        finite = are_finite(self.point.params) and all(map(is_finite, [*beside, *more]))
        finite = self._in_all_parts(finite)
        note = self._note(more, NOTHING_YET if self.is_new else float(finite))
        held: tuple[list[HeldValues], list[HeldValues]] = ([], [])
        if under_way or self.team.elastic:
            held = self._held(beside), self._held(more)
        errand = self._errand(rows, held[0] or beside, held[1] or more, note)
        self.pending.append(Pending(fragments, merge_at, rows, *held, note, errand))

    def _merge(self, pending: Pending) -> None:
        outcome = self.settle(pending.errand)
        if outcome is None:
            self.news.undone += 1
            self.come_together([] if pending.under_way else pending.fragments)
            return
        self._hear(outcome)
        if pending.note.step == self.schedule.start:  # it was sent as the present block began
            self.schedule.length = int(outcome.first.length)
        counts = pending.note.counts
        self.point.hold_frozen()
        for row in pending.rows:
            row.merge(outcome, counts)
        buffers = numbered(self.buffer_tensors) if pending.beside else {}
        for row in pending.beside:
            row.put(outcome, buffers)
        state = state_of(self.optimizer) if pending.more else {}
        for row in pending.more if outcome.more else []:
            row.put(outcome, state)
        self.point.share(pending.fragments)
        if not counts:
            self._heal()
        if self.state == "reset" and self.schedule.fragments - 1 in pending.fragments:
            self.reset_state()
        self.rounds += 1
        self.is_new = False
        covered = len(pending.fragments) == self.schedule.fragments
        self.apart = pending.under_way or not covered
        self.come_together()

    def _heal(self) -> None:
        """Parameters are the common point's; what is under way brings nothing of ours."""
        self.point.go_back()
        drop_what_is_not_finite(self.optimizer)
        for pending in self.pending:
            pending.note = replace(pending.note, brings=NOTHING_YET)

    def _end_warmup(self) -> None:
        """Everybody has the common point from here on: the first worker's parameters."""
        self.agreed = False  # if this is undone, those who come together take one's for all
        tensors = [*trained(self.optimizer), *self.buffer_tensors]
        averaged = self.local_warmup and self.state.startswith("average")
        first = rows_of(numbered(tensors), first_only=True)
        self.hold(first, self._state() if averaged else [])
        if self.local_warmup and not averaged:
            self.reset_state()
        self.agreed, self.apart = True, False
        self.point.begin()
        self.restart_clock()
        self.come_together()

    # -- meetings ------------------------------------------------------------------------------

    def hold(self, rows: Sequence[Values], more: Sequence[Values] = ()) -> Outcome | None:
        """A meeting about other things than blocks, now.

        None: it is undone, and the team is another. (If it is kept, `come_together` is the
        caller's: first what it was held for has to be done.)
        """
        finite = all(map(is_finite, [*rows, *more]))
        note = self._note(more, float(self._in_all_parts(finite)))
        held: tuple[list[HeldValues], list[HeldValues]] = ([], [])
        if self.team.elastic:
            held = self._held(rows), self._held(more)
        outcome = self.settle(self._errand(held[0] or rows, [], held[1] or more, note))
        if outcome is None:
            self.news.undone += 1
            self.come_together()
            return None
        for row, values in zip(held[0], rows, strict=False):
            row.put(outcome, values.tensors)
        for row, values in zip(held[1] if outcome.more else [], more, strict=False):
            row.put(outcome, values.tensors)
        return outcome

    def _held(self, rows: Sequence[Values]) -> list[HeldValues]:
        return [HeldValues(row) for row in rows]

    def _errand(
        self, rows: Sequence[Row], beside: Sequence[Row], more: Sequence[Row], note: Note
    ) -> BackgroundSync:
        def meeting(workers: RankGroup) -> Outcome:
            return meet(workers, rows, beside, more, note)

        errand = BackgroundSync(meeting, self.team.workers, self._last)
        if self.team.elastic or self.schedule.overlap:
            errand.start()
            self._last = errand
        else:
            errand.run()
        return errand

    def settle(self, errand: BackgroundSync, sync_round: bool = True) -> Outcome | None:
        """Wait for a meeting, and for all to agree on it. None: it is undone."""
        begin = time.perf_counter()
        outcome = self.team.settle(errand, sync_round)
        self.news.waited += time.perf_counter() - begin
        return outcome

    def clock(self) -> list[float]:
        """For how many seconds, and steps, the time of a step has been taken."""
        then, step = self._since
        return [time.perf_counter() - then, self.steps - step]

    def restart_clock(self, seconds: float = 0.0, steps: float = 0) -> None:
        """The time of a step is taken from here on, or goes on after so many seconds and steps."""
        self._since = (time.perf_counter() - seconds, self.steps - int(steps))

    def _note(self, more: Sequence[Row], brings: float) -> Note:
        now, (then, step) = time.perf_counter(), self._since
        return Note(
            step=float(self.steps),
            brings=brings,
            options=self._fingerprint_now(),
            more=float(sum(row.length for row in more)),
            seconds=(now - then) / max(self.steps - step, 1),
            lr=float(self.optimizer.param_groups[0].get("lr", 1.0)),
            length=float(self.schedule.length),
        )

    def _in_all_parts(self, finite: bool) -> bool:
        """Whether that holds in all processes that are this worker: they count, or none does."""
        parts = self.point.inner if self.point.inner.size > 1 else self.team.inner
        if parts.size == 1:
            return finite
        device = next(p.device for group in self.optimizer.param_groups for p in group["params"])
        return all(told == 1.0 for (told,) in parts.all_gather([float(finite)], device))

    def _fingerprint_now(self) -> float:
        """Of the options, and of what has been frozen."""
        frozen = [i for i, param in enumerate(self.point.params) if not param.requires_grad]
        return fingerprint((self.fingerprint, frozen)) if frozen else self.fingerprint

    @property
    def buffer_tensors(self) -> list[Tensor]:
        """The model's buffers, unless each worker keeps its own."""
        return [] if self.buffers is None else self.buffers.tensors()

    def _buffers(self) -> list[Values]:
        """Those that are averaged with the last fragment."""
        return rows_of(numbered(self.buffer_tensors), self.first_buffers_only)

    def _state(self) -> list[Values]:
        """The optimizer state that is averaged with the last fragment, if all workers have it."""
        if self.state not in ("average", "average_moments"):
            return []
        only = MOMENTS if self.state == "average_moments" else None
        return rows_of(state_of(self.optimizer, only))

    def _hear(self, outcome: Outcome) -> None:
        news, counted = self.news, outcome.counted
        news.drift = Drift.of([outcome.squares[rank] for rank in counted], outcome.square_of_mean)
        news.workers = len(outcome.notes)
        if not self._compared and news.drift.distance > 0:
            self._compared = True
            if moved_alike(outcome, news.drift.cosine, self.point.codec.rounds):
                warn_that_workers_move_alike(len(counted))
        numbers = self.team.numbers
        if len(numbers) != len(outcome.notes):  # of a meeting that came out of a checkpoint
            numbers = range(len(outcome.notes))
        told = zip(numbers, outcome.notes, strict=True)
        news.left_out = [number for number, note in told if note.brings == NOT_FINITE]
        news.left_out_ever += len(news.left_out)
        news.seconds = max(note.seconds for note in outcome.notes)
        self.restart_clock()

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
            welcome(self)
        if self.owed:
            fragments, self.owed = self.owed, []
            self._send(fragments, self.steps)
            self._merge(self.pending.popleft())

    @property
    def alone(self) -> bool:
        """Whether there is nobody to meet, ever."""
        return not self.team.elastic and self.team.workers.size == 1

    @property
    def version(self) -> int:
        """Grows with all that workers may have ahead of each other."""
        return (self.rounds << 32) + self.steps if self.agreed else -1

    # -- state ---------------------------------------------------------------------------------

    def common_state(self) -> dict[str, Any]:
        """What every worker has alike."""
        return {
            **self.counters(),
            "order": memory_order(self.point.params),
            "anchor": [segment.anchor for segment in self.point.segments],
            "memories": [segment.memories for segment in self.point.segments],
        }

    def counters(self) -> dict[str, Any]:
        """The plain numbers of the common state."""
        return {
            "steps": self.steps,
            "rounds": self.rounds,
            "block": [self.schedule.start, self.schedule.length],
            "news": [*astuple(self.news.drift), self.news.seconds],
        }

    def load_common(self, state: dict[str, Any]) -> None:
        for segment, anchor, memories in zip(
            self.point.segments, state["anchor"], state["memories"], strict=True
        ):
            segment.anchor.copy_(anchor)
            for memory, value in zip(segment.memories, memories, strict=True):
                memory.copy_(value)
        self.load_counters(state)

    def load_counters(self, state: dict[str, Any]) -> None:
        self.steps, self.rounds = state["steps"], state["rounds"]
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
        beside, more = (
            [ArrivedValues(row["keys"], row["sizes"], row["mean"].clone()) for row in saved[name]]
            for name in ("beside", "more")
        )
        *squares, of_mean = saved["squares"]
        outcome = Outcome([Note(*note) for note in saved["notes"]], squares, of_mean)
        note, errand = Note(*saved["note"]), BackgroundSync.come_back(outcome)
        pending = Pending(saved["fragments"], saved["merge_at"], rows, beside, more, note, errand)
        self.pending.append(pending)

    @property
    def fresh(self) -> dict[Any, Any] | None:
        """The state that the inner optimizer will be reset to; None if it never will."""
        ahead = self.local_warmup and self.steps < self.warmup
        return self._fresh if ahead or self.state == "reset" else None

    @fresh.setter
    def fresh(self, state: dict[Any, Any]) -> None:
        self._fresh = copy.deepcopy(state)

    def reset_state(self) -> None:
        """The inner optimizer's state as it was before its first step; its options stay."""
        bare = unwrap(self.optimizer)[-1]
        bare.state.clear()
        if self._fresh:
            groups = bare.state_dict()["param_groups"]
            bare.load_state_dict({"state": copy.deepcopy(self._fresh), "param_groups": groups})
