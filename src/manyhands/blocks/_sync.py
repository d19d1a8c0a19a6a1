"""`Sync`: send, commit, merge and undo sync rounds, and end a warm-up.

send      When a fragment is due, a sync round averages the difference from the anchor. With
          overlap, training continues meanwhile.
commit    All workers agree that the round took place (`averaging/_round.py`).
merge     The outer step moves anchor and parameters.
undo      A member was lost in the round. The remaining members repeat the round immediately; with
          overlap, the fragments are sent again when next due.
joiners   New members of a crew receive the common state (`_common_state.py`).
warm-up   The round after the last warm-up step makes the first anchor.
samples   With a `Cursor`, the round also commits the samples of the block (`_samples.py`).

`Sync.state` (`_block_state.py`) is the worker's place in this sequence.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyhands._ranks.stop_notice import stop_notice
from manyhands.blocks._anchor import Anchor, AnchorDifference
from manyhands.blocks._block_state import BlockState
from manyhands.blocks._common_state import CommonParts
from manyhands.blocks._samples import BlockSamples
from manyhands.blocks._schedule import Schedule
from manyhands.blocks.averaging._payload import (
    NO_CONTRIBUTION,
    NO_WORK,
    Extras,
    Payload,
    RoundResult,
    SnapshotPayload,
    TensorPayload,
    WorkerReport,
    are_finite,
    by_index,
    drop_nonfinite_state,
    fingerprint,
    is_payload_finite,
    make_payloads,
    state_tensors,
    trainable_params,
)
from manyhands.blocks.averaging._round import (
    BackgroundSync,
    ElasticMembers,
    Members,
    RoundStats,
    StateTransfer,
    StepClock,
    SyncRound,
)


@dataclass
class PendingRound:
    fragments: Sequence[int]
    merge_at: int  # merge the mean after this step of `Sync.now`
    differences: Sequence[AnchorDifference]
    buffers: Sequence[SnapshotPayload]
    state: Sequence[SnapshotPayload]  # of the inner optimizer
    report: WorkerReport  # of this worker
    background: BackgroundSync
    overlaps: bool  # whether training continues meanwhile
    mix: float | None  # see `AnchorDifference.merge`

    @property
    def diverges(self) -> bool:
        """Whether parameters may differ from the anchor after the merge."""
        return self.overlaps or self.mix not in (None, 0.0)

    def merge(self, result: RoundResult, anchor: Anchor, extras: Extras) -> None:
        anchor.reset_frozen()  # parameters may have been frozen since the send
        for difference in self.differences:
            difference.merge(result, self.report.included, self.mix)
        # Buffers and state may have been replaced by new tensors since the send.
        if self.buffers:
            buffers = by_index(extras.buffer_tensors())
            for mean in self.buffers:
                mean.copy_to(result, buffers)
        if self.state and result.averages_state:
            state = state_tensors(extras.optimizer)
            for mean in self.state:
                mean.copy_to(result, state)
        anchor.all_gather_inner(self.fragments)


class Sync:
    def __init__(
        self,
        members: Members,
        anchor: Anchor,
        schedule: Schedule,
        state: BlockState,
        extras: Extras,
        options: object,
        mix: float | None,
    ) -> None:
        self.mix = mix
        self.members = members
        self.anchor = anchor
        self.schedule = schedule
        self.state = state
        self.extras = extras
        self.clock = StepClock()
        self.stats = RoundStats()
        self.pending: deque[PendingRound] = deque()
        self.samples = BlockSamples(members, schedule)
        self.common = CommonParts(anchor, schedule, self.stats, extras, self.samples)
        self._options_checksum = fingerprint(options)

    # -- the life of a block -------------------------------------------------------------------

    def count_step(self) -> None:
        state = self.state
        if self.members.alone or state.steps < state.warmup:
            steps = state.steps + 1
        else:
            elapsed, _ = self.clock.elapsed(state.own)
            steps = self.schedule.count(state.steps, in_flight=state.in_flight > 0, elapsed=elapsed)
        self.state = state.step(steps, self.samples.end_step())

    @property
    def now(self) -> int:
        return self.state.own if self.schedule.every.own_steps else self.state.steps

    def after_step(self) -> None:
        step = self.state.steps
        if self.state.before_blocks:
            if step == self.state.warmup:
                self.state = self.state.end_warmup()
            self.regroup()
            return
        due = self.schedule.due(step)
        if self.state.newcomer and not due and self._is_awaited():
            self.regroup()
            return
        if self.schedule.ends(step):
            self.schedule.begin_next(step, self.stats.seconds)
        workers = self.members.workers
        while self.pending and self.pending[0].merge_at <= self.now:
            self._merge()
        # A merge may admit joiners, which have no values for fragments due before they joined.
        if due and self.members.workers is workers and self.anchor.buckets:
            self._send(due, self.now + self.schedule.overlap, self.mix)
            if not self.schedule.overlap:
                self._merge()

    def end_block(self) -> None:
        """With own steps, end this worker's block now, and complete the round."""
        # At an unscheduled sync round, workers are at different steps of a block, or just after
        # the block with the round completed or in flight.
        if self.schedule.taken > 0:
            joins = self.state.joins
            self.merge_pending()
            if self.state.joins == joins:  # else a state transfer put this worker in a new block
                self.state = self.state.end_block(self.schedule.end())
                self.after_step()

    def set_steps(self, step: int) -> None:
        self.merge_pending()
        self.state = self.state.continue_at(step)
        self.begin_block()
        self.restart_clock()

    def begin_block(self) -> None:
        start = self.schedule.every.first_start(max(self.state.steps, self.state.warmup))
        self.schedule.begin(start, self.schedule.length)

    def sync_now(self, *, closing: bool = False) -> None:
        """Merge all rounds in flight, then synchronize all fragments if diverged."""
        # `closing`: all members have arrived. If a merge admits joiners, they take part in the next
        # round.
        fragments = range(self.schedule.fragments if self.anchor.buckets else 0)
        if self.state.has_let_in and self.state.diverged and fragments and not closing:
            # The joiners are training and do not know about this round. End the generation: the
            # joiners notice at their next step (`_is_awaited`), and regroup for the round.
            assert isinstance(self.members, ElasticMembers)
            self.members.crew.settle(False)
            self.regroup(fragments)
            return
        joins = self.state.joins
        self.end_block()
        self.merge_pending(fragments)
        if self.state.diverged and fragments and self.state.joins == joins:
            self._send(fragments, self.now)
            self._merge()

    def close(self) -> None:
        assert isinstance(self.members, ElasticMembers)
        self.end_block()
        self.merge_pending()
        while self.state.diverged and self.anchor.buckets:
            if self.members.crew.close(self.state.steps):
                self.sync_now(closing=True)
            elif self.members.regroup_due:  # this worker was disconnected, and has reconnected
                self.regroup()
                continue
            elif self.state.anchor_in_use:
                self.anchor.restore_params()
                self.state = self.state.return_to_anchor()
            break

    def merge_pending(self, due: Sequence[int] = ()) -> None:
        while self.pending:
            self._merge(due)

    def restart_clock(self, seconds: float = 0.0, steps: float = 0) -> None:
        """Time steps from now, with this many seconds and steps already counted."""
        self.clock.restart(self.state.own, seconds, steps)

    @property
    def between_blocks(self) -> bool:
        """Whether the anchor contains all steps of this worker, except steps of an overlap."""
        into_block = self.schedule.into(self.state.steps)
        just_merged = not self.pending and into_block == self.schedule.overlap
        return just_merged or not self.state.diverged

    def seconds_to_merge(self) -> float:
        schedule = self.schedule
        steps = max(0, schedule.own + schedule.overlap - schedule.into(self.state.steps))
        seconds, taken = self.clock.elapsed(self.state.own)
        return steps * seconds / max(taken, 1)

    def received_tensors(self) -> list[Tensor]:
        if not self.state.joined_late:
            return []
        return [*self.anchor.params, *self.extras.buffer_tensors()]

    # -- sync rounds of fragments --------------------------------------------------------------

    def _send(self, fragments: Sequence[int], merge_at: int, mix: float | None = None) -> None:
        self.anchor.reset_frozen()
        overlaps = merge_at > self.now
        # With overlap, parameters change during the round; a crew may undo the round; and mixing
        # needs the whole result.
        kept_apart = overlaps or self.members.elastic or mix is not None
        differences = self.anchor.differences(fragments)
        if kept_apart:
            for difference in differences:
                difference.defer_outer_step(copied=overlaps)
        ends_block = self.schedule.fragments - 1 in fragments
        buffers: list[TensorPayload] = []
        state: list[TensorPayload] = []
        if ends_block:
            buffers = self.extras.buffer_payloads()
            if not self.state.state_dropped:  # dropped state is incomplete until the next step
                state = self.extras.state_payloads()
        finite = are_finite(self.anchor.params) and all(map(is_payload_finite, [*buffers, *state]))
        contributes = self.state.contributes
        report = self._write_report(finite, state, ends_block=ends_block, contributes=contributes)
        weight = self.samples.weight(self.state.work, report.drawn)
        report = report.with_work(self.state.work)._replace(weight=weight)
        kept_buffers: list[SnapshotPayload] = []
        kept_state: list[SnapshotPayload] = []
        if kept_apart:
            kept_buffers = [payload.snapshot() for payload in buffers]
            kept_state = [payload.snapshot() for payload in state]
        sent = [*differences, *(kept_buffers or buffers)]
        self.pending.append(
            PendingRound(
                fragments,
                merge_at,
                differences,
                kept_buffers,
                kept_state,
                report,
                self._start(sent, kept_state or state, report),
                overlaps,
                mix,
            )
        )
        self.state = self.state.send(fragments)

    def _write_report(
        self,
        finite: bool,
        state: Sequence[Payload],
        *,
        ends_block: bool = True,
        contributes: bool = True,
    ) -> WorkerReport:
        stop = stop_notice.received
        inner = self.members.inner
        if inner.size > 1:
            # The mean contains either all slices of a worker or none.
            flags = inner.all_gather([float(finite), float(stop)], inner.any_device)
            all_finite, stops = zip(*flags, strict=True)
            finite = all(all_finite)
            stop = any(stops)
        # Parameters may have been frozen after the comparison of options.
        frozen = [i for i, param in enumerate(self.anchor.params) if not param.requires_grad]
        return WorkerReport(
            step=float(self.state.steps),
            status=float(finite) if contributes else NO_CONTRIBUTION,
            options=fingerprint((self._options_checksum, frozen, self.samples.position)),
            state_elements=float(sum(payload.length for payload in state)),
            seconds=self.clock.seconds_per_step(self.state.own),
            lr=float(self.extras.optimizer.param_groups[0].get("lr", 1.0)),
            length=float(self.schedule.length),
            drawn=float(self.samples.account.taken if ends_block else 0),
            stop=float(stop),
        )

    def _start(
        self, payloads: Sequence[Payload], state: Sequence[Payload], report: WorkerReport
    ) -> BackgroundSync:
        before = self.pending[-1].background if self.pending else None
        background = BackgroundSync(
            lambda workers: SyncRound(workers, report).run(payloads, state),
            self.members.workers,
            before,
        )
        # A crew monitors its members while the round waits for messages.
        if self.members.elastic or self.schedule.overlap > 0:
            background.start()
        else:
            background.run()
        return background

    def _commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        """Wait until all workers agree on a round. Return None if it is undone."""
        begin = time.perf_counter()
        result = self.members.commit(background, moves_anchor)
        self.stats.waited += time.perf_counter() - begin
        if result is None and moves_anchor:
            self.stats.undone += 1
        return result

    def _merge(self, due: Sequence[int] = ()) -> None:
        pending = self.pending.popleft()
        try:
            result = self._commit(pending.background)
        except BaseException:  # such as RanksDisagree: do not repeat the round
            self.state = self.state.undo()
            raise
        if result is None:
            # With overlap the anchor is unchanged; differences are sent when next due.
            self.state = self.state.undo([] if pending.overlaps else pending.fragments)
            self.regroup(due)
            if pending.overlaps:
                self.restart_clock()  # the elapsed time includes waiting
            return
        report = pending.report
        self.stats.record(result, self.members.numbers, self.anchor.codec)
        ends_block = self.schedule.fragments - 1 in pending.fragments
        if ends_block:
            self.samples.commit(result, int(report.step))
        if report.step == self.schedule.start:  # sent at the start of the current block
            self.schedule.follow_round(result, self.members.numbers, self.members.number)
        pending.merge(result, self.anchor, self.extras)
        work = report.work
        if not report.included:
            work = NO_WORK
            self._discard_own_values()
        if self.extras.state == "reset" and ends_block:
            self.extras.reset_state()
        complete = len(pending.fragments) == self.schedule.fragments
        self.state = self.state.commit(complete=complete, diverges=pending.diverges, work=work)
        for later in self.pending:  # these rounds include the work just merged
            later.report = later.report.with_work(later.report.work.minus(work))
        self.regroup(due)
        self.restart_clock()

    def _discard_own_values(self) -> None:
        self.anchor.restore_params()
        self.state = self.state.drop_steps()
        if drop_nonfinite_state(self.extras.optimizer):
            self.state = replace(self.state, state_dropped=True)
        for pending in self.pending:
            pending.report = pending.report.with_work(NO_WORK)._replace(status=NO_CONTRIBUTION)

    # -- sync rounds of plain values -----------------------------------------------------------

    def _average_once(
        self,
        payloads: Sequence[TensorPayload],
        state: Sequence[TensorPayload] = (),
        *,
        contributes: bool = True,
    ) -> RoundResult | None:
        """Average tensors in place. Return None if the round was undone: `regroup` is due.

        A worker that does not contribute receives the mean of the other workers.
        """
        everything = [*payloads, *state]
        finite = all(map(is_payload_finite, everything))
        report = self._write_report(finite, state, contributes=contributes)
        copies: list[SnapshotPayload] = []
        if self.members.elastic:  # an undone round must not change the tensors
            copies = [payload.snapshot() for payload in everything]
        count = len(payloads)
        sent = copies[:count] or payloads
        result = self._commit(self._start(sent, copies[count:] or state, report))
        if result is None:
            return None
        if not result.averages_state:
            copies = copies[:count]
        # (without copies, the round wrote to the tensors directly)
        for mean, payload in zip(copies, everything, strict=False):
            mean.copy_to(result, payload.tensors)
        self.stats.stop = any(report.stop for report in result.reports)
        return result

    @torch.no_grad()
    def average_gradients(self, params: Sequence[Tensor]) -> bool:
        """Set every gradient to the workers' mean, and return whether the mean is usable.

        If no worker has a gradient for a parameter, the gradient remains None. After a state
        transfer, this worker's gradients belong to old parameters and are excluded. If the transfer
        ended the warm-up, there is no mean.
        """
        # Workers may use different parameters but must send equal payloads. Zeros replace missing
        # gradients, and `present` says which gradients exist.
        grads = []
        for param in params:
            grads.append(torch.zeros_like(param) if param.grad is None else param.grad)
        present = torch.tensor([float(param.grad is not None) for param in params])
        payloads = make_payloads(by_index([*grads, present]))
        joins = self.state.joins
        self.samples.account.step()  # this mean includes the samples of the coming step
        result = self._average_once(payloads)
        while result is None:
            self.regroup()  # a member was lost: repeat with the remaining members
            if not self.state.steps_together:
                return False
            result = self._average_once(payloads, contributes=self.state.joins == joins)
        self.samples.commit(result, self.state.steps + 1)
        # The mean of `present` is positive if any worker has a gradient.
        for param, grad, anywhere in zip(params, grads, present.tolist(), strict=True):
            if param.grad is None and anywhere:
                param.grad = grad
        return bool(result.included)

    def _begin_anchor(self) -> None:
        """Make the first worker's parameters the first anchor, at the end of a warm-up."""
        tensors = [*trainable_params(self.extras.optimizer), *self.extras.buffer_tensors()]
        state = self.extras.state_payloads() if self.state.local_warmup else []
        result = self._average_once(make_payloads(by_index(tensors), first_only=True), state)
        if result is None:  # `regroup` repeats the round
            return
        self.samples.commit(result, self.state.steps)
        self._reset_after_local_warmup()
        self.state = self.state.begin_anchor()
        self.anchor.begin()
        if isinstance(self.members, ElasticMembers):
            self.members.crew.begin_blocks()
        self.restart_clock()

    def _reset_after_local_warmup(self) -> None:
        if self.state.local_warmup and not self.extras.averages_state:
            self.extras.reset_state()

    # -- elastic members -----------------------------------------------------------------------

    def regroup(self, due: Sequence[int] = ()) -> None:
        """Change members if necessary, then repeat an undone round.

        With new members, synchronize the fragments `due`. Also end a warm-up.
        """
        self._change_members(due)
        while self.state.ends_warmup:
            self._begin_anchor()
            self._change_members(due)
        if self.state.retry:
            self._send(self.state.retry, self.now)
            self._merge(due)
        self.samples.hand_out(self.state)

    def _change_members(self, due: Sequence[int]) -> None:
        while self.members.regroup_due:
            assert isinstance(self.members, ElasticMembers)
            self.pending.clear()  # not merged; sent again when due
            self.samples.account.due = True  # redistribute the remaining samples
            self.state = self.state.regroup(due)
            self.members.regroup(self.state.version)
            self.anchor.reset_residuals()
            self.transfer_state()

    def _is_awaited(self) -> bool:
        """Return whether the members wait in a round at the step at which this worker joined."""
        # Ranks of a worker could notice this after different steps, so they wait until their next
        # round is due.
        if self.members.inner.size > 1 or not isinstance(self.members, ElasticMembers):
            return False
        return self.members.crew.is_awaited(self.state.steps)

    def transfer_state(self) -> None:
        assert isinstance(self.members, ElasticMembers)
        if not self.members.crew.joiners:
            return
        transfer = StateTransfer(self.members, lambda: self.common.pack(self.state))
        if self._commit(transfer.background, moves_anchor=False) is None:
            return
        if transfer.received is None:
            self.state = replace(self.state, has_let_in=True)
            return
        before = self.state
        self.state = self.common.take_over(transfer.received, before)
        if self.state.anchor_in_use and not before.anchor_in_use:
            self._reset_after_local_warmup()  # this worker missed the round that ended it
        self.restart_clock()
