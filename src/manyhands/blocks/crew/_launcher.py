"""Start workers, pass on what they print, and start those again that die.

A worker is one process, or several that train one model together: these live and die together.

    an end with 0           the worker is done
    an error                started again, `restarts` times within an hour; but before the first
                            sync round it ends them all: there is nothing to lose
    refused                 it differs from the others (_terms.py): it stays away
    a crash (SIGSEGV, ...)  is an error
    another signal          somebody else's doing: always started again, with a growing pause if it
                            did not live for long
    stopped                 a worker that has not beaten for `STOPPED` seconds is killed

A worker that dies when the others have finished is not started again, and does not count.

One thread does it all, between waiting for output. What the crew has to know (this one died, this
one is done) stands in the store before a worker is started again.

Each worker is a process group. However the launcher ends, no process of these is left: on Linux the
workers get a signal when it dies, and everywhere a process beside it (_guard.py) kills the groups.

A launcher that needs the store stands in the roster as a host, until it has ended. Whoever serves
the store waits for the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from manyhands.blocks.crew import _guard, _store
from manyhands.blocks.crew._heartbeat import HeartbeatMonitor
from manyhands.blocks.crew._roster import Roster, number_of
from manyhands.blocks.crew._shared_roster import PLACE, SharedRoster
from manyhands.blocks.crew._store import VARIABLE, Signer, StoreClient, address, serve
from manyhands.errors import StoreLost

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
    store: Any = None  # where its own processes find each other, if it has several
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
        secret: str | None = None,
    ) -> None:
        self.command = list(command)
        self.workers = [Worker(number) for number in numbers]
        self.processes = processes
        self.restarts = restarts
        self.serving = serving
        self.signer = Signer.from_environment(secret)
        line = StoreClient(store, 1.0, self.signer)
        self.board: SharedRoster | None = SharedRoster(line, HeartbeatMonitor(STOPPED), processes)
        self.host = f"host-{secrets.token_hex(4)}"
        line.beat(f"{PLACE}beat/{self.host}")
        self.board.change(lambda roster: roster.with_host(self.host))
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # or a killed worker's last lines would be lost
            **os.environ,
            **(environment or {}),
            "MANYHANDS_STORE": store,
            "MANYHANDS_RUN": self.board.roster.run,
            "MANYHANDS_WORKERS": self._expected(line, expected),
        }
        if secret is not None:
            self.environment[VARIABLE] = secret
        self._asked = 0  # by which signal we were asked to stop
        self._final: int | None = None  # the exit code, once that is settled
        self._watched = 0.0
        self._pipes = selectors.DefaultSelector()
        self._guard: subprocess.Popen[bytes] | None = None

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
                self._at_board(lambda board: board.change(lambda r: r.without_host(self.host)))
                if self.board is not None:
                    self.board.line.close()
                if self._guard is not None:
                    self._guard.communicate()
                if self.signer.ignored:
                    _say(
                        f"{self.signer.ignored} value(s) in the store were ignored here: they were "
                        "not signed with the secret of this run, or not what a member writes."
                    )
        if self._asked:
            return 128 + self._asked
        if self._final is not None:
            return self._final
        return next((worker.code for worker in self.workers if worker.code), 0)

    def _expected(self, line: StoreClient, expected: int | None) -> str:
        """For how many workers the first meeting waits: who serves the store says so there."""

        key = PLACE + "expected"
        until = time.monotonic() + SAID
        while expected is None and not self.serving and time.monotonic() < until:
            if said := line.verified(key, line.fetch(key)):
                return said
            time.sleep(0.05)
        mine = str(expected or len(self.workers))
        found = line.fetch(key)
        if said := line.verified(key, found):
            return said
        line.call("compare_set", key, found or "", line.signer.sign(key, mine))
        return line.verified(key, line.fetch(key)) or mine

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
        port = None
        if self.processes > 1:
            worker.store, name = serve("127.0.0.1")
            port = address(name)[1]
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
            self._tell_guard(f"+{process.pid}")
            name = f"{worker.number}.{part}" if self.processes > 1 else f"{worker.number}"
            for pipe, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                worker.open[pipe] = b""
                self._pipes.register(pipe, selectors.EVENT_READ, (worker, name, to))

    def _told(self, worker: Worker, part: int, port: int | None) -> dict[str, str]:
        """What a process knows of itself; with a port, of its worker's own group as well.

        The store of that group is ours, as torchrun's is: one that torch's rank 0 hosts would
        listen on all interfaces.
        """
        told: dict[str, object] = {"MANYHANDS_WORKER": worker.number}
        if port is not None:
            here = self.workers.index(worker) * self.processes + part
            told |= {"RANK": part, "LOCAL_RANK": here, "WORLD_SIZE": self.processes}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            told |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        return {name: str(value) for name, value in told.items()}

    def _ended(self, worker: Worker, code: int) -> None:
        """A worker is over: tell the crew, and say when it starts again."""
        now = time.monotonic()
        self._signal(worker, signal.SIGKILL)  # its other processes, and what they left behind
        self._reap(worker)
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
        if code > 0 and roster is not None and self._is_refused(worker, roster) and roster.begun:
            _say(f"worker {worker.number} was not let in ({how}): it stays away.")
            return
        if code > 0 or how in CRASHES:
            worker.errors = [t for t in worker.errors if now - t < HOUR] + [now]
            if roster is None:
                self._final = worker.code
                _say(f"worker {worker.number} ended ({how}), and without the store none can go on.")
                return
            if not roster.begun:
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

    def _is_refused(self, worker: Worker, roster: Roster) -> bool:
        return any(number // self.processes == worker.number for number in roster.refused)

    def _reap(self, worker: Worker) -> None:
        """Wait for the end of a worker's processes, and read what they have said to the last."""
        for process in worker.processes:
            process.wait()
            self._tell_guard(f"-{process.pid}")
        for pipe in list(worker.open):
            self._read(pipe, last=True)
        worker.processes, worker.store = [], None

    def _tell_guard(self, change: str) -> None:
        """Say which process groups are to end with us."""
        while True:
            if self._guard is None or self._guard.poll() is not None:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(Path(_guard.__file__))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # so that what kills our group leaves it
                )
                running = [p.pid for worker in self.workers for p in worker.processes]
                change = "\n".join([*(f"+{pid}" for pid in running), change])
            assert self._guard.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(f"{change}\n".encode())
                self._guard.stdin.flush()
                return

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
            self._reap(worker)

    # -- the crew ------------------------------------------------------------------------------

    def _report(self, number: int, left: bool) -> None:
        def all_parts(board: SharedRoster) -> None:
            for part in range(self.processes):
                board.report(number * self.processes + part, left)

        self._at_board(all_parts)

    def _kill_stopped(self) -> None:
        self._at_board(SharedRoster.look)
        if self.board is None:
            return
        silent = self.board.pulse.silent - {*self.board.roster.hosts}
        numbers = {number_of(id) // self.processes for id in silent}
        for worker in self.workers:
            if worker.number in numbers and worker.processes:
                _say(f"worker {worker.number} has not beaten for {STOPPED:g} s and is killed.")
                for process in worker.processes:
                    process.kill()

    def _linger(self) -> None:
        """The store is needed for as long as other hosts' workers live, and their launchers."""
        while self.serving and not self._asked:
            self._at_board(SharedRoster.look)
            if self.board is None:
                return
            roster = self.board.roster
            out = {*roster.gone, *self.board.pulse.silent_for(_store.LIMIT), self.host}
            if out >= {*roster.ids, *(member.id for member in roster.waiting), *roster.hosts}:
                return
            time.sleep(0.1)

    def _at_board(self, do: Callable[[SharedRoster], object]) -> None:
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


def _die_with_parent() -> Callable[[], None] | None:
    """Run in the new process: it is killed when we die, however that happens (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _say(message: str) -> None:
    print(f"manyhands run: {message}", file=sys.stderr, flush=True)
