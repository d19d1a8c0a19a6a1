"""The life of a block: when a worker synchronizes, and what becomes of the mean.

send      the schedule says that a fragment is due: a sync round averages its difference from the
          anchor, at once or, with overlap, while training goes on
commit    all workers agree that the round took place (`blocks/crew/_membership.py`)
merge     the outer step moves the anchor, and the parameters with it
undo      a member was lost in the round: it is repeated among those who are left, or, if it ran
          in the background, sent again when it is next due
joiners   a crew's new members receive the common state (`_joiners.py`)
"""

from __future__ import annotations

import copy
import io
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.ranks import RankGroup
from manyhands.blocks._anchor import (
    Anchor,
    AnchorDifference,
    OverlappedDifference,
    StagedDifference,
)
from manyhands.blocks._checks import fingerprint, memory_order
from manyhands.blocks._drift import Drift
from manyhands.blocks._joiners import StateTransfer
from manyhands.blocks._other_averaging import moved_identically, warn_identical_moves
from manyhands.blocks._rounds import InitialState, Pending, RoundStats
from manyhands.blocks._schedule import Every, Schedule
from manyhands.blocks.averaging._average import run_sync_round
from manyhands.blocks.averaging._extras import (
    MOMENTS,
    Buffers,
    SnapshotPayload,
    TensorPayload,
    by_index,
    make_payloads,
    state_tensors,
    trainable_params,
)
from manyhands.blocks.averaging._finite import (
    are_finite,
    drop_nonfinite_state,
    is_payload_finite,
)
from manyhands.blocks.averaging._payload import (
    NOT_FINITE,
    NOTHING_YET,
    Note,
    Payload,
    RoundResult,
)
from manyhands.blocks.crew._membership import BackgroundSync, ElasticMembers, Membership


class Sync:
    """Keeps this worker's parameters and the other workers' together."""

    def __init__(
        self,
        optimizer: Optimizer,
        members: Membership,
        anchor: Anchor,
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
        self.optimizer, self.members, self.anchor = optimizer, members, anchor
        self.every, self.schedule = every, schedule
        self.warmup, self.local_warmup = warmup, local_warmup
        self.state, self.fingerprint = state, fingerprint(options)
        self.buffers, self.first_buffers_only = buffers, first_buffers_only
        self.steps = 0
        self.rounds = 0
        self.has_anchor = not (local_warmup and warmup)  # a local warm-up begins without one
        self.diverged = False  # whether parameters may differ from the anchor
        self.just_joined = False  # whether no step was taken since the state transfer
        self.retry: list[int] = []  # fragments of an undone round, which is repeated
        self.stats = RoundStats()
        self.pending: deque[Pending] = deque()
        self._last: BackgroundSync | None = None
        self._clock_start = (time.perf_counter(), 0)  # seconds, and the step at that time
        self._regroups = 0
        self._compared = False  # whether the first block was searched for identical moves
        resets = state == "reset" or (local_warmup and warmup > 0)
        self._initial_state = InitialState(optimizer, needed=resets)

    # -- the life of a block -------------------------------------------------------------------

    def after_step(self) -> None:
        """Send and merge the fragments that are due after a step."""
        step, regroups = self.steps, self._regroups
        if step <= self.warmup:
            self.diverged = self.local_warmup
            self.regroup()
            if step == self.warmup:
                self._end_warmup()
            return
        due = self.schedule.due(step)
        if self.schedule.ends(step):
            length = self.every.next(self.schedule.length, self.stats.seconds, self.stats.drift)
            self.schedule.begin(step, length)
        while self.pending and self.pending[0].merge_at <= step:
            self._merge(self.pending.popleft())
        # A merge may let joiners in, and they have not computed what was due before they came.
        same_members = self._regroups == regroups
        if due and same_members and self.anchor.buckets:
            self._send(due, step + self.schedule.overlap)
            if not self.schedule.overlap:
                self._merge(self.pending.popleft())

    def set_steps(self, step: int) -> None:
        """Continue as after `step` steps."""
        self.merge_pending()
        self.steps = step
        # After the warm-up the workers had agreed on an anchor, in the run that is continued.
        self.has_anchor = self.has_anchor or step >= self.warmup
        self.begin_block()
        self.restart_clock()

    def begin_block(self) -> None:
        """Enter the block that the current step is in, when its steps were not taken here."""
        start = self.every.first_start(max(self.steps, self.warmup))
        self.schedule.begin(start, self.schedule.length)

    def sync_now(self) -> None:
        """Merge all that is in flight, and then synchronize all fragments if any has diverged."""
        self.merge_pending()
        if not (self.diverged and self.anchor.buckets):
            return
        self._send(range(self.schedule.fragments), self.steps)
        self._merge(self.pending.popleft())

    def close(self) -> None:
        """Hold a last sync round if the crew's other members are done, too.

        If they train on, this worker's last block is lost, as if it had died, and its parameters
        go back to the anchor.
        """
        self.merge_pending()
        if self.diverged and self.anchor.buckets:
            if self.members.close(self.steps):
                self.sync_now()
            elif self.has_anchor and self.steps >= self.warmup:
                self.anchor.restore_params()
                self.diverged = False

    def merge_pending(self) -> None:
        """Wait for all that is in flight, and merge it."""
        while self.pending:
            self._merge(self.pending.popleft())

    def _send(self, fragments: Sequence[int], merge_at: int) -> None:
        """Begin a sync round about these fragments."""
        self.anchor.reset_frozen_memories()
        differences: Sequence[AnchorDifference] = [
            difference for f in fragments for difference in self.anchor.differences(f)
        ]
        overlaps = merge_at > self.steps
        if overlaps:  # parameters change while it travels: send a copy
            differences = [OverlappedDifference.copy_now(each) for each in differences]
        elif self.members.elastic:  # the round may be undone: keep the mean apart until then
            differences = [StagedDifference(each) for each in differences]
        ends_block = self.schedule.fragments - 1 in fragments
        buffers = self._buffer_payloads() if ends_block else []
        state = self._state_payloads() if ends_block else []
        finite = are_finite(self.anchor.params) and all(map(is_payload_finite, [*buffers, *state]))
        finite = self._finite_on_all_ranks(finite)
        note = self._note(state, NOTHING_YET if self.just_joined else float(finite))
        copies: tuple[list[SnapshotPayload], list[SnapshotPayload]] = ([], [])
        if overlaps or self.members.elastic:
            copies = [SnapshotPayload(p) for p in buffers], [SnapshotPayload(p) for p in state]
        background = self._start_round(differences, copies[0] or buffers, copies[1] or state, note)
        self.pending.append(Pending(fragments, merge_at, differences, *copies, note, background))

    def _merge(self, pending: Pending) -> None:
        """Wait for a sync round, and move anchor and parameters by its mean."""
        result = self.commit(pending.background)
        if result is None:  # undone
            self.stats.undone += 1
            # Without overlap it is repeated at once, so that no worker's block is lost. With
            # overlap nothing has changed: the differences are sent when they are next due.
            self.regroup([] if pending.overlaps else pending.fragments)
            return
        self._record_result(result)
        if pending.note.step == self.schedule.start:  # sent as the present block began
            self.schedule.length = int(result.first_note.length)
        included = pending.note.included
        self.anchor.reset_frozen_memories()  # once more: parameters may freeze in between
        for difference in pending.differences:
            difference.merge(result, included)
        # The buffers and the state that the model has now, which may be other tensors than those
        # that were sent.
        buffers = by_index(self.buffer_tensors) if pending.buffers else {}
        for mean in pending.buffers:
            mean.copy_to(result, buffers)
        state = state_tensors(self.optimizer) if pending.state else {}
        for mean in pending.state if result.averages_state else []:
            mean.copy_to(result, state)
        self.anchor.all_gather_inner(pending.fragments)
        if not included:
            self._discard_own_values()
        if self.state == "reset" and self.schedule.fragments - 1 in pending.fragments:
            self._initial_state.restore()
        self.rounds += 1
        self.just_joined = False
        complete = len(pending.fragments) == self.schedule.fragments
        self.diverged = pending.overlaps or not complete
        self.regroup()

    def _discard_own_values(self) -> None:
        """Go back to the anchor, and contribute nothing to the rounds that are in flight."""
        self.anchor.restore_params()
        drop_nonfinite_state(self.optimizer)
        for pending in self.pending:
            pending.note = replace(pending.note, status=NOTHING_YET)

    def _end_warmup(self) -> None:
        """Make the first worker's parameters the anchor on every worker."""
        # Until that has succeeded there is no anchor: if the round is undone, the state transfer
        # takes one worker's parameters for all.
        self.has_anchor = False
        tensors = [*trainable_params(self.optimizer), *self.buffer_tensors]
        averaged = self.local_warmup and self.state.startswith("average")
        first = make_payloads(by_index(tensors), first_only=True)
        self.average_now(first, self._state_payloads() if averaged else [])
        if self.local_warmup and not averaged:
            self._initial_state.restore()
        self.has_anchor, self.diverged = True, False
        self.anchor.begin()
        self.restart_clock()
        self.regroup()

    # -- sync rounds ---------------------------------------------------------------------------

    def average_now(
        self, payloads: Sequence[TensorPayload], state: Sequence[TensorPayload] = ()
    ) -> RoundResult | None:
        """Average tensors in place over the workers, without anchor and outer step.

        Return None if the round was undone; the members have changed then. After a round that
        took place the caller calls `regroup`, once it has used the means.
        """
        finite = all(map(is_payload_finite, [*payloads, *state]))
        note = self._note(state, float(self._finite_on_all_ranks(finite)))
        copies: tuple[list[SnapshotPayload], list[SnapshotPayload]] = ([], [])
        if self.members.elastic:  # an undone round must leave the tensors as they were
            copies = [SnapshotPayload(p) for p in payloads], [SnapshotPayload(p) for p in state]
        background = self._start_round(copies[0] or payloads, [], copies[1] or state, note)
        result = self.commit(background)
        if result is None:
            self.stats.undone += 1
            self.regroup()
            return None
        # (without copies, the round has written to the tensors themselves)
        for mean, payload in zip(copies[0], payloads, strict=False):
            mean.copy_to(result, payload.tensors)
        for mean, payload in zip(copies[1] if result.averages_state else [], state, strict=False):
            mean.copy_to(result, payload.tensors)
        return result

    def _start_round(
        self,
        payloads: Sequence[Payload],
        buffers: Sequence[Payload],
        state: Sequence[Payload],
        note: Note,
    ) -> BackgroundSync:
        def sync_round(workers: RankGroup) -> RoundResult:
            return run_sync_round(workers, payloads, buffers, state, note)

        background = BackgroundSync(sync_round, self.members.workers, self._last)
        # A thread only where it is needed: with overlap, and in a crew, whose members are watched
        # while the round waits for their messages.
        if self.members.elastic or self.schedule.overlap:
            background.start()
            self._last = background
        else:
            background.run()
        return background

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        """Wait for a round, and for all workers to agree on it. None: it is undone."""
        begin = time.perf_counter()
        result = self.members.commit(background, moves_anchor)
        self.stats.waited += time.perf_counter() - begin
        return result

    def clock(self) -> list[float]:
        """Return the seconds and the steps since the time of a step began to be measured."""
        then, step = self._clock_start
        return [time.perf_counter() - then, self.steps - step]

    def restart_clock(self, seconds: float = 0.0, steps: float = 0) -> None:
        """Measure the time of a step from here on, as if `seconds` and `steps` had passed."""
        self._clock_start = (time.perf_counter() - seconds, self.steps - int(steps))

    def _note(self, state: Sequence[Payload], status: float) -> Note:
        now, (then, step) = time.perf_counter(), self._clock_start
        return Note(
            step=float(self.steps),
            status=status,
            options=self._options_checksum(),
            state_elements=float(sum(payload.length for payload in state)),
            seconds=(now - then) / max(self.steps - step, 1),
            lr=float(self.optimizer.param_groups[0].get("lr", 1.0)),
            length=float(self.schedule.length),
        )

    def _finite_on_all_ranks(self, finite: bool) -> bool:
        """Return whether `finite` holds on all ranks of this worker.

        A worker is in the mean with all its slices, or with none.
        """
        ranks = self.anchor.inner if self.anchor.inner.size > 1 else self.members.inner
        if ranks.size == 1:
            return finite
        device = next(p.device for group in self.optimizer.param_groups for p in group["params"])
        return all(flag == 1.0 for (flag,) in ranks.all_gather([float(finite)], device))

    def _options_checksum(self) -> float:
        """Return a checksum of the options, and of which parameters have been frozen since."""
        frozen = [i for i, param in enumerate(self.anchor.params) if not param.requires_grad]
        return fingerprint((self.fingerprint, frozen)) if frozen else self.fingerprint

    @property
    def buffer_tensors(self) -> list[Tensor]:
        """The model's buffers; none if each worker keeps its own."""
        return [] if self.buffers is None else self.buffers.tensors()

    def _buffer_payloads(self) -> list[TensorPayload]:
        return make_payloads(by_index(self.buffer_tensors), self.first_buffers_only)

    def _state_payloads(self) -> list[TensorPayload]:
        """Return the optimizer state that is averaged at the end of a block."""
        if self.state not in ("average", "average_moments"):
            return []
        only = MOMENTS if self.state == "average_moments" else None
        return make_payloads(state_tensors(self.optimizer, only))

    def _record_result(self, result: RoundResult) -> None:
        stats, included = self.stats, result.included
        stats.drift = Drift.of([result.squares[rank] for rank in included], result.square_of_mean)
        stats.workers = len(result.notes)
        if not self._compared and stats.drift.distance > 0:
            self._compared = True
            if moved_identically(result, stats.drift.cosine, self.anchor.codec.rounds):
                warn_identical_moves(len(included))
        numbers = self.members.numbers
        if len(numbers) != len(result.notes):  # a round that was restored from a checkpoint
            numbers = range(len(result.notes))
        noted = zip(numbers, result.notes, strict=True)
        stats.left_out = [number for number, note in noted if note.status == NOT_FINITE]
        stats.left_out_ever += len(stats.left_out)
        stats.seconds = max(note.seconds for note in result.notes)
        self.restart_clock()

    # -- elastic members -----------------------------------------------------------------------

    def regroup(self, retry: Sequence[int] = ()) -> None:
        """Let members leave and joiners in, if any do; then repeat an undone round.

        `retry` are the fragments of the undone round. It is repeated by those who are members
        now, so that no work of theirs is lost.
        """
        self.retry = list(retry)
        while self.members.regroup_due:
            self.pending.clear()  # they have changed nothing yet, and are sent again when due
            self._last = None
            self._regroups += 1
            self.members.regroup(self.version)
            self.anchor.reset_residuals()
            self.transfer_state()
        if self.retry:
            fragments, self.retry = self.retry, []
            self._send(fragments, self.steps)
            self._merge(self.pending.popleft())

    def transfer_state(self) -> None:
        """Send joiners the common state; all members agree that the joiners have it."""
        assert isinstance(self.members, ElasticMembers)
        if not self.members.crew.joiners:
            return
        transfer = StateTransfer(self.members, self._pack)
        took_place = self.commit(transfer.background, moves_anchor=False) is not None
        if took_place and transfer.received is not None:
            self._unpack(transfer.received)
            self.has_anchor = not self.local_warmup or self.steps >= self.warmup

    def _pack(self) -> bytes:
        """Return the common state, for joiners."""
        if self.steps <= self.warmup:  # no anchor yet: this worker's parameters take its place
            self.anchor.begin()
        file = io.BytesIO()
        state = {**self.common_state(), "retry": self.retry, "diverged": self.diverged}
        buffers = [buffer.detach() for buffer in self.buffer_tensors]
        torch.save({**state, "buffers": buffers}, file)
        return file.getvalue()

    def _unpack(self, data: bytearray) -> None:
        state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        self.load_common(state)
        with torch.no_grad():
            for buffer, value in zip(self.buffer_tensors, state["buffers"], strict=True):
                buffer.copy_(value)
        self.anchor.restore_params()
        # A joiner takes part in a round that is repeated, although it has nothing to contribute.
        self.retry, self.diverged, self.just_joined = state["retry"], state["diverged"], True
        self.restart_clock()

    @property
    def alone(self) -> bool:
        """Whether there is no other worker, and never will be."""
        return not self.members.elastic and self.members.workers.size == 1

    @property
    def version(self) -> int:
        """How far this worker is: the one with the highest version sends joiners its state."""
        return (self.rounds << 32) + self.steps if self.has_anchor else -1

    # -- state that is saved (`_state.py`) -----------------------------------------------------

    def common_state(self) -> dict[str, Any]:
        """Return the state that is equal on every worker."""
        return {
            **self.counters(),
            "order": memory_order(self.anchor.params),
            "anchor": [bucket.anchor for bucket in self.anchor.buckets],
            "memories": [bucket.memories for bucket in self.anchor.buckets],
        }

    def counters(self) -> dict[str, Any]:
        """Return the plain numbers of the common state."""
        return {
            "steps": self.steps,
            "rounds": self.rounds,
            "block": [self.schedule.start, self.schedule.length],
            "drift": [*astuple(self.stats.drift), self.stats.seconds],
        }

    def load_common(self, state: dict[str, Any]) -> None:
        for bucket, anchor, memories in zip(
            self.anchor.buckets, state["anchor"], state["memories"], strict=True
        ):
            bucket.anchor.copy_(anchor)
            for memory, value in zip(bucket.memories, memories, strict=True):
                memory.copy_(value)
        self.load_counters(state)

    def load_counters(self, state: dict[str, Any]) -> None:
        self.steps, self.rounds = state["steps"], state["rounds"]
        self.schedule.begin(*state["block"])
        *drift, self.stats.seconds = state["drift"]
        self.stats.drift = Drift(*drift)

    def restore_pending(self, saved: dict[str, Any]) -> None:
        """Restore a mean that arrived but was not merged when it was saved."""
        if not self.members.elastic:  # a crew sends its differences again when they are due
            self.pending.append(Pending.restored(saved, self.anchor))

    @property
    def initial_state(self) -> dict[Any, Any] | None:
        """The state that the inner optimizer will be reset to; None if it never will be."""
        in_local_warmup = self.local_warmup and self.steps < self.warmup
        resets = in_local_warmup or self.state == "reset"
        return self._initial_state.state if resets else None

    @initial_state.setter
    def initial_state(self, state: dict[Any, Any]) -> None:
        self._initial_state.state = copy.deepcopy(state)
