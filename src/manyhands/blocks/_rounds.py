"""One sync round: what a worker says of itself, how a round runs, and what it leaves behind.

StepClock      how long a step takes, measured since the last round
RoundRunner    writes a round's note, begins it, and lets all workers agree on it
Pending        fragments whose round has begun, and whose mean is not merged yet
RoundStats     what the last rounds have shown
InitialState   the inner optimizer's state before its first step, for state="reset"
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, TypedDict

from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.ranks import RankGroup
from manyhands._core.wrappers import unwrap
from manyhands.blocks._anchor import Anchor, AnchorDifference, OverlappedDifference
from manyhands.blocks._checks import fingerprint
from manyhands.blocks._schedule import Drift, Schedule
from manyhands.blocks.averaging._average import run_sync_round
from manyhands.blocks.averaging._extras import (
    ArrivedMean,
    Extras,
    SavedMean,
    SnapshotPayload,
    TensorPayload,
    by_index,
    state_tensors,
)
from manyhands.blocks.averaging._payload import (
    NOT_FINITE,
    Note,
    Payload,
    RoundResult,
    is_payload_finite,
)
from manyhands.blocks.crew._membership import BackgroundSync, Membership


class StepClock:
    """The time that a step takes, measured since the last sync round."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int, seconds: float = 0.0, steps: float = 0) -> None:
        """Measure from this step on, as if `seconds` and `steps` had passed."""
        self._start = (time.perf_counter() - seconds, step - int(steps))

    def elapsed(self, step: int) -> list[float]:
        """Return the seconds and the steps since the measurement began."""
        then, first = self._start
        return [time.perf_counter() - then, step - first]

    def seconds_per_step(self, step: int) -> float:
        seconds, steps = self.elapsed(step)
        return seconds / max(steps, 1)


class RoundRunner:
    """Runs sync rounds among the present members, in the background where that is needed."""

    def __init__(
        self,
        optimizer: Optimizer,
        members: Membership,
        anchor: Anchor,
        schedule: Schedule,
        options: object,
    ) -> None:
        self._optimizer, self._members = optimizer, members
        self._anchor, self._schedule = anchor, schedule
        self._fingerprint = fingerprint(options)
        self.clock = StepClock()
        self.stats = RoundStats()
        # A thread only where it is needed: with overlap, and in a crew, whose members are watched
        # while the round waits for their messages.
        self._threaded = members.elastic or schedule.overlap > 0
        self._last: BackgroundSync | None = None

    # -- before a round ------------------------------------------------------------------------

    def finite_on_all_ranks(self, finite: bool) -> bool:
        """Return whether `finite` holds on all ranks of this worker.

        A worker is in the mean with all its slices, or with none.
        """
        inner = self._anchor.inner
        ranks = inner if inner.size > 1 else self._members.inner
        if ranks.size == 1:
            return finite
        device = next(p.device for group in self._optimizer.param_groups for p in group["params"])
        return all(flag == 1.0 for (flag,) in ranks.all_gather([float(finite)], device))

    def write_note(self, step: int, status: float, state: Sequence[Payload]) -> Note:
        """Return the note of a round after this step, which averages this optimizer state."""
        return Note(
            step=float(step),
            status=status,
            options=self._options_checksum(),
            state_elements=float(sum(payload.length for payload in state)),
            seconds=self.clock.seconds_per_step(step),
            lr=float(self._optimizer.param_groups[0].get("lr", 1.0)),
            length=float(self._schedule.length),
        )

    def _options_checksum(self) -> float:
        """Return a checksum of the options, and of which parameters have been frozen since."""
        frozen = [i for i, param in enumerate(self._anchor.params) if not param.requires_grad]
        return fingerprint((self._fingerprint, frozen)) if frozen else self._fingerprint

    # -- a round -------------------------------------------------------------------------------

    def start(
        self,
        payloads: Sequence[Payload],
        buffers: Sequence[Payload],
        state: Sequence[Payload],
        note: Note,
    ) -> BackgroundSync:
        """Begin a round; without a thread, hold it."""

        def sync_round(workers: RankGroup) -> RoundResult:
            return run_sync_round(workers, payloads, buffers, state, note)

        background = BackgroundSync(sync_round, self._members.workers, self._last)
        if self._threaded:
            background.start()
            self._last = background
        else:
            background.run()
        return background

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        """Wait for a round, and for all workers to agree on it. None: it is undone."""
        begin = time.perf_counter()
        result = self._members.commit(background, moves_anchor)
        self.stats.waited += time.perf_counter() - begin
        return result

    def average(
        self, step: int, payloads: Sequence[TensorPayload], state: Sequence[TensorPayload]
    ) -> RoundResult | None:
        """Average tensors in place, without anchor and outer step. None: the round is undone."""
        finite = all(map(is_payload_finite, [*payloads, *state]))
        note = self.write_note(step, float(self.finite_on_all_ranks(finite)), state)
        copies: tuple[list[SnapshotPayload], list[SnapshotPayload]] = ([], [])
        if self._members.elastic:  # an undone round must leave the tensors as they were
            copies = [SnapshotPayload(p) for p in payloads], [SnapshotPayload(p) for p in state]
        result = self.commit(self.start(copies[0] or payloads, [], copies[1] or state, note))
        if result is None:
            return None
        # (without copies, the round has written to the tensors themselves)
        for mean, payload in zip(copies[0], payloads, strict=False):
            mean.copy_to(result, payload.tensors)
        for mean, payload in zip(copies[1] if result.averages_state else [], state, strict=False):
            mean.copy_to(result, payload.tensors)
        return result

    def forget_last(self) -> None:
        """Let the next round not wait for the last one: it was among other members."""
        self._last = None


class SavedRound(TypedDict):
    """A round in flight, in plain values and tensors."""

    fragments: list[int]
    merge_at: int
    held: list[Tensor]
    arrived: list[Tensor]
    buffers: list[SavedMean]
    state: list[SavedMean]
    note: tuple[float, ...]
    notes: list[tuple[float, ...]]
    squares: list[float]


@dataclass
class Pending:
    """Fragments in flight, and what travels with the last fragment of a block."""

    fragments: Sequence[int]
    merge_at: int  # the step after which the mean is merged
    differences: Sequence[AnchorDifference]
    buffers: Sequence[ArrivedMean]
    state: Sequence[ArrivedMean]  # of the inner optimizer
    note: Note  # as this worker sent it
    background: BackgroundSync

    @property
    def overlaps(self) -> bool:
        """Whether training goes on while the fragments travel."""
        return isinstance(self.differences[0], OverlappedDifference)

    def merge(self, result: RoundResult, anchor: Anchor, extras: Extras) -> None:
        """Move the anchor and the parameters by the mean, and set buffers and state to theirs."""
        anchor.reset_frozen_memories()  # once more: parameters may have frozen since it was sent
        for difference in self.differences:
            difference.merge(result, self.note.included)
        # The buffers and the state that the model has now, which may be other tensors than those
        # that were sent.
        buffers = by_index(extras.buffer_tensors()) if self.buffers else {}
        for mean in self.buffers:
            mean.copy_to(result, buffers)
        state = state_tensors(extras.optimizer) if self.state else {}
        for mean in self.state if result.averages_state else []:
            mean.copy_to(result, state)
        anchor.all_gather_inner(self.fragments)

    def saved(self) -> SavedRound:
        """Wait for the mean, and return everything in plain values and tensors."""
        self.background.finished()
        result = self.background.result
        if result is None:
            raise RuntimeError(
                "a sync round failed while it was in flight"
            ) from self.background.error
        overlapped = [d for d in self.differences if isinstance(d, OverlappedDifference)]
        return {
            "fragments": list(self.fragments),
            "merge_at": self.merge_at,
            "held": [difference.held for difference in overlapped],
            "arrived": [difference.arrived for difference in overlapped],
            "buffers": [mean.saved() for mean in self.buffers],
            "state": [mean.saved() for mean in self.state],
            "note": astuple(self.note),
            "notes": [astuple(note) for note in result.notes],
            "squares": [*result.squares, result.square_of_mean],
        }

    @classmethod
    def restored(cls, saved: SavedRound, anchor: Anchor) -> Pending:
        """Return what `saved` has described: a mean that arrived but was not merged."""
        fragments = saved["fragments"]
        differences = [OverlappedDifference(d) for f in fragments for d in anchor.differences(f)]
        for difference, held, arrived in zip(
            differences, saved["held"], saved["arrived"], strict=True
        ):
            difference.held.copy_(held)
            difference.arrived.copy_(arrived)
        buffers, state = (
            # (cloned: the caller's state dict must not change when the mean is merged)
            [ArrivedMean(mean["keys"], mean["sizes"], mean["mean"].clone()) for mean in means]
            for means in (saved["buffers"], saved["state"])
        )
        *squares, square_of_mean = saved["squares"]
        result = RoundResult([Note(*note) for note in saved["notes"]], squares, square_of_mean)
        note, done = Note(*saved["note"]), BackgroundSync.already_done(result)
        return cls(fragments, saved["merge_at"], differences, buffers, state, note, done)


@dataclass
class RoundStats:
    """What the last sync rounds have shown, for `snapshot`."""

    drift: Drift = field(default_factory=Drift)
    workers: int = 0  # in the last round
    left_out: list[int] = field(default_factory=list)  # of the last round: not finite
    left_out_ever: int = 0
    undone: int = 0
    waited: float = 0.0  # seconds in which steps waited for sync rounds
    seconds: float = 0.0  # a step takes on the slowest worker

    def record(self, result: RoundResult, numbers: Sequence[int]) -> None:
        """Take in a round's result; `numbers` are the numbers of its workers, in rank order."""
        included, notes = result.included, result.notes
        self.drift = Drift.of([result.squares[rank] for rank in included], result.square_of_mean)
        self.workers = len(notes)
        if len(numbers) != len(notes):  # a round that was restored from a checkpoint
            numbers = range(len(notes))
        noted = zip(numbers, notes, strict=True)
        self.left_out = [number for number, note in noted if note.status == NOT_FINITE]
        self.left_out_ever += len(self.left_out)
        self.seconds = max(note.seconds for note in notes)


class InitialState:
    """The inner optimizer's state before its first step (Adagrad has some, most have none)."""

    def __init__(self, optimizer: Optimizer, needed: bool) -> None:
        self._optimizer = optimizer
        bare = self._bare()
        state = bare.state_dict()["state"] if needed and bare.state else {}
        self.state: dict[Any, Any] = copy.deepcopy(state)

    def _bare(self) -> Optimizer:
        # The innermost optimizer: a scaling rule around it keeps its own statistics.
        return unwrap(self._optimizer)[-1]

    def restore(self) -> None:
        """Reset the inner optimizer's state; options such as `lr` stay as they are."""
        bare = self._bare()
        bare.state.clear()
        if self.state:
            groups = bare.state_dict()["param_groups"]
            bare.load_state_dict({"state": copy.deepcopy(self.state), "param_groups": groups})
