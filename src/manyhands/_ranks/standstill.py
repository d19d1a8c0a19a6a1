"""Detect a thread that stands still, with the line in which it waits.

A process that waits for other ranks uses no processor time: gloo's threads sleep. CUDA polls, so a
process that waits for a GPU uses processor time. A stack alone is not sufficient, because a loop is
often seen in a single line.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from manyhands._warn import user_line

# Fraction of a core below which a thread or process counts as idle.
THREAD_SHARE = 0.01
PROCESS_SHARE = 0.05

# Modules in which an idle thread waits for other ranks, rather than for files or data.
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
    """Measures how long the creating thread has used no processor time."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # Not available on macOS, where only the time of the process counts.
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        self._clock: int | None = None
        if clock_of is not None:
            self._clock = clock_of(self.thread)
        self._since = time.monotonic()
        self._looked = self._since
        self._used_by_thread, self._used_by_process = self._times()

    def look(self) -> float:
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
        frame = sys._current_frames().get(self.thread)
        while frame is not None and _module_of(frame).partition(".")[0] in sys.stdlib_module_names:
            frame = frame.f_back  # such as an event or a lock
        if frame is None or not _module_of(frame).startswith(WAITING):
            return ""
        return user_line(frame)

    def _times(self) -> tuple[float, float]:
        """Return the processor time of the thread and of the process, in seconds."""
        thread = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        return thread, time.process_time()


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
