"""Start workers, pass on what they print, and start those again that die.

A worker is one process, or several that train one model together: these live and die together.

    an end with 0           the worker is done
    an error                started again, `restarts` times within an hour; but before the workers
                            have met for the first time it ends them all: there is nothing to lose
    a crash (SIGSEGV, ...)  is an error
    another signal          somebody else's doing: always started again, with a growing pause if it
                            did not live for long
    stopped                 a worker that has not beaten for `STOPPED` seconds is killed

A worker that dies when the others have finished is not started again, and does not count.

One thread does it all, between waiting for output. What the crew has to know (this one died, this
one is done) stands in the store before a worker is started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from manyhands.blocks._board import PLACE, Board
from manyhands.blocks._line import Line, StoreLost
from manyhands.blocks._pulse import Pulse
from manyhands.blocks._roster import number_of

STOPPED = 60.0  # seconds without a beat, until a worker is killed
SAID = 2.0  # seconds after which nobody says any more how many workers are expected
GRACE = 5.0  # seconds from asking to stop until killing
HOUR = 3600.0
SHORT = 10.0  # seconds: a life so short is followed by a pause, at most PAUSE
PAUSE = 30.0
LINE = 1 << 20  # bytes: a longer line is passed on in parts
CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGSYS", "SIGTRAP"}


@dataclass
class Worker:
    """One worker's number and its present processes, if it has any."""

    number: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)  # all, or none
    began: float = 0.0
    due: float | None = 0.0  # when to start it; None: not any more
    code: int = 0
    errors: list[float] = field(default_factory=list)
    short: int = 0  # lives in a row
    open: dict[IO[bytes], bytes] = field(default_factory=dict)  # pipes, and a line's beginning


class Launcher:
    """The workers of this host, from their start until all have ended."""

    def __init__(
        self,
        command: Sequence[str],
        numbers: Sequence[int],
        store: str,
        *,
        expected: int | None = None,
        processes: int = 1,
        restarts: int = 3,
        environment: Mapping[str, str] | None = None,
        serving: bool = True,
    ) -> None:
        self.command = list(command)
        self.workers = [Worker(number) for number in numbers]
        self.processes = processes
        self.restarts = restarts
        self.serving = serving
        self.board: Board | None = Board(Line(store, 1.0), Pulse(STOPPED), processes)
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # or a killed worker's last lines would be lost
            **os.environ,
            **(environment or {}),
            "MANYHANDS_STORE": store,
            "MANYHANDS_WORKERS": self._expected(self.board.line, expected),
        }
        self._asked = 0  # by which signal we were asked to stop
        self._final: int | None = None  # the exit code, once that is settled
        self._watched = 0.0
        self._pipes = selectors.DefaultSelector()

    def run(self) -> int:
        """Until all workers have ended; gives the exit code."""
        with self._signals():
            try:
                while self._final is None and not self._asked and self._living():
                    self._turn()
                if self._final is None and not self._asked:
                    self._linger()
            finally:
                self._stop_all()
                if self.board is not None:
                    self.board.line.close()
        if self._asked:
            return 128 + self._asked
        if self._final is not None:
            return self._final
        return next((worker.code for worker in self.workers if worker.code), 0)

    def _expected(self, line: Line, expected: int | None) -> str:
        """For how many workers the first meeting waits: who serves the store says so there."""

        def say(number: str) -> str:
            return str(line.call("compare_set", PLACE + "expected", "", number).decode())

        until = time.monotonic() + SAID
        while expected is None and not self.serving and time.monotonic() < until:
            if said := say(""):
                return said
            time.sleep(0.05)
        return say(str(expected or len(self.workers)))

    def _living(self) -> bool:
        return any(w.processes or w.due is not None for w in self.workers)

    def _turn(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if not worker.processes and worker.due is not None and worker.due <= now:
                self._start(worker)
        self._pass_on(0.05)
        for worker in self.workers:
            if (code := _code_of(worker)) is not None:
                self._ended(worker, code)
        if self.board is not None and now - self._watched >= self.board.pulse.interval:
            self._watched = now
            self._kill_stopped()

    # -- one worker ----------------------------------------------------------------------------

    def _start(self, worker: Worker) -> None:
        worker.began = time.monotonic()
        port = _free_port() if self.processes > 1 else None
        for part in range(self.processes):
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**self.environment, **self._told(worker, part, port)},
                start_new_session=True,  # Ctrl-C is for us; and its own children end with it
                preexec_fn=_die_with_parent(),
            )
            worker.processes.append(process)
            name = f"{worker.number}.{part}" if self.processes > 1 else f"{worker.number}"
            for pipe, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                worker.open[pipe] = b""
                self._pipes.register(pipe, selectors.EVENT_READ, (worker, name, to))

    def _told(self, worker: Worker, part: int, port: int | None) -> dict[str, str]:
        """What a process knows of itself; with a port, of its worker's own group as well."""
        told: dict[str, object] = {"MANYHANDS_WORKER": worker.number}
        if port is not None:
            here = self.workers.index(worker) * self.processes + part
            told |= {"RANK": part, "LOCAL_RANK": here, "WORLD_SIZE": self.processes}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return {name: str(value) for name, value in told.items()}

    def _ended(self, worker: Worker, code: int) -> None:
        """A worker is over: tell the crew, and say when it starts again."""
        now = time.monotonic()
        self._signal(worker, signal.SIGKILL)  # its other processes, and what they left behind
        for process in worker.processes:
            process.wait()
        for pipe in list(worker.open):
            self._read(pipe, last=True)
        worker.processes = []
        self._report(worker.number, left=code == 0)
        roster = None if self.board is None else self.board.roster
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        worker.code = code if code >= 0 else 128 - code
        worker.due = None
        if code == 0:
            return
        if roster is not None and roster.finished:
            worker.code = 0
            _say(f"worker {worker.number} ended ({how}) when the others had finished.")
            return
        worker.short = worker.short + 1 if now - worker.began < SHORT else 0
        if code > 0 or how in CRASHES:
            worker.errors = [t for t in worker.errors if now - t < HOUR] + [now]
            if roster is None:
                self._final = worker.code
                _say(f"worker {worker.number} ended ({how}), and without the store none can go on.")
                return
            if roster.generation == 0:
                self._final = worker.code
                _say(f"worker {worker.number} ended ({how}) before the first meeting.")
                return
            if len(worker.errors) > self.restarts:
                _say(f"worker {worker.number} ended ({how}), and too often: it stays away.")
                return
        elif self.board is None:
            _say(f"worker {worker.number} ended ({how}), and the store is lost.")
            return
        pause = min(2.0 ** (worker.short - 2), PAUSE) if worker.short > 1 else 0.0
        worker.due = now + pause
        _say(f"worker {worker.number} ended ({how}) and is started again.")

    def _signal(self, worker: Worker, number: int) -> None:
        """To the worker's processes and their children."""
        for process in worker.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _stop_all(self) -> None:
        running = [worker for worker in self.workers if worker.processes]
        for worker in running:
            self._signal(worker, signal.SIGTERM)
            self._signal(worker, signal.SIGCONT)  # one that is stopped hears nothing else
        until, asked = time.monotonic() + GRACE, self._asked
        while time.monotonic() < until and asked == self._asked:
            if all(p.poll() is not None for worker in running for p in worker.processes):
                break
            self._pass_on(0.05)
        for worker in running:
            self._signal(worker, signal.SIGKILL)
        for worker in running:
            for process in worker.processes:
                process.wait()
            for pipe in list(worker.open):
                self._read(pipe, last=True)

    # -- the crew ------------------------------------------------------------------------------

    def _report(self, number: int, left: bool) -> None:
        def all_parts(board: Board) -> None:
            for part in range(self.processes):
                board.report(number * self.processes + part, left)

        self._at_board(all_parts)

    def _kill_stopped(self) -> None:
        self._at_board(Board.look)
        silent = set() if self.board is None else self.board.pulse.silent
        numbers = {number_of(id) // self.processes for id in silent}
        for worker in self.workers:
            if worker.number in numbers and worker.processes:
                _say(f"worker {worker.number} has not beaten for {STOPPED:g} s and is killed.")
                for process in worker.processes:
                    process.kill()

    def _linger(self) -> None:
        """The store is needed for as long as other hosts' workers live."""
        while self.serving and not self._asked:
            self._at_board(Board.look)
            if self.board is None:
                return
            roster = self.board.roster
            out = roster.gone | self.board.pulse.silent
            if out >= {*roster.ids, *(member.id for member in roster.waiting)}:
                return
            time.sleep(0.1)

    def _at_board(self, do: Callable[[Board], object]) -> None:
        """With the roster, as long as there is a store; that it is lost is said once."""
        if self.board is None:
            return
        try:
            do(self.board)
        except StoreLost as error:
            _say(str(error))
            self.board.line.close()
            self.board = None

    # -- output --------------------------------------------------------------------------------

    def _pass_on(self, seconds: float) -> None:
        if not self._pipes.get_map():
            time.sleep(seconds)
        for key, _ in self._pipes.select(seconds):
            self._read(key.fileobj)

    def _read(self, pipe: Any, last: bool = False) -> None:
        """Pass on the lines that a pipe holds, each behind the worker's number."""
        worker, name, to = self._pipes.get_key(pipe).data
        data = worker.open[pipe]
        while True:
            try:
                part = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                break
            last = last or not part
            data += part
            if not part or (len(data) > LINE and not last):
                break
        *lines, rest = data.split(b"\n")
        if rest and (last or len(rest) > LINE):
            lines, rest = [*lines, rest], b""
        worker.open[pipe] = rest
        if lines:
            prefix = f"[{name}] ".encode()
            to.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
            to.flush()
        if last:
            self._pipes.unregister(pipe)
            del worker.open[pipe]
            pipe.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """While we run, SIGINT and SIGTERM stop the workers; a second one kills them at once."""

        def ask(number: int, _: object) -> None:
            self._asked = number if not self._asked else -number

        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            self._asked = abs(self._asked)
            for number, handler in before.items():
                signal.signal(number, handler)


def _code_of(worker: Worker) -> int | None:
    """With what a worker has ended; None if it has not.

    It ends when all of its processes are done, or when the first of them dies.
    """
    codes = [process.poll() for process in worker.processes]
    failed = [code for code in codes if code]
    if failed:
        return min(failed)  # a signal, if there is one: others may have failed for want of it
    return 0 if codes and None not in codes else None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _die_with_parent() -> Callable[[], None] | None:
    """Run in the new process: it is killed when we die, however that happens (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _say(message: str) -> None:
    print(f"manyhands run: {message}", file=sys.stderr, flush=True)
