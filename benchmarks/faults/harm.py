"""Start a crew as a user does, and kill and stop its workers at set times.

    kill   a random member gets SIGKILL
    stop   a random member gets SIGSTOP, and SIGCONT after some seconds, like a host that hung

Both are equally many, in a random order. If half of the workers are away already, the next fault
waits. Victim, kind and time are drawn from a seed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pages

from manyhands.blocks.crew._processes import die_with_parent
from manyhands.record import read_record
from manyhands.record._tally import Tally, tally

COMMAND = (sys.executable, "-c", "from manyhands.cli import main; main()", "run")
HANGS = 90.0  # seconds without a line in the log, after which the benchmark gives up
ASKED = 15.0  # seconds in which a run must stop after SIGTERM
KINDS = ("kill", "stop")
LogLine = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A run: its workers, its length, and its faults."""

    workers: int
    steps: int
    every: int  # steps of a block
    batch: int
    pace: float  # seconds that a step takes at least
    lr: float
    stall: float  # --stall of `manyhands run`
    jitter: float  # a fault comes up to this many seconds later, so that it hits any moment
    asleep: float  # seconds for which a worker is stopped
    interval: float = 0.0  # seconds from one fault to the next; 0: none
    seed: int = 0


@dataclass
class Fault:
    """What was done to a worker; times are of the monotonic clock, as in the log."""

    kind: str
    number: int
    pid: int
    time: float
    woken: float | None = None


@dataclass
class Trial:
    """What is left of a run."""

    plan: Plan
    log: list[LogLine]
    faults: list[Fault]
    code: int
    cpu: float  # seconds, of all processes
    seconds: float  # from the start of the command to its end
    spent: Tally  # what each worker's seconds went into


class _Harm:
    """Decides which worker is hit when, and hits it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.faults: list[Fault] = []
        self._dice = random.Random(1_000 * plan.seed + round(plan.interval))
        self._kinds = self._shuffled()
        self._began: float | None = None
        self._due = self._next()

    def _shuffled(self) -> Iterator[str]:
        while True:
            yield from self._dice.sample(KINDS, len(KINDS))

    def _next(self) -> float:
        """Return when the next fault is due, in seconds after the first round."""
        after = self.plan.interval * (len(self.faults) + 1)
        return after + self._dice.uniform(0, self.plan.jitter)

    def turn(self, log: Sequence[LogLine]) -> None:
        """Do what is due."""
        now = time.monotonic()
        for fault in self.faults:
            if _sleeps(fault) and now - fault.time >= self.plan.asleep:
                fault.woken = now
                _send(fault.pid, signal.SIGCONT)
        if not self.plan.interval or not log:
            return
        if self._began is None:
            self._began = next((line["time"] for line in log if line["event"] == "round"), None)
            return
        if now - self._began < self._due:
            return
        if max(line["steps"] for line in log) >= self.plan.steps - 2 * self.plan.every:
            return  # nobody is hit who could not count again
        here = self._here(log)
        if len(here) > self.plan.workers // 2:
            number, kind = self._dice.choice(sorted(here)), next(self._kinds)
            self.faults.append(Fault(kind, number, here[number], time.monotonic()))
            _send(here[number], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            print(f"  {now - self._began:6.1f} s: {kind} {number}", flush=True)
            self._due = max(self._next(), now - self._began + self.plan.interval / 2)

    def _here(self, log: Sequence[LogLine]) -> dict[int, int]:
        """The process of each worker that takes part and is awake."""
        newest = max(line["rounds"] for line in log)
        last = {line["number"]: line for line in log}
        away = {fault.pid for fault in self.faults if fault.kind == "kill" or _sleeps(fault)}
        return {
            number: line["pid"]
            for number, line in last.items()
            if line["rounds"] >= newest - 1 and line["pid"] not in away
        }


def _sleeps(fault: Fault) -> bool:
    return fault.kind == "stop" and fault.woken is None


def _send(pid: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, what)


def run(plan: Plan, data: Path) -> Trial:
    """Run until the command has ended."""
    with tempfile.TemporaryDirectory() as name:
        log, output = Path(name, "log.jsonl"), Path(name, "output")
        began, cpu, harm = time.monotonic(), _cpu_of_children(), _Harm(plan)
        words = ["--workers", str(plan.workers), "--stall", str(plan.stall)]
        words += ["--preload", "quality.workloads", "-m", "faults.worker"]
        words += ["--log", str(log), "--plan", json.dumps(asdict(plan))]
        words += ["--data", str(data.resolve())]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*COMMAND, *words], stdout=file, stderr=file, **die_with_parent()
            )
        try:
            _watch(process, log, harm)
        finally:
            _stop(process)
            if process.returncode:
                print("\n".join(output.read_text(errors="replace").splitlines()[-40:]))
        seconds, cpu = time.monotonic() - began, _cpu_of_children() - cpu
        spent = tally({path.stem: read_record(path).worker_time for path in log.parent.glob("w*")})
        rows = pages.read_rows(log)
        return Trial(plan, rows, harm.faults, process.returncode, cpu, seconds, spent)


def _watch(process: subprocess.Popen[bytes], log: Path, harm: _Harm) -> None:
    heard, size, lines = time.monotonic(), 0, []
    while process.poll() is None:
        if log.exists() and log.stat().st_size > size:
            heard, size, lines = time.monotonic(), log.stat().st_size, pages.read_rows(log)
        if time.monotonic() - heard > HANGS:
            raise RuntimeError(f"the run hangs: no worker has written a line for {HANGS:g} s.")
        harm.turn(lines)
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """No process stays: the launcher ends its workers, those that are stopped as well."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ASKED)
        except subprocess.TimeoutExpired:
            process.kill()  # its workers die with it
            process.wait()


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
