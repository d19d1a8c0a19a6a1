"""Detect a thread that stands still, and the line in which it waits.

A thread that waits for other ranks uses no processor time, and neither does the rest of its process
(gloo's threads sleep as well). A thread that computes uses some, and so does one that waits for a
GPU, because CUDA's waits spin. A stack alone would not tell: a loop is often seen on one line.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from types import FrameType

from manyhands._warn import is_passed_over

# Shares of a core below which a thread, or its process, counts as idle.
THREAD_SHARE = 0.01
PROCESS_SHARE = 0.05

# Modules in which a thread waits for other ranks, if it stands still there. Reading and writing
# files is in others, and so is waiting for data.
WAITING = (
    "torch.distributed",
    "torch.autograd",
    "torch.nn",
    "torch._tensor",
    "manyhands._ranks",
    "manyhands.blocks",
    "manyhands.checkpoint._writing",
    "manyhands.engines",
    "manyhands.scaling",
    "manyhands.sharding",
)


class Standstill:
    """The seconds for which the thread that made this object has used no processor time."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # Not on macOS, where the time of the process has to do.
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._clock: int | None = None
        if clock_of is not None:
            self._clock = clock_of(self.thread)
        self._since = time.monotonic()
        self._looked = self._since
        self._used_by_thread, self._used_by_process = self._times()

    def look(self) -> float:
        """Return how long the thread has stood still, as far as the looks so far can tell."""
        now = time.monotonic()
        passed = now - self._looked
        thread, process = self._times()
        if thread - self._used_by_thread > THREAD_SHARE * passed:
            self._since = now
        if process - self._used_by_process > PROCESS_SHARE * passed:
            self._since = now
        self._looked = now
        self._used_by_thread = thread
        self._used_by_process = process
        return now - self._since

    def place(self) -> str:
        """Return the user's line in which the thread waits for other ranks, or "" elsewhere."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and _module_of(frame).partition(".")[0] in sys.stdlib_module_names:
            frame = frame.f_back  # an event or a lock, in which one of ours waits
        if frame is None or not _module_of(frame).startswith(WAITING):
            return ""
        while frame.f_back is not None and is_passed_over(frame):
            frame = frame.f_back
        return _describe_line(frame)

    def _times(self) -> tuple[float, float]:
        """Return the seconds of processor time of the thread and of its process."""
        thread = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        return thread, time.process_time()


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _describe_line(frame: FrameType) -> str:
    """Such as "loss.backward() (train.py, line 31)"."""
    path = frame.f_code.co_filename
    code = linecache.getline(path, frame.f_lineno).strip() or f"{frame.f_code.co_name}()"
    return f"{code} ({os.path.basename(path)}, line {frame.f_lineno})"
