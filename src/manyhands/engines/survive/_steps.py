"""Agree on each step; after a failure, meet the remaining ranks and repeat the step.

    backward     gradients are averaged (`_ddp.py`); a failure is noted
    commit       before the optimizer steps, ranks whose gradients have arrived vote
                   all ranks voted      the optimizer steps
                   a rank failed        the ranks meet, and the optimizer does not step
    meet         the remaining ranks and waiting ranks form a generation of the crew, compare their
                 progress, and send the state to joiners
    next batch   the cursor repeats the samples of a failed step, divided among the new ranks

A vote that succeeds on one rank proves that the gradients have arrived on all ranks. So if a rank
has stepped and another rank's vote failed, the other rank steps as well, in the meeting.

A second thread watches the crew. If a member is lost while this rank waits for a message, the
thread aborts the process group, and the message fails.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from manyhands._ranks.groups import group_closer
from manyhands._ranks.ranks import PendingSums, RankGroup
from manyhands.blocks.crew._crew import Crew, Outlook
from manyhands.blocks.crew._enrollment import MemberFacts
from manyhands.blocks.crew._roster import Version
from manyhands.engines.survive._ddp import AveragedModule
from manyhands.engines.survive._messages import LOST, Messages
from manyhands.engines.survive._state import BeforeRepeat, RunState
from manyhands.errors import StoreLost, WorkerLost
from manyhands.scaling._optimizer import ScaledOptimizer

WATCH = 0.1  # seconds between two looks at the crew, for up to CROWD ranks
CROWD = 50
ATTEMPTS = 3  # of a step that fails although all ranks are present


class Progress(NamedTuple):
    """The progress of a rank that comes to a meeting."""

    generation: int  # in which the rank has trained; 0 for a new rank
    steps: int  # committed, in this run of the crew
    samples: int  # trained, from the cursor
    holds_step: bool  # has the averaged gradients of the next step
    has_state: bool  # has trained or loaded a checkpoint

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.generation, self.steps, self.samples)


@dataclass(frozen=True)
class Agreement:
    """The decisions of a meeting, equal on all ranks."""

    source: int  # the rank that sends the state
    joiners: list[int]  # ranks that need the state
    stepping: list[int]  # ranks that step as well, because the source has stepped
    steps: int

    @classmethod
    def of(cls, ranks: Sequence[Progress]) -> Agreement:
        """Compare the progress of all ranks.

        >>> stepped = Progress(2, 8, 512, False, True)
        >>> waiting = Progress(2, 7, 448, True, True)
        >>> Agreement.of([waiting, stepped, Progress(0, 0, 0, False, False)])
        Agreement(source=1, joiners=[2], stepping=[0], steps=8)
        """
        lead = max(ranks, key=lambda each: each.order)
        source = [each.order for each in ranks].index(lead.order)
        joiners = []
        stepping = []
        for rank, each in enumerate(ranks):
            behind = (each.generation, each.steps + 1) == (lead.generation, lead.steps)
            if lead.generation and behind and each.holds_step:
                stepping.append(rank)
            elif each.order != lead.order or (rank != source and not each.has_state):
                joiners.append(rank)
        return cls(source, joiners, stepping, lead.steps)


class SurvivingRun:
    def __init__(
        self,
        crew: Crew,
        state: RunState,
        modules: Sequence[DistributedDataParallel],
        *,
        loaded: bool,
    ) -> None:
        self.crew = crew
        self.state = state
        self._cursor = state.cursor
        self._messages = Messages(self.fail)
        self._modules = []
        for module in modules:
            averaged = AveragedModule(
                module, self.check_undecided, self.has_failed, self.fail, self._messages
            )
            self._modules.append(averaged)
        self._rules = _rules_of(state.optimizers)
        self._loaded = loaded
        self._lock = threading.Lock()
        self._training = False  # whether the thread may abort the group
        self._aborted = False  # whether the thread has aborted the group of this step
        self._failed = False
        self._error: Exception | None = None  # the first error of this step on this rank
        self._unexplained = 0  # consecutive failures of the step without a lost or new rank
        self._steps = 0
        self._trained_in = 0
        self._holds_step = False
        self._decided: bool | None = None  # whether the current step was committed
        self._began = False  # whether the loop has received a batch of the current step
        self._regroup_wanted = False  # by this rank
        self._regroup_due = False  # on all ranks, after this step
        self._joined = False  # whether the last meeting had joiners
        self._met = False  # whether the members may have changed since the last step
        self._before: BeforeRepeat | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="manyhands survive", daemon=True)

    def check_undecided(self) -> None:
        """Raise if the loop calls `backward` again after the step of a batch."""
        if self._decided is not None:
            raise RuntimeError(
                "survive=True needs a single step per batch of the Cursor, and the script calls "
                "backward() after optimizer.step(). Run all backward passes of a batch before all "
                "optimizers step."
            )

    def has_failed(self) -> bool:
        return self._failed

    def fail(self, error: Exception | None = None) -> None:
        self._error = self._error or error
        self._failed = True

    # -- the run -------------------------------------------------------------------------------

    def join(self, facts: MemberFacts) -> None:
        """Join the crew. Return when this rank has the state of the run."""
        guard_steps(self)
        self._cursor.guard = self
        self.crew.join(self._version(), facts)
        self._meet(joined=True)
        self._thread.start()

    def finish(self) -> None:
        """Leave at the end of the script."""
        self._stop_watching()
        with suppress(StoreLost):
            # Others may still receive the last messages, so wait for them.
            self.crew.close(self._steps)
        self.crew.leave()

    def leave(self) -> None:
        """Leave while other ranks continue."""
        self._stop_watching()
        self.crew.leave()

    def drop_out(self) -> None:
        """Leave like a dead rank, after an error."""
        self._stop_watching()
        self.crew.drop_out()

    def _stop_watching(self) -> None:
        self._closed.set()
        self._thread.join(1.0)
        self._begin_meeting()

    def restore(self) -> None:
        """After a failed step, restore the objects, for a checkpoint before the next step."""
        if self._before is not None:
            self.state.restore(self._before)

    # -- a step --------------------------------------------------------------------------------

    def commit(self) -> bool:
        """Return whether the optimizer may step. A collective, once per step."""
        if self._decided is not None:
            return self._decided
        arrived = self._gradients_arrived()
        if arrived and self._vote():
            self._steps += 1
            self._unexplained = 0
            self._decided = True
            return True
        self._holds_step = arrived
        self._decided = self._recover()
        self._holds_step = False
        return self._decided

    def _gradients_arrived(self) -> bool:
        if self._failed:
            return False
        for rule in self._rules:
            pending = rule._core.measurement.pending
            if pending is not None and pending.work is not None:
                self._messages.wait(pending.work, pending.table)
        for module in self._modules:
            module.rebuild_buckets()
        return not self._failed

    def _vote(self) -> bool:
        wanted = torch.tensor([float(self._regroup_wanted)])
        try:
            work = dist.all_reduce(wanted, op=dist.ReduceOp.MAX, async_op=True)
            assert work is not None
            self._messages.wait(work, wanted)
        except LOST as error:
            self.fail(error)
        if self._failed:  # after an abort, this rank was alone in the collective
            return False
        self._regroup_due = bool(wanted[0])
        return True

    def _recover(self) -> bool:
        """Meet the other ranks. Return whether the optimizer steps as well."""
        self._begin_meeting()
        self.crew.abort()
        self._messages.end_all()
        members = self.crew.members
        if self._meet(repeats=True):
            return True
        self._unexplained += 1
        if members != self.crew.members or self._joined:
            self._unexplained = 0
        if self._unexplained == ATTEMPTS and self._error is not None:
            raise RuntimeError(
                f"this step failed {ATTEMPTS} times, although all ranks are present. See the first "
                "error on this rank above."
            ) from self._error
        self.state.clear_gradients()
        self._before = self.state.before_repeat()
        return False

    def between_steps(self) -> bool:
        """Prepare the next step. Return whether the cursor must divide the samples again."""
        if self._began and self._decided is None:  # a gradient scaler has skipped the optimizer
            self.commit()
        if self._decided:
            self._cursor.end_step()
        if self._before is not None:  # before a meeting, which may send the state to joiners
            self.state.restore(self._before)
            self._before = None
        # A rank waits to join.
        while self._regroup_due:
            self._begin_meeting()
            self._meet()
        met = self._met
        if met:
            self._met = False
            self._follow_members()
        self.end_loop()
        self._error = None
        self.state.begin_step()  # before the cursor loads the samples, which may draw numbers
        return met

    def end_loop(self) -> None:
        self._decided = None
        self._began = False

    def _begin_meeting(self) -> None:
        """Stop the thread from aborting the group. Call before the members change."""
        with self._lock:
            self._failed = True
            self._training = False
            self._aborted = False

    def begin_step(self) -> None:
        self._began = True

    def _follow_members(self) -> None:
        for module in self._modules:
            module.renew()
        self._change_ranks()
        with self._lock:
            self._failed = False
            self._training = True

    def _change_ranks(self) -> None:
        ranks = SteppingRanks(self.crew.size, self.crew.rank, run=self)
        expected = self.crew.expected
        self._cursor.change_ranks(ranks, expected)
        passes = self._cursor.usual_passes
        for rule in self._rules:
            rule._core.change_ranks(ranks, passes, expected, self._cursor.passes_on(expected))

    # -- a meeting -----------------------------------------------------------------------------

    def _version(self) -> Version:
        samples = self._samples()
        rounds = samples if self._has_state else -1
        return Version(rounds, self._trained_in > 0, self._steps)

    @property
    def _has_state(self) -> bool:
        return self._trained_in > 0 or self._loaded

    def _samples(self) -> int:
        return self._cursor.epoch * len(self._cursor.dataset) + self._cursor.position

    def _meet(self, *, joined: bool = False, repeats: bool = False) -> bool:
        """Form a generation, and bring all members to equal progress.

        `joined`: this rank has already joined. `repeats`: this rank's step has failed. Return
        whether this rank must step, because another rank has stepped.
        """
        self._failed = True
        self._cursor.commit_steps()
        while True:
            if not joined:
                self.crew.regroup(self._version())
            joined = False
            agreement = None
            received = None
            try:
                agreement = Agreement.of(self._exchange())
                if repeats and self.crew.rank == agreement.source:
                    self.state.undo_forward()  # before joiners receive the buffers
                received = self._transfer(agreement)
            except (WorkerLost, StoreLost):  # `settle` decides whether to wait for the store
                agreement = None  # also if only the transfer failed
                self.crew.abort()
            if self.crew.settle(agreement is not None, sync_round=False) and agreement is not None:
                break
        if repeats and self.crew.rank not in agreement.stepping:
            self.state.undo_forward()
        if received is not None:
            self._change_ranks()  # the scale of a rule depends on the ranks
            self.state.unpack(received)
        self._joined = bool(agreement.joiners)
        self._steps = agreement.steps
        self._trained_in = self.crew.generation
        self._regroup_wanted = False
        self._regroup_due = self.crew.regroup_due
        self._met = True
        return self.crew.rank in agreement.stepping

    def _exchange(self) -> list[Progress]:
        own = Progress(
            self._trained_in, self._steps, self._samples(), self._holds_step, self._has_state
        )
        sent = torch.tensor(own, dtype=torch.int64)
        rows = [torch.zeros_like(sent) for _ in range(self.crew.size)]
        self._send(partial(dist.all_gather, rows, sent, async_op=True))
        found = []
        for row in rows:
            generation, steps, samples, holds, has_state = row.tolist()
            found.append(Progress(generation, steps, samples, bool(holds), bool(has_state)))
        return found

    def _transfer(self, agreement: Agreement) -> torch.Tensor | None:
        """Send the state to the joiners. Return the received state on a joiner."""
        rank = self.crew.rank
        if rank == agreement.source and agreement.joiners:
            data = self.state.pack()
            for joiner in agreement.joiners:
                self._send(partial(dist.isend, torch.tensor([len(data)]), joiner))
                self._send(partial(dist.isend, data, joiner))
        if rank not in agreement.joiners:
            return None
        size = torch.zeros(1, dtype=torch.int64)
        self._send(partial(dist.irecv, size, agreement.source))
        received = torch.empty(int(size), dtype=torch.uint8)
        self._send(partial(dist.irecv, received, agreement.source))
        return received

    def _send(self, send: Callable[[], dist.Work | None]) -> None:
        """Send or receive a message of a meeting. Raise WorkerLost if a member is lost."""
        errors: list[Exception] = []

        def run() -> None:
            try:
                work = send()
                assert work is not None
                work.wait(default_pg_timeout)  # else `recv` has a short timeout: see _group.py
            except LOST as error:
                errors.append(error)

        # A thread, because gloo completes a `send` or a `recv` only in `wait`.
        thread = threading.Thread(target=run, name="manyhands survive", daemon=True)
        group_closer.await_at_end(thread)
        thread.start()

        def done(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        self.crew.wait(done)
        if errors:
            raise WorkerLost("a message of a meeting was lost.") from errors[0]

    # -- watching the crew ---------------------------------------------------------------------

    def _watch(self) -> None:
        noted = False
        while not self._closed.wait(WATCH * max(1.0, self.crew.size / CROWD)):
            try:
                if self._steps and not noted:
                    self.crew.note_progress()
                    noted = True
                outlook = self.crew.look()
            except StoreLost:
                # With a quorum, members of the other side do not answer. The meeting waits for the
                # store, or raises the error.
                outlook = Outlook(self.crew.generation, over=self.crew.quorum > 1)
            if outlook.waiting:
                self._regroup_wanted = True
            in_a_step = self._began and self._decided is None
            deserted = in_a_step and outlook.closed_after <= self._steps
            with self._lock:
                current = outlook.generation == self.crew.generation and self._training
                # A message may wait although another message has failed.
                if current and (outlook.over or deserted or self._failed):
                    # First, because after the abort this rank is alone.
                    self._failed = True
                    self._training = False
                    self._aborted = True
                if self._aborted:  # again, until the training thread notices
                    with suppress(LOST):
                        self.crew.abort()
                    self._messages.end_all()


@dataclass(frozen=True)
class SteppingRanks(RankGroup):
    """The present ranks. A failed message of a rule fails the step, instead of raising an error."""

    run: SurvivingRun | None = None

    def sum_and_gather(self, row: torch.Tensor, summed: int) -> PendingSums:
        assert self.run is not None
        if not self.run.has_failed():
            try:
                return super().sum_and_gather(row, summed)
            except LOST as error:
                self.run.fail(error)
        return PendingSums(row, summed)  # never read


def _rules_of(optimizers: Sequence[Optimizer]) -> list[ScaledOptimizer]:
    return [each for each in optimizers if isinstance(each, ScaledOptimizer)]


def guard_steps(run: SurvivingRun) -> None:
    """Let the optimizers and gradient scalers ask `commit` first."""
    for optimizer in run.state.optimizers:
        _guard_optimizer(run, optimizer)
    for scaler in run.state.scalers:
        _guard_scaler(run, scaler)


def _guard_optimizer(run: SurvivingRun, optimizer: Any) -> None:
    original = optimizer.step

    @functools.wraps(original)  # with the mark of a scheduler
    def step(self: Optimizer, closure: object = None, *args: Any, **kwargs: Any) -> Any:
        if closure is not None:
            raise TypeError(
                "survive=True does not support step(closure). Run forward and backward before "
                "optimizer.step()."
            )
        if run.commit():
            return original(*args, **kwargs)
        self._opt_called = True  # type: ignore[attr-defined]  # schedulers would warn
        return None

    # A bound method, as schedulers expect.
    optimizer.step = types.MethodType(step, optimizer)


def _guard_scaler(run: SurvivingRun, scaler: Any) -> None:
    original = scaler.step

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        run.commit()  # the scaler may skip the optimizer
        return original(optimizer, *args, **kwargs)

    scaler.step = step
