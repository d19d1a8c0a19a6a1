"""Sync rounds: run a round, agree with all workers that it took place, measure the drift.

FixedMembers     the workers of a process group
ElasticMembers   the members of a crew (`blocks/crew/`), which may undo a round and regroup
BackgroundSync   a round in a thread
Drift            distance of the mean from the anchor, and disagreement of the workers
RoundStats       statistics of the last rounds
StepClock        time per step since the last round
SyncRound        average payloads over the workers
StateTransfer    send joiners of a crew the common state

A few chunks of payloads (`_chunks.py`) are in flight at a time, so that reading and encoding
overlap with communication, and no second copy of a payload exists.

Reports travel with the chunks, so agreement checks, the exclusion of non-finite values and the
drift need no further message. All workers see equal reports, and reach equal conclusions.

A thread runs the round if training continues meanwhile, or if a crew must notice lost members while
others wait for messages. Rounds of a group run sequentially, because their messages must not mix.
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
    WorkerReport,
)
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._enrollment import MemberFacts
from manyhands.blocks.crew._roster import Version
from manyhands.errors import RanksDisagree

IN_FLIGHT = 2  # chunks per phase: values in flight, means in flight
MESSAGE_BYTES = 1 << 26  # per message of a state transfer
EQUAL_STEPS = 1e-6  # maximum relative difference between squared lengths of equal steps
MAX_FAILURES = 5  # among unchanged members; more have another cause than a lost worker

RunRound = Callable[[RankGroup], RoundResult]


# -- members ---------------------------------------------------------------------------------------


class FixedMembers:
    elastic = False
    regroup_due = False

    def __init__(self, workers: RankGroup, inner: RankGroup) -> None:
        self.workers = workers
        self.inner = inner  # the ranks of this worker

    def choose_transport(
        self, devices: Sequence[torch.device], *, background: bool, shared_memory: bool
    ) -> None:
        """Choose the collectives for sync rounds.

        `background`: rounds run while training continues. `shared_memory`: use it if possible.
        """
        workers = self.workers
        if background:  # a separate group, because training uses collectives too
            workers = workers.with_background_group(devices[0])
        on_cpu = all(d.type == "cpu" and workers.on_gloo(d) for d in {*devices})
        if shared_memory and on_cpu:
            workers = workers.with_shared_memory(required=False)
        self.workers = workers

    @property
    def alone(self) -> bool:
        return self.workers.size == 1

    @property
    def numbers(self) -> Sequence[int]:
        return range(self.workers.size)

    @property
    def number(self) -> int:
        return self.workers.rank

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        """Wait until all workers agree on a sync round. Return None if it is undone everywhere.

        `moves_anchor` is False for a state transfer.
        """
        background.finished()
        if background.error is not None:
            with explained(self.workers, f"before a sync round. {UNEVEN}"):
                raise background.error
        return background.result


class ElasticMembers:
    """The members of a crew, with the interface of `FixedMembers`."""

    elastic = True
    alone = False

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.inner: RankGroup = crew.inner
        self.workers = RankGroup()
        self._failures = 0  # consecutive undone rounds among unchanged members

    @property
    def numbers(self) -> Sequence[int]:
        return self.crew.members or (self.crew.number,)  # alone after `leave`

    @property
    def number(self) -> int:
        return self.crew.number

    @property
    def regroup_due(self) -> bool:
        return self.crew.regroup_due

    def commit(self, background: BackgroundSync, moves_anchor: bool = True) -> RoundResult | None:
        try:
            self.crew.wait(background.finished)
        except RuntimeError:  # WorkerLost, or a lost store: `settle` raises again
            self.crew.abort()
        error = background.error
        if isinstance(error, RanksDisagree) and self.workers.rank in error.odd:
            self.crew.drop_out()  # the remaining members repeat the round
            raise error
        kept = self.crew.settle(background.finished(0) and error is None, moves_anchor)
        self._failures = 0 if kept else self._failures + 1
        # torch.distributed raises RuntimeError if a connection breaks.
        of_others = isinstance(error, RuntimeError | RanksDisagree) and self.crew.size > 1
        if error is not None and (not of_others or self._failures >= MAX_FAILURES):
            raise error  # repeating would not help
        return background.result if kept else None

    def join(self, version: Version, facts: MemberFacts) -> None:
        self.crew.join(version, facts)
        self._adopt_crew_group()

    def regroup(self, version: Version) -> None:
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


# -- a round and its statistics --------------------------------------------------------------------


class BackgroundSync(threading.Thread):
    """A sync round in a thread. Call `run` to run it in the calling thread."""

    def __init__(
        self, run_round: RunRound, workers: RankGroup, before: BackgroundSync | None
    ) -> None:
        super().__init__(name="manyhands sync round", daemon=True)
        self._run_round = run_round
        self._workers = workers
        self._before = before
        self._done = threading.Event()
        self.result: RoundResult | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        group_closer.await_at_end(self)
        super().start()

    def run(self) -> None:
        before = self._before
        self._before = None
        try:
            if before is not None:
                before.finished()
                if before.error is not None:
                    raise before.error
            self.result = self._run_round(self._workers)
        except BaseException as error:
            clear_frames(error.__traceback__)  # frames keep the process group alive
            self.error = error
        finally:
            del self._run_round, self._workers
            self._done.set()

    def finished(self, seconds: float | None = None) -> bool:
        return self._done.wait(seconds)


class Drift(NamedTuple):
    """Distance and disagreement of the workers in a block, computed from a few lengths.

    n workers have moved by d_i from the anchor, D is the mean, and < > is a mean over workers.

        spread^2    <|d_i - D|^2>  =  <|d_i|^2> - |D|^2
        cosine      mean of d_i . d_j over all pairs, in units of <|d_i|^2>
                    =  (n |D|^2 - <|d_i|^2>) / ((n - 1) <|d_i|^2>)

    The cosine is 1 for identical movements, and 0 for unrelated movements. With weights p_i that
    sum to 1, which also apply to < >:

        cosine      (|D|^2 - sum p_i^2 |d_i|^2) / ((1 - sum p_i^2) <|d_i|^2>)
    """

    distance: float = math.nan  # of the mean from the anchor
    spread: float = math.nan  # of the workers around their mean
    cosine: float = math.nan

    @classmethod
    def of(
        cls, squares: Sequence[float], square_of_mean: float, weights: Sequence[float] = ()
    ) -> Drift:
        """Return the drift from squared distances. Weight 0 excludes a worker from the mean.

        >>> Drift.of([25.0, 25.0], 16.0)  # (4, 3) and (4, -3)
        Drift(distance=4.0, spread=3.0, cosine=0.28)
        """
        weights = weights or [1.0] * len(squares)
        total = sum(weights)
        if total == 0.0:
            return cls()
        mean = sum(map(operator.mul, weights, squares)) / total
        if not math.isfinite(mean + square_of_mean):  # the square of 1e20 overflows in float32
            return cls()
        distance = math.sqrt(square_of_mean)
        # Variance = mean square - squared mean; rounding may make it negative.
        spread = math.sqrt(max(mean - square_of_mean, 0.0))
        # |D|^2 is a sum over all pairs, including each vector with itself (`alone`).
        alone = 0.0
        pairs = 1.0
        for weight, square in zip(weights, squares, strict=True):
            share = weight / total
            alone += share**2 * square
            pairs -= share**2
        if mean * pairs <= 0.0:  # a single worker
            return cls(distance, spread)
        cosine = (square_of_mean - alone) / (mean * pairs)
        return cls(distance, spread, max(-1.0, min(1.0, cosine)))


@dataclass
class RoundStats:
    """Statistics of the last sync rounds, for `snapshot`."""

    drift: Drift = field(default_factory=Drift)
    workers: int = 0  # in the last round
    members: tuple[int, ...] = ()  # numbers of these workers
    left_out: list[int] = field(default_factory=list)  # in the last round: not finite
    left_out_ever: int = 0
    undone: int = 0
    waited: float = 0.0  # seconds that steps waited for sync rounds
    seconds: float = 0.0  # per step on the slowest worker
    stop: bool = False  # whether a worker of the last round had a stop notice
    compared: bool = False  # whether a first block was tested for identical movements

    def record(self, result: RoundResult, numbers: Sequence[int], codec: Codec) -> None:
        reports = result.reports
        weights = [report.weight if report.included else 0.0 for report in reports]
        self.drift = Drift.of(result.squares, result.square_of_mean, weights)
        self.workers = len(reports)
        self.members = tuple(numbers)
        self.left_out = []
        for number, report in zip(numbers, reports, strict=True):
            if report.status == NOT_FINITE:
                self.left_out.append(number)
        self.left_out_ever += len(self.left_out)
        self.seconds = max(report.seconds for report in reports)
        self.stop = any(report.stop for report in reports)
        if not self.compared and self.drift.distance > 0:
            self.compared = True
            # Lengths alone do not suffice: Adam's first steps have equal lengths for any gradients.
            moved = [result.exact_squares[rank] for rank in result.included]
            same_lengths = 0.0 < max(moved) <= min(moved) * (1 + EQUAL_STEPS)
            if same_lengths and self.drift.cosine > codec.cosine:
                warn(
                    f"in the first block all {len(moved)} workers have taken the same steps. "
                    "Either the model is in DistributedDataParallel or ShardedDataParallel (unwrap "
                    f"it), or all workers draw the same samples.{advice('no DDP')}",
                    RuntimeWarning,
                )


class StepClock:
    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int, seconds: float = 0.0, steps: float = 0) -> None:
        self._start = (time.perf_counter() - seconds, step - int(steps))
        self._measured = (-1, 0.0)  # step and answer of the last `seconds_per_step`

    def elapsed(self, step: int) -> list[float]:
        then, first = self._start
        return [time.perf_counter() - then, step - first]

    def seconds_per_step(self, step: int) -> float:
        if self._measured[0] != step:  # a repeated round must not count its own wait
            seconds, steps = self.elapsed(step)
            self._measured = (step, seconds / max(steps, 1))
        return self._measured[1]


# -- the round itself ------------------------------------------------------------------------------


class SyncRound:
    def __init__(self, workers: RankGroup, report: WorkerReport) -> None:
        self.workers = workers
        self.report = report
        zeros = [0.0] * workers.size
        self.result = RoundResult(squares=zeros, exact_squares=zeros.copy())
        self._squares = [0.0, 0.0]  # of this worker: as sent, and unrounded
        self._sent: deque[PayloadChunk] = deque()  # values are in flight
        self._averaging: deque[PayloadChunk] = deque()  # means are in flight

    @torch.no_grad()
    def run(self, payloads: Sequence[Payload], state: Sequence[Payload]) -> RoundResult:
        """Average payloads, and `state` if every worker has some."""
        for chunk in cut_into_chunks(self.workers, payloads):
            self._send(chunk)
        # Reports say whether every worker has optimizer state, so a chunk must arrive first.
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
        while len(self._sent) >= IN_FLIGHT:
            self._start_mean(self._sent.popleft())
        chunk.send_values(self.report, self._squares)
        self._sent.append(chunk)

    def _start_mean(self, chunk: PayloadChunk) -> None:
        while len(self._averaging) >= IN_FLIGHT:
            self._finish(self._averaging.popleft())
        reports = chunk.receive_reports()
        result = self.result
        if not result.reports:  # the reports with the first chunk apply to all chunks
            result.reports = [WorkerReport(*numbers[: REPORT - 2]) for numbers in reports]
            _check_reports(result.reports)
        if reports:  # with the squared lengths of all chunks so far
            for rank in result.included:
                result.squares[rank], result.exact_squares[rank] = reports[rank][-2:]
        chunk.send_mean(result)
        if chunk.has_mean:
            self._finish(chunk)
        else:
            self._averaging.append(chunk)

    def _finish(self, chunk: PayloadChunk) -> None:
        self.result.square_of_mean += chunk.write_mean(self.result)


def _check_reports(reports: Sequence[WorkerReport]) -> None:
    _check_equal(
        [report.step for report in reports],
        "numbers of steps at a sync round",
        "Every worker must call step() equally often: give all workers the same number of batches, "
        "or stop them together.",
    )
    _check_equal(
        [report.options for report in reports],
        "options, frozen parameters or positions of a Cursor",
        "(These are checksums.) Build the same optimizer and Cursor on every worker, and change or "
        "load them on all workers at the same step.",
    )
    kinds = set()  # of the included workers: 0 with samples, otherwise the kind of unknown
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
            "count_samples() was called before some steps of this block, but not before others "
            f"(samples: {', '.join(counted)}). The mean is weighted by samples. Call it before "
            "every step on every worker, or never.",
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


# -- state transfer --------------------------------------------------------------------------------


class StateTransfer:
    """Send the packed state from a member to all joiners, in a thread, while other members wait."""

    def __init__(self, members: ElasticMembers, pack: Callable[[], bytes]) -> None:
        self._crew = members.crew
        self._pack = pack
        self.received: bytearray | None = None
        self.background = BackgroundSync(self._run, members.workers, None)
        self.background.start()

    def _run(self, workers: RankGroup) -> RoundResult:
        crew = self._crew
        group: Any = crew.group
        if crew.rank == crew.source:
            # frombuffer() needs writable memory, unlike bytes.
            data = torch.frombuffer(bytearray(self._pack()), dtype=torch.uint8)
            for rank in crew.joiners:
                group.send([torch.tensor([len(data)])], rank, 0).wait()
                for message in data.split(MESSAGE_BYTES):
                    group.send([message], rank, 0).wait()
        elif crew.rank in crew.joiners:
            size = torch.zeros(1, dtype=torch.int64)
            group.recv([size], crew.source, 0).wait()
            received = bytearray(int(size))
            for message in torch.frombuffer(received, dtype=torch.uint8).split(MESSAGE_BYTES):
                group.recv([message], crew.source, 0).wait()
            self.received = received
        return RoundResult()
