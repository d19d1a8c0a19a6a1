"""Fork the processes of one run, wait for them, and read what they recorded.

They are forked from this one, which has imported torch already. A run ends when all processes have
recorded enough, when one fails, or when none of them computes any more.
"""

import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from manyhands.tools.check import _machine
from manyhands.tools.check._compare import Recording, read
from manyhands.tools.check._feed import Feed
from manyhands.tools.check._files import keep_files, put_back
from manyhands.tools.check._recorder import Recorder

IDLE = 8.0  # seconds in which all processes of a run sleep, after which it hangs
ADVICE = {
    "cuda": " It needs a GPU here: take the device from torch.cuda.is_available().",
    "HTTP": " It needs a network: give it files that are here.",
}


@dataclass(frozen=True)
class CheckedScript:
    """What is run."""

    script: str
    arguments: tuple[str, ...] = ()
    steps: int = 5
    float64: bool = True
    module: bool = False  # it is named as `python -m` names it
    grouped: bool = False  # the script makes a group for several ranks only: there is one already


@dataclass
class CheckRun:
    """What came of one run."""

    folder: Path
    records: list[Recording] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    hangs: bool = False
    late: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.errors) or self.hangs or self.late

    def why(self, where: str) -> str:
        """Return why it failed, and what to do about it."""
        if self.late or self.hangs:
            return f"{where} it {'took too long' if self.late else 'waits for ever'}."
        # A rank that another one left says so, and not why.
        rank, text = min(self.errors.items(), key=lambda item: ("Connection" in item[1], item[0]))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        frames = [f" ({line})" for line in lines if line.startswith("File ")]
        advice = "".join(tip for sign, tip in ADVICE.items() if sign in text)
        if not frames:  # it ended without a traceback
            said = (self.folder / f"output{rank}.txt").read_text(errors="replace").splitlines()
            words = " / ".join(line for line in said[-3:] if line.strip())
            advice = f" Its last words: {words}" if words else ""
        return f"{where}, rank {rank} failed: {lines[-1]}{''.join(frames[-1:])}.{advice}"


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
        for rank in range(world):
            processes.append(os.fork())
            if not processes[-1]:
                try:
                    os.close(writing)
                    run_rank(job, rank, world, port, out, feed, reading)
                finally:
                    os._exit(70)
        found = _wait(processes, out, time.monotonic() + seconds)
    finally:
        os.close(writing)  # ranks that are done end by themselves
        for process in filter(None, processes):
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # and what it started
            with suppress(ChildProcessError):
                os.waitpid(process, 0)
        os.close(reading)
        put_back(out)
    if not found.failed:
        found.records = [read(out / f"record{rank}.pt") for rank in range(world)]
    return found


def _wait(processes: list[int], out: Path, deadline: float) -> CheckRun:
    """Wait until every process has written a record, or one of them an error."""
    found = CheckRun(out)
    worked = -1.0
    since = time.monotonic()
    asked = 0.0
    files = [out / f"record{rank}.pt" for rank in range(len(processes))]
    while not (found.failed or all(file.exists() for file in files)):
        for rank, process in enumerate(processes):
            if (out / f"error{rank}.txt").exists():
                found.errors[rank] = (out / f"error{rank}.txt").read_text()
            elif (ended := os.waitpid(process, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                found.errors[rank] = f"the process ended with {how}"
        now = time.monotonic()
        if now > asked + 0.3:
            asked = now
            (seconds, running) = _work(processes)
            if running or seconds > worked + 0.05:
                worked = seconds
                since = now
        found.hangs = now - since > IDLE
        found.late = now > deadline
        time.sleep(0.01)
    return found


def _work(processes: list[int]) -> tuple[float, bool]:
    """Return the processor time of processes and what they started, and whether one could run."""
    total = 0
    running = False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended just now
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) in processes:  # its session
                total += int(fields[11]) + int(fields[12])
                running = running or fields[0] in "RD"
    return total / os.sysconf("SC_CLK_TCK"), running


def run_rank(
    job: CheckedScript, rank: int, world: int, port: int, out: Path, feed: Feed | None, ends: int
) -> NoReturn:
    """Run the script as one rank, write what was recorded, and wait for the other ranks."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(out / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        GROUP_RANK="0", GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="check", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0",
        CUDA_VISIBLE_DEVICES="", WANDB_MODE="disabled", ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    torch.set_num_threads(1)
    warnings.resetwarnings()  # the script's, not those of the process that checks it

    def leave(name: str, value: object) -> NoReturn:
        """Show what came of this rank, and wait until no other needs it: the parent kills it."""
        new = out / f"{name}.new"
        new.write_text(value) if isinstance(value, str) else torch.save(value, new)
        new.rename(out / name)
        sys.stdout.flush()
        os.read(ends, 1)  # returns when the parent has gone, too
        os._exit(0)

    def finish() -> NoReturn:
        recorder.record.noise = sorted(recorder.noise.used)
        if feed is None:
            recorder.probe()
            torch.save(recorder.source, out / f"source{rank}.pt")
        leave(f"record{rank}.pt", recorder.record)

    path = Path(job.script).resolve()
    folder = Path.cwd() if job.module else path.parent
    recorder = Recorder(job.steps, job.float64, folder, feed, finish)
    try:
        mode = _machine.patch(rank, world, job.float64)
        recorder.patch()
        keep_files(out)
        if job.grouped:
            torch.distributed.init_process_group()
            torch.nn.Module.no_sync = lambda _: nullcontext()  # type: ignore[attr-defined]
        mode.watch = recorder.watch
        torch.manual_seed(0)  # a script that sets no seed begins alike in all runs
        sys.argv = [job.script, *job.arguments]
        sys.path.insert(0, str(folder))
        if job.module:
            runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            leave(f"error{rank}.txt", f"the script ended with exit code {end.code}")
    except BaseException:
        leave(f"error{rank}.txt", traceback.format_exc())
    finish()
