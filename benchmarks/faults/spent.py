"""Measure the seconds of a crew's workers by cause.

    worker 0   setup | steps  sync | steps  waiting  connecting  repeating | steps  sync | ...
    worker 1   setup | steps  sync | steps ✕  away | starting  joining | steps  sync | ...

    useful       steps that count, and the exchange after them
    setup        the first start of a worker, until its record was opened
    away         a worker that was killed or stopped, or cut off from the store
    starting     the start of the next process, until the record was opened, without joining
    joining      waiting until the members let the worker in
    connecting   forming a generation, connecting its members, sending joiners the state
    waiting      rounds that were undone because a member was lost
    repeating    rounds that repeated an undone round
    idle         waiting for slower members in rounds that were kept
    thrown_away  steps that are in no mean

`measure_crew` counts the seconds that are not steps, in the process of a worker, by wrapping
methods of the crew. The other time between two lines of the record belongs to steps. Steps count
with the next kept round, except those that the optimizer reports as `dropped`; they are thrown away
if the process ends before. `shares` reads the records of all workers. A killed worker was away from
the last line to the start of the next process (or the last line of all), while any other worker was
there. The last member that arrives at a round waits for the exchange only.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pages

from manyhands.blocks.averaging._payload import RoundResult
from manyhands.blocks.averaging._round import BackgroundSync, ElasticMembers
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._enrollment import Enrollment
from manyhands.blocks.crew._roster import Roster, Version

CAUSES = {
    "useful": "steps that count",
    "setup": "first start",
    "away": "ended or stopped",
    "starting": "started again",
    "joining": "waiting to be let in",
    "connecting": "connecting",
    "waiting": "rounds with a lost worker",
    "repeating": "repeated rounds",
    "idle": "waiting for slower workers",
    "thrown_away": "steps thrown away",
}
COUNTED = ("away", "joining", "connecting", "waiting", "repeating")  # by the worker
LOOK = 0.25  # seconds between two looks at the clock
PAUSE = 1.0  # seconds by which a look is late only if the process was stopped

Span = tuple[float, float]  # from one time to another


# -- in a worker -----------------------------------------------------------------------------------


@dataclass
class OpenSpan:
    """The cause of a `with` block's time, which may change until the block ends."""

    cause: str


class SecondsSpent:
    """The seconds of this process by cause: `sync`, and those in `COUNTED`."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("sync", *COUNTED), 0.0)
        self._paused = 0.0  # seconds in which the process was stopped
        self._counted = 0.0  # seconds of all spans that have ended
        self.repeats = False  # whether the last round was undone

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the sums so far, for a record."""
        return {"crew_seconds": dict(self._seconds)}

    @contextmanager
    def on(self, cause: str) -> Iterator[OpenSpan]:
        """Count the time of a `with` block. The time of a nested block is counted there only."""
        span = OpenSpan(cause)
        began = self._now()
        counted = self._counted
        try:
            yield span
        finally:
            nested = self._counted - counted
            seconds = max(0.0, self._now() - began - nested)
            self._counted += seconds
            self._seconds[span.cause] += seconds

    def wrap(self, owner: type, name: str, cause: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.on(cause):
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    def watch_pauses(self) -> None:
        """Count the seconds in which the process is stopped, which belong to no span."""
        while True:
            due = time.monotonic() + LOOK
            time.sleep(LOOK)
            late = time.monotonic() - due
            if late > PAUSE:
                self._paused += late
                self._seconds["away"] += late

    def _now(self) -> float:
        return time.monotonic() - self._paused


def measure_crew() -> SecondsSpent:
    """Count the time of the crew that this process joins afterwards."""
    spent = SecondsSpent()
    spent.wrap(Crew, "join", "joining")
    spent.wrap(Crew, "regroup", "connecting")
    spent.wrap(Crew, "_return_to_store", "away")
    spent.wrap(Crew, "_connect", "connecting")
    wait_for_generation = Enrollment.wait_for_generation
    commit = ElasticMembers.commit

    def timed_wait(self: Enrollment, version: Version, after: int, longest_wait: float) -> Roster:
        is_member = self.id in self.shared.roster.ids
        with spent.on("connecting" if is_member else "joining"):
            return wait_for_generation(self, version, after, longest_wait)

    def timed_commit(
        self: ElasticMembers, background: BackgroundSync, moves_anchor: bool = True
    ) -> RoundResult | None:
        with spent.on("sync" if moves_anchor else "connecting") as span:
            result = commit(self, background, moves_anchor)
            if moves_anchor:
                if result is None:
                    span.cause = "waiting"
                elif spent.repeats:
                    span.cause = "repeating"
                spent.repeats = result is None
            elif self.crew.rank in self.crew.joiners:
                spent.repeats = False  # the next round is a new round for this worker
        return result

    Enrollment.wait_for_generation = timed_wait  # type: ignore[method-assign]
    ElasticMembers.commit = timed_commit  # type: ignore[method-assign]
    threading.Thread(target=spent.watch_pauses, daemon=True).start()
    return spent


def times_of_start() -> dict[str, float]:
    """Return when this process began and when its record is opened, in seconds since 1970."""
    opened = time.time()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds since the machine's start
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    return {"opened": opened, "began": opened - age}


# -- from the records of all workers ---------------------------------------------------------------


@dataclass
class WorkerTime:
    """The seconds of one worker by cause, from its record."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    rounds: int = 0  # that the worker has held
    syncs: dict[int, float] = field(default_factory=dict)  # seconds of each round, by its number
    block: float = 0.0  # seconds of the steps since the last round
    lives: list[Span] = field(default_factory=list)  # of each process, up to its last line
    absences: list[Span] = field(default_factory=list)  # after each process that was lost
    closed: bool = False
    replaces: bool = False  # whether this process replaces one that was lost
    before: dict[str, float] | None = None  # the numbers of the line before; None: a new start
    opened: float = 0.0  # when this process opened the record
    own_steps: float = 0.0  # steps of this process until the block began
    dropped: float = 0.0  # steps of these that were dropped

    @classmethod
    def of(cls, path: Path) -> WorkerTime:
        worker = cls()
        for line in pages.read_rows(path):
            if "manyhands" in line:
                worker.take_header(line["manyhands"])
            else:
                worker.take_line(line)
        return worker

    @property
    def end(self) -> float:
        return self.lives[-1][1]

    def take_header(self, header: Mapping[str, Any]) -> None:
        """Add a start of the worker, or the end of its record."""
        if "ended" in header:
            self.closed = header["error"] is None
            return
        opened = header["config"]["opened"]
        began = header["config"]["began"]
        self.opened = opened
        self.replaces = bool(self.lives) and not self.closed
        if self.replaces:
            self.absences.append((self.end, began))
            self.seconds["thrown_away"] += self.block
            self.seconds["starting"] += opened - max(began, self.end)
        else:
            self.seconds["useful"] += self.block
            self.seconds["setup"] += opened - began
        self.block = 0.0
        self.before = None
        self.closed = False
        self.lives.append((began, opened))

    def take_line(self, line: Mapping[str, Any]) -> None:
        """Add the time since the line before."""
        now = {key: line[key] for key in ("time", "rounds", "own_steps", "dropped")}
        now |= line["crew_seconds"]
        if self.before is None:
            self._begin_life(now)
            before = {**now, "time": 0.0, "sync": 0.0}
        else:
            before = self.before
        more = {key: max(0.0, value - before[key]) for key, value in now.items()}
        self.before = now
        steps = more["time"] - more["sync"]
        for cause in COUNTED:
            self.seconds[cause] += more[cause]
            steps -= more[cause]
        self.block += steps  # below 0 if a pause is noticed after the line that it delayed
        number = int(now["rounds"])
        if more["sync"]:
            self.syncs[number] = self.syncs.get(number, 0.0) + more["sync"]
        if more["rounds"]:
            self._end_block(now["own_steps"], now["dropped"])
            self.rounds = number
        self.lives[-1] = (self.lives[-1][0], self.opened + now["time"])

    def _begin_life(self, now: Mapping[str, float]) -> None:
        """Start a block at the first line of a process."""
        if self.replaces:  # the process has joined before that: this was not part of its start
            for cause in ("joining", "connecting"):
                seconds = min(now[cause], self.seconds["starting"])
                self.seconds[cause] += seconds
                self.seconds["starting"] -= seconds
        self.own_steps = max(0.0, now["own_steps"] - 1)
        self.dropped = now["dropped"]

    def _end_block(self, own_steps: float, dropped: float) -> None:
        """Divide the seconds of the block into steps that count and steps that were dropped."""
        steps = own_steps - self.own_steps
        share = (dropped - self.dropped) / steps if steps > 0 else 0.0
        share = min(1.0, max(0.0, share))
        seconds = max(0.0, self.block)
        self.seconds["thrown_away"] += share * seconds
        self.seconds["useful"] += (1.0 - share) * seconds
        self.block -= seconds
        self.own_steps = own_steps
        self.dropped = dropped


def shares(records: Iterable[Path]) -> dict[str, float]:
    """Return the part of all workers' seconds that each cause has taken."""
    total = add_up([WorkerTime.of(path) for path in records])
    whole = sum(total.values())
    return {cause: seconds / whole for cause, seconds in total.items()}


def add_up(workers: list[WorkerTime]) -> dict[str, float]:
    latest = max(worker.end for worker in workers)
    newest = max(worker.rounds for worker in workers)
    over = any(worker.closed and worker.rounds == newest for worker in workers)
    there = without_overlap(life for worker in workers for life in worker.lives)
    exchange: dict[int, float] = {}  # how long the last member to arrive has waited
    for worker in workers:
        for number, seconds in worker.syncs.items():
            exchange[number] = min(seconds, exchange.get(number, seconds))
    total = dict.fromkeys(CAUSES, 0.0)
    for worker in workers:
        for cause, seconds in worker.seconds.items():
            total[cause] += seconds
        for number, seconds in worker.syncs.items():
            total["useful"] += exchange[number]
            total["idle"] += seconds - exchange[number]
        absences = list(worker.absences)
        held = newest if over else newest - 1  # all living members have held this round
        if worker.closed or worker.rounds >= held:
            total["useful"] += worker.block
        else:
            total["thrown_away"] += worker.block
            absences.append((worker.end, latest))
        for since, until in absences:
            for start, end in there:
                total["away"] += max(0.0, min(end, until) - max(start, since))
    return total


def without_overlap(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
