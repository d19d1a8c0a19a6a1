"""Launcher: start workers, forward their output, and restart workers that die.

A worker is a process, or multiple processes that train a model together and end together.

    exit code 0              the worker is done
    an error                 restarted, `restarts` times within an hour; before the first sync
                             round, an error ends the run
    refused                  options or model differ (_enrollment.py): not restarted
    a crash (SIGSEGV, ...)   counts as an error
    other signals            sent from outside: always restarted, after a growing pause if the
                             worker ran for a short time only
    suspended                killed after `STOPPED_LIMIT` seconds of silence

Workers that die after all other workers have finished are not restarted, and their exit codes do
not count.

A launcher that loses the store reconnects in a thread (_link.py) and starts no worker until then.
Ended workers are reported to the crew, and restarted, after the store answers. Their errors do not
count, because the cut may be the cause. After `patience` seconds, ended workers are given up.

A single thread performs these tasks while waiting for output. The crew is told about the end of a
worker before the restart. Each worker is a process group that ends with the launcher
(_processes.py). A launcher that cannot print continues.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from torch.distributed import TCPStore

from manyhands.blocks.crew import _link
from manyhands.blocks.crew._crew import PATIENCE
from manyhands.blocks.crew._fork_server import ForkedProcess, ForkServer, pipes_of
from manyhands.blocks.crew._link import CrewLink
from manyhands.blocks.crew._processes import (
    OutputForwarder,
    die_with_parent,
    how_it_ended,
    killed_from_outside,
    say,
)
from manyhands.blocks.crew._roster import Roster
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import SECRET_VARIABLE, Signer, parse_address, serve_store

STOP_GRACE = 30.0  # seconds from SIGTERM to SIGKILL, for ending a step and saving
ERROR_GRACE = 5.0  # seconds from SIGTERM to SIGKILL after an error, without saving
ERROR_WINDOW = 3600.0  # seconds within which errors count against `restarts`
SHORT_LIFE = 10.0  # seconds: workers with a shorter life are restarted after a pause
LONGEST_RESTART_PAUSE = 30.0  # seconds before a restart
POLL = 0.05  # seconds between two looks at the processes
NO_CREW = (
    "no worker has joined the crew. Blocks, such as DiLoCo, need crew=mh.Crew(). Start a script of "
    "DistributedDataParallel or mh.AdaScale by torchrun, or by "
    "`manyhands run --workers 1 --processes 2`."
)


@dataclass
class LaunchedWorker:
    """A worker and its running processes: all of them, or none."""

    number: int
    processes: list[subprocess.Popen[bytes] | ForkedProcess] = field(default_factory=list)
    began: float = 0.0
    due: float | None = 0.0  # time of the next start; None: never
    unreported: int | None = None  # exit code that could not be reported to a lost store
    code: int = 0
    errors: list[float] = field(default_factory=list)  # times within ERROR_WINDOW
    short_lives: int = 0  # consecutive
    store: TCPStore | None = None  # for a process group of the worker's processes
    pipes: list[IO[bytes]] = field(default_factory=list)


class Launcher:
    def __init__(
        self,
        command: Sequence[str],
        numbers: Sequence[int],
        store: str,
        *,
        expected: int | None = None,
        processes: int = 1,
        restarts: int = 3,
        patience: float = PATIENCE,
        grace: float = STOP_GRACE,
        fork: bool = True,
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        serving: bool = True,
        secret: str | None = None,
    ) -> None:
        self.command = list(command)
        self.workers = [LaunchedWorker(number) for number in numbers]
        self.processes = processes
        self.restarts = restarts
        self.grace = grace
        self.link = CrewLink(
            store,
            Signer.from_environment(secret),
            numbers,
            processes=processes,
            serving=serving,
            patience=patience,
        )
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # preserves the last lines of killed workers
            **os.environ,
            **(environment or {}),
            "MANYHANDS_GRACE": f"{grace:g}",
            "MANYHANDS_STORE": store,
            "MANYHANDS_WORKERS": self.link.agree_on_expected(expected),
        }
        if secret is not None:
            self.environment[SECRET_VARIABLE] = secret
        self._stop_signal = 0  # signal to stop; negative after a second signal
        self._exit_code: int | None = None  # set if the run must end early
        self._last_check = 0.0  # time of the last check for suspended workers
        self._output = OutputForwarder()
        self._fork_server: ForkServer | None = None
        if fork:
            self._fork_server = ForkServer(self.command, self.environment, preload, self._output)

    def run(self) -> int:
        with self._handle_signals():
            try:
                while self._exit_code is None and not self._stop_signal and self._has_work():
                    self._do_what_is_due()
                if self._exit_code is None and not self._stop_signal:
                    self._serve_until_others_end()
                    roster = self.link.ask(SharedRoster.refresh)
                    several = self.environment["MANYHANDS_WORKERS"] != "1"
                    if several and roster is not None and not roster.incarnations:
                        say(NO_CREW)
            finally:
                self._stop_all()
                if self._fork_server is not None:
                    self._fork_server.close()
                self.link.leave()
        if self._stop_signal:
            return 128 + self._stop_signal  # convention of shells
        if self._exit_code is not None:
            return self._exit_code
        for worker in self.workers:
            if worker.code:
                return worker.code
        return 0

    def _has_work(self) -> bool:
        return any(w.processes or w.due is not None or w.unreported for w in self.workers)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        self._handle_lost_store()
        for worker in self.workers:
            is_due = worker.due is not None and worker.due <= now
            if is_due and not worker.processes and self.link.shared is not None:
                self._start(worker, self.link.shared.roster.run)
        shared = self.link.shared
        if self._fork_server is not None and shared is not None and shared.roster.synced:
            self._fork_server.watch()  # not earlier, while workers are starting
            self._reap_strangers(self._fork_server)
        self._output.forward(POLL)
        for worker in self.workers:
            code = _exit_code_of(worker)
            if code is not None:
                self._handle_end(worker, code)
        if shared is not None and now - self._last_check >= shared.monitor.interval:
            self._last_check = now
            self._kill_stopped()

    # -- starting and ending a worker ----------------------------------------------------------

    def _start(self, worker: LaunchedWorker, run: str) -> None:
        worker.began = time.monotonic()
        port = None
        if self.processes > 1:
            worker.store, name = serve_store("127.0.0.1")
            port = parse_address(name)[1]
        for inner_rank in range(self.processes):
            own = self._own_environment(worker, inner_rank, run, port)
            forked = None
            if self._fork_server is not None:
                forked = self._fork_server.fork(own)
            process = forked or self._start_fresh(own)
            worker.processes.append(process)
            name = str(worker.number)
            if self.processes > 1:
                name += f".{inner_rank}"
            for pipe, target in zip(pipes_of(process), (sys.stdout, sys.stderr), strict=True):
                worker.pipes.append(pipe)
                self._output.add(pipe, name, target)

    def _start_fresh(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.environment, **environment},
            # A separate process group: Ctrl-C reaches only the launcher, and children end with it.
            start_new_session=True,
            **die_with_parent(),
        )

    def _own_environment(
        self, worker: LaunchedWorker, inner_rank: int, run: str, port: int | None
    ) -> dict[str, str]:
        # A store on torch's rank 0 would listen on all interfaces.
        values: dict[str, object] = {"MANYHANDS_WORKER": worker.number, "MANYHANDS_RUN": run}
        if port is not None:
            # Selects the GPU, so count all processes of this host.
            local_rank = self.workers.index(worker) * self.processes + inner_rank
            values |= {"RANK": inner_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": self.processes}
            values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            # Lets torch connect to the store instead of hosting a store on rank 0.
            values |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        return {name: str(value) for name, value in values.items()}

    def _handle_end(self, worker: LaunchedWorker, code: int) -> None:
        self._signal(worker, signal.SIGKILL)  # other processes of the worker, and children
        self._reap(worker)
        worker.code = code
        if code < 0:
            worker.code = 128 - code
        worker.due = None
        roster = self.link.report_end(worker.number, left=code == 0)
        if roster is not None:
            self._decide(worker, code, roster)
            return
        worker.unreported = code
        if code:
            number = worker.number
            say(f"worker {number} ended ({how_it_ended(code)}) while the store does not answer.")

    def _decide(self, worker: LaunchedWorker, code: int, roster: Roster) -> None:
        now = time.monotonic()
        how = how_it_ended(code)
        if code == 0:
            return
        if roster.finished:
            worker.code = 0
            say(f"worker {worker.number} ended ({how}) when the others had finished.")
            return
        worker.short_lives += 1
        if now - worker.began >= SHORT_LIFE:
            worker.short_lives = 0
        refused = {number // self.processes for number in roster.refused}
        if code > 0 and worker.number in refused and roster.synced:
            say(f"worker {worker.number} was not let in ({how}): it is not started again.")
            return
        was_cut_off = worker.began < self.link.lost_at
        if not killed_from_outside(code) and not was_cut_off:
            worker.errors = [t for t in worker.errors if now - t < ERROR_WINDOW] + [now]
            if not roster.synced:
                self._exit_code = worker.code
                say(f"worker {worker.number} ended ({how}) before the first sync round.")
                if not roster.incarnations and self.processes == 1:
                    say(NO_CREW)
                return
            if len(worker.errors) > self.restarts:
                say(f"worker {worker.number} ended ({how}), too often: it is not started again.")
                return
        worker.due = now + _restart_pause(worker.short_lives)
        say(f"worker {worker.number} ended ({how}) and is started again.")

    def _reap(self, worker: LaunchedWorker) -> None:
        for process in worker.processes:
            process.wait()
        self._output.finish(worker.pipes)
        worker.processes = []
        worker.pipes = []
        worker.store = None

    def _reap_strangers(self, server: ForkServer) -> None:
        own = {server.pid}
        for worker in self.workers:
            own.update(process.pid for process in worker.processes)
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, flags)) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)

    def _signal(self, worker: LaunchedWorker, number: int) -> None:
        for process in worker.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _stop_all(self) -> None:
        running = [worker for worker in self.workers if worker.processes]
        for worker in running:
            self._signal(worker, signal.SIGTERM)
            self._signal(worker, signal.SIGCONT)  # suspended processes do not handle SIGTERM
        grace = self.grace
        if not self._stop_signal:
            grace = min(grace, ERROR_GRACE)
        until = time.monotonic() + grace
        asked = self._stop_signal
        while time.monotonic() < until and asked == self._stop_signal:  # until a second signal
            if not any(map(_is_running, running)):
                break
            self._output.forward(POLL)
        for worker in running:
            self._signal(worker, signal.SIGKILL)
        for worker in running:
            self._reap(worker)

    # -- the crew ------------------------------------------------------------------------------

    def _kill_stopped(self) -> None:
        stopped = self.link.stopped()
        for worker in self.workers:
            if worker.number in stopped and worker.processes:
                say(
                    f"worker {worker.number} had no heartbeat for {_link.STOPPED_LIMIT:g} s and is "
                    "killed."
                )
                for process in worker.processes:
                    process.kill()

    def _serve_until_others_end(self) -> None:
        while self.link.serving and not self._stop_signal:
            self._handle_lost_store()
            if self.link.given_up or self.link.others_have_ended():
                return
            time.sleep(0.1)

    def _handle_lost_store(self) -> None:
        if self.link.has_returned():
            for worker in self.workers:
                code = worker.unreported
                if code is None:
                    continue
                roster = self.link.report_end(worker.number, left=code == 0)
                if roster is not None:
                    worker.unreported = None
                    self._decide(worker, code, roster)
        elif self.link.given_up:
            for worker in self.workers:
                is_due = worker.due is not None and not worker.processes
                if worker.unreported or is_due:
                    say(f"worker {worker.number} is not started again: {self.link.given_up}")
                    worker.unreported = None
                    worker.due = None

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM stop the workers; a second signal kills the workers."""

        def stop(number: int, _: object) -> None:
            if self._stop_signal:
                number = -number
            self._stop_signal = number

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            self._stop_signal = abs(self._stop_signal)
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_running(worker: LaunchedWorker) -> bool:
    return any(process.poll() is None for process in worker.processes)


def _exit_code_of(worker: LaunchedWorker) -> int | None:
    # A worker ends when all processes are done or the first process fails.
    codes = [process.poll() for process in worker.processes]
    failed = list(filter(None, codes))
    if failed:
        # Prefer a signal, because failures of other processes may follow from it.
        return min(failed)
    if not codes or None in codes:
        return None
    return 0


def _restart_pause(short_lives: int) -> float:
    """Return the seconds before a restart: 0, then 1, 2, 4, ... after consecutive short lives."""
    if short_lives < 2:
        return 0.0
    # Limit the exponent as well, because a worker may be killed repeatedly for days.
    return min(2.0 ** min(short_lives - 2, 30), LONGEST_RESTART_PAUSE)
