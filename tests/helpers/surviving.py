"""Ranks that run `surviving_script.py`, and the same training in a single process.

    with SurvivingRanks(tmp_path, 4, Options(epochs=0)) as run:
        run.start()
        run.wait_for_commits(3, ranks=4)
        run.kill(2)
        run.finish()
        run.check()          each step equals the oracle's step, each sample is used once

The oracle is plain PyTorch: one process, the batches of `data_oracle.py`, none of our code.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import multiprocessing.util
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers import surviving_script
from helpers.crew_workers import SECRET, Store, fork
from helpers.data_oracle import global_batches
from helpers.networks import Networks
from helpers.run_command import Command, alive, gone
from helpers.surviving_script import (
    BATCH,
    SAMPLES,
    Options,
    Rows,
    infinite_samples,
    losses_of,
)
from manyhands._ranks.groups import group_closer
from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import Signer, StoreClient
from manyhands.errors import StoreLost

NEEDS_TORCH = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="survive=True needs torch 2.15: make survive"
)
SCRIPT = Path(surviving_script.__file__).read_text()
STALL = 3.0  # seconds until a silent rank is lost
PAUSE = 0.2  # seconds until a lost worker is started again
TOLERANCE = 1e-10
Key = tuple[int, int]  # epoch, and position before the step


class SurvivingRanks:
    """Forks of this process, in the environment of `manyhands run`, which restart after a death."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        options: Options,
        *,
        store: Store | None = None,
        stall: float = STALL,
        restarts: bool = True,
        quorum: int = 1,
        networks: Networks | None = None,
        engine: bool = True,
    ) -> None:
        self.folder = folder
        self.options = options
        self.restarts = restarts
        self.report = True  # tell the crew about a death, as the launcher does
        self._engine = engine  # False: as a script that no engine has started
        self._command: Command | None = None
        self._networks = networks
        self._stall = stall
        self._own_store = None if store is not None else Store()
        self._store = store or self._own_store
        self._ranks = ranks
        self._quorum = quorum
        self._running: dict[int, int] = {}  # worker: process
        self._due: dict[int, float] = {}  # worker: time of the restart
        self._ended: dict[int, int] = {}  # worker: exit code
        self.hosts: dict[int, str] = {}  # of `Networks`
        self._events: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by kind
        self._offsets: dict[Path, int] = defaultdict(int)  # of the logs, as read so far

    def __enter__(self) -> SurvivingRanks:
        if self._own_store is not None:
            self._own_store.__enter__()
        assert self._store is not None
        monitor = HeartbeatMonitor(self._stall)
        client = StoreClient(self._store.address, monitor.interval, Signer(SECRET))
        self._shared = SharedRoster(client, monitor, 1)
        return self

    def __exit__(self, *error: object) -> None:
        self._shared.client.close()
        for pid in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if self._own_store is not None:
            self._own_store.__exit__()

    def start(self, *workers: int, host: str = "") -> SurvivingRanks:
        """Start these workers, or all."""
        for worker in workers or range(self._ranks):
            if host:
                self.hosts[worker] = host
            self._start(worker)
        return self

    def _start(self, worker: int) -> None:
        self._due.pop(worker, None)
        self._ended.pop(worker, None)
        host = self.hosts.get(worker)
        inside = nullcontext() if host is None else self._networks.inside(host)  # type: ignore[union-attr]
        with inside:
            self._running[worker] = fork(partial(self._live, worker), self._errors(worker))

    def _errors(self, worker: int) -> Path:
        return self.folder / f"errors-{worker}"

    def _live(self, worker: int) -> None:
        """Run the script in a worker's process, and the exit functions of this process."""
        os.setpgid(0, 0)  # ends as a whole, as under the launcher
        atexit._clear()  # of pytest
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        assert self._store is not None
        if self._engine:
            os.environ.update(
                MANYHANDS_STORE=self._store.address,
                MANYHANDS_WORKER=str(worker),
                MANYHANDS_WORKERS=str(self._ranks),
                MANYHANDS_STALL=str(self._stall),
                MANYHANDS_QUORUM=str(self._quorum),
                MANYHANDS_PATIENCE="60",
            )
        os.chdir(self.folder)
        # Of imported modules, in the order of the imports.
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        atexit.register(group_closer.close)
        try:
            surviving_script.Training(self.options).run()
        except BaseException as error:
            sys.last_value = error  # as Python does at the end of a script
            if not isinstance(error, SystemExit) or error.code:
                raise
        finally:
            atexit._run_exitfuncs()

    def tend(self) -> None:
        """Notice ended workers, and restart these unless they are done."""
        for worker, pid in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self._running[worker]
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # processes that load data
            code = os.waitstatus_to_exitcode(status)
            self._ended[worker] = code
            if code and self.report:
                with suppress(StoreLost):
                    self._shared.report_end(worker)
            if code and self.restarts:
                self._due[worker] = time.monotonic() + PAUSE
        finished = [worker for worker, code in self._ended.items() if code == 0]
        for worker, due in list(self._due.items()):
            if len(finished) == self._ranks - 1:
                del self._due[worker]  # as the launcher, which leaves the last workers alone
                self._ended[worker] = 0
            elif time.monotonic() > due:
                self._start(worker)

    def sleep(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            self.tend()
            time.sleep(0.01)

    # -- events --------------------------------------------------------------------------------

    def events(self, kind: str, worker: int | None = None) -> list[dict[str, Any]]:
        """Return the events of this kind of all processes, in the order of time."""
        self._read_logs()
        found = []
        for event in self._events[kind]:
            if worker in (None, event["worker"]):
                found.append(event)
        return sorted(found, key=lambda event: event["time"])

    def _read_logs(self) -> None:
        for path in self.folder.glob("log-*"):
            _, number, pid = path.name.split("-")
            with path.open() as file:
                file.seek(self._offsets[path])
                for line in file:
                    if not line.endswith("\n"):
                        break  # in the middle of a write
                    event = {**json.loads(line), "worker": int(number), "pid": int(pid)}
                    self._events[event["event"]].append(event)
                    self._offsets[path] += len(line)

    def pids(self) -> list[int]:
        return [int(path.name.split("-")[2]) for path in self.folder.glob("log-*")]

    def pid(self, worker: int) -> int | None:
        """Return the living process of a worker that has joined."""
        for event in reversed(self.events("joined", worker)):
            if alive(event["pid"]):
                return event["pid"]
        return None

    def said(self, worker: int) -> str:
        path = self._errors(worker)
        return path.read_text() if path.exists() else ""

    # -- faults --------------------------------------------------------------------------------

    def send(self, number: signal.Signals, *workers: int) -> None:
        pids = [self.pid(worker) for worker in workers]
        for pid in pids:
            assert pid is not None, f"a worker of {workers} is not alive"
            os.kill(pid, number)

    def kill(self, *workers: int) -> None:
        self.send(signal.SIGKILL, *workers)

    def stop(self, worker: int, seconds: float) -> None:
        self.suspend(worker)
        self.sleep(seconds)
        self.resume(worker)

    def suspend(self, worker: int) -> None:
        self.send(signal.SIGSTOP, worker)

    def resume(self, worker: int) -> None:
        with suppress(ProcessLookupError, AssertionError):  # the worker has ended
            self.send(signal.SIGCONT, worker)

    def joined(self) -> list[int]:
        """Return the workers that are in step."""
        return [worker for worker in range(self._ranks) if self.pid(worker) is not None]

    def lives(self, worker: int) -> int:
        return len(list(self.folder.glob(f"log-{worker}-*")))

    # -- waiting -------------------------------------------------------------------------------

    def until(self, condition: Callable[[], object], timeout: float = 60.0) -> None:
        limit = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < limit, self.describe()
            assert self._running or self._due or self._command, self.describe()
            self.sleep(0.03)

    def until_ended(self, timeout: float = 60.0) -> None:
        """Wait for the end of all workers, with any exit code."""
        limit = time.monotonic() + timeout
        while self._running or self._due:
            assert time.monotonic() < limit, self.describe()
            self.sleep(0.02)

    def code(self, worker: int) -> int:
        return self._ended[worker]

    def watch(self, command: Command) -> None:
        """Wait for the ranks of a command instead of forks."""
        self._command = command

    def wait_for_commits(
        self, number: int, ranks: int | None = None, timeout: float = 60.0
    ) -> None:
        """Wait for this many further steps, of this number of ranks."""
        known = len(self.committed(ranks))
        self.until(lambda: len(self.committed(ranks)) >= known + number, timeout)

    def committed(self, ranks: int | None = None) -> set[Key]:
        self._read_logs()
        events = self._events["commit"]
        return {_key(event) for event in events if ranks in (None, event["ranks"])}

    def stop_soon(self) -> None:
        """Let all ranks end with a later epoch."""
        epochs = [event["at"][0] for event in self.events("commit")]
        new = self.folder / "end.new"
        new.write_text(str(max(epochs, default=0) + 3))
        new.rename(self.folder / "end")

    def finish(self, timeout: float = 60.0) -> None:
        """Wait for the end of all workers, and check that all succeeded and no process is left."""
        if not self.options.epochs and not (self.folder / "end").exists():
            self.stop_soon()
        self.until_ended(timeout)
        assert not any(self._ended.values()), (self._ended, self.describe())
        self.no_process_left()

    def no_process_left(self) -> None:
        loaders = [int(path.name.split("-")[1]) for path in self.folder.glob("loader-*")]
        pids = [*self.pids(), *loaders]
        assert gone(pids), [pid for pid in pids if alive(pid)]

    def describe(self) -> str:
        """Describe the last events and the stacks of all processes, for a failed test."""
        for pid in self._running.values():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        lines = [f"running {self._running}, ended {self._ended}"]
        if self._command is not None:
            lines.append(self._command.said()[-5000:])
        for worker in range(self._ranks):
            own = [line for line in self.said(worker).splitlines() if "pytest" not in line]
            lines.append("\n".join([f"worker {worker} wrote:", *own[-80:]]))
        for path in sorted(self.folder.glob("log-*")):
            last = path.read_text().splitlines()[-4:]
            state = "alive" if alive_now(path) else "gone"
            lines.append(f"{path.name} ({state}):")
            for line in last:
                event = json.loads(line)
                event.pop("params", None)
                lines.append(f"    {event}")
        return "\n".join(lines)

    # -- the oracle ----------------------------------------------------------------------------

    def check(self, *, parameters: bool = True) -> dict[Key, dict[str, Any]]:
        """Compare all steps with the oracle. Return a commit for each step."""
        epochs = self.options.epochs or int((self.folder / "end").read_text())
        wanted = train_alone(self.options, epochs)
        commits: dict[Key, dict[str, Any]] = {}
        generations: dict[Key, Any] = {}
        for event in self.events("commit"):
            key = _key(event)
            first = commits.setdefault(key, event)
            for name in ("params", "rate", "gain", "progress", "ema", "loss_scale", "tracked"):
                assert event.get(name) == first.get(name), (name, "differs between ranks", event)
            assert generations.setdefault(key, event["generation"]) == event["generation"], event
        assert commits.keys() == wanted.keys(), (
            f"missing {sorted(wanted.keys() - commits.keys())}, "
            f"additional {sorted(commits.keys() - wanted.keys())}"
        )
        if parameters:
            for key, step in wanted.items():
                for name, values in step.items():
                    if name != "samples":
                        difference = _distance(values, commits[key][name])
                        assert difference < TOLERANCE, (key, name, difference)
        self.check_samples(wanted, commits)
        return commits

    def check_samples(self, wanted: Any, commits: Any) -> None:
        """Check that the ranks of each committed step had each sample of the step once."""
        tried: dict[tuple[Key, int], dict[int, list[int]]] = defaultdict(dict)
        for event in self.events("try"):
            of_ranks = tried[_key(event), event["generation"]]
            of_ranks.setdefault(event["rank"], []).extend(event["samples"])
        for key, commit in commits.items():
            of_ranks = tried[key, commit["generation"]]
            assert sorted(of_ranks) == list(range(commit["ranks"])), (key, sorted(of_ranks))
            samples = [sample for rank in sorted(of_ranks) for sample in of_ranks[rank]]
            assert sorted(samples) == sorted(wanted[key]["samples"]), key


def alive_now(path: Path) -> bool:
    return alive(int(path.name.split("-")[2]))


def _key(event: dict[str, Any]) -> Key:
    epoch, position = event["at"]
    return epoch, position


def compare(left: dict[Key, dict[str, Any]], right: dict[Key, dict[str, Any]]) -> float:
    """Return the largest difference between the steps of two runs."""
    assert left.keys() == right.keys()
    distances = []
    for key, step in left.items():
        for name in ("params", "rate", "gain", "scale", "progress"):
            distances.append(_distance(step[name], right[key][name]))
    return max(distances)


def _distance(left: Any, right: Any) -> float:
    difference = torch.tensor(left, dtype=torch.float64) - torch.tensor(right, dtype=torch.float64)
    return difference.abs().max().item()


def train_alone(options: Options, epochs: int) -> dict[Key, dict[str, Any]]:
    """Train in a single process, with plain PyTorch. Return the state after each step."""
    model = surviving_script.make_model(options)
    optimizer = surviving_script.make_optimizer(model)
    scheduler = surviving_script.make_schedule(optimizer)
    ema = surviving_script.make_ema(model) if options.ema else None
    scaler = surviving_script.make_scaler() if options.scaler else None
    rows = Rows()
    found: dict[Key, dict[str, Any]] = {}
    for epoch in range(epochs):
        infinite = infinite_samples(options, epoch)
        position = 0
        pending: list[int] = []  # since the last step that was not skipped
        for numbers in global_batches(SAMPLES, BATCH, epoch=epoch):
            batch = (rows.x[numbers], rows.y[numbers], torch.tensor(numbers))
            loss = losses_of(model, batch, infinite).sum() / len(numbers)
            optimizer.zero_grad()
            before = surviving_script.values_of(model)
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            else:
                loss.backward()
            if options.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            rate = optimizer.param_groups[0]["lr"]
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            scheduler.step()
            if ema is not None:
                ema.update_parameters(model)
            pending += numbers
            if surviving_script.values_of(model) == before:
                continue
            step: dict[str, Any] = {"params": surviving_script.values_of(model), "rate": rate}
            if ema is not None:
                step["ema"] = surviving_script.values_of(ema)
            if scaler is not None:
                step["loss_scale"] = scaler.get_scale()
            found[epoch, position] = {**step, "samples": pending}
            position += len(pending)
            pending = []
    return found
