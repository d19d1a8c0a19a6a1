"""Sum up what each second of a crew's workers went into, from the records of all its workers.

    worker 0   setup | steps  sync | steps  waiting  connecting  repeating | steps  sync | ...
    worker 1   setup | steps  sync | steps ✕  away | starting  joining | steps  sync | ...

    useful       steps that count, and the exchange after them
    setup        a worker's first start, until its record was opened
    away         a worker that had ended or was stopped, or was cut off from the store
    starting     its new process, until it asked to be let in, and after it was in until its record
                 was opened
    joining      waiting to be let in
    connecting   forming a generation, connecting its members, sending joiners the state
    waiting      rounds that were undone, because a member was lost in them
    repeating    rounds that repeated these
    idle         waiting for slower members, in rounds that were kept
    thrown_away  steps that are in no mean

The causes add up to the time from the start of each worker to its last step, less any time in which
no worker was there.

A worker counts the seconds that are no steps by itself (`crew_seconds` in its lines: sums since its
process began, see blocks/crew/_spent.py). What is left of the time between two lines are steps.
They count with the next kept round, less those that `dropped` says were given up, and they are
thrown away if the process ends before.

A worker that was killed says nothing of it. It was away from its last line to the start of its next
process, both by its host's clock (`opened` and `began` in the header), as long as any other worker
was there. If there is no next process, and the others have held later rounds, it was away until
their last line.

The last member to arrive at a round waits for the exchange only. What others wait longer is idle.

Arithmetic only. A record may come from a stranger, so each number is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
FAULTS = ("away", "starting", "waiting", "repeating", "thrown_away")
SHOWN = 0.0005  # smaller shares are left out of a line
_COUNTED = ("away", "joining", "connecting", "waiting", "repeating")  # by the worker itself

Span = tuple[float, float]  # from one time to another


@dataclass
class WorkerTime:
    """What one worker's seconds went into, as far as its record was read; `take` reads a line."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    rounds: int = 0  # that it has held, as it counts them
    syncs: dict[int, float] = field(default_factory=dict)  # seconds of each round, by its number
    block: float = 0.0  # seconds of the steps since its last round
    lives: list[Span] = field(default_factory=list)  # of each process, up to its last line
    absences: list[Span] = field(default_factory=list)  # after each process that was lost
    closed: bool = False
    in_crew: bool = False
    _replaces: bool = False  # whether this process is the successor of one that was lost
    _opened: float | None = None  # when the record was opened the last time; None: unknown
    _before: dict[str, float] | None = None  # the numbers of the line before; None: of a new start
    _known: tuple[dict[str, Any], object] = ({}, None)  # which the line before had
    _begun: tuple[float, float] = (0.0, 0.0)  # steps taken and dropped when the block began

    @property
    def end(self) -> float:
        """The time of its last line."""
        return self.lives[-1][1] if self.lives else 0.0

    def take_header(self, header: Mapping[str, Any]) -> None:
        """Take in that the run has started, has started again, or has ended."""
        if "ended" in header:
            self.closed = header.get("error") is None
            return
        opened = to_number(header.get("opened"))
        if opened is None:
            return
        began = min(opened, to_number(header.get("began")) or opened)
        self._replaces = self._opened is not None and not self.closed
        if self._replaces:
            self.absences.append((self.end, began))
        self.seconds["thrown_away" if self._replaces else "useful"] += self.block
        start = max(0.0, opened - max(began, self.end))
        self.seconds["starting" if self._replaces else "setup"] += start
        self.block, self._before, self.closed = 0.0, None, False
        self._opened = opened
        self.lives.append((began, opened))

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in a line of a step."""
        spent = line.get("crew_seconds")
        if not isinstance(spent, dict) or self._opened is None:
            return
        if self._before is not None and (spent, line.get("rounds")) == self._known:
            time = to_number(line["time"]) or 0.0  # inside a block: only time has passed
            self.block += time - self._before["time"]
            self._before["time"] = time
            self._live_until(self._opened + time)
            return
        self._known = (spent, line.get("rounds"))
        keys = ("time", "rounds", "own_steps", "dropped")
        now = {key: to_number(line.get(key)) or 0.0 for key in keys}
        now |= {key: to_number(spent.get(key)) or 0.0 for key in ("sync", *_COUNTED)}
        before = self._before or self._before_first(now)
        self.in_crew, self._before = True, now
        more = {key: max(0.0, value - before[key]) for key, value in now.items()}
        for cause in _COUNTED:
            self.seconds[cause] += more[cause]
        if more["sync"]:
            number = int(now["rounds"])
            self.syncs[number] = self.syncs.get(number, 0.0) + more["sync"]
        # A pause may be noticed after the line that it delayed: then it is in the next line.
        self.block += more["time"] - more["sync"] - sum(more[cause] for cause in _COUNTED)
        if more["rounds"]:
            self._end_block(now["own_steps"], now["dropped"])
            self.rounds = int(now["rounds"])
        self._live_until(self._opened + now["time"])

    def _live_until(self, end: float) -> None:
        self.lives[-1] = (self.lives[-1][0], end)

    def _before_first(self, now: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers as they were when the record was opened, before its first line."""
        # A new process has joined before that: not all of the time until then was its start.
        before = {**now, "time": 0.0, "sync": 0.0}
        if self._replaces:
            for cause in ("joining", "connecting"):
                seconds = min(now[cause], self.seconds["starting"])
                self.seconds[cause] += seconds
                self.seconds["starting"] -= seconds
        self._begun = (max(0.0, now["own_steps"] - 1), now["dropped"])
        return before

    def _end_block(self, own: float, dropped: float) -> None:
        """Share out the seconds of the steps since the last round: they count, or were dropped."""
        steps, lost = own - self._begun[0], dropped - self._begun[1]
        share = min(1.0, max(0.0, lost / steps)) if steps > 0 else 0.0
        seconds = max(0.0, self.block)
        self.seconds["thrown_away"] += share * seconds
        self.seconds["useful"] += (1.0 - share) * seconds
        self.block, self._begun = self.block - seconds, (own, dropped)


@dataclass(frozen=True)
class Tally:
    """What the seconds of all workers went into."""

    workers: dict[str, dict[str, float]]  # seconds by cause (`CAUSES`) and by worker's name

    @property
    def total(self) -> dict[str, float]:
        """Seconds of all workers together, by cause."""
        return {cause: sum(each[cause] for each in self.workers.values()) for cause in CAUSES}

    @property
    def has_faults(self) -> bool:
        """Whether any worker was lost, or lost anything."""
        total = self.total
        return any(total[cause] for cause in FAULTS)

    def shares(self) -> dict[str, float]:
        """Return the part of all seconds that each cause has taken."""
        total = self.total
        whole = sum(total.values()) or 1.0
        return {cause: seconds / whole for cause, seconds in total.items()}

    def __str__(self) -> str:
        """Return one line: the shares of the causes, the largest first."""
        shares = sorted(self.shares().items(), key=lambda share: -share[1])
        return ", ".join(f"{CAUSES[cause]} {s:.1%}" for cause, s in shares if s >= SHOWN)


def tally(times: Mapping[str, WorkerTime]) -> Tally:
    """Sum up the time of a crew, from what was read of each worker's record."""
    crew = {name: time for name, time in times.items() if time.in_crew}
    latest = max((time.end for time in crew.values()), default=0.0)
    newest = max((time.rounds for time in crew.values()), default=0)
    over = any(time.closed and time.rounds == newest for time in crew.values())
    exchange: dict[int, float] = {}  # how long the last member to arrive has waited
    for time in crew.values():
        for number, seconds in time.syncs.items():
            exchange[number] = min(seconds, exchange.get(number, seconds))
    there = _joined(life for time in crew.values() for life in time.lives)
    found: dict[str, dict[str, float]] = {}
    for name, time in crew.items():
        sums = dict(time.seconds)
        useful = sum(exchange[number] for number in time.syncs)
        sums["idle"] += sum(time.syncs.values()) - useful
        sums["useful"] += useful
        # All living members have held the last round but one.
        lost = not time.closed and newest > time.rounds + (not over)
        sums["thrown_away" if lost else "useful"] += time.block
        absences = [*time.absences, *([(time.end, latest)] if lost else [])]
        sums["away"] += sum(
            max(0.0, min(end, until) - max(start, since))
            for since, until in absences
            for start, end in there
        )
        found[name] = sums
    return Tally(found)


def _joined(times: Iterable[Span]) -> list[Span]:
    """Return spans without overlap that cover the same time."""
    found: list[Span] = []
    for start, end in sorted(times):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def tally_faults(times: Mapping[Path, WorkerTime]) -> dict[Path, Tally]:
    """Return the tally of each folder with the records of a crew in which any worker was lost."""
    folders: dict[Path, dict[str, WorkerTime]] = {}
    for path, time in times.items():
        folders.setdefault(path.parent, {})[path.stem] = time
    tallies = {folder: tally(workers) for folder, workers in folders.items()}
    return {folder: found for folder, found in tallies.items() if found.has_faults}


def to_number(value: object) -> float | None:
    """Return a number that may be a time or a count, or None: a stranger may write anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 2**53 else None
