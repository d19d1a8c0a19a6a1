"""Samples of a worker in blocks, and weights in a sync round.

With a `Cursor`, each worker owns a part of the epoch, and all workers have equal ledgers
(`data/_ledger.py`). The report of the round that ends a block contains the worker's number of
samples. If the round takes place, all workers commit all samples of the block, including samples of
excluded workers. Each member then receives samples for the steps until the next round.
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
    def __init__(self, members: Members, schedule: Schedule) -> None:
        self._members = members
        self._schedule = schedule
        self.account = Account()  # without rules if there is no cursor
        self.joined_late = False  # whether the ledger came from another worker
        self._counted: int | None = None  # from `count_samples`, for the current step

    @property
    def number(self) -> int:
        return self._members.number

    # -- a step --------------------------------------------------------------------------------

    def count(self, samples: int) -> None:
        self._counted = (self._counted or 0) + samples

    def end_step(self) -> int | None:
        samples = self._counted
        self._counted = None
        if self.account.rules is None:
            return samples
        if samples is None:  # `count_samples` takes precedence
            samples = self.account.in_step
        self.account.step()
        return samples

    # -- a sync round --------------------------------------------------------------------------

    @property
    def position(self) -> float | None:
        """Checksum of the cursor's position, equal on all workers."""
        return None if self.account.rules is None else self.account.checksum()

    def weight(self, work: Work, drawn: float) -> float:
        """Return the weight of this work in the mean; `drawn` is the cursor's number of samples."""
        if work.counted:
            return float(max(work.samples, 1))
        if not self._schedule.every.own_steps:
            return 1.0
        steps: float = work.steps
        if self.account.rules is not None:  # a cursor's last batches may be short
            steps = drawn / self.account.rules["batch"]
        # 1 for the mean number of steps, and always positive.
        length = self._schedule.length
        return max(steps, 1 / length) / length

    def commit(self, result: RoundResult, step: int) -> None:
        if self.account.rules is None:
            return
        taken = {}
        for number, report in zip(self._members.numbers, result.reports, strict=True):
            taken[number] = int(report.drawn)
        self.account.commit(taken, self.number, step)

    def hand_out(self, state: BlockState) -> None:
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
            # A shared warm-up commits samples after each step, a local warm-up after the last step.
            steps = state.warmup - state.steps if state.local_warmup else 1
        if schedule.overlap:  # training continues meanwhile
            steps += schedule.length + schedule.overlap
        account.hand_out(dict.fromkeys(numbers, steps), state.steps - account.committed_at)

    def restart(self, state: BlockState) -> None:
        if not self.account.taken:
            self.account.committed_at = state.steps
            self.account.due = True
            self.hand_out(state)


class Rounds(Protocol):
    schedule: Schedule
    state: BlockState
    samples: BlockSamples

    def sync_now(self) -> None: ...


class SampleRounds:
    """Samples of blocks for a `Cursor`; implements `CursorBlocks` of `data/_cursor.py`."""

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
        """Start with a new cursor's ledger, or continue with the ledger of the joined run."""
        schedule = self._rounds.schedule
        if schedule.every.own_steps and schedule.overlap > 0:
            raise ValueError(
                "a Cursor with own_steps=True needs overlap=0, because the numbers of samples of "
                "other workers are unknown while a round is in flight. Leave out overlap."
            )
        account = self.account
        if account.rules is None:
            account.begin(rules, ledger, self._rounds.state.steps)
        elif not account.received:
            raise ValueError(
                "these blocks already have a Cursor, which determines the committed samples. Make "
                "one Cursor for the training data, and others without optimizer=."
            )
        elif account.rules != rules:
            here = dict(rules)
            differ = []
            for name, value in account.rules.items():
                if here[name] != value:
                    differ.append(f"{name}: {here[name]} here, {value} in the run")
            raise ValueError(
                f"this worker has joined a run with a different Cursor ({', '.join(differ)}). Use "
                "the arguments of the run, or start a new run."
            )
        account.received = False
        self._samples.hand_out(self._rounds.state)

    def load(self, rules: Rules, ledger: Ledger) -> None:
        if self._rounds.state.joined_late:
            return
        if self._samples.joined_late:
            raise RuntimeError(
                "this worker has joined a running job and received its position. Load a checkpoint "
                "before the first step."
            )
        self.account.begin(rules, ledger, self._rounds.state.steps)
        self._samples.hand_out(self._rounds.state)

    def next_epoch(self) -> None:
        self.account.next_epoch(self._rounds.state.steps)
        self._samples.hand_out(self._rounds.state)

    def synchronize(self) -> None:
        self._rounds.sync_now()
