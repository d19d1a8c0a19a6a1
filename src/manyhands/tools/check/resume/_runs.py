"""Fork the ranks of a run, and kill them when they have recorded their steps."""

import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy
import torch

from manyhands.tools.check import _machine
from manyhands.tools.check._files import keep_files
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import (
    CheckRun,
    end_processes,
    leave,
    reason_of,
    run_script,
    set_up_process,
    wait_for,
)
from manyhands.tools.check._records import read
from manyhands.tools.check.resume._checkpoints import CheckpointWatch, ReadWatch
from manyhands.tools.check.resume._history import HistoryRecorder, RecordPlan
from manyhands.tools.check.resume._meeting import Meeting
from manyhands.tools.check.resume._records import RankHistory


@dataclass(frozen=True)
class ResumeJob:
    """A run of the script."""

    script: CheckedScript
    ranks: int
    kept: Path  # the folder of `keep_files`, which an interrupted and a resumed run share
    plan: RecordPlan
    enough: Callable[[HistoryRecorder, CheckpointWatch], bool]  # whether to stop before a step
    seed: int = 0  # of a script that sets none
    files: tuple[str, ...] = ()  # of the interrupted run


@dataclass
class JobRun(CheckRun):
    """The result of a run."""

    histories: list[RankHistory] = field(default_factory=list)  # by rank; empty if the run failed


def run_job(job: ResumeJob, folder: Path, seconds: float) -> JobRun:
    """Run the script, kill it, and return the histories of its ranks."""
    out = Path(tempfile.mkdtemp(dir=folder))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe()
    meeting = Meeting(job.ranks)
    processes: list[int] = []
    try:
        for rank in range(job.ranks):
            process = os.fork()
            if process == 0:
                try:
                    os.close(writing)
                    set_up_process(rank, job.ranks, port, out)
                    _run_rank(job, rank, out, meeting, reading)
                finally:
                    os._exit(70)
            processes.append(process)
        waited = wait_for(processes, out, time.monotonic() + seconds)
    finally:
        os.close(writing)
        end_processes(processes)
        os.close(reading)
    found = JobRun(out, [], waited.errors, waited.hangs, waited.late)
    if not found.failed:
        found.histories = [read(out / f"record{rank}.pt") for rank in range(job.ranks)]
    return found


def _run_rank(job: ResumeJob, rank: int, out: Path, meeting: Meeting, ends: int) -> NoReturn:
    """Run the script as one rank until all ranks stop, and wait to be killed."""

    def finish() -> NoReturn:
        history = recorder.history
        if history.ended and rank == 0:
            watch.written(recorder.least_size())
        history.files = sorted(watch.files)
        history.checkpoint = watch.latest
        history.read = sorted(reads.read)
        meeting.leave(rank)
        leave(out / f"record{rank}.pt", history, ends)

    def stops(recorder: HistoryRecorder) -> bool:
        return meeting.stops(rank, recorder.made + 1, lambda: job.enough(recorder, watch))

    recorder = HistoryRecorder(job.plan, stops, finish)
    reads = ReadWatch(list(job.files))
    try:
        _machine.patch(rank, job.ranks, replace(job.script, float64=False))
        recorder.patch()
        keep_files(job.kept)
        reads.patch()
        watch = CheckpointWatch(job.kept / "kept")
        torch.manual_seed(job.seed)
        random.seed(job.seed)
        numpy.random.seed(job.seed)
        run_script(job.script)
    except BaseException as error:
        meeting.leave(rank)
        leave(out / f"error{rank}.txt", reason_of(error), ends)
    recorder.history.ended = True
    finish()
