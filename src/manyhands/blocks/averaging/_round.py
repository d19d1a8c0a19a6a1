"""Run a sync round, agree with all workers that it took place, and measure the drift.

FixedMembers     the workers of a process group
ElasticMembers   or the members of a crew (`blocks/crew/`), who may undo a round, and regroup
BackgroundSync   a round in a separate thread
Drift            the distance and the disagreement of the workers
RoundStats       statistics of the last rounds
StepClock        the time of a step, measured since the last round
run_sync_round   the round itself: every worker contributes payloads, and all get their mean
StateTransfer    one of the members sends the joiners of a crew the common state

Payloads are cut into chunks (`_chunks.py`), and a few chunks are in flight at once: one is read and
encoded while others travel. So a second copy of a payload is never made.

A *report* travels with the chunks: a few numbers about the worker, and the squared length of the
sent values. Checking that workers agree, leaving out values that are not finite and measuring the
drift therefore need no further message. All workers see the same reports in the same order, and
come to the same conclusions.

A round runs in a separate thread so that training goes on meanwhile, or so that a lost worker is
noticed while other members still wait for its messages. Rounds of a group run one after the other,
because their messages must not mix.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any, NamedTuple

import torch

from manyhands._optimizers.foreign import advice
from manyhands._ranks.agreement import raise_if_different
from manyhands._ranks.groups import group_closer
from manyhands._ranks.presence import UNEVEN, explained
from manyhands._ranks.ranks import RankGroup
from manyhands._warn import warn
from manyhands.blocks.averaging._chunks import PayloadChunk, cut_into_chunks
from manyhands.blocks.averaging._codec import Codec
from manyhands.blocks.averaging._payload import (
    NOT_FINITE,
    REPORT,
    SAMPLES_INCOMPLETE,
    Payload,
    RoundResult,
    Squares,
    WorkerReport,
)
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._enrollment import MemberFacts
from manyhands.blocks.crew._roster import Version
from manyhands.errors import RanksDisagree

IN_FLIGHT = 2  # chunks in each of the two phases: values on their way, means on their way
MESSAGE = 1 << 26  # bytes in one message of a state transfer at most
SAME = 1e-6  # relative difference of squared lengths, below which steps are the same
PERSISTENT = 5  # failures among the same members: the cause is not a lost worker

SyncRound = Callable[[RankGroup], RoundResult]


# -- who takes part --------------------------------------------------------------------------------


class FixedMembers:
    """The workers of a process group."""

    elastic = False
    regroup_due = False

    def __init__(self, workers: RankGroup, inner: RankGroup) -> None:
        self.workers = workers
        self.inner = inner  # the ranks that make up this worker

    def choose_transport(
        self,
        devices: Sequence[torch.device],
        *,
        background: bool,
        shared_memory: bool | None,
        exact: bool,
    ) -> None:
        """Give the workers the collectives that sync rounds will use."""
        # `devices` are those of the parameters. `background`: rounds run while training goes on.
        # `shared_memory` is the option of `Blocks`. `exact`: the codec does not round.
        workers = self.workers
        if background:  # a separate group, so that rounds do not mix with training's collectives
            workers = workers.with_background_group(devices[0])
        if shared_memory is None:
            can = exact and all(d.type == "cpu" and workers.on_gloo(d) for d in {*devices})
            workers = workers.with_shared_memory(required=False) if can else workers
        elif shared_memory:
            workers = workers.with_shared_memory()
        self.workers = workers

    @property
    def alone(self) -> bool:
        """Whether there is no other worker, and never will be."""
        return self.workers.size == 1

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers by which users know the workers, in rank order."""
        return range(self.workers.size)

    @property
    def number(self) -> int:
        """This worker's number."""
        return self.workers.rank

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        """Wait for a sync round, and agree that it took place. None: it is undone, on every worker.

        `moves_anchor` is False for a state transfer, which only brings joiners to the anchor.
        """
        background.finished()
        with explained(self.workers, f"before a sync round. {UNEVEN}"):
            if background.error is not None:
                raise background.error
        return background.result

    def begin_blocks(self) -> None:
        """Forget how long rounds took: those of a warm-up come after each step."""


class ElasticMembers:
    """The members of a crew, with the methods of `FixedMembers`."""

    elastic = True
    alone = False

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.inner: RankGroup = crew.inner
        self.workers = RankGroup()
        self._failures = 0  # rounds undone in a row among the same members

    @property
    def numbers(self) -> Sequence[int]:
        return self.crew.members

    @property
    def number(self) -> int:
        return self.crew.number

    @property
    def regroup_due(self) -> bool:
        return self.crew.regroup_due

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        """Wait for a round, and settle with the crew whether it is kept. None: it is undone."""
        try:
            self.crew.wait(background.finished)
        except RuntimeError:  # WorkerLost, or a lost store: `settle` raises it again
            self.crew.abort()
        error = background.error
        if isinstance(error, RanksDisagree) and self.workers.rank in error.odd:
            self.crew.drop_out()  # only this worker differs: the others repeat the round
            raise error
        kept = self.crew.settle(background.finished(0) and error is None, moves_anchor)
        self._failures = 0 if kept else self._failures + 1
        # torch.distributed raises RuntimeError when another worker's connection breaks.
        of_others = isinstance(error, RuntimeError | RanksDisagree) and self.crew.size > 1
        if error is not None and (not of_others or self._failures >= PERSISTENT):
            raise error  # repeating the round is of no use
        return background.result if kept else None

    def begin_blocks(self) -> None:
        self.crew.begin_blocks()

    def join(self, version: Version, facts: MemberFacts) -> None:
        self.crew.join(version, facts)
        self._adopt_crew_group()

    def regroup(self, version: Version) -> None:
        """Form the next generation of the crew, and take over its group."""
        before = self.crew.members
        self.crew.abort()
        self.crew.regroup(version)
        if self.crew.members != before:
            self._failures = 0
        self._adopt_crew_group()

    def leave(self) -> None:
        self.crew.leave()
        self.workers = RankGroup()

    def _adopt_crew_group(self) -> None:
        crew = self.crew
        self.workers = RankGroup(crew.size, crew.rank, crew.group, own_group=True)


Members = FixedMembers | ElasticMembers


# -- a round, and its statistics -------------------------------------------------------------------


class BackgroundSync(threading.Thread):
    """A sync round in a separate thread. `run` instead of `start` holds it at once."""

    def __init__(
        self, sync_round: SyncRound, workers: RankGroup, before: BackgroundSync | None
    ) -> None:
        super().__init__(name="manyhands sync round", daemon=True)
        self._sync_round = sync_round
        self._workers = workers
        self._before = before
        self._done = threading.Event()
        self.result: RoundResult | None = None
        self.error: BaseException | None = None

    @classmethod
    def already_done(cls, result: RoundResult) -> BackgroundSync:
        """Return one that has ended with this result."""
        background = cls(lambda _: result, RankGroup(), None)
        background.run()
        return background

    def start(self) -> None:
        group_closer.await_at_end(self)
        super().start()

    def run(self) -> None:
        """Hold the round in this thread, after the one before; keep its result or error."""
        before = self._before
        self._before = None
        try:
            if before is not None:  # an earlier round of the same group, which may have failed
                before.finished()
                if before.error is not None:
                    raise before.error
            self.result = self._sync_round(self._workers)
        except BaseException as error:
            clear_frames(error.__traceback__)  # frames hold the process group, which has to end
            self.error = error
        finally:
            del self._sync_round, self._workers
            self._done.set()

    def finished(self, seconds: float | None = None) -> bool:
        """Wait for the end, for `seconds` at most; return whether it has ended."""
        return self._done.wait(seconds)


class Drift(NamedTuple):
    """How far the workers went in a block, and how far apart, from the lengths of a few vectors.

    n workers have moved by d_i from the anchor, and their mean is D. With a mean over workers
    written as < >,

        spread^2    <|d_i - D|^2>  =  <|d_i|^2> - |D|^2
        cosine      mean of d_i . d_j over all pairs, in units of <|d_i|^2>
                    =  (n |D|^2 - <|d_i|^2>) / ((n - 1) <|d_i|^2>)

    The cosine is 1 if all workers moved the same way, and 0 if their ways are unrelated. If workers
    count differently in the mean, by weights p_i that sum to 1, these are the weights of < > too:

        cosine      (|D|^2 - sum p_i^2 |d_i|^2) / ((1 - sum p_i^2) <|d_i|^2>)
    """

    distance: float = math.nan  # of the mean from the anchor
    spread: float = math.nan  # of the workers around their mean
    cosine: float = math.nan

    @classmethod
    def of(
        cls, squares: Sequence[float], square_of_mean: float, weights: Sequence[float] = ()
    ) -> Drift:
        """Return the drift from each worker's squared distance and the mean's.

        A worker of weight 0 is not in the mean.

        >>> Drift.of([25.0, 25.0], 16.0)  # (4, 3) and (4, -3)
        Drift(distance=4.0, spread=3.0, cosine=0.28)
        """
        weights = weights or [1.0] * len(squares)
        total = sum(weights)
        if total == 0.0:
            return cls()
        mean = sum(map(operator.mul, weights, squares)) / total
        if not math.isfinite(mean + square_of_mean):  # the square of 1e20 overflows a float32
            return cls()
        distance = math.sqrt(square_of_mean)
        # Variance = mean square - square of the mean; rounding may make it negative.
        spread = math.sqrt(max(mean - square_of_mean, 0.0))
        # |D|^2 is the sum over all pairs, of which these are a vector with itself.
        alone = 0.0
        pairs = 1.0
        for weight, square in zip(weights, squares, strict=True):
            share = weight / total
            alone += share**2 * square
            pairs -= share**2
        if mean * pairs <= 0.0:  # of one worker
            return cls(distance, spread)
        cosine = (square_of_mean - alone) / (mean * pairs)
        return cls(distance, spread, max(-1.0, min(1.0, cosine)))  # after rounding


@dataclass
class RoundStats:
    """Statistics of the last sync rounds, for `snapshot`."""

    # Of the model; of several optimizers, also of each.
    drifts: list[Drift] = field(default_factory=lambda: [Drift()])
    workers: int = 0  # in the last round
    members: tuple[int, ...] = ()  # their numbers
    left_out: list[int] = field(default_factory=list)  # of the last round: not finite
    left_out_ever: int = 0
    undone: int = 0
    waited: float = 0.0  # seconds in which steps waited for sync rounds
    seconds: float = 0.0  # a step takes on the slowest worker
    stop: bool = False  # whether a worker of the last round was asked to stop
    compared: bool = False  # whether a first block was searched for identical moves

    def record(self, result: RoundResult, numbers: Sequence[int], codec: Codec) -> None:
        """Take in a round's result; `numbers` are the numbers of its workers, in rank order."""
        reports = result.reports
        parts = result.parts
        weights = [report.weight if report.included else 0.0 for report in reports]
        totals = list(map(sum, zip(*[part.by_rank for part in parts], strict=True)))
        drift = Drift.of(totals, sum(part.of_mean for part in parts), weights)
        self.drifts = [drift]
        if len(parts) > 1:
            for part in parts:
                self.drifts.append(Drift.of(part.by_rank, part.of_mean, weights))
        self.workers = len(reports)
        if len(numbers) != len(reports):  # a round that was restored from a checkpoint
            numbers = range(len(reports))
        self.members = tuple(numbers)
        self.left_out = []
        for number, report in zip(numbers, reports, strict=True):
            if report.status == NOT_FINITE:
                self.left_out.append(number)
        self.left_out_ever += len(self.left_out)
        self.seconds = max(report.seconds for report in reports)
        self.stop = any(report.stop for report in reports)
        if not self.compared and drift.distance > 0:
            self.compared = True
            # Equal lengths are not enough: in its first steps Adam goes equally far whatever the
            # gradients. The cosine is that of values as the codec has rounded them.
            exact = list(map(sum, zip(*[part.exact for part in parts], strict=True)))
            moved = [exact[rank] for rank in result.included]
            same_lengths = 0.0 < max(moved) <= min(moved) * (1 + SAME)
            if same_lengths and drift.cosine > codec.cosine:
                warn(
                    f"in the first block all {len(moved)} workers have taken the same steps. "
                    "Either the model is in DistributedDataParallel or ShardedDataParallel (unwrap "
                    f"it), or all workers draw the same samples.{advice('no DDP')}",
                    RuntimeWarning,
                )


class StepClock:
    """The time that a step of this worker takes, measured since the last sync round."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int, seconds: float = 0.0, steps: float = 0) -> None:
        """Measure from this step on, as if `seconds` and `steps` had passed."""
        self._start = (time.perf_counter() - seconds, step - int(steps))
        self._measured = (-1, 0.0)  # the last answer, and the step that it was given after

    def elapsed(self, step: int) -> list[float]:
        """Return the seconds and the steps since the measurement began."""
        then, first = self._start
        return [time.perf_counter() - then, step - first]

    def seconds_per_step(self, step: int) -> float:
        """Return the seconds of a step since the last round, for this worker's report."""
        if self._measured[0] != step:  # else a round is repeated, and the time since was waiting
            seconds, steps = self.elapsed(step)
            self._measured = (step, seconds / max(steps, 1))
        return self._measured[1]


# -- the round itself ------------------------------------------------------------------------------


def run_sync_round(
    workers: RankGroup,
    payloads: Sequence[Payload],
    state: Sequence[Payload],
    report: WorkerReport,
) -> RoundResult:
    """Average the payloads, and `state` if every worker has some."""
    # Every worker passes the same payloads.
    with torch.no_grad():
        return _SyncRound(workers, report).run(payloads, state)


class _SyncRound:
    """The two queues of chunks in flight, and the result as it becomes known."""

    def __init__(self, workers: RankGroup, report: WorkerReport) -> None:
        self.workers = workers
        self.report = report
        self.result = RoundResult()
        self._squares: list[list[float]] = []  # by part: of this worker as sent, and unrounded
        self._sent: deque[PayloadChunk] = deque()  # values are on their way
        self._averaging: deque[PayloadChunk] = deque()  # means are on their way

    def run(self, payloads: Sequence[Payload], state: Sequence[Payload]) -> RoundResult:
        """Send all chunks, with a few in flight; return the result."""
        for chunk in cut_into_chunks(self.workers, payloads):
            self._send(chunk)
        # Only the reports say whether every worker has optimizer state, so at least one chunk's
        # reports have to be here before `state` is sent.
        while not self.result.reports and self._sent:
            self._start_mean(self._sent.popleft())
        if self.result.reports and self.result.averages_state:
            for chunk in cut_into_chunks(self.workers, state):
                self._send(chunk)
        while self._sent:
            self._start_mean(self._sent.popleft())
        while self._averaging:
            self._finish(self._averaging.popleft())
        return self.result

    def _send(self, chunk: PayloadChunk) -> None:
        """Send a chunk's values, once fewer than `IN_FLIGHT` are on their way."""
        while len(self._sent) >= IN_FLIGHT:
            self._start_mean(self._sent.popleft())
        part = chunk.payload.part
        while len(self._squares) <= part:
            self._squares.append([0.0, 0.0])
            self.result.parts.append(Squares(self.workers.size))
        chunk.send_values(self.report, self._squares[part])
        self._sent.append(chunk)

    def _start_mean(self, chunk: PayloadChunk) -> None:
        """Receive a chunk's values, and send its mean. The first brings the workers' reports."""
        while len(self._averaging) >= IN_FLIGHT:
            self._finish(self._averaging.popleft())
        reports = chunk.receive_reports()
        if not self.result.reports:  # the first chunk: its reports are those of all the others
            self.result.reports = [WorkerReport(*numbers[: REPORT - 2]) for numbers in reports]
            _check_reports(self.result.reports)
        if reports:  # of this chunk, and all before it of the same part
            part = self.result.parts[chunk.payload.part]
            for rank in self.result.included:
                part.by_rank[rank], part.exact[rank] = reports[rank][-2:]
        chunk.send_mean(self.result)
        if chunk.has_mean:
            self._finish(chunk)
        else:
            self._averaging.append(chunk)

    def _finish(self, chunk: PayloadChunk) -> None:
        self.result.parts[chunk.payload.part].of_mean += chunk.write_mean(self.result)


def _check_reports(reports: Sequence[WorkerReport]) -> None:
    """Raise on every worker unless all are at the same step of the same training."""
    _check_equal(
        [report.step for report in reports],
        "numbers of steps at a sync round",
        "Every worker has to call step() as often as the others: give them equally many batches, "
        "or stop together.",
    )
    _check_equal(
        [report.options for report in reports],
        "options, frozen parameters or positions of a Cursor",
        "(These are checksums.) Build the same optimizer and the same Cursor on every worker, and "
        "change or load them on all of them at once.",
    )
    kinds = set()  # of the workers in the mean: 0 with samples, or else what is unknown
    for report in reports:
        if (report.included and report.taken > 0) or report.samples == SAMPLES_INCOMPLETE:
            kinds.add(min(report.samples, 0.0))
    if len(kinds) > 1 or SAMPLES_INCOMPLETE in kinds:
        counted = []
        for rank, report in enumerate(reports[:8]):
            samples = f"{report.samples:.0f}"
            if report.samples < 0.0:
                samples = "of some steps" if report.samples == SAMPLES_INCOMPLETE else "none"
            counted.append(f"rank {rank}: {samples}")
        raise RanksDisagree(
            "count_samples() was called before some steps of this block, and not before others "
            f"(samples: {', '.join(counted)}). The mean is weighted by samples: call it before "
            "every step, on every worker, or never.",
            [min(report.samples, 0.0) for report in reports],
        )
    elements = [report.state_elements for report in reports]
    if min(elements) > 0:
        _check_equal(
            elements,
            "numbers of elements of optimizer state",
            'Use the same inner optimizer and model on every worker, or state="keep".',
        )


def _check_equal(values: Sequence[float], title: str, advice: str) -> None:
    if len(set(values)) > 1:
        raise_if_different([{title: value} for value in values], advice)


# -- state transfer to joiners ---------------------------------------------------------------------


class StateTransfer:
    """A member packs the state and sends it to every joiner; the other members wait.

    It runs in the background like a sync round, so that a member that dies meanwhile is noticed.
    `received` is the state on a joiner, and None elsewhere.
    """

    def __init__(self, members: ElasticMembers, pack: Callable[[], bytes]) -> None:
        self._crew = members.crew
        self._pack = pack
        self.received: bytearray | None = None
        self.background = BackgroundSync(self._run, members.workers, None)
        self.background.start()

    def _run(self, workers: RankGroup) -> RoundResult:
        """Send the packed state from the source to the joiners; on other members do nothing."""
        crew = self._crew
        group: Any = crew.group
        if crew.rank == crew.source:
            # frombuffer() needs memory that may be written to, which bytes is not.
            data = torch.frombuffer(bytearray(self._pack()), dtype=torch.uint8)
            for rank in crew.joiners:
                group.send([torch.tensor([len(data)])], rank, 0).wait()
                for message in data.split(MESSAGE):
                    group.send([message], rank, 0).wait()
        elif crew.rank in crew.joiners:
            size = torch.zeros(1, dtype=torch.int64)
            group.recv([size], crew.source, 0).wait()
            received = bytearray(int(size))
            for message in torch.frombuffer(received, dtype=torch.uint8).split(MESSAGE):
                group.recv([message], crew.source, 0).wait()
            self.received = received
        return RoundResult()
