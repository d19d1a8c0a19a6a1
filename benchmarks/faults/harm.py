"""Start a crew as a user does, kill and stop its workers at set times, and cut their network.

    kill   a random member gets SIGKILL
    stop   a random member gets SIGSTOP, and SIGCONT after some seconds, like a host that hung
    cut    the workers of a second host, if there is one, reach nobody for some seconds

All are equally many, in a random order. If half of the workers are away already, the next fault
waits. Victim, kind and time are drawn from a seed. Hosts are network namespaces.
"""

from __future__ import annotations

import json
import os
import random
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pages

from helpers.networks import Networks
from manyhands.blocks.crew._processes import die_with_parent

COMMAND = (sys.executable, "-c", "from manyhands.tools.cli import main; main()", "run")
HANGS = 90.0  # seconds without a line in the log, after which the benchmark gives up
ASKED = 15.0  # seconds in which a run must stop after SIGTERM
OF_ONE = ("kill", "stop")
KINDS = (*OF_ONE, "cut")
RESTART = 2.0  # seconds that a worker may be away beyond its fault
PORT = 29411  # of a store that two hosts use
LogLine = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    workers: int
    steps: int
    every: int  # steps of a block
    batch: int
    pace: float  # seconds that a step takes at least
    lr: float
    stall: float  # --stall of `manyhands run`
    jitter: float  # a fault comes up to this many seconds later, so that it hits any moment
    asleep: float  # seconds for which a worker is stopped, or a host is cut off
    interval: float = 0.0  # seconds from one fault to the next; 0: none
    seed: int = 0
    far: int = 0  # workers, the last ones, on a second host


@dataclass
class Fault:
    """A fault of workers; times are of the monotonic clock, as in the log."""

    kind: str
    numbers: frozenset[int]
    pid: int  # 0 of a cut
    time: float
    over: float | None = None  # when the worker was woken, or the line was mended

    def lasts(self) -> bool:
        return self.kind != "kill" and self.over is None


@dataclass
class Trial:
    plan: Plan
    log: list[LogLine]
    faults: list[Fault]
    code: int
    cpu: float  # seconds, of all processes
    seconds: float  # from the start of the command to its end


class _Harm:
    """Decides which worker is hit when, and hits it."""

    def __init__(self, plan: Plan, networks: Networks | None) -> None:
        self.plan = plan
        self.networks = networks
        self.far = frozenset(range(plan.workers - plan.far, plan.workers))
        self.faults: list[Fault] = []
        self._dice = random.Random(1_000 * plan.seed + round(plan.interval))
        self._kinds = self._shuffled()
        self._began: float | None = None
        self._due = self._next()

    def _shuffled(self) -> Iterator[str]:
        while True:
            kinds = KINDS if self.far else OF_ONE
            yield from self._dice.sample(kinds, len(kinds))

    def _next(self) -> float:
        """Return when the next fault is due, in seconds after the first round."""
        after = self.plan.interval * (len(self.faults) + 1)
        return after + self._dice.uniform(0, self.plan.jitter)

    def turn(self, log: Sequence[LogLine]) -> None:
        now = time.monotonic()
        for fault in self.faults:
            if fault.lasts() and now - fault.time >= self.plan.asleep:
                fault.over = now
                if fault.kind == "stop":
                    _send(fault.pid, signal.SIGCONT)
                elif self.networks is not None:
                    self.networks.mend("far")
        if not self.plan.interval or not log:
            return
        if self._began is None:
            rounds = [line["time"] for line in log if line["event"] == "round"]
            self._began = rounds[0] if rounds else None
            return
        if now - self._began < self._due:
            return
        if max(line["steps"] for line in log) >= self.plan.steps - 2 * self.plan.every:
            return  # nobody is hit who could not count again
        here = self._here(log)
        cut = any(fault.lasts() for fault in self.faults if fault.kind == "cut")
        if len(here) > self.plan.workers // 2 and not cut:
            fault = self._hit(here)
            print(f"  {now - self._began:6.1f} s: {fault.kind} {sorted(fault.numbers)}", flush=True)
            self.faults.append(fault)
            self._due = max(self._next(), now - self._began + self.plan.interval / 2)

    def _hit(self, here: dict[int, int]) -> Fault:
        kind = next(self._kinds)
        number = self._dice.choice(sorted(here))
        if kind == "cut" and self.networks is not None:
            self.networks.drop("far")
            return Fault(kind, self.far, 0, time.monotonic())
        _send(here[number], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return Fault(kind, frozenset([number]), here[number], time.monotonic())

    def _here(self, log: Sequence[LogLine]) -> dict[int, int]:
        """The process of each worker that takes part and is awake."""
        newest = max(line["rounds"] for line in log)
        last = {line["number"]: line for line in log}
        away = {fault.pid for fault in self.faults if fault.kind == "kill" or fault.lasts()}
        return {
            number: line["pid"]
            for number, line in last.items()
            if line["rounds"] >= newest - 1 and line["pid"] not in away
        }


def _send(pid: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, what)


def allowed(plan: Plan, faults: Sequence[Fault], end: float, seconds: float) -> float:
    """Return the share of all workers' time in which no fault has them away.

    A fault has its workers away for as long as it lasts; a kill and a stop for `RESTART` more.
    """
    away = 0.0
    for number in range(plan.workers):
        until = 0.0
        for fault in (fault for fault in faults if number in fault.numbers):
            over = end if fault.lasts() else fault.over or fault.time
            over += RESTART if fault.kind in OF_ONE else 0.0
            away += max(0.0, min(over, end) - max(fault.time, until))
            until = max(until, over)
    return 1.0 - away / (plan.workers * seconds)


def run(plan: Plan, data: Path) -> Trial:
    """Run until the command has ended; of two hosts, that of the first."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        log = Path(name, "log.jsonl")
        output = Path(name, "output")
        networks = stack.enter_context(Networks()) if plan.far else None
        began = time.monotonic()
        cpu = _cpu_of_children()
        harm = _Harm(plan, networks)
        words = ["--stall", str(plan.stall), "--preload", "quality.workloads"]
        words += ["-m", "faults.worker", "--log", str(log), "--plan", json.dumps(asdict(plan))]
        words += ["--data", str(data.resolve())]
        with output.open("wb") as file:
            processes = [
                subprocess.Popen([*command, *words], stdout=file, stderr=file, **die_with_parent())
                for command in _commands(plan, networks)
            ]
        try:
            _watch(processes[0], log, harm)
        finally:
            for process in processes:
                _stop(process)
            code = processes[0].returncode
            if code:
                print("\n".join(output.read_text(errors="replace").splitlines()[-40:]))
        seconds = time.monotonic() - began
        cpu = _cpu_of_children() - cpu
        return Trial(plan, pages.read_rows(log), harm.faults, code, cpu, seconds)


def _commands(plan: Plan, networks: Networks | None) -> list[list[str]]:
    if networks is None:
        return [[*COMMAND, "--workers", str(plan.workers)]]
    os.environ.setdefault("MANYHANDS_SECRET", secrets.token_hex(32))
    store = f"{networks.address('near')}:{PORT}"
    near = plan.workers - plan.far
    crew = ["--expected", str(plan.workers), "--quorum", str(plan.workers // 2 + 1)]
    first = ["--numbers", f"0-{near - 1}", "--listen", store, *crew]
    second = ["--numbers", f"{near}-{plan.workers - 1}", "--store", store, *crew]
    return [networks.command("near", *COMMAND, *first), networks.command("far", *COMMAND, *second)]


def _watch(process: subprocess.Popen[bytes], log: Path, harm: _Harm) -> None:
    heard = time.monotonic()
    size = 0
    lines: list[LogLine] = []
    while process.poll() is None:
        if log.exists() and log.stat().st_size > size:
            heard = time.monotonic()
            size = log.stat().st_size
            lines = pages.read_rows(log)
        if time.monotonic() - heard > HANGS:
            raise RuntimeError(f"the run hangs: no worker has written a line for {HANGS:g} s.")
        harm.turn(lines)
        time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends all workers."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(2 * RESTART)  # a second host ends a moment after the first
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
