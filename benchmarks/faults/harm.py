"""A run of a crew, started as a user does, and what is done to its workers meanwhile.

At set times a random worker of those that take part is killed (SIGKILL), or stopped (SIGSTOP) and
woken (SIGCONT) after some seconds, as a host that hung. Where half of them are away already, that
waits. Kills and stops are equally many, in a random order; who is hit, how, and when is drawn from
a seed.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from manyhands.blocks._launch import _die_with_parent

COMMAND = (sys.executable, "-c", "from manyhands.cli import main; main()", "run")
HANGS = 90.0  # seconds without a line in the log, after which the benchmark gives up
ASKED = 15.0  # seconds in which a run must stop when it is told to
Line = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A run: who trains, for how long, and what hits them."""

    workers: int
    steps: int
    every: int  # steps of a block
    batch: int
    pace: float  # seconds that a step takes at least
    lr: float
    stall: float  # --stall of `manyhands run`
    interval: float = 0.0  # seconds from one fault to the next; 0: none
    jitter: float = 0.0  # up to so many seconds later, so that any moment of a block is hit
    asleep: float = 10.0  # seconds for which a worker is stopped
    seed: int = 0


@dataclass
class Fault:
    """What was done to whom; times are of the monotonic clock, as in the log."""

    kind: str  # "kill" or "stop"
    number: int
    pid: int
    time: float
    woken: float | None = None


@dataclass
class Trial:
    """What is left of a run."""

    plan: Plan
    log: list[Line]
    faults: list[Fault]
    code: int
    cpu: float  # seconds, of all processes
    seconds: float  # from the start of the command to its end
    output: str


@dataclass
class _Log:
    """The lines that have come since the last look."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    _read: int = 0

    def look(self) -> bool:
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._read += end
        self.lines += [json.loads(line) for line in data[:end].splitlines()]
        return end > 0


class _Harm:
    """Decides who is hit when, and does it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.faults: list[Fault] = []
        self._dice = random.Random(1_000 * plan.seed + round(plan.interval))
        self._kinds = self._shuffled_pairs()
        self._began: float | None = None
        self._due = self._next()

    def _shuffled_pairs(self) -> Iterator[str]:
        while True:
            pair = ["kill", "stop"]
            self._dice.shuffle(pair)
            yield from pair

    def _next(self) -> float:
        """When the next fault is due, after the first meeting."""
        return self.plan.interval * (len(self.faults) + 1) + self._dice.uniform(0, self.plan.jitter)

    def turn(self, log: Sequence[Line]) -> None:
        """Do what is due."""
        now = time.monotonic()
        for fault in self.faults:
            asleep = fault.kind == "stop" and fault.woken is None
            if asleep and now - fault.time >= self.plan.asleep:
                self.wake(fault)
        if not self.plan.interval or not log:
            return
        if self._began is None:
            self._began = next((line["time"] for line in log if line["event"] == "met"), None)
            return
        if now - self._began < self._due or any(line["event"] == "left" for line in log):
            return
        here = self._here(log)
        order = list(range(self.plan.workers))
        self._dice.shuffle(order)
        if len(here) > self.plan.workers // 2:
            victim = next(number for number in order if number in here)
            self._hit(next(self._kinds), victim, here[victim])
            self._due = max(self._next(), now - self._began + self.plan.interval / 2)

    def _here(self, log: Sequence[Line]) -> dict[int, int]:
        """The process of each worker that takes part and is awake."""
        newest = max(line["meetings"] for line in log)
        last = {line["number"]: line for line in log}
        asleep = {f.number for f in self.faults if f.kind == "stop" and f.woken is None}
        gone = {f.pid for f in self.faults if f.kind == "kill"}
        return {
            number: line["pid"]
            for number, line in last.items()
            if line["meetings"] >= newest - 1 and number not in asleep and line["pid"] not in gone
        }

    def _hit(self, kind: str, number: int, pid: int) -> None:
        self.faults.append(Fault(kind, number, pid, time.monotonic()))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        print(f"  {time.monotonic() - (self._began or 0):6.1f} s: {kind} {number}", flush=True)

    def wake(self, fault: Fault) -> None:
        fault.woken = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(fault.pid, signal.SIGCONT)


def run(plan: Plan, data: Path | None) -> Trial:
    """Until the command has ended."""
    with tempfile.TemporaryDirectory() as name:
        log, output = _Log(Path(name, "log.jsonl")), Path(name, "output")
        command = [*COMMAND, "--workers", str(plan.workers), "--stall", f"{plan.stall:g}"]
        command += ["-m", "faults.worker", "--log", str(log.path)]
        command += ["--data", str(data.resolve())] if data else []
        options = asdict(plan)
        for option in ("steps", "every", "batch", "pace", "lr", "seed"):
            command += [f"--{option}", str(options[option])]
        harm, began, cpu = _Harm(plan), time.monotonic(), _cpu_of_children()
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, preexec_fn=_die_with_parent()
            )
            try:
                _watch(process, log, harm)
            except BaseException:
                print(_tail(output))
                raise
            finally:
                _stop(process)
        log.look()
        seconds = time.monotonic() - began
        cpu = _cpu_of_children() - cpu
        said = output.read_text(errors="replace")
        return Trial(plan, log.lines, harm.faults, process.returncode, cpu, seconds, said)


def _watch(process: subprocess.Popen[bytes], log: _Log, harm: _Harm) -> None:
    heard = time.monotonic()
    while process.poll() is None:
        if log.look():
            heard = time.monotonic()
        if time.monotonic() - heard > HANGS:
            raise RuntimeError(f"the run hangs: no worker has written a line for {HANGS:g} s.")
        harm.turn(log.lines)
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


def _tail(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-40:])


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
