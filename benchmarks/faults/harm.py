"""A run of a crew, started as a user does, and what is done to its workers meanwhile.

At set times one of these happens; all are equally many, in a random order:

    kill        a random member gets SIGKILL
    stop        a random member gets SIGSTOP, and SIGCONT after some seconds, like a host that hung
    partition   the line between the store and the host of the last workers is cut for some seconds
    newcomer    a worker tries to join with other options, types or order of parameters
    stranger    a process that does not know the secret writes to the store
    leave       a further worker joins, and leaves in mid-block

If half of the workers are away already, the next fault waits. Victim, kind and time are drawn from
a seed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faults.link import Link
from faults.strangers import BAD, GUEST, Guest, Writer
from manyhands.blocks.crew._processes import die_with_parent
from manyhands.blocks.crew._store import SECRET_VARIABLE

COMMAND = (sys.executable, "-c", "from manyhands.cli import main; main()", "run")
HANGS = 90.0  # seconds without a line in the log, after which the benchmark gives up
ASKED = 15.0  # seconds in which a run must stop after SIGTERM
ORDINARY = ("kill", "stop")
ALL = (*ORDINARY, "partition", "newcomer", "stranger", "leave")
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
    interval: float = 0.0  # seconds from one fault to the next; 0: none
    jitter: float = 0.0  # up to this many seconds later, so that any moment of a block is hit
    asleep: float = 10.0  # seconds for which a worker is stopped, or a line is cut
    kinds: tuple[str, ...] = ORDINARY
    apart: int = 0  # of the workers, on a second host
    seed: int = 0
    fastest: float = 1.0  # speed of the last worker, if that of the first is 1
    seconds: float = 0.0  # of a block in which workers take steps of their own; 0: equal steps
    quorum: int = 1
    patience: str = "600"

    @property
    def speeds(self) -> list[float]:
        """The speed of each worker: the first one's step takes `pace` seconds."""
        last = max(self.workers - 1, 1)
        return [1.0 + (self.fastest - 1.0) * number / last for number in range(self.workers)]


@dataclass
class Fault:
    """What was done to a worker; times are of the monotonic clock, as in the log."""

    kind: str
    number: int
    pid: int
    time: float
    woken: float | None = None
    outcome: str = ""  # of a newcomer, a stranger or a worker that leaves


@dataclass
class Trial:
    """What is left of a run."""

    plan: Plan
    log: list[LogLine]
    faults: list[Fault]
    code: int
    cpu: float  # seconds, of all processes
    seconds: float  # from the start of the command to its end
    output: str


@dataclass
class _Log:
    """The lines that have come since the last look."""

    path: Path
    lines: list[LogLine] = field(default_factory=list)
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
    """Decides which worker is hit when, and hits it."""

    def __init__(self, plan: Plan, stage: _Stage) -> None:
        self.plan, self.stage = plan, stage
        self.faults: list[Fault] = []
        self._dice = random.Random(1_000 * plan.seed + round(plan.interval))
        self._kinds = self._shuffled()
        self._bad = itertools.cycle(BAD)
        self._guests: list[tuple[Fault, Guest]] = []
        self._writer = Writer(stage.store, self._dice)
        self._done = 0  # things that were done
        self._began: float | None = None
        self._due = self._next()

    def _shuffled(self) -> Iterator[str]:
        while True:
            kinds = list(self.plan.kinds)
            self._dice.shuffle(kinds)
            yield from kinds

    def _next(self) -> float:
        """Return when the next fault is due, in seconds after the first round."""
        return self.plan.interval * (self._done + 1) + self._dice.uniform(0, self.plan.jitter)

    def turn(self, log: Sequence[LogLine]) -> None:
        """Do what is due."""
        now = time.monotonic()
        for fault in self.faults:
            asleep = fault.kind in ("stop", "partition") and fault.woken is None
            if asleep and now - fault.time >= self.plan.asleep:
                self.wake(fault)
        if not self.plan.interval or not log:
            return
        if self._began is None:
            self._began = next((line["time"] for line in log if line["event"] == "round"), None)
            return
        if now - self._began < self._due or any(line["event"] == "left" for line in log):
            return
        here = self._here(log)
        order = list(range(self.plan.workers))
        self._dice.shuffle(order)
        if len(here) > self.plan.workers // 2:
            victim = next(number for number in order if number in here)
            self._do(next(self._kinds), victim, here)
            self._done += 1
            self._due = max(self._next(), now - self._began + self.plan.interval / 2)

    def _here(self, log: Sequence[LogLine]) -> dict[int, int]:
        """The process of each worker that takes part and is awake."""
        newest = max(line["rounds"] for line in log)
        last = {line["number"]: line for line in log}
        still = [f for f in self.faults if f.kind in ("stop", "partition") and f.woken is None]
        asleep = {fault.number for fault in still}
        gone = {f.pid for f in self.faults if f.kind == "kill"}
        return {
            number: line["pid"]
            for number, line in last.items()
            if line["rounds"] >= newest - 1 and number not in asleep and line["pid"] not in gone
        }

    def _do(self, kind: str, victim: int, here: dict[int, int]) -> None:
        if kind in ORDINARY:
            self._hit(kind, victim, here[victim])
        elif kind == "partition":
            self.stage.link.cut()
            now, first = time.monotonic(), self.plan.workers - self.plan.apart
            behind = [number for number in here if number >= first]
            self.faults += [Fault(kind, number, here[number], now) for number in behind]
            self._say(f"partition of {behind}")
        elif kind == "stranger":
            self.faults.append(Fault(kind, -1, -1, time.monotonic()))
            self.faults[-1].outcome = self._writer.write()
            self._say(f"stranger: {self.faults[-1].outcome}")
        else:
            block = self.plan.every
            bad = next(self._bad) if kind == "newcomer" else ""
            leave = ["--leave-after", str(2 * block + block // 2)]
            number = GUEST + len(self._guests)
            guest = self.stage.guest(["--bad", bad] if kind == "newcomer" else leave, number)
            fault = Fault(kind, number, guest.process.pid, time.monotonic())
            self.faults.append(fault)
            self._guests.append((fault, guest))
            self._say(f"{kind} {number} {bad}")

    def end(self) -> None:
        """Note how the newcomers and the workers that leave have ended."""
        for fault, guest in self._guests:
            fault.outcome = guest.end(HANGS)
            print(f"  {fault.kind} {fault.number}: {fault.outcome}", flush=True)

    def _say(self, what: str) -> None:
        print(f"  {time.monotonic() - (self._began or 0):6.1f} s: {what}", flush=True)

    def _hit(self, kind: str, number: int, pid: int) -> None:
        self.faults.append(Fault(kind, number, pid, time.monotonic()))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self._say(f"{kind} {number}")

    def wake(self, fault: Fault) -> None:
        fault.woken = time.monotonic()
        if fault.kind == "partition":
            self.stage.link.mend()
            return
        with suppress(ProcessLookupError):
            os.kill(fault.pid, signal.SIGCONT)


class _Stage:
    """Where a run takes place: its commands, one for each host, and the line between these."""

    def __init__(self, plan: Plan, data: Path | None, folder: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.store = f"127.0.0.1:{probe.getsockname()[1]}"
        self.link = Link(self.store)
        self._folder = folder
        self._variables = {
            SECRET_VARIABLE: secrets.token_hex(),
            "MANYHANDS_STORE": self.store,
            "MANYHANDS_WORKERS": str(plan.workers),
            "MANYHANDS_STALL": f"{plan.stall:g}",
        }
        self._arguments = ["faults.worker", "--log", str(log)]
        self._arguments += ["--data", str(data.resolve())] if data else []
        options = asdict(plan)
        for option in ("steps", "every", "batch", "pace", "lr", "seed"):
            self._arguments += [f"--{option}", str(options[option])]
        self._arguments += ["--seconds", str(plan.seconds)]
        self._arguments += ["--speeds", *map(str, plan.speeds)]
        self._options = ["--stall", f"{plan.stall:g}", "--patience", plan.patience]
        self._options += ["--quorum", str(plan.quorum)]
        first = plan.workers - plan.apart
        words = ["--workers", str(first), "--listen", self.store, "--expected", str(plan.workers)]
        self.outputs = [folder / "output"]
        self.commands = [self._command(words, self.outputs[0])]
        if plan.apart:
            words = ["--store", self.link.address, "--numbers", f"{first}-{plan.workers - 1}"]
            self.outputs.append(folder / "output-2")
            self.commands.append(self._command(words, self.outputs[1]))

    def _command(self, words: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                [*COMMAND, *words, *self._options, "-m", *self._arguments],
                stdout=file,
                stderr=file,
                env={**os.environ, SECRET_VARIABLE: self._variables[SECRET_VARIABLE]},
                preexec_fn=die_with_parent(),
            )

    def guest(self, extra: Sequence[str], number: int) -> Guest:
        return Guest(self._arguments, extra, number, self._variables, self._folder)

    def said(self) -> str:
        return "\n".join(output.read_text(errors="replace") for output in self.outputs)


def run(plan: Plan, data: Path | None) -> Trial:
    """Until the commands have ended."""
    with tempfile.TemporaryDirectory() as name:
        log = _Log(Path(name, "log.jsonl"))
        began, cpu = time.monotonic(), _cpu_of_children()
        stage = _Stage(plan, data, Path(name), log.path)
        harm = _Harm(plan, stage)
        try:
            _watch(stage.commands, log, harm)
            harm.end()
        except BaseException:
            print("\n".join(stage.said().splitlines()[-40:]))
            raise
        finally:
            for process in stage.commands:
                _stop(process)
            stage.link.close()
        log.look()
        seconds = time.monotonic() - began
        cpu = _cpu_of_children() - cpu
        code = next((p.returncode for p in stage.commands if p.returncode), 0)
        return Trial(plan, log.lines, harm.faults, code, cpu, seconds, stage.said())


def _watch(processes: Sequence[subprocess.Popen[bytes]], log: _Log, harm: _Harm) -> None:
    heard = time.monotonic()
    while any(process.poll() is None for process in processes):
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


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
