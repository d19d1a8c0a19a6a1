"""End a process that hangs after SIGTERM.

Our handler of SIGTERM only records the signal, and Python cannot run it while the main thread waits
in C++, for example in a collective. A hanging job would then require SIGKILL. So a thread also
waits for the signal, and ends the process

    UNREAD seconds after the signal    if the main thread has stood still since then, waiting for
                                       other ranks, and no other rank was at work
    MARGIN seconds before the kill     in any case

unless the script has called `mh.stopping` since the signal. A main thread that computes, reads
files or waits for data does not stand still (`standstill.py`). Waits for other workers of a crew
end without this thread.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from manyhands._ranks.presence import Presence
from manyhands._ranks.standstill import Standstill
from manyhands._ranks.stop_notice import stop_notice

UNREAD = 8.0  # seconds
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
        others = _OtherRanks(began)
        others.start()
        while not (stop_notice.read or self._over.wait(STEP)):
            still = self._standstill.look()
            others.tell = others.tell or still == 0.0
            now = time.monotonic()
            # If the reason is empty, the main thread has run no Python code since the signal.
            waits = not stop_notice.reason or self._standstill.place() != ""
            alone = min(still, now - others.heard) >= UNREAD
            hangs = waits and alone and not stop_notice.in_crew
            if hangs or now - began >= max(UNREAD, stop_notice.grace - MARGIN):
                self._end_process(now - began)
        others.over.set()

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


class _OtherRanks(threading.Thread):
    """Exchanges whether ranks are at work, in a thread because the store may hang."""

    def __init__(self, began: float) -> None:
        super().__init__(name="manyhands at work", daemon=True)
        self.over = threading.Event()
        self.tell = False  # whether this rank was at work since the last exchange
        self.heard = began  # last time that a different rank was at work

    def run(self) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        # The store or the process group may end at this moment (RuntimeError or ValueError).
        with suppress(RuntimeError, ValueError):
            store: Any = _get_default_store()
            presence = Presence(store.clone())
            known = presence.count_at_work()
            while not self.over.wait(1.0):
                own = int(self.tell)
                self.tell = False
                count = presence.count_at_work(own)
                if count - own != known:
                    self.heard = time.monotonic()
                known = count
