"""End a process that hangs after SIGTERM.

Our handler of SIGTERM only records the signal, and Python cannot run it while the main thread waits
in C++, for example in a collective. A hanging job would then require SIGKILL. So a thread also
waits for the signal, and ends the process `MARGIN` seconds before the kill, unless the script has
called `mh.stopping` since the signal.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import time

import torch.distributed as dist

from manyhands._ranks.standstill import Standstill
from manyhands._ranks.stop_notice import stop_notice

MARGIN = 2.0  # seconds
STEP = 0.25  # seconds between checks


class HangWatch:
    """A thread that waits for SIGTERM while `handler` is set. Create in the main thread."""

    def __init__(self, handler: object) -> None:
        self._handler = handler
        self._over = threading.Event()
        self._standstill = Standstill()
        self._pipe, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        # Python writes signals to the pipe, even if the main thread is blocked.
        before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        if before != -1:  # used by an event loop
            signal.set_wakeup_fd(before)
        self._thread = threading.Thread(target=self._run, name="manyhands stop", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        atexit.unregister(self.end)
        self._over.set()
        self._let_go()
        self._thread.join(1.0)

    def forget(self) -> None:
        """Stop watching in a forked process."""
        atexit.unregister(self.end)
        self._let_go()
        os.close(self._pipe)

    def _let_go(self) -> None:
        wakes = signal.set_wakeup_fd(-1)
        if wakes not in (self._wakes, -1):
            signal.set_wakeup_fd(wakes)
        os.close(self._wakes)

    def _run(self) -> None:
        while numbers := os.read(self._pipe, 64):
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is self._handler:
                self._await_reader()
        os.close(self._pipe)

    def _await_reader(self) -> None:
        """Wait until the script reads the notice, or end the process."""
        began = time.monotonic()
        while not (stop_notice.read or self._over.wait(STEP)):
            waited = time.monotonic() - began
            if waited >= max(MARGIN, stop_notice.grace - MARGIN):
                self._end_process(waited)

    def _end_process(self, waited: float) -> None:
        rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        text = (
            f"manyhands: {rank} ends by SIGTERM: it has not called mh.stopping for {waited:.0f} s"
        )
        place = self._standstill.place()
        if place:
            text += f", and waits in {place}"
        os.write(2, f"{text}.\n".encode())
        # Python sets handlers only in the main thread, which is blocked.
        ctypes.CDLL(None).signal(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
