"""Start the processes of a run, wait for them, and read their records.

Rank 0, and the only process of a replay, are forked from this process, which has imported torch
already. Other ranks are started as a launcher starts them, because ranks must differ in the seed of
Python's string hashes and in unseeded random numbers. A run ends when all processes have written a
record, when one fails, or when none of them computes any more.
"""

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import torch

from manyhands.tools.check import _machine
from manyhands.tools.check._feed import Feed
from manyhands.tools.check._files import keep_files, put_back
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._recorder import Recorder
from manyhands.tools.check._records import Recording, read

IDLE = 8.0  # seconds without computation in any process, after which a run hangs
POLL = 0.01  # seconds between looks at the files of a run
POLL_WORK = 0.3  # seconds between looks at the processor time of a run
ADVICE = {
    "cuda": " It needs a GPU here: take the device from torch.cuda.is_available().",
    "HTTP": " It needs a network: give it files that are here.",
}


@dataclass
class CheckRun:
    """The result of a run."""

    folder: Path
    records: list[Recording] = field(default_factory=list)  # by rank; empty if the run failed
    errors: dict[int, str] = field(default_factory=dict)  # by rank
    hangs: bool = False
    late: bool = False

    @property
    def was_cut(self) -> bool:
        """Whether an epoch was shortened in a run that failed, or ended before the last step."""
        incomplete = any(record.cut and not record.complete for record in self.records)
        return incomplete or (self.folder / "cut").exists()

    @property
    def asked(self) -> bool:
        """Whether the script asked for accelerators."""
        return any(record.asked for record in self.records) or (self.folder / "asked").exists()

    def last_words(self, rank: int = 0) -> str:
        """Return the last lines that a rank has printed."""
        output = (self.folder / f"output{rank}.txt").read_text(errors="replace")
        return " / ".join(filter(str.strip, output.splitlines()[-3:]))

    @property
    def failed(self) -> bool:
        return bool(self.errors) or self.hangs or self.late

    def why(self, where: str) -> str:
        """Return why the run failed, and what to do about it."""
        if self.late:
            return f"{where} it took too long."
        if self.hangs:
            return f"{where} it waits for ever."
        # A rank whose peer failed reports a lost connection, which is not the cause.
        causes = [rank for rank, text in self.errors.items() if "Connection" not in text]
        rank = min(causes or self.errors)
        text = self.errors[rank]
        place = ""
        last = ""
        for line in text.splitlines():
            last = line.strip() or last
            if last.startswith("File "):
                place = f" ({last})"
        advice = ""
        if place:
            for sign, tip in ADVICE.items():
                if sign in text:
                    advice += tip
        else:  # the process ended without a traceback
            words = self.last_words(rank)
            if words:
                advice = f" Its last words: {words}"
        return f"{where}, rank {rank} failed: {last}{place}.{advice}"


def run(
    job: CheckedScript, world: int, folder: Path, seconds: float, feed: Feed | None = None
) -> CheckRun:
    """Run the script in some processes, and return their records."""
    out = Path(tempfile.mkdtemp(dir=folder))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe()
    processes: list[int] = []
    try:
        for rank in range(1, world):
            processes.append(_start_rank(job, rank, world, port, out, reading))
        process = os.fork()
        if process == 0:
            try:
                os.close(writing)
                run_rank(job, 0, world, port, out, feed, reading)
            finally:
                os._exit(70)
        processes.insert(0, process)
        found = wait_for(processes, out, time.monotonic() + seconds)
    finally:
        os.close(writing)  # ranks that are done end by themselves
        end_processes(processes)
        os.close(reading)
        put_back(out)
    if not found.failed:
        found.records = [read(out / f"record{rank}.pt") for rank in range(world)]
    return found


def _start_rank(job: CheckedScript, rank: int, world: int, port: int, out: Path, ends: int) -> int:
    """Start a rank in a new interpreter, and return the number of its process."""
    os.set_inheritable(ends, True)
    values = {"rank": rank, "world": world, "port": port, "out": str(out), "ends": ends}
    words = json.dumps({"job": asdict(job), **values})
    command = f"from {__name__} import run_started_rank; run_started_rank()"
    arguments = [sys.executable, "-c", command, words]
    return os.posix_spawn(sys.executable, arguments, os.environ, setsid=True)


def run_started_rank() -> NoReturn:
    """Run a rank that `_start_rank` has started."""
    values = json.loads(sys.argv[1])
    job = CheckedScript(**values["job"])
    job = replace(job, arguments=tuple(job.arguments))
    sys.path.pop(0)  # the working folder, of `python -c`
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # as in rank 0
    out = Path(values["out"])
    run_rank(job, values["rank"], values["world"], values["port"], out, None, values["ends"])


def wait_for(processes: list[int], out: Path, deadline: float) -> CheckRun:
    """Wait until every process has written a record, or one of them an error."""
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
                found.errors[rank] = f"the process ended with {_describe_exit(status)}"
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
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _work(processes: list[int]) -> tuple[float, bool]:
    """Return the processor time of all processes of a run, and whether one could run now."""
    ticks = 0
    running = False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process ended just now
            state, _, _, session, *fields = path.read_text().rpartition(")")[2].split()
            if int(session) in processes:
                ticks += int(fields[7]) + int(fields[8])
                running = running or state in "RD"
    return ticks / os.sysconf("SC_CLK_TCK"), running


def run_rank(
    job: CheckedScript, rank: int, world: int, port: int, out: Path, feed: Feed | None, ends: int
) -> NoReturn:
    """Run the script as one rank, write the record, and wait for the other ranks.

    `ends` is a pipe whose other end the parent closes when the run is over.
    """
    set_up_process(rank, world, port, out)

    def finish() -> NoReturn:
        record = recorder.finished_record()
        if feed is None:
            torch.save(recorder.source, out / f"source{rank}.pt")
        leave(out / f"record{rank}.pt", record, ends)

    recorder = Recorder(job, job.folder, feed, finish)
    try:
        mode = _machine.patch(rank, world, job)
        recorder.patch()
        keep_files(out)
        if job.grouped:
            torch.distributed.init_process_group()
            torch.nn.Module.no_sync = lambda _: nullcontext()  # type: ignore[attr-defined]
        mode.watch = recorder.exchange_targets
        mode.is_script = recorder.is_script
        if feed is None:
            mode.note = recorder.note_call
        torch.manual_seed(0)  # a script that sets no seed starts equally in all runs
        run_script(job)
    except BaseException as error:
        for sign in ("cut", "asked"):
            if getattr(recorder.record, sign):
                (out / sign).touch()
        leave(out / f"error{rank}.txt", reason_of(error), ends)
    finish()


def run_script(job: CheckedScript) -> None:
    """Run a script in `__main__`; exit code 0 is its end."""
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
        sys.modules["__main__"].__dict__.update(variables)  # the record may have its classes


def reason_of(error: BaseException) -> str:
    """Return why a script has ended."""
    if isinstance(error, SystemExit):
        return f"the script ended with exit code {error.code}"
    return "".join(traceback.format_exception(error))


def leave(path: Path, value: object, ends: int) -> NoReturn:
    """Publish a file, and wait until no other rank needs this process."""
    new = path.with_name(f"{path.name}.new")
    if isinstance(value, str):
        new.write_text(value)
    else:
        torch.save(value, new)
    new.rename(path)
    sys.stdout.flush()
    os.read(ends, 1)
    os._exit(0)


def end_processes(processes: list[int]) -> None:
    """Kill the processes of a run, and the processes that they started."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(process, 0)


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute on one thread: a process that is forked beside OpenMP's threads may hang in them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def set_up_process(rank: int, world: int, port: int, out: Path) -> None:
    """Give a forked process a session, streams and torchrun's environment."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(out / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0", GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        ROLE_NAME="default", ROLE_RANK=str(rank), ROLE_WORLD_SIZE=str(world),
        TORCHELASTIC_RUN_ID="check", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0",
        CUDA_VISIBLE_DEVICES="", WANDB_MODE="disabled", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun; Accelerate reads it
    torch.set_num_threads(1)
    warnings.resetwarnings()  # the parent's filters do not apply to the script
