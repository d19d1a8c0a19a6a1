"""Record a request to stop this process.

Requests come from signals, a file or engines (`engines/_stopping.py`), at different times on each
rank. So ranks do not act alone: scaling rules send the flag with the numbers of each step, blocks
with each sync round, and `mh.stopping` otherwise asks the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK = 1.0  # seconds between two checks of the sources


class StopNotice:
    """A request to stop this process, with the reason and the remaining time."""

    def __init__(self) -> None:
        self.reason = ""  # such as "SIGTERM"; empty before a request
        self.read = False  # whether the script has read the request
        self.grace = 30.0  # seconds from the request until the process is killed
        self.given_at = 0.0
        self.sources: list[Callable[[], str]] = []  # each returns a reason or ""
        self._looked_at = -LOOK

    def give(self, reason: str) -> None:
        """Record a request to stop. Safe to call in a signal handler."""
        if not self.reason:
            self.reason = reason
            self.given_at = time.monotonic()

    @property
    def received(self) -> bool:
        """Whether this process was asked to stop. Other ranks may not know yet."""
        if not self.reason and self.sources and time.monotonic() - self._looked_at >= LOOK:
            self._looked_at = time.monotonic()
            reason = next(filter(None, (source() for source in self.sources)), "")
            if reason:
                self.give(reason)
        return bool(self.reason)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.given_at + self.grace - time.monotonic())

    def clear(self) -> None:
        self.reason = ""
        self.read = False
        self._looked_at = -LOOK


stop_notice = StopNotice()
