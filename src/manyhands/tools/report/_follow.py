"""Read growing records, and detect silent workers.

    waiting   the file has no line yet
    running   lines are being written
    silent    no line for more than SILENT seconds and more than SILENT_TIMES the usual interval
    died      the process ended without closing the record
    failed    an exception closed the record
    ended     the record was closed
    damaged   the file is not a record, or cannot be read

The death of a process is detected only on the same machine and in the same container.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from manyhands.tools.record import Run, read_record
from manyhands.tools.record._run import is_alive, to_positive
from manyhands.tools.report._curves import numbers

State = Literal["waiting", "running", "silent", "died", "failed", "ended", "damaged"]

SUFFIX = ".jsonl"
SILENT = 30.0  # seconds since the last line
SILENT_TIMES = 10.0  # intervals since the last line
RECENT = 60.0  # seconds of training for measuring the speed
RECENT_LINES = 10  # minimum lines for measuring the speed
GAPS = 50  # number of recent intervals; their median is the usual interval


@dataclass(frozen=True)
class WorkerState:
    """The state of a worker according to its record."""

    path: Path
    state: State
    text: str = ""  # the reason
    run: Run | None = None  # None if the file has no line or cannot be read
    age: float | None = None  # seconds since the last line
    left: float | None = None  # seconds until the end of training


class FollowedRecords:
    """Read records, including all records that appear in folders."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._read: dict[Path, tuple[os.stat_result, Run]] = {}

    def states(self, now: float | None = None) -> list[WorkerState]:
        """Read changed records, and return the state of each worker at time `now`."""
        if now is None:
            now = time.time()
        return [self._state_of(path, now) for path in self._find()]

    def _find(self) -> Iterator[Path]:
        for path in self._paths:
            if path.is_dir():
                yield from sorted(path.glob(f"*{SUFFIX}"))
            else:
                yield path

    def _state_of(self, path: Path, now: float) -> WorkerState:
        try:
            status = path.stat()
            if status.st_size == 0:
                return WorkerState(path, "waiting", "the record has no line yet")
            run = self._read_if_changed(path, status)
        except (OSError, ValueError) as error:
            return WorkerState(path, "damaged", str(error))
        age = max(0.0, now - status.st_mtime)
        state, text = judge(run, age)
        left = None
        if state == "running":
            left = seconds_left(run)
        return WorkerState(path, state, text, run, age, left)

    def _read_if_changed(self, path: Path, status: os.stat_result) -> Run:
        if path in self._read:
            before, run = self._read[path]
            same_file = os.path.samestat(before, status) and before.st_size == status.st_size
            if same_file and before.st_mtime_ns == status.st_mtime_ns:
                return run
        run = read_record(path)
        self._read[path] = (status, run)
        return run


def judge(run: Run, age: float) -> tuple[State, str]:
    """Return the state of a worker `age` seconds after the last line, and the reason."""
    header = run.header
    if "ended" in header:
        error = header.get("error")
        if isinstance(error, str):
            return "failed", f"ended by {error}"
        return "ended", f"ended {header['ended']}"
    alive = is_alive(header.get("process"))
    if alive is False:
        return "died", "the process has ended without closing the record"
    usual = usual_gap(run)
    if age <= SILENT or (usual is not None and age <= SILENT_TIMES * usual):
        return "running", ""
    known = "the process is not visible from this machine"
    if alive:
        known = "the process runs"
    if usual is None:
        return "silent", known
    return "silent", f"a line usually takes {usual:.3g} s; {known}"


def usual_gap(run: Run) -> float | None:
    """Return the median interval between lines; None with fewer than two lines."""
    times = [line["time"] for line in run.lines[-GAPS:]]
    if len(times) < 2:
        return None
    return median(later - earlier for earlier, later in pairwise(times))


def seconds_left(run: Run) -> float | None:
    """Return the seconds until the run reaches `until` at the current speed, if known."""
    until = to_positive(run.header.get("until"))
    if until is None or len(run.lines) < 2:
        return None
    times = run.column("time")
    column = "step"
    if "progress" in run.columns:
        column = "progress"
    done = numbers(run, column)
    start = min(bisect_left(times, times[-1] - RECENT), max(0, len(times) - RECENT_LINES))
    seconds = times[-1] - times[start]
    before = done[start]
    now = done[-1]
    if before is None or now is None or seconds <= 0 or not now > before:
        return None
    return max(0.0, until - now) * seconds / (now - before)
