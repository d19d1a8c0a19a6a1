"""Start workers, forward their output, and start workers that die again.

A worker is one process, or several that train one model together: these live and die together.

    exit code 0              the worker is done
    an error                 restarted, `restarts` times within an hour. Before the first sync round
                             it ends the run: there is nothing to lose yet
    refused                  its options or model differ (_enrollment.py): not restarted
    a crash (SIGSEGV, ...)   counts as an error
    another signal           came from outside: always restarted, after a growing pause if the
                             worker lived only for a short time
    stopped                  a worker without a heartbeat for `STOPPED_LIMIT` seconds is killed

A worker that dies after the others have finished is not restarted, and its exit code does not
count.

A launcher that is cut off from the store tries to reach it again, on a thread (_link.py). No
worker is started meanwhile. The crew learns of workers that have ended when the store answers, and
they are restarted then. (They may have failed because of the cut, so their errors do not count.)
After `patience` seconds they are given up.

One thread does all this, between waiting for output. The crew learns that a worker has died, or is
done, before the worker is restarted.

A worker in place of one that died is forked from a process with torch imported (_kept.py), if that
is safe.

Each worker is a process group. However the launcher ends, no group is left behind: on Linux the
system kills them when the launcher dies, and on every system a separate process, the guard, does
(_processes.py). A launcher that cannot print goes on.
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
from manyhands.blocks.crew._kept import ENVIRONMENT, ForkedProcess, KeptProcess, pipes_of
from manyhands.blocks.crew._link import CrewLink
from manyhands.blocks.crew._processes import (
    Guard,
    OutputForwarder,
    die_with_parent,
    how_it_ended,
    killed_from_outside,
    say,
)
from manyhands.blocks.crew._roster import Roster
from manyhands.blocks.crew._store import (
    SECRET_VARIABLE,
    SharedRoster,
    Signer,
    parse_address,
    serve_store,
)

STOP_GRACE = 30.0  # seconds from SIGTERM to SIGKILL: to end a step, and to save
ERROR_GRACE = 5.0  # the same, when the run ends because of an error: nothing is to be saved
ERROR_WINDOW = 3600.0  # seconds in which errors are counted against `restarts`
SHORT_LIFE = 10.0  # seconds: a worker that lives no longer is restarted after a pause
LONGEST_RESTART_PAUSE = 30.0  # seconds before a restart
POLL = 0.05  # seconds between two looks at the processes
NO_CREW = (
    "no worker has joined the crew. Blocks, such as DiLoCo, need crew=mh.Crew(). Start a script of "
    "DistributedDataParallel or mh.AdaScale by torchrun, or by "
    "`manyhands run --workers 1 --processes 2`."
)


@dataclass
class LaunchedWorker:
    """One worker: its number, and its present processes, if it runs."""

    number: int
    # all, or none
    processes: list[subprocess.Popen[bytes] | ForkedProcess] = field(default_factory=list)
    began: float = 0.0
    due: float | None = 0.0  # when to start it; None: never again
    unreported: int | None = None  # how it ended, while the store is lost
    code: int = 0
    errors: list[float] = field(default_factory=list)  # times of the latest ones
    short_lives: int = 0  # in a row
    store: TCPStore | None = None  # where its processes find each other, if there are several
    pipes: list[IO[bytes]] = field(default_factory=list)


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
            "PYTHONUNBUFFERED": "1",  # or a killed worker's last lines would be lost
            **os.environ,
            **(environment or {}),
            "MANYHANDS_GRACE": f"{grace:g}",
            "MANYHANDS_STORE": store,
            "MANYHANDS_WORKERS": self.link.agree_on_expected(expected),
        }
        if secret is not None:
            self.environment[SECRET_VARIABLE] = secret
        self._stop_signal = 0  # the signal that asked us to stop; negative after a second one
        self._exit_code: int | None = None  # set early if the run must end
        self._last_check = 0.0  # for stopped workers
        self._output = OutputForwarder()
        self._guard = Guard()
        self._kept: KeptProcess | None = None
        if fork:
            self._kept = KeptProcess(self.command, self.environment, preload, self._output)

    def run(self) -> int:
        """Run until all workers have ended; return the exit code."""
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
                if self._kept is not None:
                    self._kept.close()
                self.link.leave()
                self._guard.close()
                ignored = self.link.signer.ignored
                if ignored:
                    say(
                        f"{ignored} value(s) in the store were ignored here: they were "
                        "not signed with the secret of this run, or not what a member writes."
                    )
        if self._stop_signal:
            return 128 + self._stop_signal  # as a shell reports it
        if self._exit_code is not None:
            return self._exit_code
        for worker in self.workers:
            if worker.code:
                return worker.code
        return 0

    def _has_work(self) -> bool:
        return any(w.processes or w.due is not None or w.unreported for w in self.workers)

    def _do_what_is_due(self) -> None:
        """Do once all that may be due: start, forward output, notice ends, kill stopped workers."""
        now = time.monotonic()
        self._await_store()
        for worker in self.workers:
            is_due = worker.due is not None and worker.due <= now
            if is_due and not worker.processes and self.link.shared is not None:
                self._start(worker)
        self._guard.watch()
        shared = self.link.shared
        if self._kept is not None and shared is not None and shared.roster.begun:
            self._kept.watch()  # not before: the workers are starting
            self._reap_strangers(self._kept)
        self._output.forward(POLL)
        for worker in self.workers:
            code = _exit_code_of(worker)
            if code is not None:
                self._handle_end(worker, code)
        if shared is not None and now - self._last_check >= shared.monitor.interval:
            self._last_check = now
            self._kill_stopped()

    # -- one worker ----------------------------------------------------------------------------

    def _start(self, worker: LaunchedWorker) -> None:
        """Start a worker's processes, with their output forwarded and a guard over them."""
        forks = self.link.ask(lambda shared: self._may_fork(shared, worker))
        if self.link.shared is None:
            return  # lost just now
        worker.began = time.monotonic()
        run = self.link.shared.roster.run
        port = None
        if self.processes > 1:
            worker.store, name = serve_store("127.0.0.1")
            port = parse_address(name)[1]
        for inner_rank in range(self.processes):
            own = self._own_environment(worker, inner_rank, run, port)
            forked = None
            if forks and self._kept is not None:
                forked = self._kept.fork(own)
            process = forked or self._start_fresh(own)
            worker.processes.append(process)
            self._guard.add(process.pid)
            name = str(worker.number)
            if self.processes > 1:
                name += f".{inner_rank}"
            for pipe, target in zip(pipes_of(process), (sys.stdout, sys.stderr), strict=True):
                worker.pipes.append(pipe)
                self._output.add(pipe, name, target)

    def _may_fork(self, shared: SharedRoster, worker: LaunchedWorker) -> bool:
        """Return whether libraries would find the same variables in a fresh process.

        The last process of the same number has reported which variables the script changes.
        """
        kept = self._kept
        if kept is None or not kept.ready:
            return False
        for inner_rank in range(self.processes):
            key = f"{ENVIRONMENT}{worker.number * self.processes + inner_rank}"
            described = shared.client.read(key)
            if not described:
                return False  # it has never joined
            names = kept.differences(described, shared.client.signer)
            if names:
                kept.give_up(f"the script changes {', '.join(names)}")
                return False
        return True

    def _start_fresh(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.environment, **environment},
            # A process group: Ctrl-C reaches only us, and its children end with it.
            start_new_session=True,
            **die_with_parent(),
        )

    def _own_environment(
        self, worker: LaunchedWorker, inner_rank: int, run: str, port: int | None
    ) -> dict[str, str]:
        """Return the variables that differ between processes."""
        # With a port they include the address of the worker's own process group. We serve that
        # group's store, as torchrun does: a store hosted by torch's rank 0 would listen on all
        # interfaces.
        values: dict[str, object] = {"MANYHANDS_WORKER": worker.number, "MANYHANDS_RUN": run}
        if port is not None:
            # Counts all processes of this host, because it selects the GPU.
            local_rank = self.workers.index(worker) * self.processes + inner_rank
            values |= {"RANK": inner_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": self.processes}
            values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            # torch then connects to the store instead of hosting one on rank 0.
            values |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        return {name: str(value) for name, value in values.items()}

    def _handle_end(self, worker: LaunchedWorker, code: int) -> None:
        """End the rest of a worker, and decide whether it is restarted."""
        self._signal(worker, signal.SIGKILL)  # its other processes, and its children
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
        """Decide whether a worker is restarted, whose end the crew knows."""
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
        if code > 0 and worker.number in refused and roster.begun:
            say(f"worker {worker.number} was not let in ({how}): it is not started again.")
            return
        was_cut_off = worker.began < self.link.lost_at
        if not killed_from_outside(code) and not was_cut_off:
            worker.errors = [t for t in worker.errors if now - t < ERROR_WINDOW] + [now]
            if not roster.begun:
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
        """Wait for the end of a worker's processes, and forward the last of their output."""
        for process in worker.processes:
            process.wait()
            self._guard.remove(process.pid)
        self._output.finish(worker.pipes)
        worker.processes = []
        worker.pipes = []
        worker.store = None

    def _reap_strangers(self, kept: KeptProcess) -> None:
        """Reap children of dead workers: with forked workers their parent is this process."""
        own = {kept.pid, self._guard.pid}
        for worker in self.workers:
            own.update(process.pid for process in worker.processes)
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, flags)) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)

    def _signal(self, worker: LaunchedWorker, number: int) -> None:
        """Send a signal to the worker's processes and their children."""
        for process in worker.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _stop_all(self) -> None:
        """Ask all workers to stop, wait as long as the grace lasts, and kill the rest."""
        running = [worker for worker in self.workers if worker.processes]
        for worker in running:
            self._signal(worker, signal.SIGTERM)
            self._signal(worker, signal.SIGCONT)  # a stopped process handles no other signal
        grace = self.grace
        if not self._stop_signal:
            grace = min(grace, ERROR_GRACE)
        until = time.monotonic() + grace
        asked = self._stop_signal
        while time.monotonic() < until and asked == self._stop_signal:  # changed: asked again
            if not any(map(_is_running, running)):
                break
            self._output.forward(POLL)
        for worker in running:
            self._signal(worker, signal.SIGKILL)
        for worker in running:
            self._reap(worker)

    # -- the crew ------------------------------------------------------------------------------

    def _kill_stopped(self) -> None:
        """Kill workers without a heartbeat: a stopped one does not end by itself."""
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
        """Wait for other hosts' workers and launchers, which still need the store served here."""
        while self.link.serving and not self._stop_signal:
            self._await_store()
            if self.link.given_up or self.link.others_have_ended():
                return
            time.sleep(0.1)

    def _await_store(self) -> None:
        """Go on if a lost store answers again; give up workers that have waited too long for it."""
        if self.link.await_store():
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
        """Let SIGINT and SIGTERM stop the workers; a second signal kills them at once."""

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
    """Return the code with which a worker ended (negative: by a signal); None if it has not."""
    # It ends when all of its processes are done, or when the first of them dies.
    codes = [process.poll() for process in worker.processes]
    failed = list(filter(None, codes))
    if failed:
        # A signal comes first: the other processes may have failed because of it.
        return min(failed)
    if not codes or None in codes:
        return None
    return 0


def _restart_pause(short_lives: int) -> float:
    """Return the seconds before a restart: 0, then 1, 2, 4, ... for short lives in a row."""
    if short_lives < 2:
        return 0.0
    # Limit the exponent too: a worker may be killed again and again for days.
    return min(2.0 ** min(short_lives - 2, 30), LONGEST_RESTART_PAUSE)
