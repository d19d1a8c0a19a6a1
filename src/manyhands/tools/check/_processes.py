"""Start the processes of a run, wait for the end, and read the records.

A rank is a fork of this process, or of an interpreter with a different seed of Python's string
hashes. A run ends when all processes have written a record, a process fails, or no process
computes. If this process dies, the ranks die as well.
"""

import gc
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch

from manyhands.blocks.crew._processes import lifeline, tie_group_to
from manyhands.tools._interpreters import AVAILABLE, start_interpreter
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._records import read

IDLE = 8.0  # seconds without computation in any process, after which a run hangs
POLL = 0.01  # seconds between looks at the files of a run
POLL_WORK = 0.3  # seconds between looks at the processor time of a run
PATH_BYTES = 4096  # longest path of a request


@dataclass
class Rank:
    """A process of a run."""

    number: int
    world: int
    out: Path  # folder of the run
    listener: int  # descriptor of the socket for the store, in rank 0
    port: int  # of the listener
    end: int  # descriptor of a pipe that the parent closes at the end of the run
    life: int  # descriptor of a pipe that closes when the parent dies

    def set_up(self) -> None:
        gc.freeze()  # collections would copy the pages of all objects
        os.setsid()
        tie_group_to(self.life)
        if select.select([self.life], [], [], 0)[0]:
            os._exit(1)  # the parent has died before
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(self.out / f"output{self.number}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        rank = str(self.number)
        world = str(self.world)
        os.environ.update(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
            GROUP_RANK="0", GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port), ROLE_NAME="default", ROLE_RANK=rank, ROLE_WORLD_SIZE=world,
            TORCHELASTIC_RUN_ID="check", TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_MAX_RESTARTS="0", CUDA_VISIBLE_DEVICES="", WANDB_MODE="disabled",
            ACCELERATE_USE_CPU="true",
        )  # fmt: skip
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; Accelerate reads it
        torch.set_num_threads(1)
        warnings.resetwarnings()  # the parent's filters do not apply to the script

    def publish(self, name: str, value: object) -> None:
        """Write a file atomically."""
        new = self.out / f"{name}.new"
        if isinstance(value, str):
            new.write_text(value)
        else:
            torch.save(value, new)
        new.rename(self.out / name)

    def leave(self, record: object) -> NoReturn:
        self.publish(f"record{self.number}.pt", record)
        self._wait_and_exit()

    def fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, SystemExit):
            reason = f"the script ended with exit code {error.code}"
        else:
            reason = "".join(traceback.format_exception(error))
        self.publish(f"error{self.number}.txt", reason)
        self._wait_and_exit()

    def _wait_and_exit(self) -> NoReturn:
        sys.stdout.flush()
        os.read(self.end, 1)
        os._exit(0)


class RankJob(Protocol):
    """The work of a rank; ends with `Rank.leave`."""

    def run(self, rank: Rank) -> None: ...


@dataclass
class CheckRun:
    """The result of a run."""

    folder: Path
    records: list[Any] = field(default_factory=list)  # by rank; empty if the run failed
    errors: dict[int, str] = field(default_factory=dict)  # by rank
    hangs: bool = False
    late: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.errors) or self.hangs or self.late

    @property
    def asked(self) -> bool:
        """Whether the script asked for accelerators."""
        return (self.folder / "asked").exists()

    def last_output(self, rank: int = 0) -> str:
        """Return the last lines of a rank's output."""
        file = self.folder / f"output{rank}.txt"
        if not file.exists():  # the script did not start
            return ""
        output = file.read_text(errors="replace")
        return " / ".join(filter(str.strip, output.splitlines()[-3:]))

    def why(self, where: str) -> str:
        """Return the reason of the failure."""
        if self.late:
            return f"{where}, the script exceeds the time limit. Raise --timeout."
        if self.hangs:
            return f"{where}, the script hangs."
        # After a failure, other ranks report lost connections.
        causes = [rank for rank, text in self.errors.items() if "Connection" not in text]
        rank = min(causes or self.errors)
        text = self.errors[rank]
        place = ""
        last = ""
        for line in text.splitlines():
            if line.startswith("  File "):
                place = f" ({line.strip()})"
                last = ""
            elif not line.startswith(" "):
                last = last or line  # the first line of the exception
        output = self.last_output(rank)
        if output and not place:  # no traceback
            place = f". Last output: {output}"
        return f"{where}, rank {rank} failed: {last}{place}."


def run(job: RankJob, world: int, out: Path, seconds: float, forks: int) -> CheckRun:
    """Run a job on `world` ranks, and return the records.

    The first `forks` ranks are forks of this process, and the others of new interpreters.
    """
    if not AVAILABLE:
        forks = world
    reading, writing = os.pipe()
    life, parent_end = lifeline()
    processes: list[int] = []
    requests: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
        port = listener.getsockname()[1]
        place = (world, out, listener.fileno(), port, reading, life)
        try:
            for number in range(forks, world):
                requests.append(_request_rank(job, Rank(number, *place)))
            import_optimizers()
            for number in range(forks):
                process = os.fork()
                if process == 0:
                    os.close(writing)
                    os.close(parent_end)
                    _run_rank(job, Rank(number, *place))
                processes.append(process)
            for request in requests:
                answer = request.recv(16)
                if not answer:
                    raise RuntimeError("an interpreter of the check has died. Repeat the check.")
                processes.append(int(answer))
                request.send(b".")
            found = _wait_for(processes, out, time.monotonic() + seconds)
        finally:
            for request in requests:
                request.close()
            os.close(writing)  # finished ranks exit by themselves
            _kill(processes)
            os.close(reading)
    if not found.failed:
        found.records = [read(out / f"record{rank}.pt") for rank in range(world)]
    return found


def _request_rank(job: RankJob, rank: Rank) -> socket.socket:
    """Let an interpreter fork a rank, which sends its process id and waits for a byte."""
    file = rank.out / f"rank{rank.number}.pt"
    torch.save((job, rank, dict(os.environ), os.getcwd()), file)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        descriptors = [theirs.fileno(), rank.listener, rank.end, rank.life]
        try:
            socket.send_fds(start_interpreter(rank.number), [bytes(file)], descriptors)
        except OSError:  # the interpreter has died
            start_interpreter.cache_clear()
            socket.send_fds(start_interpreter(rank.number), [bytes(file)], descriptors)
    return ours


def serve() -> NoReturn:
    """Fork a rank for each request, until the parent dies."""
    import_optimizers()
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        file, descriptors, _, _ = socket.recv_fds(requests, PATH_BYTES, 4)
        if not file:
            os._exit(0)
        between = os.fork()
        if between == 0:
            requests.close()
            _fork_rank(Path(os.fsdecode(file)), *descriptors)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_rank(file: Path, request: int, listener: int, end: int, life: int) -> NoReturn:
    between = os.getpid()
    try:
        if os.fork() == 0:
            while os.getppid() == between:
                time.sleep(0.001)
            with socket.socket(fileno=request) as parent:
                parent.send(str(os.getpid()).encode())
                if not parent.recv(1):  # the run has ended
                    os._exit(0)
            job, rank, environment, folder = read(file)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            _run_rank(job, replace(rank, listener=listener, end=end, life=life))
    finally:
        os._exit(0)


def _kill(processes: list[int]) -> None:
    """Kill the processes of a run, with all children."""
    for process in processes:
        for kill in (os.killpg, os.kill):  # a fork may not have made its session yet
            with suppress(ProcessLookupError):
                kill(process, signal.SIGKILL)
        for waited in (process, -process):  # orphans in the group have become children
            with suppress(ChildProcessError):
                while True:
                    os.waitpid(waited, 0)


def _run_rank(job: RankJob, rank: Rank) -> NoReturn:
    try:
        rank.set_up()
        job.run(rank)
    except BaseException as error:
        rank.fail(error)
    finally:
        os._exit(70)


def _wait_for(processes: list[int], out: Path, deadline: float) -> CheckRun:
    found = CheckRun(out)
    records = [out / f"record{rank}.pt" for rank in range(len(processes))]
    worked = -1.0  # seconds of processor time at the latest sign of work
    worked_at = time.monotonic()
    asked_at = 0.0
    while not found.failed and not all(record.exists() for record in records):
        for rank, process in enumerate(processes):
            error = out / f"error{rank}.txt"
            if error.exists():
                found.errors[rank] = error.read_text()
                continue
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                found.errors[rank] = _describe_exit(status)
        now = time.monotonic()
        if now > asked_at + POLL_WORK:
            asked_at = now
            seconds, running = _work(processes)
            if running or seconds > worked + 0.05:
                worked = seconds
                worked_at = now
        found.hangs = now - worked_at > IDLE
        found.late = now > deadline
        time.sleep(POLL)
    return found


def _describe_exit(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"the process ended with signal {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _work(processes: list[int]) -> tuple[float, bool]:
    """Return the processor time of a run, and whether a process can run now."""
    ticks = 0
    running = not AVAILABLE  # without /proc, only the time limit ends a run
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process ended just now
            state, _, _, session, *fields = path.read_text().rpartition(")")[2].split()
            if int(session) in processes:
                ticks += int(fields[7]) + int(fields[8])
                running = running or state in "RD"
    return ticks / os.sysconf("SC_CLK_TCK"), running


def import_optimizers() -> None:
    """Import torch._dynamo, which takes a second, with a first optimizer."""
    gc.disable()  # makes the import a third faster
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.enable()


def run_script(job: CheckedScript) -> None:
    """Run a script in `__main__`. Exit code 0 is no error."""
    sys.argv = [job.script, *job.arguments]
    sys.path.insert(0, str(job.folder))
    try:
        if job.module:
            variables = runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        else:
            variables = runpy.run_path(str(Path(job.script).resolve()), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    else:
        sys.modules["__main__"].__dict__.update(variables)  # for records with the script's classes


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute on one thread. A process forked beside OpenMP's threads may hang."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
