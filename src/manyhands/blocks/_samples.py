"""Track the samples of a worker in blocks, and weigh its steps in a sync round.

With a `Cursor` every worker holds a part of the epoch (`data/_ledger.py`), and all workers have the
same ledger:

    send      the report of the round that ends a block says how many samples the worker has taken
    commit    if the round is kept, all workers commit the samples that each one took
    members   a worker that left or died holds no samples any more; a joiner receives the ledger
              with the state
    hand out  every member gets a part of the remaining samples, for the steps until the next round

A worker may be left out of the mean because its values are not finite. It commits its samples all
the same: they count like those of a step that a gradient scaler skips.

`Sync` holds one `BlockSamples`; a `Cursor` sees it through `SampleRounds`.
"""

from __future__ import annotations

from typing import Protocol

from manyhands.blocks._block_state import BlockState
from manyhands.blocks._schedule import Schedule
from manyhands.blocks.averaging._payload import RoundResult, Work
from manyhands.blocks.averaging._round import Members
from manyhands.data._account import Account
from manyhands.data._ledger import Ledger
from manyhands.data._rules import Rules


class BlockSamples:
    """This worker's samples, and its account if there is a `Cursor`."""

    def __init__(self, members: Members, schedule: Schedule) -> None:
        self._members = members
        self._schedule = schedule
        self.account = Account()  # without rules if there is no cursor
        self.joined_late = False  # whether the ledger came from another worker
        # Whether the samples of other workers are unknown while a round is in flight.
        self.unknown_in_flight = schedule.every.own_steps and schedule.overlap > 0
        self._counted: int | None = None  # by `count_samples`, for the step that is being taken

    @property
    def number(self) -> int:
        """This worker's number: its rank, or that in a crew."""
        return self._members.number

    # -- a step --------------------------------------------------------------------------------

    def count(self, samples: int) -> None:
        """Count samples of the step that is being taken."""
        self._counted = (self._counted or 0) + samples

    def end_step(self) -> int | None:
        """Count a step; return the number of its samples, or None if it is not known."""
        samples = self._counted
        self._counted = None
        if self.account.rules is None:
            return samples
        if samples is None:  # the user's own count comes first
            samples = self.account.in_step
        self.account.step()
        return samples

    # -- a sync round --------------------------------------------------------------------------

    @property
    def position(self) -> float | None:
        """A checksum of the position, equal on all workers; None without a cursor."""
        return None if self.account.rules is None else self.account.checksum()

    def weight(self, work: Work, drawn: float) -> float:
        """Return the weight of this work in the mean; `drawn` are the samples of the cursor in it.

        It follows from the samples, or with `own_steps=True` from the steps.
        """
        if work.counted:
            return float(max(work.samples, 1))
        if not self._schedule.every.own_steps:
            return 1.0
        steps: float = work.steps
        if self.account.rules is not None:  # the last batches of a cursor may be short
            steps = drawn / self.account.rules["batch"]
        # 1 for a worker that takes as many steps as the mean, and never 0.
        length = self._schedule.length
        return max(steps, 1 / length) / length

    def commit(self, result: RoundResult, step: int) -> None:
        """Commit the samples of all workers until this step: the round was kept."""
        numbers = self._members.numbers
        reports = result.reports
        # A round that was restored from a checkpoint may have had another number of workers.
        if self.account.rules is None or len(numbers) != len(reports):
            return
        taken = {}
        for number, report in zip(numbers, reports, strict=True):
            taken[number] = int(report.drawn)
        self.account.commit(taken, self.number, step)

    def hand_out(self, state: BlockState) -> None:
        """Hand out the remaining samples for the steps until the next sync round, if it is due."""
        account = self.account
        if account.rules is None or not account.due:
            return
        schedule = self._schedule
        numbers = self._members.numbers
        in_warmup = state.steps < state.warmup
        if schedule.every.own_steps and not in_warmup:
            account.hand_out(schedule.steps_of(numbers), own=self.number)
            return
        steps = max(1, schedule.start + schedule.length - state.steps)
        if in_warmup:
            # In a shared warm-up each step commits its samples, in a local one the last step does.
            steps = state.warmup - state.steps if state.local_warmup else 1
        if schedule.overlap:  # training goes on while the round is in flight
            steps += schedule.length + schedule.overlap
        account.hand_out(dict.fromkeys(numbers, steps), state.steps - account.committed_at)

    def restart(self, state: BlockState) -> None:
        """Hand out for the block that this state is in: it was loaded from a checkpoint."""
        if not self.account.taken:
            self.account.committed_at = state.steps
            self.account.due = True
            self.hand_out(state)


class Rounds(Protocol):
    """The part of `Sync` that `SampleRounds` uses."""

    state: BlockState
    samples: BlockSamples

    def sync_now(self) -> None:
        """Synchronize all fragments, on all workers."""


class SampleRounds:
    """The `CursorBlocks` of `data/_cursor.py`: the samples of blocks, for a `Cursor`."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._samples = rounds.samples

    @property
    def account(self) -> Account:
        return self._samples.account

    @property
    def number(self) -> int:
        return self._samples.number

    def begin(self, rules: Rules, ledger: Ledger) -> None:
        """As a Cursor is made: begin with its ledger, or go on with that of the run we joined."""
        if self._samples.unknown_in_flight:
            raise ValueError(
                "a Cursor needs overlap=0 with own_steps=True: while a round is in flight, it is "
                "not known how many samples each worker has taken meanwhile. Leave overlap out."
            )
        account = self.account
        if account.rules is None:
            account.begin(rules, ledger, self._rounds.state.steps)
        elif not account.received:
            raise ValueError(
                "these blocks have a Cursor already, with which they commit samples. Make one "
                "Cursor for the training data, and others without optimizer=."
            )
        elif account.rules != rules:
            here = dict(rules)
            differ = []
            for name, value in account.rules.items():
                if here[name] != value:
                    differ.append(f"{name}: {here[name]} here, {value} in the run")
            raise ValueError(
                f"this worker has joined a run whose Cursor differs ({', '.join(differ)}). Make "
                "the Cursor as it is in the run, or begin a new run."
            )
        account.received = False
        self._samples.hand_out(self._rounds.state)

    def load(self, rules: Rules, ledger: Ledger) -> None:
        """As a Cursor loads a state: go on with the saved ledger, or with the run's if it is later.

        A worker that has just joined has the run's position, which is later than any checkpoint's.
        """
        if self._rounds.state.joined_late:
            return
        if self._samples.joined_late:
            raise RuntimeError(
                "this worker has joined a run that goes on, and received its position. Load a "
                "checkpoint before the first step."
            )
        self.account.begin(rules, ledger, self._rounds.state.steps)
        self._samples.hand_out(self._rounds.state)

    def next_epoch(self) -> None:
        """Begin the next epoch: all workers are at its end."""
        self.account.next_epoch(self._rounds.state.steps)
        self._samples.hand_out(self._rounds.state)

    def synchronize(self) -> None:
        """Hold a sync round: all workers need one here."""
        self._rounds.sync_now()
