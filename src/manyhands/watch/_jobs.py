"""Jobs as their records show them: what state each is in, how fast it is, what has happened.

A job is in one of these states:

    waiting    there is no file yet, or it has no whole line
    running    it writes
    silent     no line for much longer than usual; its process runs, or cannot be seen from here
    died       its process is gone, and the record was not closed
    failed     the record was closed by an exception
    ended      the record was closed
    damaged    the file is no record, or cannot be read

A run's speed is that of its last minute, or of its last ten lines if these took longer. The time
left is the progress that is missing (or the steps, if there is no progress) over that speed.

`Jobs` are the records that were named, and all that appear in a named folder.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

from manyhands.record._run import (
    HEADER,
    GrowingRecord,
    Header,
    Line,
    count_small_batches,
    is_alive,
    to_positive,
)
from manyhands.watch._points import MOST, Curves, Points

State = Literal["waiting", "running", "silent", "died", "failed", "ended", "damaged"]

# A job is silent after so many seconds without a line, and so many times the usual time for a line.
SILENT_FROM, SILENT_TIMES = 30.0, 10.0
RECENT, RECENT_LINES = 60.0, 10  # the seconds and the lines that a run's speed is measured over
MARKS, EVENTS = 600, 100  # as many are kept
LOOK_EVERY = 2.0  # seconds between two looks into a folder
SUFFIX = ".jsonl"
COUNTED = {  # columns that only grow, what they count, and what has happened when one does
    "undone": ("round", "undone: a worker was lost in the sync round"),
    "left_out": ("worker", "left out of a mean: its numbers were not finite"),
    "dropped": ("step", "dropped: too late for the sync round, or not finite"),
    "nonfinite": ("step", "with a gradient that was not finite"),
    "skipped": ("step", "skipped by the gradient scaler"),
}


@dataclass(frozen=True)
class Event:
    """Something that a reader should notice."""

    step: int
    seconds: float  # of the run
    kind: str  # start, workers, fault, back
    text: str


@dataclass(frozen=True)
class Mark:
    """Where a run was at one line."""

    seconds: float
    step: float
    progress: float | None
    samples: float | None


@dataclass(frozen=True)
class JobState:
    """What a reader wants to know of a job, in plain values; None is unknown."""

    name: str
    path: str
    state: State
    text: str
    age: float | None  # seconds since the record grew
    behind: float  # the fraction of the file that is still to be read
    step: int = 0
    seconds: float = 0.0
    progress: float | None = None
    until: float | None = None
    left: float | None = None  # seconds
    latest: dict[str, float] = field(default_factory=dict)  # the last line's numbers, by column
    own: tuple[str, ...] = ()  # the columns of the user's values
    batch: float | None = None  # samples of a step, or small batches if their size is unknown
    batch_unit: str = "small batches"
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    workers: int | None = None
    members: str = ""
    rounds: int | None = None
    faults: dict[str, int] = field(default_factory=dict)  # counts, by column of `COUNTED`
    parts: dict[str, float] = field(default_factory=dict)  # seconds of a step, by what they are for
    starts: int = 0
    date: str = ""
    process: str = ""
    config: dict[str, object] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def over(self) -> bool:
        """Whether nothing more is expected of the job."""
        return self.state in ("ended", "failed", "died", "damaged")


class WatchedJob:
    """One job, whose record is read as it grows."""

    def __init__(self, path: Path, most: int = MOST) -> None:
        self.path = path
        self.version = 0  # grows with every change
        self._most = most
        self._file = GrowingRecord(path)
        self._problem: str | None = None
        self._begin()

    def _begin(self) -> None:
        """Forget all that was read, as before the record's first line, or when it was replaced."""
        self._header: Header | None = None
        self._starts = 0
        self._points = Points(self._most)
        self._marks: deque[Mark] = deque(maxlen=MARKS)
        self._gaps: deque[float] = deque(maxlen=50)  # seconds from line to line, the last ones
        self._events: deque[Event] = deque(maxlen=EVENTS)
        self._last: Line | None = None
        self._latest: dict[str, float] = {}
        self._own: dict[str, None] = {}  # the columns of the user's values, in their order
        self._earlier = 0.0  # seconds of the starts before this one
        self._new_start = False  # whether no line has come since the last header

    # -- reading -------------------------------------------------------------------------------

    def read(self, seconds: float = 0.2) -> None:
        """Take in what was added to the record, for about so many seconds at most."""
        restarts, size = self._file.restarts, self._file.size
        try:
            lines = self._file.read(seconds)
        except (OSError, ValueError) as error:
            self.version += str(error) != self._problem
            self._problem = str(error)
            return
        if self._problem is not None or self._file.restarts != restarts:
            self._problem = None
            if self._file.restarts != restarts:
                self._begin()
        for line in lines:
            self._take_line(line)
        self.version += bool(lines) or size != self._file.size

    def _take_line(self, line: Line) -> None:
        """Take in one line of the record: its values, its events, and where the run is."""
        if HEADER in line:
            self._take_header(line[HEADER])
            return
        step = line["step"]
        before = self._last
        if before is not None and step <= before["step"]:
            self._go_back(step, before)
        if self._new_start:
            # The time goes on from the last line that was kept, as in `read_record`.
            self._earlier, self._new_start = self._position().get("time", 0.0), False
        seconds = float(line["time"]) + self._earlier
        latest = _numbers_of_line(line)
        self._notice(line, latest, seconds)
        size, previous = self._small_batch, self._position()
        position = {"step": float(step), "time": seconds}
        if "progress" in latest:
            position["progress"] = latest["progress"]
        if size is not None:
            batches = count_small_batches(self._header or {}, latest)
            more = (step - previous.get("step", 0.0)) * batches * size
            position["samples"] = previous.get("samples", 0.0) + more
        if previous:
            self._gaps.append(seconds - previous["time"])
        self._add_derived(latest)
        self._points.add(step, position, latest)
        if before is None or line.keys() != before.keys():  # hardly ever, so most lines cost less
            ours = {"step", "time", *self._keys}
            self._own.update(dict.fromkeys(key for key in line if key not in ours))
        self._latest, self._last = latest, line
        if not self._marks or seconds - self._marks[-1].seconds >= RECENT / MARKS * 2:
            self._marks.append(self._mark(position))

    def _take_header(self, header: Header) -> None:
        """Take in a header: the run has started, started again, or ended."""
        self._header = header
        if "ended" in header:
            return
        self._starts += 1
        self._new_start = True
        self._marks.clear()
        if self._starts > 1:
            step, seconds = header["step"], self._position().get("time", 0.0)
            self._events.append(Event(step, seconds, "start", f"started again after step {step}"))

    def _go_back(self, step: int, before: Line) -> None:
        """Drop what the run does again after a restart from an earlier checkpoint."""
        self._points.go_back(step)
        self._marks.clear()
        self._latest = {}
        seconds = self._position().get("time", 0.0)
        text = f"went back from step {before['step']} to step {step}"
        self._events.append(Event(step, seconds, "back", text))

    def _notice(self, line: Line, latest: Mapping[str, float], seconds: float) -> None:
        """Add an event for whatever has happened since the line before."""
        before, step = self._latest, line["step"]

        def note(kind: str, text: str) -> None:
            self._events.append(Event(step, seconds, kind, text))

        if not before:
            return
        for key, (unit, text) in COUNTED.items():
            more = latest.get(key, 0.0) - before.get(key, 0.0)
            if math.isfinite(more) and more > 0:
                note("fault", f"{more:.0f} {unit}{'s' * (more != 1)} {text}")
        now, then = latest.get("workers"), before.get("workers")
        if now is not None and then is not None and now != then:
            members = line.get("members")
            names = f" ({members})" if isinstance(members, str) and members else ""
            note("workers", f"workers: {then:.0f} → {now:.0f}{names}")
        for key in self._own:
            value = latest.get(key, 0.0)
            if not math.isfinite(value) and math.isfinite(before.get(key, 0.0)):
                note("fault", f"{key} is {value}")

    def _add_derived(self, latest: dict[str, float]) -> None:
        """Add what follows from a line: the efficiency, and the seconds of this line's rounds."""
        gain, scale = latest.get("gain"), latest.get("scale")
        if "efficiency" not in latest and gain is not None and scale:
            latest["efficiency"] = gain / scale
        waited = latest.get("waited")
        if waited is not None:
            latest["rounds_seconds"] = max(0.0, waited - self._latest.get("waited", 0.0))

    # -- what is known -------------------------------------------------------------------------

    @property
    def _keys(self) -> list[str]:
        return [] if self._header is None else self._header["keys"]

    @property
    def _small_batch(self) -> float | None:
        """The samples of a small batch, if the record says so."""
        return None if self._header is None else to_positive(self._header.get("batch_size"))

    def _position(self) -> dict[str, float]:
        return self._points.points[-1].position if self._points.points else {}

    def _mark(self, at: Mapping[str, float]) -> Mark:
        return Mark(at["time"], at["step"], at.get("progress"), at.get("samples"))

    def _speed(self) -> tuple[Mark, Mark] | None:
        """Return where the run was a while ago, and where it is now."""
        if not (position := self._position()):
            return None
        now = self._mark(position)
        marks = list(self._marks)
        recent = [mark for mark in marks if now.seconds - mark.seconds <= RECENT]
        then = min([*recent, *marks[-RECENT_LINES:]], key=lambda mark: mark.seconds, default=now)
        return (then, now) if now.seconds > then.seconds else None

    def state(self, now: float | None = None) -> JobState:
        """Return what is known now, which is `time.time()`."""
        now = time.time() if now is None else now
        file = self._file
        age = None if file.changed is None else max(0.0, now - file.changed)
        state, text = self._find_state(age)
        header: Mapping[str, object] = self._header or {}
        latest, position = self._latest, self._position()
        speed = self._speed()
        until = to_positive(header.get("until"))
        scale = count_small_batches(header, latest) if latest else None
        size = self._small_batch
        workers = latest.get("workers", to_positive(header.get("workers")))
        members = (self._last or {}).get("members")
        process = header.get("process")
        config, sources = header.get("config"), header.get("sources")
        return JobState(
            name=str(header.get("name", self.path.stem)),
            path=str(self.path),
            state=state,
            text=text,
            age=age,
            behind=file.behind / file.size if file.size else 0.0,
            step=0 if self._last is None else self._last["step"],
            seconds=position.get("time", 0.0),
            progress=latest.get("progress"),
            until=until,
            left=None if until is None or speed is None else _time_left(*speed, until),
            latest=dict(latest),
            own=tuple(self._own),
            batch=scale if scale is None or size is None else scale * size,
            batch_unit="small batches" if size is None else "samples",
            steps_per_second=None if speed is None else _growth_per_second(*speed, "step"),
            samples_per_second=None if speed is None else _growth_per_second(*speed, "samples"),
            workers=None if workers is None or not math.isfinite(workers) else int(workers),
            members=members if isinstance(members, str) else "",
            rounds=_whole(latest.get("rounds")),
            faults={key: count for key in COUNTED if (count := _whole(latest.get(key)))},
            parts=self._parts(),
            starts=self._starts,
            date=str(header.get("date", "")),
            process=_name_process(process),
            config=config if isinstance(config, dict) else {},
            sources=tuple(map(str, sources)) if isinstance(sources, list) else (),
            events=tuple(self._events),
        )

    def _find_state(self, age: float | None) -> tuple[State, str]:
        """Return the job's state, and how one knows, `age` seconds after its last line."""
        if self._problem is not None:
            return "damaged", self._problem
        header = self._header
        if age is None or header is None:
            return "waiting", "there is no record yet"
        if "ended" in header:
            error = header.get("error")
            if isinstance(error, str):
                return "failed", f"ended by {error}"
            return "ended", f"ended {header['ended']}"
        if self._file.behind:
            return "running", "reading the record"
        alive = is_alive(header.get("process"))
        if alive is False:
            return "died", "its process is gone, and the record was not closed"
        usual = median(self._gaps) if self._gaps else 0.0
        if age > max(SILENT_FROM, SILENT_TIMES * usual):
            known = "its process runs" if alive else "its process cannot be seen from here"
            usually = f"; usual are {usual:.3g} s" if self._gaps else ""
            return "silent", f"no line for {age:.0f} s{usually}; {known}"
        return "running", ""

    def _parts(self) -> dict[str, float]:
        """Return what a step's seconds have gone into lately."""
        totals, steps = self._points.recent_parts()
        if set(totals) == {"other"}:
            totals = self._fitted_parts(totals["other"], steps)
        return {part: seconds / steps for part, seconds in totals.items()} if steps > 0 else {}

    def _fitted_parts(self, total: float, steps: float) -> dict[str, float]:
        """Return the parts by the fit of `Ramp`, if there is one and nothing was measured."""
        latest = self._latest
        keys = ("pass_seconds", "passes", "fixed_seconds")
        each, passes, fixed = (latest.get(key, math.nan) for key in keys)
        if not math.isfinite(each * passes + fixed):
            return {}
        parts = {"passes": each * passes * steps, "fixed": fixed * steps}
        return {**parts, "other": max(0.0, total - sum(parts.values()))}

    def curves(self) -> Curves:
        """Return the run's course, in lists."""
        return self._points.curves()


class Jobs:
    """Several jobs, in the order in which they were named or found."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._folders = [path for path in paths if path.is_dir()]
        self._jobs = {path: WatchedJob(path) for path in paths if path not in self._folders}
        self._looked = -LOOK_EVERY
        self._find_new_records()

    def _find_new_records(self) -> None:
        """Find new records in the folders."""
        self._looked = time.monotonic()
        for folder in self._folders:
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                if path not in self._jobs:
                    self._jobs[path] = WatchedJob(path)

    @property
    def all(self) -> list[WatchedJob]:
        """The jobs as they were read last."""
        return list(self._jobs.values())

    def read(self, seconds: float = 0.3) -> list[WatchedJob]:
        """Take in what is new, for about so many seconds at most, and return all jobs."""
        if time.monotonic() - self._looked >= LOOK_EVERY:
            self._find_new_records()
        jobs = self.all
        for job in jobs:
            job.read(seconds / max(1, len(jobs)))
        return jobs


# -- plain arithmetic -----------------------------------------------------------------------------


def _numbers_of_line(line: Line) -> dict[str, float]:
    """Return the numbers of a line; of a list (one value per parameter group) the first one."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if type(value) is list:
            value = next((one for one in value if one is not None), None)
        if type(value) is float:
            found[key] = value
        elif type(value) is int:  # and not bool
            try:
                found[key] = float(value)
            except OverflowError:  # a whole number beyond all floats, in a stranger's file
                found[key] = math.copysign(math.inf, value > 0 or -1)
    del found["step"], found["time"]
    return found


def _whole(value: float | None) -> int | None:
    return None if value is None or not math.isfinite(value) else int(value)


def _name_process(process: object) -> str:
    if not isinstance(process, dict):
        return ""
    return f"{process.get('host', '?')}, process {process.get('pid', '?')}"


def _growth_per_second(then: Mark, now: Mark, what: str) -> float | None:
    """Return by how much something grew in a second."""
    before, after = getattr(then, what), getattr(now, what)
    if before is None or after is None:
        return None
    return (after - before) / (now.seconds - then.seconds)


def _time_left(then: Mark, now: Mark, until: float) -> float | None:
    """Return the seconds until the run's progress is `until`, at its speed.

    >>> then, now = Mark(0.0, 0, 0.0, None), Mark(10.0, 5, 20.0, None)
    >>> _time_left(then, now, until=100.0)
    40.0
    """
    what = "step" if now.progress is None else "progress"
    rate, at = _growth_per_second(then, now, what), getattr(now, what)
    if rate is None or not (math.isfinite(rate) and rate > 0):
        return None
    return max(0.0, (until - at) / rate)
