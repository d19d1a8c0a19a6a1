"""Workers of a crew as forked processes, which a test kills, stops and starts again.

    with Store() as store, Workers(store, tmp_path, expected=4, stall=1.0) as workers:
        workers.start(range(4), rounds=10)
        workers.kill(2, report=True)
        workers.start([2], rounds=10)
        workers.finish()
        workers.agreed()          # all of them saw the same members and the same decisions

A worker trains a number: every kept round adds the mean of what the members send, which is 1.
It logs each event at once, in a line of its own, so that a kill loses nothing.

Where a worker is to come back, none of the others may end before: on a busy machine the start of a
process takes seconds. So all go on, without a number of rounds or steps, until `finish_together`
tells them their last one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._roster import Version
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import SECRET_VARIABLE, Signer, StoreClient, serve_store
from manyhands.errors import WorkerLost

SECRET = "the secret of the tests"
os.environ[SECRET_VARIABLE] = SECRET  # which the workers, and their commands, inherit


def fork(fn: Callable[[], None], errors: Path) -> int:
    """Run a function in a fork of this process, to `os._exit`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        gc.freeze()
        torch.set_num_threads(1)
        null = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(null, 2)  # torch reports lost connections there
        warnings.filterwarnings("ignore", "all workers of this run were lost")
        warnings.filterwarnings("ignore", "in the first block all")  # on purpose, in tests
        fn()
        code = 0
    except BaseException:
        traceback.print_exc()
        with errors.open("a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


class Store:
    """A store in a process of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host

    def __enter__(self) -> Store:
        read, write = os.pipe()

        def host() -> None:
            _store, address = serve_store(self._host)
            os.write(write, address.encode())
            time.sleep(1000)

        self.pid: int | None = fork(host, Path(os.devnull))
        os.close(write)
        self.address = os.read(read, 100).decode()
        os.close(read)
        assert self.address
        return self

    def kill(self) -> None:
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = None

    def __exit__(self, *_: object) -> None:
        self.kill()


class Log:
    """One worker's events, each written at once."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "time": time.monotonic(), **facts})
        os.write(self.file, line.encode() + b"\n")


Limit = Callable[[], float]  # how many rounds or steps a worker is to take


def limit(folder: Path, number: float | None) -> Limit:
    """Return this number, or if there is none, what `finish_together` says."""
    file = folder / "last"

    def told() -> float:
        if number is not None:
            return number
        return int(file.read_text()) if file.exists() else math.inf

    return told


Hook = Callable[[str, Crew], None]  # called with the place: "steps", "exchange", "settle", ...


def train(
    crew: Crew,
    log: Log,
    rounds: Limit,
    hook: Hook,
    version: int = -1,
    steps: float = 0.01,
) -> None:
    """Hold so many rounds; `version` counts the outer steps, and the state is their number."""
    state = torch.full((1000,), float(max(version, 0)))

    def entered() -> None:
        log(
            "entered",
            generation=crew.generation,
            members=crew.members,
            rank=crew.rank,
            source=crew.source,
            joiners=crew.joiners,
            version=version,
        )

    def hold_round(exchange: Callable[[], None]) -> bool:
        generation, round_index = crew.generation, crew._round
        arrived = attempt(crew, exchange)
        hook("settle", crew)
        kept = crew.settle(arrived)
        facts = {"round": round_index, "kept": kept, "arrived": arrived, "version": version}
        log("settled", generation=generation, **facts)
        return kept

    def regroup() -> None:
        hook("regroup", crew)
        crew.regroup(Version(version))
        entered()

    crew.join(Version(version))
    entered()
    transferred = False
    while version < rounds():
        if not transferred and crew.joiners:
            message = torch.cat([state, torch.tensor([float(max(version, 0))])])
            hook("state", crew)
            transferred = hold_round(partial(broadcast, crew, message))
            if transferred:
                state = message[:-1].clone()
                version = int(message[-1])
        elif version < 0:
            version = 0
        else:
            hook("steps", crew)
            time.sleep(steps)
            mean = torch.ones(1000)
            hook("exchange", crew)
            if hold_round(partial(average, crew, mean)):
                state = state + mean
                version += 1
                assert state.unique().tolist() == [float(version)], (state, version)
        if crew.regroup_due and version < rounds():
            regroup()
            transferred = False
    crew.leave()
    log("done", version=version)


def attempt(crew: Crew, exchange: Callable[[], None]) -> bool:
    """Run an exchange on a thread; return whether it arrived."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            exchange()
        except Exception as error:
            errors.append(error)

    def finished(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        crew.wait(finished)
    except WorkerLost:
        crew.abort()
        return False
    return not errors


def average(crew: Crew, tensor: torch.Tensor) -> None:
    if crew.group is not None:
        crew.group.allreduce([tensor]).wait()
        tensor /= crew.size


def broadcast(crew: Crew, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = crew.source
    assert crew.group is not None
    crew.group.broadcast([tensor], options).wait()


class Workers:
    """The workers of one run, in processes of their own; none is left behind."""

    parts = 1  # processes of a worker

    def __init__(
        self,
        store: Store,
        folder: Path,
        expected: int,
        stall: float = 1.0,
        patience: float | str = 30.0,
        quorum: int = 1,
    ) -> None:
        self.store = store
        self.folder = folder
        self.stall = stall
        self.options: dict[str, Any] = {
            "expected": expected,
            "stall": stall,
            "patience": patience,
            "quorum": quorum,
        }
        self.pids: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}

    def __enter__(self) -> Workers:
        monitor = HeartbeatMonitor(self.stall)
        self.shared = SharedRoster(
            StoreClient(self.store.address, monitor.interval, Signer(SECRET)), monitor, self.parts
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.shared.client.close()
        for number in list(self.pids):
            self.kill(number)

    def start(self, numbers: Iterable[int], *args: Any, **options: Any) -> None:
        """Start workers; the other arguments are those of `work`."""
        for number in numbers:
            incarnation = self.incarnations.get(number, 0) + 1
            self.incarnations[number] = incarnation
            log = Log(self.folder / f"{number}.{incarnation}.jsonl")
            crew = partial(Crew, self.store.address, number=number, **self.options)
            work = partial(self.work, crew, log, *args, **options)
            self.pids[number] = fork(work, self.folder / f"{number}.errors")

    def work(
        self,
        make_crew: Callable[[], Crew],
        log: Log,
        rounds: int | None = None,
        hook: Callable[[int], Hook] = lambda _: lambda *_: None,
        **options: Any,
    ) -> None:
        """Train in a worker's process."""
        crew = make_crew()
        train(crew, log, limit(self.folder, rounds), hook(crew.number), **options)

    def kill(self, number: int, report: bool = False) -> None:
        pid = self.pids.pop(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if report:
            self.shared.report_end(number)

    def stop(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGSTOP)

    def wake(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGCONT)

    def ended(self) -> dict[int, int]:
        """Return the exit codes of the workers that have ended since, by number."""
        found = {}
        for number, pid in list(self.pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.pids[number]
                found[number] = os.waitstatus_to_exitcode(status)
        return found

    def finish(self, timeout: float = 30.0) -> None:
        """Wait until all have ended, with exit code 0."""
        until = time.monotonic() + timeout
        while self.pids:
            for number, code in self.ended().items():
                assert code == 0, f"worker {number}: {code}\n{self.errors(number)}"
            assert time.monotonic() < until, f"still running: {list(self.pids)}\n{self.story()}"
            time.sleep(0.01)

    def finish_together(self, more: int, timeout: float = 30.0) -> int:
        """Wait until all are in, and end them after so many more rounds or steps; return which."""
        self.present(len(self.pids))
        seen = [e for number in self.pids for e in self.events(number)]
        last = more + max(e.get("steps", e.get("version", 0)) for e in seen)
        new = self.folder / "last.new"
        new.write_text(str(last))
        new.rename(self.folder / "last")
        self.finish(timeout)
        return last

    def errors(self, number: int) -> str:
        return (self.folder / f"{number}.errors").read_text()[-6000:]

    def story(self) -> str:
        lines = [f"{n}: {self.events(n)[-3:]}\n{self.errors(n)}" for n in self.pids]
        return "\n".join([*lines, self.shared.refresh().text])

    def last(self, number: int, event: str, fact: str) -> Any:
        """Return a fact of a worker's latest event of this kind; None if there is none yet."""
        return next((e[fact] for e in reversed(self.events(number, event))), None)

    # -- their logs ----------------------------------------------------------------------------

    def events(self, number: int, event: str = "") -> list[dict[str, Any]]:
        found = []
        for incarnation in range(1, self.incarnations[number] + 1):
            path = self.folder / f"{number}.{incarnation}.jsonl"
            text = path.read_text() if path.exists() else ""
            lines = text[: text.rfind("\n") + 1].splitlines()  # the last may be half written
            found += [{**json.loads(line), "incarnation": incarnation} for line in lines]
        return [line for line in found if event in ("", line["event"])]

    def until(self, fact: Callable[[], bool], timeout: float = 15.0) -> None:
        limit = time.monotonic() + timeout
        while not fact():
            assert time.monotonic() < limit, self.story()
            time.sleep(0.005)

    def wait_for_rounds(self, number: int, rounds: int) -> None:
        """Wait until a worker has held this many rounds in its present incarnation."""
        incarnation = self.incarnations[number]

        def held() -> bool:
            settled = self.events(number, "settled")
            return sum(e["kept"] for e in settled if e["incarnation"] == incarnation) >= rounds

        self.until(held)

    def present(self, least: int) -> list[int]:
        """Return the processes that are in the crew, once there are at least this many.

        (If the last one is killed before another is in, all begin anew.)
        """
        found: list[int] = []

        def enough() -> bool:
            found[:] = [
                number
                for number in self.pids
                if any(e["incarnation"] == self.incarnations[number] for e in self.events(number))
            ]
            return len(found) >= least

        self.until(enough)
        return found

    def next_kept(self, number: int, after: float) -> float:
        """Return the seconds from a time to the first kept round of a worker after it."""
        times: list[float] = []

        def found() -> bool:
            settled = self.events(number, "settled")
            times[:] = [e["time"] - after for e in settled if e["kept"] and e["time"] > after]
            return bool(times)

        self.until(found)
        return times[0]

    def agreed(self) -> dict[tuple[int, int], bool]:
        """Check that all workers saw the same members and decisions; return the decisions."""
        answers: dict[tuple[int, int], bool] = {}
        rosters: dict[int, Any] = {}
        for number in self.incarnations:
            for e in self.events(number):
                if e["event"] == "settled":
                    where = (e["generation"], e["round"])
                    assert answers.setdefault(where, e["kept"]) == e["kept"], (number, where)
                    assert e["arrived"] or not e["kept"], where
                if e["event"] == "entered":
                    seen = (e["members"], e["source"], e["joiners"])
                    assert rosters.setdefault(e["generation"], seen) == seen, e
                    assert e["members"][e["rank"]] == number
        return answers
