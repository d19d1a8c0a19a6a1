"""Count the seconds that a worker of a crew spends on anything but its steps, by cause.

    with spent.on("connecting"):
        with spent.on("joining"):       what is spent inside is not counted twice
            ...
    with spent.on("sync") as span:      the cause may become known at the end
        span.cause = "sync" if kept else "waiting"

    sync        sync rounds that were kept, with the wait for slower members
    waiting     rounds that were undone, because a member was lost
    repeating   kept rounds that repeated an undone one
    connecting  forming a generation, connecting its members, and sending joiners the state
    joining     waiting to be let in
    away        stopped, or cut off from the store

`manyhands.record` writes these sums, and computes from them what a whole run has lost
(record/_tally.py). A process cannot measure that it is stopped while it is: the thread that sends
the heartbeat sees afterwards that it was late, and reports the pause (`add_pause`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CAUSES = ("sync", "waiting", "repeating", "connecting", "joining", "away")


@dataclass
class Span:
    """What a `with` block's time is spent on."""

    cause: str


class SecondsSpent:
    """The seconds of this worker by cause, since its process has begun."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._paused = 0.0  # in which the process was stopped
        self._counted = 0.0  # in all spans that have ended

    def add_pause(self, seconds: float) -> None:
        """Count seconds in which the process was stopped: they belong to no span."""
        self._paused += seconds
        self._seconds["away"] += seconds

    @contextmanager
    def on(self, cause: str) -> Iterator[Span]:
        """Count the time of a `with` block."""
        span, began, before = Span(cause), self._now(), self._counted
        try:
            yield span
        finally:
            seconds = max(0.0, self._now() - began - (self._counted - before))
            self._counted += seconds
            self._seconds[span.cause] += seconds

    @property
    def seconds(self) -> dict[str, float]:
        """The sums so far, to the millisecond, without causes that had none."""
        return {cause: round(sum, 3) for cause, sum in self._seconds.items() if sum}

    def _now(self) -> float:
        return time.monotonic() - self._paused
