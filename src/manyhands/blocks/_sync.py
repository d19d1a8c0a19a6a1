"""The life of a block: when a worker synchronizes, and what becomes of the mean.

send      the schedule says that a fragment is due: a sync round averages its difference from the
          anchor, at once or, with overlap, while training goes on
plan      with `Seconds(..., own_steps=True)` the reports of a round say how many steps each worker
          takes in the next block. A worker that becomes slower in a block ends it early: every
          worker takes part in one round a block, and its report says how many steps it took
commit    all workers agree that the round took place (`averaging/_round.py`)
merge     the outer step moves the anchor, and the parameters with it
undo      a member was lost in the round. The members that are left repeat it at once; a round that
          ran in the background is sent again when it is next due
joiners   a crew's new members receive the common state (`_common_state.py`)
warm-up   the round after its last step makes the first anchor, among the members of that moment
samples   with a `Cursor`, the samples that were taken are committed with the round (`_samples.py`)

Where a worker is in this life is a value, `Sync.state` (`_block_state.py`). A method here does what
a change of that value stands for: it sends, waits, and moves anchor and parameters.
(`blocks/__init__.py` says what a block, a sync round, the anchor and a fragment are.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.stop_notice import stop_notice
from manyhands._tensors.flat import versions_of
from manyhands.blocks._anchor import (
    Anchor,
    AnchorDifference,
    OverlappedDifference,
    StagedDifference,
)
from manyhands.blocks._block_state import BlockState
from manyhands.blocks._checks import (
    moved_identically,
    warn_different_rates,
    warn_identical_moves,
    warn_moved,
)
from manyhands.blocks._common_state import CommonParts
from manyhands.blocks._samples import BlockSamples
from manyhands.blocks._schedule import Every, Schedule
from manyhands.blocks.averaging._payload import (
    NOTHING_YET,
    ArrivedMean,
    Extras,
    GradientPayloads,
    InitialState,
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
from manyhands.blocks.averaging._work import NO_WORK


@dataclass
class Pending:
    """Fragments in flight, and what travels with the last fragment of a block."""

    fragments: Sequence[int]
    merge_at: int  # the step, as `Sync.now` counts, after which the mean is merged
    differences: Sequence[AnchorDifference]
    buffers: Sequence[ArrivedMean]
    state: Sequence[ArrivedMean]  # of the inner optimizer
    report: WorkerReport  # as this worker sent it
    background: BackgroundSync

    @property
    def overlaps(self) -> bool:
        """Whether training goes on while the fragments travel."""
        return isinstance(self.differences[0], OverlappedDifference)

    def merge(self, result: RoundResult, anchor: Anchor, extras: Extras) -> None:
        """Move anchor and parameters by the mean, and set buffers and state to their means."""
        anchor.reset_frozen()  # once more: parameters may have frozen since it was sent
        for difference in self.differences:
            difference.merge(result, self.report.included)
        # The buffers and the state that the model has now, which may be other tensors than those
        # that were sent.
        buffers = by_index(extras.buffer_tensors()) if self.buffers else {}
        for mean in self.buffers:
            mean.copy_to(result, buffers)
        state = state_tensors(extras.optimizer) if self.state else {}
        for mean in self.state if result.averages_state else []:
            mean.copy_to(result, state)
        anchor.all_gather_inner(self.fragments)


class Sync:
    """Keeps this worker's parameters and the other workers' together: it holds all sync rounds."""

    def __init__(
        self,
        optimizer: Optimizer,
        members: Members,
        anchor: Anchor,
        every: Every,
        schedule: Schedule,
        state: BlockState,
        extras: Extras,
        options: object,
    ) -> None:
        self.optimizer = optimizer
        self.members = members
        self.anchor = anchor
        self.every = every
        self.schedule = schedule
        self.state = state
        self.extras = extras
        # The ranks that make up this worker: in a crew, or in a process group.
        self._inner = anchor.inner if anchor.inner.size > 1 else members.inner
        self.clock = StepClock()
        self.stats = RoundStats()
        # A thread only where it is needed: with overlap, and in a crew, whose members are watched
        # while the round waits for their messages.
        self._threaded = members.elastic or schedule.overlap > 0
        self._last: BackgroundSync | None = None  # the round that the next one waits for
        self.pending: deque[Pending] = deque()
        self.samples = BlockSamples(members, every, schedule)
        self.common = CommonParts(anchor, schedule, self.stats, extras, self.samples)
        self._options_checksum = fingerprint(options)
        self.regroups = 0  # how often the members have changed
        self.joins = 0  # how often this worker has received the others' state
        self._let_in_at = -1  # own steps when others have received the state
        self._came_at = -1  # own steps when this worker came into a run under way
        self._due_after_merges: Sequence[int] = ()  # fragments that `sync_now` is about to send
        self._state_dropped_at = -1  # own steps when a state that was not finite was dropped
        self._compared = False  # whether the first block was searched for identical moves
        self._warned_of_rates = False  # of learning rates that are not the same
        self._highest_rate = 0.0  # of all workers and rounds
        self._warned_of_moves = False  # of parameters that were not at the anchor
        self._versions: list[int] = []  # torch's counts of changes to the parameters
        resets = extras.state == "reset" or state.in_local_warmup
        self.initial_state = InitialState(optimizer, needed=resets)

    # -- the life of a block -------------------------------------------------------------------

    def before_step(self) -> None:
        """Warn once if a block begins and the parameters are not at the anchor."""
        if self._warned_of_moves or self.state.diverged or not self.state.anchor_in_use:
            return
        if versions_of(self.anchor.params) != self._versions and self.anchor.moved():
            self._warned_of_moves = True
            warn_moved()

    def note_params(self) -> None:
        """Note the parameters as they are, so that only a change is compared with the anchor."""
        if not self.state.diverged:
            self._versions = versions_of(self.anchor.params)

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
        return self.state.own if self.every.own_steps else self.state.steps

    def after_step(self) -> None:
        """Send and merge the fragments that are due after the step that was counted."""
        step = self.state.steps
        regroups = self.regroups
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
            self.schedule.begin_next(step, self.every, self.stats.seconds)
        while self.pending and self.pending[0].merge_at <= self.now:
            self._merge()
        # A merge may let joiners in, and they have not computed what was due before they came.
        same_members = self.regroups == regroups
        if due and same_members and self.anchor.buckets:
            self._send(due, self.now + self.schedule.overlap)
            if not self.schedule.overlap:
                self._merge()

    def end_block(self) -> None:
        """If workers take steps of their own: end this worker's block now, and hold its round."""
        # A call for a sync round outside of the schedule finds workers at different steps of one
        # block, and some just after it: these have held the block's round, or have it in flight.
        if self.schedule.unfinished:
            joins = self.joins
            self.merge_pending()
            if self.joins == joins:  # not if it came too late, and is in another block now
                self.state = self.state.end_block(self.schedule.end())
                self.after_step()

    def set_steps(self, step: int) -> None:
        """Continue as after `step` steps: merge what is in flight, and begin the block there."""
        self.merge_pending()
        self.state = self.state.continue_at(step)
        self.begin_block()
        self.restart_clock()

    def begin_block(self) -> None:
        """Enter the block that the current step is in, when its steps were not taken here."""
        start = self.every.first_start(max(self.state.steps, self.state.warmup))
        self.schedule.begin(start, self.schedule.length)

    def sync_now(self, *, closing: bool = False) -> None:
        """Merge all that is in flight, and then synchronize all fragments if any has diverged."""
        # `closing`: all members have said that they are here.
        # Joiners that come as something is merged take part in the round that follows. This worker
        # does not if it came too late: the others have held theirs, and train on.
        fragments = range(self.schedule.fragments if self.anchor.buckets else 0)
        if self._let_in_at == self.state.own and self.state.diverged and fragments and not closing:
            self._call_joiners(fragments)
            return
        joins = self.joins
        self.end_block()
        self._due_after_merges = fragments
        try:
            self.merge_pending()
        finally:
            self._due_after_merges = range(0)
        if self.state.diverged and fragments and self.joins == joins:
            self._send(fragments, self.now)
            self._merge()

    def close(self) -> None:
        """Hold a last sync round if the crew's other members are done, too."""
        # If they train on, this worker's last block is lost, as if it had died, and its parameters
        # go back to the anchor.
        self.end_block()
        self.merge_pending()
        while self.state.diverged and self.anchor.buckets:
            if self.members.close(self.state.steps):
                self.sync_now(closing=True)
            elif self.members.regroup_due:  # it was cut off meanwhile, and is back
                self.regroup()
                continue
            elif self.state.anchor_in_use:
                self.anchor.restore_params()
                self.state = self.state.return_to_anchor()
            break

    def merge_pending(self) -> None:
        """Wait for all that is in flight, and merge it."""
        while self.pending:
            self._merge()

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

    @property
    def joined_late(self) -> bool:
        """Whether this worker came into a run under way, and has taken no step since."""
        # It may have taken part in a round, which the others have repeated with it.
        return self._came_at == self.state.own

    def received_tensors(self) -> list[Tensor]:
        """Return the tensors with the run's state, if this worker has just come into a run."""
        if not self.joined_late:
            return []
        return [*self.anchor.params, *self.extras.buffer_tensors()]

    @property
    def alone(self) -> bool:
        """Whether there is no other worker, and never will be."""
        return not self.members.elastic and self.members.workers.size == 1

    # -- a sync round about fragments ----------------------------------------------------------

    def _send(self, fragments: Sequence[int], merge_at: int) -> None:
        """Begin a sync round about these fragments: cut payloads, report, and start it."""
        self.anchor.reset_frozen()
        differences: Sequence[AnchorDifference] = [
            difference for f in fragments for difference in self.anchor.differences(f)
        ]
        overlaps = merge_at > self.now
        if overlaps:  # parameters change while it travels: send a copy
            differences = [OverlappedDifference.copy_now(each) for each in differences]
        elif self.members.elastic:  # the round may be undone: keep the mean apart until then
            differences = [StagedDifference(each) for each in differences]
        ends_block = self.schedule.fragments - 1 in fragments
        buffers = self.extras.buffer_payloads() if ends_block else []
        state = self.extras.state_payloads() if ends_block else []
        if self._state_dropped_at == self.state.own:
            state = []  # it is not complete before the next step: nobody's is averaged
        finite = are_finite(self.anchor.params) and all(map(is_payload_finite, [*buffers, *state]))
        report = self._write_report(finite, state, ends_block=ends_block).with_work(self.state.work)
        report = replace(report, weight=self.samples.weight(self.state.work, report.drawn))
        if not self.state.contributes:
            report = replace(report, status=NOTHING_YET)
        copies: tuple[list[SnapshotPayload], list[SnapshotPayload]] = ([], [])
        if overlaps or self.members.elastic:
            copies = [SnapshotPayload(p) for p in buffers], [SnapshotPayload(p) for p in state]
        background = self._start(differences, copies[0] or buffers, copies[1] or state, report)
        self.pending.append(Pending(fragments, merge_at, differences, *copies, report, background))
        self.state = self.state.send(fragments)

    def _write_report(
        self, finite: bool, state: Sequence[Payload], *, ends_block: bool = True
    ) -> WorkerReport:
        """Return what this worker says of itself in a round that averages this optimizer state."""
        # `finite`: whether all its numbers are, on this rank. The samples of a block are committed
        # with the round that `ends_block`.
        groups = self.optimizer.param_groups
        step = self.state.steps
        device = next(param.device for group in groups for param in group["params"])
        # Parameters may have been frozen since the options were compared.
        frozen = [i for i, param in enumerate(self.anchor.params) if not param.requires_grad]
        checksum = self._options_checksum
        facts: list[object] = [*([frozen] if frozen else []), *self.samples.facts]
        stop = stop_notice.received
        all_finite, stop = self._agree_inside(finite, stop, device)
        return WorkerReport(
            step=float(step),
            status=float(all_finite),
            options=fingerprint((checksum, *facts)) if facts else checksum,
            state_elements=float(sum(payload.length for payload in state)),
            seconds=self.clock.seconds_per_step(self.state.own),
            lr=float(groups[0].get("lr", 1.0)),
            length=float(self.schedule.length),
            drawn=float(self.samples.account.taken if ends_block else 0),
            stop=float(stop),
        )

    def _agree_inside(self, finite: bool, stop: bool, device: torch.device) -> tuple[bool, bool]:
        """Return whether `finite` holds on all ranks of this worker, and `stop` on any of them."""
        # A worker is in the mean with all its slices, or with none.
        if self._inner.size == 1:
            return finite, stop
        flags = self._inner.all_gather([float(finite), float(stop)], device)
        return all(flag == 1.0 for flag, _ in flags), any(flag == 1.0 for _, flag in flags)

    def _start(
        self,
        payloads: Sequence[Payload],
        buffers: Sequence[Payload],
        state: Sequence[Payload],
        report: WorkerReport,
    ) -> BackgroundSync:
        """Begin a round in a thread, or hold it at once where none is needed."""

        def sync_round(workers: RankGroup) -> RoundResult:
            return run_sync_round(workers, payloads, buffers, state, report)

        background = BackgroundSync(sync_round, self.members.workers, self._last)
        if self._threaded:
            background.start()
            self._last = background
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

    def _merge(self) -> None:
        """Wait for the oldest round in flight, and move anchor and parameters by its mean."""
        pending = self.pending.popleft()
        try:
            result = self._commit(pending.background)
        except BaseException:  # an error, such as workers that disagree: nothing is repeated
            self.state = self.state.undo()
            raise
        if result is None:
            # Without overlap it is repeated at once, so that no worker's block is lost. With
            # overlap nothing has changed: the differences are sent when they are next due.
            self.state = self.state.undo([] if pending.overlaps else pending.fragments)
            self.regroup()
            if pending.overlaps:
                self.restart_clock()  # the time until here was also spent waiting
            return
        self._record_result(result)
        ends_block = self.schedule.fragments - 1 in pending.fragments
        if ends_block:
            self.samples.commit(result, int(pending.report.step))
        if pending.report.step == self.schedule.start:  # sent as the present block began
            members = self.members
            self.schedule.follow_round(result, self.every, members.numbers, members.number)
        pending.merge(result, self.anchor, self.extras)
        if not pending.report.included:
            self._discard_own_values()
        if self.extras.state == "reset" and ends_block:
            self.initial_state.restore()
        complete = len(pending.fragments) == self.schedule.fragments
        work = pending.report.work if pending.report.included else NO_WORK
        self.state = self.state.commit(complete=complete, overlaps=pending.overlaps, work=work)
        for later in self.pending:  # sent with this work too, which is merged now
            later.report = later.report.with_work(later.report.work.minus(work))
        self.regroup()
        self.restart_clock()

    def _record_result(self, result: RoundResult) -> None:
        """Update what logs show; warn of workers that all moved alike, or have other rates."""
        self.stats.record(result, self.members.numbers)
        drift = self.stats.drift
        if not self._warned_of_rates:
            rates = [report.lr for report in result.reports]
            self._highest_rate = max(self._highest_rate, *rates)
            floor = self._highest_rate / 1000  # as at the end of a schedule
            self._warned_of_rates = warn_different_rates(result, self.members.numbers, floor)
        if not self._compared and drift.distance > 0 and result.exact_squares:
            self._compared = True
            squares = [result.exact_squares[rank] for rank in result.included]
            if moved_identically(squares, drift.cosine, self.anchor.codec):
                warn_identical_moves(len(squares))

    def _discard_own_values(self) -> None:
        """Go back to the anchor, and contribute nothing to the rounds that are in flight."""
        self.anchor.restore_params()
        if drop_nonfinite_state(self.optimizer):
            self._state_dropped_at = self.state.own
        self.state = self.state.drop_steps()
        for pending in self.pending:
            pending.report = replace(pending.report.with_work(NO_WORK), status=NOTHING_YET)

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
        does not contribute gets the others' mean.
        """
        finite = all(map(is_payload_finite, [*payloads, *state]))
        report = self._write_report(finite, state)
        if not contributes:
            report = replace(report, status=NOTHING_YET)
        copies: tuple[list[SnapshotPayload], list[SnapshotPayload]] = ([], [])
        if self.members.elastic:  # an undone round must leave the tensors as they were
            copies = [SnapshotPayload(p) for p in payloads], [SnapshotPayload(p) for p in state]
        result = self._commit(self._start(copies[0] or payloads, [], copies[1] or state, report))
        if result is None:
            return None
        # (without copies, the round has written to the tensors themselves)
        for mean, payload in zip(copies[0], payloads, strict=False):
            mean.copy_to(result, payload.tensors)
        for mean, payload in zip(copies[1] if result.averages_state else [], state, strict=False):
            mean.copy_to(result, payload.tensors)
        self.stats.stop = any(report.stop for report in result.reports)
        return result

    def average_gradients(self, params: Sequence[Tensor]) -> bool:
        """Set every gradient to the workers' mean; return whether there is one to step along.

        The steps of a shared warm-up follow it. A worker whose gradients are not finite is left
        out, and gets the others' mean. A parameter that has no gradient on any worker stays
        without one.

        The gradients of a worker that came too late are of parameters that the others have left:
        they are not in the mean, and after the warm-up there is none.
        """
        with torch.no_grad():
            gradients = GradientPayloads(params)
            joins = self.joins
            self.samples.account.step()  # the samples of the step that follows are in this mean
            own = True
            while (result := self._average_once(gradients.payloads, contributes=own)) is None:
                self.regroup()  # a member was lost: repeat with those that are left
                if not self.state.steps_together:
                    return False
                own = self.joins == joins
            self.samples.commit(result, self.state.steps + 1)
            if result.included:
                gradients.fill_missing()
            return bool(result.included)

    def _begin_anchor(self) -> None:
        """End a warm-up by a round: all take the first worker's parameters as the first anchor."""
        tensors = [*trainable_params(self.optimizer), *self.extras.buffer_tensors()]
        averaged = self.state.local_warmup and self.extras.averages_state
        first = make_payloads(by_index(tensors), first_only=True)
        result = self._average_once(first, self.extras.state_payloads() if averaged else [])
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
            self.initial_state.restore()

    # -- elastic members -----------------------------------------------------------------------

    def regroup(self) -> None:
        """Let members leave and joiners in, if any do; then hold the round that is to be held."""
        # That is an undone round, which the present members repeat so that none of their work is
        # lost, or the round that ends a warm-up.
        self._change_members()
        while self.state.ends_warmup:
            self._begin_anchor()
            self._change_members()
        if self.state.retry:
            self._send(self.state.retry, self.now)
            self._merge()
        self.samples.hand_out(self.state)

    def _change_members(self) -> None:
        """Let lost members leave and joiners in, and send these the state; until none is due."""
        while self.members.regroup_due:
            self.pending.clear()  # they have changed nothing yet, and are sent again when due
            self._last = None  # it was among other members
            self.regroups += 1
            self.samples.account.due = True  # other members share what is left
            self.state = self.state.regroup(self._due_after_merges)
            self.members.regroup(self.state.version)
            self.anchor.reset_residuals()
            self.transfer_state()

    def _call_joiners(self, fragments: Sequence[int]) -> None:
        """Synchronize with joiners that the last step has let in, and that train already."""
        # They cannot know of this round. So the generation ends, which they notice in their next
        # steps (`_is_awaited`), and the next one begins with the round.
        assert isinstance(self.members, ElasticMembers)
        self.members.crew.settle(False)
        self._due_after_merges = fragments
        try:
            self.regroup()
        finally:
            self._due_after_merges = range(0)

    def _is_awaited(self) -> bool:
        """Return whether the others hold a round at the step at which this worker was let in."""
        # (The processes of one worker may see it after different steps: they come when their next
        # round is due.) It gets the others' state again, and gives up its steps.
        if self._inner.size > 1 or not isinstance(self.members, ElasticMembers):
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
            self._let_in_at = self.state.own
        else:
            before = self.state
            self.state = self.common.take_over(transfer.received, before)
            if self.state.anchor_in_use and not before.anchor_in_use:
                self._reset_after_local_warmup()  # it comes too late for the round that ended it
            self.joins += 1
            if self.state.steps > 0:  # otherwise the run begins for the others, too
                self._came_at = self.state.own
            self.restart_clock()
