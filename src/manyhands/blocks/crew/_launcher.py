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

A launcher that is cut off from the store tries to reach it again, on a thread (_return.py). No
worker is started meanwhile. The crew learns of workers that have ended when the store answers, and
they are restarted then. (They may have failed because of the cut, so their errors do not count.)
After `patience` seconds they are given up.

One thread does all this, between waiting for output. What the crew has to know (this worker died,
this one is done) is in the store before a worker is restarted.

A worker in place of one that died is forked from a process with torch imported (_kept.py), if that
is safe.

Each worker is a process group. However the launcher ends, no group is left behind: on Linux the
system kills them when the launcher dies, and on every system a separate process, the guard, does
(_processes.py). A launcher that cannot print goes on.

A launcher that needs the store is in the roster until it ends. The launcher that serves the store
waits for the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TypeVar

from torch.distributed import TCPStore

from manyhands.blocks.crew import _store
from manyhands.blocks.crew._crew import PATIENCE
from manyhands.blocks.crew._kept import ENVIRONMENT, ForkedProcess, KeptProcess, pipes_of
from manyhands.blocks.crew._processes import (
    Guard,
    OutputForwarder,
    die_with_parent,
    how_it_ended,
    killed_from_outside,
    say,
)
from manyhands.blocks.crew._return import ReturnToStore
from manyhands.blocks.crew._roster import Roster, number_of
from manyhands.blocks.crew._store import (
    PREFIX,
    SECRET_VARIABLE,
    HeartbeatMonitor,
    SharedRoster,
    Signer,
    StoreClient,
    parse_address,
    serve_store,
)
from manyhands.errors import StoreLost

STOPPED_LIMIT = 60.0  # seconds without a heartbeat after which a worker is killed
EXPECTED_WAIT = 2.0  # seconds that the serving launcher has to publish how many are expected
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
Answer = TypeVar("Answer")


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
    store: TCPStore | None = None  # where its own processes find each other, if it has several
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
        self.patience = patience  # seconds for which a lost store is awaited
        self.grace = grace
        self.serving = serving
        self.store = store
        self.signer = Signer.from_environment(secret)
        self.shared: SharedRoster | None = self._connect()  # None while the store is lost
        self._return: ReturnToStore | None = None  # while the store is lost
        self._lost = -float("inf")  # when it was lost the last time
        self._cut_off: frozenset[str] = frozenset()  # processes that were here when it was lost
        client = self.shared.client
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # or a killed worker's last lines would be lost
            **os.environ,
            **(environment or {}),
            "MANYHANDS_GRACE": f"{grace:g}",
            "MANYHANDS_STORE": store,
            "MANYHANDS_WORKERS": self._agree_on_expected(client, expected),
        }
        if secret is not None:
            self.environment[SECRET_VARIABLE] = secret
        self._stop_signal = 0  # the signal that asked us to stop; negative after a second one
        self._exit_code: int | None = None  # set early if the run must end
        self._last_check = 0.0  # for stopped workers
        self._output = OutputForwarder()
        self._guard = Guard()
        kept = KeptProcess(self.command, self.environment, preload, self._output) if fork else None
        self._kept = kept

    def run(self) -> int:
        """Run until all workers have ended; return the exit code."""
        with self._handle_signals():
            try:
                while self._exit_code is None and not self._stop_signal and self._has_work():
                    self._do_what_is_due()
                if self._exit_code is None and not self._stop_signal:
                    self._serve_until_others_end()
                    if self.environment["MANYHANDS_WORKERS"] != "1":
                        self._ask(_say_if_nobody_joined)
            finally:
                self._stop_all()
                if self._kept is not None:
                    self._kept.close()
                self._leave()
                self._guard.close()
                if self.signer.ignored:
                    say(
                        f"{self.signer.ignored} value(s) in the store were ignored here: they were "
                        "not signed with the secret of this run, or not what a member writes."
                    )
        if self._stop_signal:
            return 128 + self._stop_signal  # as a shell reports it
        if self._exit_code is not None:
            return self._exit_code
        return next((worker.code for worker in self.workers if worker.code), 0)

    def _agree_on_expected(self, client: StoreClient, expected: int | None) -> str:
        """Return how many workers the first round waits for."""
        # The launcher that serves the store publishes the number; the others read it, or decide
        # themselves if it is not published in time.
        key = PREFIX + "expected"
        until = time.monotonic() + EXPECTED_WAIT
        while expected is None and not self.serving and time.monotonic() < until:
            if published := client.verify_or_ignore(key, client.fetch(key)):
                return published
            time.sleep(0.05)
        own = str(expected or len(self.workers))
        found = client.fetch(key)
        if published := client.verify_or_ignore(key, found):
            return published
        # Compare and set: if another launcher publishes at this moment, its number counts.
        client.call("compare_set", key, found or "", client.signer.sign(key, own))
        return client.verify_or_ignore(key, client.fetch(key)) or own

    def _connect(self, former_id: str = "") -> SharedRoster:
        """Connect to the store, and enter the roster."""
        client = StoreClient(self.store, 1.0, self.signer)
        try:
            shared = SharedRoster(client, HeartbeatMonitor(STOPPED_LIMIT), self.processes)
            shared.watched = self._watched
            # A new id each time, because the others know how far the former heartbeat has counted.
            shared.id = f"host-{secrets.token_hex(4)}"
            # The heartbeat first: a process that finds this launcher finds its heartbeat, too.
            client.start_heartbeat(f"{PREFIX}heartbeat/{shared.id}")
            shared.change(lambda r: r.without_launcher(former_id).with_launcher(shared.id))
        except BaseException:
            client.close()
            raise
        return shared

    def _has_work(self) -> bool:
        return any(w.processes or w.due is not None or w.unreported for w in self.workers)

    def _do_what_is_due(self) -> None:
        """Do once all that may be due: start, forward output, notice ends, kill stopped workers."""
        now = time.monotonic()
        if self._return is not None:
            self._await_store(self._return)
        for worker in self.workers:
            is_due = worker.due is not None and worker.due <= now
            if is_due and not worker.processes and self.shared is not None:
                self._start(worker)
        self._guard.watch()
        if self._kept is not None and self.shared is not None and self.shared.roster.begun:
            self._kept.watch()  # not before: the workers are starting
            self._reap_strangers(self._kept)
        self._output.forward(POLL)
        for worker in self.workers:
            if (code := _exit_code_of(worker)) is not None:
                self._handle_end(worker, code)
        if self.shared is not None and now - self._last_check >= self.shared.monitor.interval:
            self._last_check = now
            self._kill_stopped()

    # -- one worker ----------------------------------------------------------------------------

    def _start(self, worker: LaunchedWorker) -> None:
        """Start a worker's processes, with their output forwarded and a guard over them."""
        forks = self._ask(lambda shared: self._may_fork(shared, worker))
        if self.shared is None:
            return  # lost just now
        worker.began = time.monotonic()
        run = self.shared.roster.run
        port = None
        if self.processes > 1:
            worker.store, name = serve_store("127.0.0.1")
            port = parse_address(name)[1]
        for inner_rank in range(self.processes):
            own = self._own_environment(worker, inner_rank, run, port)
            kept = self._kept if forks else None
            process = (kept and kept.fork(own)) or self._start_fresh(own)
            worker.processes.append(process)
            self._guard.add(process.pid)
            name = f"{worker.number}.{inner_rank}" if self.processes > 1 else f"{worker.number}"
            for pipe, target in zip(pipes_of(process), (sys.stdout, sys.stderr), strict=True):
                worker.pipes.append(pipe)
                self._output.add(pipe, name, target)

    def _may_fork(self, shared: SharedRoster, worker: LaunchedWorker) -> bool:
        """Return whether libraries would find in a fresh process what they found in the kept one.

        The last process of the same number has reported which variables the script changes.
        """
        kept = self._kept
        if kept is None or not kept.ready:
            return False
        for inner_rank in range(self.processes):
            key = f"{ENVIRONMENT}{worker.number * self.processes + inner_rank}"
            described = shared.client.verify_or_ignore(key, shared.client.fetch(key))
            if described is None:
                return False  # it has never joined
            if names := kept.differences(described, self.signer):
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
        """End what is left of a worker, and decide whether it is restarted."""
        self._signal(worker, signal.SIGKILL)  # its other processes, and its children
        self._reap(worker)
        worker.code = code if code >= 0 else 128 - code
        worker.due = None
        roster = self._report_end(worker.number, left=code == 0)
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
        worker.short_lives = worker.short_lives + 1 if now - worker.began < SHORT_LIFE else 0
        if code > 0 and self._is_refused(worker, roster) and roster.begun:
            say(f"worker {worker.number} was not let in ({how}): it is not started again.")
            return
        was_cut_off = worker.began < self._lost
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

    def _is_refused(self, worker: LaunchedWorker, roster: Roster) -> bool:
        return any(number // self.processes == worker.number for number in roster.refused)

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
        """Reap what workers have left behind: with forked workers its parent is this process."""
        running = [process.pid for worker in self.workers for process in worker.processes]
        own = {*running, kept.pid, self._guard.pid}
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
        """Ask all workers to stop, wait as long as the grace lasts, and kill what is left."""
        running = [worker for worker in self.workers if worker.processes]
        for worker in running:
            self._signal(worker, signal.SIGTERM)
            self._signal(worker, signal.SIGCONT)  # a stopped process handles no other signal
        grace = self.grace if self._stop_signal else min(self.grace, ERROR_GRACE)
        until = time.monotonic() + grace
        asked = self._stop_signal
        while time.monotonic() < until and asked == self._stop_signal:  # changed: asked again
            if all(p.poll() is not None for worker in running for p in worker.processes):
                break
            self._output.forward(POLL)
        for worker in running:
            self._signal(worker, signal.SIGKILL)
        for worker in running:
            self._reap(worker)

    # -- the crew ------------------------------------------------------------------------------

    def _watched(self, roster: Roster) -> list[str]:
        """Return the processes that this launcher watches: its own; all if the others need us."""
        own = {worker.number for worker in self.workers}
        found = {id for id in roster.everyone if self.serving or roster.worker_of(id) in own}
        return sorted(found.union(roster.launchers if self.serving else ()) - roster.gone)

    def _report_end(self, number: int, left: bool) -> Roster | None:
        """Tell the crew that a worker has ended, so that nobody waits for its heartbeat."""

        def report(shared: SharedRoster) -> Roster:
            for inner_rank in range(self.processes):
                shared.report_end(number * self.processes + inner_rank, left)
            return shared.roster

        return self._ask(report)

    def _kill_stopped(self) -> None:
        """Kill workers without a heartbeat: a stopped one does not end by itself."""
        roster = self._ask(SharedRoster.refresh)
        if roster is None or self.shared is None:
            return
        monitor = self.shared.monitor
        # A worker that was cut off has a heartbeat again after its next round, under a new id.
        in_a_block = {id for id in self._cut_off if not monitor.has_advanced(id)}
        spared = in_a_block - monitor.silent_for(self.patience)
        numbers = set()
        for id in monitor.silent - spared - roster.gone:
            # Not everything that was observed is still in the roster.
            if id in roster.everyone and not roster.is_replaced(id):
                numbers.add(number_of(id) // self.processes)
        for worker in self.workers:
            if worker.number in numbers and worker.processes:
                say(
                    f"worker {worker.number} had no heartbeat for {STOPPED_LIMIT:g} s and is "
                    "killed."
                )
                for process in worker.processes:
                    process.kill()

    def _serve_until_others_end(self) -> None:
        """Wait for other hosts' workers and launchers, which still need the store served here."""
        while self.serving and not self._stop_signal:
            if self._return is not None:
                self._await_store(self._return)
                if self._return is not None and time.monotonic() - self._lost > self.patience:
                    return
            roster = self._ask(SharedRoster.refresh)
            if roster is not None and self.shared is not None:
                # A host that vanished reports nothing. Its own store calls have timed out by then.
                silent = self.shared.monitor.silent_for(_store.STORE_TIMEOUT)
                ended = {*roster.gone, *silent, self.shared.id}
                if ended >= {*roster.ids, *(m.id for m in roster.waiting), *roster.launchers}:
                    return
            time.sleep(0.1)

    def _ask(self, action: Callable[[SharedRoster], Answer]) -> Answer | None:
        """Return the action's answer; None while the store is lost. Then try to reach it again."""
        shared = self.shared
        if shared is None:
            return None
        try:
            return action(shared)
        except StoreLost as error:
            say(
                f"the store at {self.store} is lost: {error.why}. This command tries to reach it "
                f"again for {self.patience:g} s, and starts no worker meanwhile."
            )
            self.shared = None
            shared.client.close()
            self._lost = time.monotonic()
            self._return = ReturnToStore(self.store, lambda: self._connect(shared.id))
            return None

    def _await_store(self, returning: ReturnToStore) -> None:
        """Go on if the store answers again; give up workers that have waited too long for it."""
        if returning.shared is None:
            if time.monotonic() - self._lost > self.patience:
                self._give_up_waiting(returning.error)
            return
        say(f"the store at {self.store} answers again.")
        self.shared = returning.shared
        self._return = None
        self._cut_off = frozenset(self.shared.roster.everyone)
        for worker in self.workers:
            code = worker.unreported
            if code is not None and (roster := self._report_end(worker.number, left=code == 0)):
                worker.unreported = None
                self._decide(worker, code, roster)

    def _give_up_waiting(self, error: str) -> None:
        for worker in self.workers:
            is_due = worker.due is not None and not worker.processes
            if worker.unreported or is_due:
                say(f"worker {worker.number} is not started again: {error}")
                worker.unreported = None
                worker.due = None

    def _leave(self) -> None:
        """Tell the others that this launcher ends."""
        shared = self.shared
        if self._return is not None:
            self._return.close()
            shared = self._return.shared
        if shared is None:
            return
        try:
            shared.change(lambda roster: roster.without_launcher(shared.id))
        except StoreLost as error:
            say(f"the store at {self.store} is lost: {error.why}.")
        shared.client.close()

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM stop the workers; a second signal kills them at once."""

        def stop(number: int, _: object) -> None:
            self._stop_signal = number if not self._stop_signal else -number

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            self._stop_signal = abs(self._stop_signal)
            for number, handler in before.items():
                signal.signal(number, handler)


def _exit_code_of(worker: LaunchedWorker) -> int | None:
    """Return the code with which a worker ended (negative: by a signal); None if it has not."""
    # It ends when all of its processes are done, or when the first of them dies.
    codes = [process.poll() for process in worker.processes]
    failed = [code for code in codes if code]
    if failed:
        # A signal comes first: the other processes may have failed because of it.
        return min(failed)
    return 0 if codes and None not in codes else None


def _say_if_nobody_joined(shared: SharedRoster) -> None:
    shared.refresh()
    if not shared.roster.incarnations:
        say(NO_CREW)


def _restart_pause(short_lives: int) -> float:
    """Return the seconds before a restart: 0, then 1, 2, 4, ... for short lives in a row."""
    if short_lives < 2:
        return 0.0
    # Limit the exponent too: a worker may be killed again and again for days.
    return min(2.0 ** min(short_lives - 2, 30), LONGEST_RESTART_PAUSE)
