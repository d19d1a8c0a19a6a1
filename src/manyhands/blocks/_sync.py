"""Run the life of a block: decide when a worker synchronizes, and apply the mean.

send      the schedule says that a fragment is due: a sync round averages its difference from the
          anchor, at once or, with overlap, while training goes on
plan      with `Seconds(..., own_steps=True)` the reports of a round say how many steps each worker
          takes in the next block. A worker that becomes slower in a block ends it early: every
          worker takes part in one round a block, and its report says how many steps it took
commit    all workers agree that the round took place (`averaging/_round.py`)
merge     the outer step moves the anchor, and the parameters with it
undo      a member was lost in the round. The remaining members repeat it at once; a round that
          ran in the background is sent again when it is next due
joiners   a crew's new members receive the common state (`_common_state.py`)
warm-up   the round after its last step makes the first anchor, among the members of that moment
samples   with a `Cursor`, the samples that were taken are committed with the round (`_samples.py`)

The place of a worker in this life is a value, `Sync.state` (`_block_state.py`). A method here
carries out a change of that value: it sends, waits, and moves anchor and parameters.
(`blocks/__init__.py` defines block, sync round, anchor and fragment.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from manyhands._ranks.stop_notice import stop_notice
from manyhands.blocks._anchor import Anchor, AnchorDifference, ParamWatch
from manyhands.blocks._block_state import BlockState
from manyhands.blocks._common_state import CommonParts
from manyhands.blocks._samples import BlockSamples
from manyhands.blocks._schedule import Schedule
from manyhands.blocks.averaging._payload import (
    NO_WORK,
    NOTHING_YET,
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
    run_sync_round,
)


@dataclass
class Pending:
    """Fragments in flight, and with the last fragment of a block the buffers and the state."""

    fragments: Sequence[int]
    merge_at: int  # the step, as `Sync.now` counts, after which the mean is merged
    differences: Sequence[AnchorDifference]
    buffers: Sequence[SnapshotPayload]
    state: Sequence[SnapshotPayload]  # of the inner optimizer
    report: WorkerReport  # as this worker sent it
    background: BackgroundSync
    overlaps: bool = True  # whether training goes on while the fragments travel

    def merge(self, result: RoundResult, anchor: Anchor, extras: Extras) -> None:
        """Move anchor and parameters by the mean, and set buffers and state to their means."""
        anchor.reset_frozen()  # once more: parameters may have frozen since it was sent
        for difference in self.differences:
            difference.merge(result, self.report.included)
        # The buffers and the state that the model has now, which may be other tensors than those
        # that were sent.
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
    """Synchronize this worker's parameters with the other workers': hold all sync rounds."""

    def __init__(
        self,
        members: Members,
        anchor: Anchor,
        schedule: Schedule,
        state: BlockState,
        extras: Extras,
        options: object,
    ) -> None:
        self.members = members
        self.anchor = anchor
        self.schedule = schedule
        self.state = state
        self.extras = extras
        self.clock = StepClock()
        self.stats = RoundStats()
        self.pending: deque[Pending] = deque()
        self.samples = BlockSamples(members, schedule)
        self.common = CommonParts(anchor, schedule, self.stats, extras, self.samples)
        self._options_checksum = fingerprint(options)
        self._watch = ParamWatch(anchor)

    # -- the life of a block -------------------------------------------------------------------

    def before_step(self) -> None:
        """Warn once if a block begins and the parameters are not at the anchor."""
        if self.state.anchor_in_use and not self.state.diverged:
            self._watch.check()

    def note_params(self) -> None:
        """Note the parameters after a step, if they are at the anchor."""
        if not self.state.diverged:
            self._watch.note()

    def count_step(self) -> None:
        """Count a step that the optimizer has taken, or left out."""
        state = self.state
        if self.alone or state.steps < state.warmup:
            steps = state.steps + 1
        else:
            elapsed, _ = self.clock.elapsed(state.own)
            steps = self.schedule.count(state.steps, in_flight=state.in_flight > 0, elapsed=elapsed)
        self.state = state.step(steps, self.samples.end_step())

    @property
    def now(self) -> int:
        """This worker's count of steps, by which it merges: the common one, or its own."""
        return self.state.own if self.schedule.every.own_steps else self.state.steps

    def after_step(self) -> None:
        """Send and merge the fragments that are due after the step that was counted."""
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
        # A merge may let joiners in, and they have not computed what was due before they came.
        if due and self.members.workers is workers and self.anchor.buckets:
            self._send(due, self.now + self.schedule.overlap)
            if not self.schedule.overlap:
                self._merge()

    def end_block(self) -> None:
        """If workers take different steps: end this worker's block now, and hold its round."""
        # A call for a sync round outside of the schedule finds workers at different steps of one
        # block, and some just after it: these have held the block's round, or have it in flight.
        if self.schedule.unfinished:
            joins = self.state.joins
            self.merge_pending()
            if self.state.joins == joins:  # not if it came too late, and is in another block now
                self.state = self.state.end_block(self.schedule.end())
                self.after_step()

    def set_steps(self, step: int) -> None:
        """Continue as after `step` steps: merge the rounds in flight, and begin the block there."""
        self.merge_pending()
        self.state = self.state.continue_at(step)
        self.begin_block()
        self.restart_clock()

    def begin_block(self) -> None:
        """Enter the block that the current step is in, when its steps were not taken here."""
        start = self.schedule.every.first_start(max(self.state.steps, self.state.warmup))
        self.schedule.begin(start, self.schedule.length)

    def sync_now(self, *, closing: bool = False) -> None:
        """Merge all that is in flight, and then synchronize all fragments if any has diverged."""
        # `closing`: all members have said that they are here.
        # Joiners that come as a round is merged take part in the round that follows. This worker
        # does not if it came too late: the other members have held that round, and train on.
        fragments = range(self.schedule.fragments if self.anchor.buckets else 0)
        if self.state.has_let_in and self.state.diverged and fragments and not closing:
            # The joiners train already, and cannot know of this round. So the generation ends. They
            # notice that in their next steps (`_is_awaited`), and the next generation begins with
            # the round.
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
        """Hold a last sync round if the crew's other members are done, too."""
        # If they train on, this worker's last block is lost, as if it had died, and its parameters
        # go back to the anchor.
        assert isinstance(self.members, ElasticMembers)
        self.end_block()
        self.merge_pending()
        while self.state.diverged and self.anchor.buckets:
            if self.members.crew.close(self.state.steps):
                self.sync_now(closing=True)
            elif self.members.regroup_due:  # it was cut off meanwhile, and is back
                self.regroup()
                continue
            elif self.state.anchor_in_use:
                self.anchor.restore_params()
                self.state = self.state.return_to_anchor()
            break

    def merge_pending(self, due: Sequence[int] = ()) -> None:
        """Wait for all rounds in flight, and merge them. Fragments that are `due` follow."""
        while self.pending:
            self._merge(due)

    def restart_clock(self, seconds: float = 0.0, steps: float = 0) -> None:
        """Measure the time of a step from here on, as if `seconds` and `steps` had passed."""
        self.clock.restart(self.state.own, seconds, steps)

    @property
    def between_blocks(self) -> bool:
        """Whether no steps of this worker are missing in the anchor, but those of an overlap."""
        into_block = self.schedule.into(self.state.steps)
        just_merged = not self.pending and into_block == self.schedule.overlap
        return just_merged or not self.state.diverged

    def seconds_to_merge(self) -> float:
        """Return about how long this block's steps still take to be in the anchor, for a stop."""
        schedule = self.schedule
        steps = max(0, schedule.own + schedule.overlap - schedule.into(self.state.steps))
        seconds, taken = self.clock.elapsed(self.state.own)
        return steps * seconds / max(taken, 1)

    def received_tensors(self) -> list[Tensor]:
        """Return the tensors with the run's state, if this worker has just come into a run."""
        if not self.state.joined_late:
            return []
        return [*self.anchor.params, *self.extras.buffer_tensors()]

    @property
    def alone(self) -> bool:
        """Whether there is no other worker, and never will be."""
        return self.members.alone

    # -- a sync round about fragments ----------------------------------------------------------

    def _send(self, fragments: Sequence[int], merge_at: int) -> None:
        """Begin a sync round about these fragments: cut payloads, report, and start it."""
        self.anchor.reset_frozen()
        overlaps = merge_at > self.now
        # Parameters change while a round is in flight, and a crew may undo a round.
        kept_apart = overlaps or self.members.elastic
        differences = self.anchor.differences(fragments)
        if kept_apart:
            for difference in differences:
                difference.keep_apart(copied=overlaps)
        ends_block = self.schedule.fragments - 1 in fragments
        buffers: list[TensorPayload] = []
        state: list[TensorPayload] = []
        if ends_block:
            buffers = self.extras.buffer_payloads()
            if not self.state.state_dropped:  # it is not complete before the next step
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
            Pending(
                fragments,
                merge_at,
                differences,
                kept_buffers,
                kept_state,
                report,
                self._start(sent, kept_state or state, report),
                overlaps,
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
        """Return this worker's report in a round that averages this optimizer state."""
        # `finite`: whether all its numbers are, on this rank. The samples of a block are committed
        # with the round that `ends_block`.
        stop = stop_notice.received
        inner = self.members.inner
        if inner.size > 1:
            # A worker is in the mean with all its slices, or with none.
            flags = inner.all_gather([float(finite), float(stop)], inner.any_device)
            all_finite, stops = zip(*flags, strict=True)
            finite = all(all_finite)
            stop = any(stops)
        # Parameters may have been frozen since the options were compared.
        frozen = [i for i, param in enumerate(self.anchor.params) if not param.requires_grad]
        return WorkerReport(
            step=float(self.state.steps),
            status=float(finite) if contributes else NOTHING_YET,
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
        """Begin a round in a thread, or hold it at once where no thread is needed."""
        sync_round = partial(run_sync_round, payloads=payloads, state=state, report=report)
        before = self.pending[-1].background if self.pending else None
        background = BackgroundSync(sync_round, self.members.workers, before)
        # A crew's members are watched while the round waits for their messages.
        if self.members.elastic or self.schedule.overlap > 0:
            background.start()
        else:
            background.run()
        return background

    def _commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        """Wait for a round, and for all workers to agree on it. None: it is undone."""
        begin = time.perf_counter()
        result = self.members.commit(background, moves_anchor)
        self.stats.waited += time.perf_counter() - begin
        if result is None and moves_anchor:
            self.stats.undone += 1
        return result

    def _merge(self, due: Sequence[int] = ()) -> None:
        """Wait for the oldest round in flight, and move anchor and parameters by its mean."""
        pending = self.pending.popleft()
        try:
            result = self._commit(pending.background)
        except BaseException:  # an error, such as workers that disagree: no round is repeated
            self.state = self.state.undo()
            raise
        if result is None:
            # Without overlap it is repeated at once, so that no worker's block is lost. With
            # overlap the anchor is unchanged: the differences are sent when they are next due.
            self.state = self.state.undo([] if pending.overlaps else pending.fragments)
            self.regroup(due)
            if pending.overlaps:
                self.restart_clock()  # the time until here was also spent waiting
            return
        report = pending.report
        self.stats.record(result, self.members.numbers, self.anchor.codec)
        ends_block = self.schedule.fragments - 1 in pending.fragments
        if ends_block:
            self.samples.commit(result, int(report.step))
        if report.step == self.schedule.start:  # sent as the present block began
            self.schedule.follow_round(result, self.members.numbers, self.members.number)
        pending.merge(result, self.anchor, self.extras)
        work = report.work
        if not report.included:
            work = NO_WORK
            self._discard_own_values()
        if self.extras.state == "reset" and ends_block:
            self.extras.reset_state()
        complete = len(pending.fragments) == self.schedule.fragments
        self.state = self.state.commit(complete=complete, overlaps=pending.overlaps, work=work)
        for later in self.pending:  # sent with this work too, which is merged now
            later.report = later.report.with_work(later.report.work.minus(work))
        self.regroup(due)
        self.restart_clock()

    def _discard_own_values(self) -> None:
        """Return to the anchor, and do not contribute to the rounds in flight."""
        self.anchor.restore_params()
        self.state = self.state.drop_steps()
        if drop_nonfinite_state(self.extras.optimizer):
            self.state = replace(self.state, state_dropped=True)
        for pending in self.pending:
            pending.report = pending.report.with_work(NO_WORK)._replace(status=NOTHING_YET)

    # -- a sync round about values as they are -------------------------------------------------

    def _average_once(
        self,
        payloads: Sequence[TensorPayload],
        state: Sequence[TensorPayload] = (),
        *,
        contributes: bool = True,
    ) -> RoundResult | None:
        """Average tensors in place over the workers, without anchor and outer step.

        None: the round was undone, and `regroup` is due, because the members change. A worker that
        does not contribute gets the mean of the other workers.
        """
        everything = [*payloads, *state]
        finite = all(map(is_payload_finite, everything))
        report = self._write_report(finite, state, contributes=contributes)
        copies: list[SnapshotPayload] = []
        if self.members.elastic:  # an undone round must leave the tensors as they were
            copies = [payload.snapshot() for payload in everything]
        count = len(payloads)
        sent = copies[:count] or payloads
        result = self._commit(self._start(sent, copies[count:] or state, report))
        if result is None:
            return None
        if not result.averages_state:
            copies = copies[:count]
        # (without copies, the round has written to the tensors themselves)
        for mean, payload in zip(copies, everything, strict=False):
            mean.copy_to(result, payload.tensors)
        self.stats.stop = any(report.stop for report in result.reports)
        return result

    @torch.no_grad()
    def average_gradients(self, params: Sequence[Tensor]) -> bool:
        """Set every gradient to the workers' mean; return whether there is one to step along.

        The steps of a shared warm-up follow it. A worker whose gradients are not finite is left
        out, and gets the mean of the other workers. A parameter that has no gradient on any worker
        stays without one.

        The gradients of a worker that came too late are of parameters that the other workers have
        left: they are not in the mean, and after the warm-up there is none.
        """
        # Workers may use different parameters, but have to send the same payloads. So zeros stand
        # for a missing gradient, and one more number for each parameter says whether it has one.
        grads = []
        for param in params:
            grads.append(torch.zeros_like(param) if param.grad is None else param.grad)
        present = torch.tensor([float(param.grad is not None) for param in params])
        payloads = make_payloads(by_index([*grads, present]))
        joins = self.state.joins
        self.samples.account.step()  # the samples of the step that follows are in this mean
        result = self._average_once(payloads)
        while result is None:
            self.regroup()  # a member was lost: repeat with the remaining members
            if not self.state.steps_together:
                return False
            result = self._average_once(payloads, contributes=self.state.joins == joins)
        self.samples.commit(result, self.state.steps + 1)
        # `present` has the mean over the workers: above 0 if any of them has a gradient.
        for param, grad, anywhere in zip(params, grads, present.tolist(), strict=True):
            if param.grad is None and anywhere:
                param.grad = grad
        return bool(result.included)

    def _begin_anchor(self) -> None:
        """End a warm-up by a round: all take the first worker's parameters as the first anchor."""
        tensors = [*trainable_params(self.extras.optimizer), *self.extras.buffer_tensors()]
        state = self.extras.state_payloads() if self.state.local_warmup else []
        result = self._average_once(make_payloads(by_index(tensors), first_only=True), state)
        if result is None:  # `regroup` comes back to it
            return
        self.samples.commit(result, self.state.steps)
        self._reset_after_local_warmup()
        self.state = self.state.begin_anchor()
        self.anchor.begin()
        self.members.begin_blocks()
        self.restart_clock()

    def _reset_after_local_warmup(self) -> None:
        """End a local warm-up: reset the optimizer's state, which is of parameters given up."""
        if self.state.local_warmup and not self.extras.averages_state:
            self.extras.reset_state()

    # -- elastic members -----------------------------------------------------------------------

    def regroup(self, due: Sequence[int] = ()) -> None:
        """Let members leave and joiners in, if any do; then hold the next round if it is due now.

        That is an undone round, which the present members repeat so that no worker's steps are
        lost, the round that ends a warm-up, or with new members one about the fragments `due`.
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
        """Let lost members leave and joiners in, and send these the state; until none is due."""
        while self.members.regroup_due:
            assert isinstance(self.members, ElasticMembers)
            self.pending.clear()  # they are not merged yet, and are sent again when due
            self.samples.account.due = True  # other members share the remaining samples
            self.state = self.state.regroup(due)
            self.members.regroup(self.state.version)
            self.anchor.reset_residuals()
            self.transfer_state()

    def _is_awaited(self) -> bool:
        """Return whether the members hold a round at the step at which this worker was let in."""
        # (The processes of one worker may see it after different steps: they come when their next
        # round is due.) It gets the members' state again, and gives up its steps.
        if self.members.inner.size > 1 or not isinstance(self.members, ElasticMembers):
            return False
        return self.members.crew.is_awaited(self.state.steps)

    def transfer_state(self) -> None:
        """Send joiners the common state; all members agree that the joiners have it."""
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
            self._reset_after_local_warmup()  # it comes too late for the round that ended it
        self.restart_clock()
