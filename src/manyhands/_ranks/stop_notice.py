"""Note whether this process was asked to stop.

Signals, a file and engines give the notice (`engines/_stopping.py`). A notice reaches ranks at
different moments, and some ranks never. So no rank acts on it alone: a scaling rule sends it along
with each step's numbers, blocks send it with each sync round, and `mh.stopping` asks the other
ranks where neither of them does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK = 1.0  # seconds between two looks at the sources


class StopNotice:
    """Whether this process was asked to stop, why, and how much time it has left."""

    def __init__(self) -> None:
        self.reason = ""  # such as "SIGTERM"; empty until this process is asked to stop
        self.read = False  # whether the script has asked, since then, whether it should stop
        self.in_crew = (
            False  # whether this process waits for others in a crew, which ends by itself
        )
        self.grace = 30.0  # seconds from a notice until the process is killed
        self.given_at = 0.0
        self.sources: list[Callable[[], str]] = []  # each returns a reason, or nothing yet
        self._looked_at = -LOOK

    def give(self, reason: str) -> None:
        """Note that this process was asked to stop. It may be called in a signal handler."""
        if not self.reason:
            self.reason = reason
            self.given_at = time.monotonic()

    @property
    def received(self) -> bool:
        """Whether this process was asked to stop. Other ranks may not know of it yet."""
        if not self.reason and self.sources and time.monotonic() - self._looked_at >= LOOK:
            self._looked_at = time.monotonic()
            reason = next(filter(None, (source() for source in self.sources)), "")
            if reason:
                self.give(reason)
        return bool(self.reason)

    @property
    def seconds_left(self) -> float:
        """The seconds until this process may be killed."""
        return max(0.0, self.given_at + self.grace - time.monotonic())

    def clear(self) -> None:
        """Forget the notice, for a process that trains again."""
        self.reason = ""
        self.read = False
        self._looked_at = -LOOK


stop_notice = StopNotice()
