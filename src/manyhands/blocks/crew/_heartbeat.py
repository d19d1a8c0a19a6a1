"""Which processes have no heartbeat any more, judged from counters that living processes increase.

Clocks are not compared between hosts. Each worker reads the others' counters, and measures with its
own clock for how long it has *watched* a counter stand still. The time between two observations
counts for no more than an observation should take. So workers that were all stopped together, as on
a laptop that sleeps, do not consider each other lost when they wake up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class _Counter:
    """One process's heartbeat counter, as this process has observed it."""

    count: int
    last: float  # time of the latest observation
    silence: float = 0.0  # seconds for which it was watched standing still
    advanced: bool = False


@dataclass
class HeartbeatMonitor:
    """The heartbeats of other processes. One without a heartbeat for `stall` seconds is lost."""

    stall: float
    _counters: dict[str, _Counter] = field(default_factory=dict)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats, and between two observations."""
        # Five heartbeats for each stall time: one lost or late heartbeat makes nobody silent.
        return min(1.0, self.stall / 5)

    def observe(self, counts: Mapping[str, int], now: float) -> None:
        """Take in the present counter of each process; processes not named are forgotten."""
        counters = {}
        for id, count in counts.items():
            counter = self._counters.get(id) or _Counter(count, now)
            # A lower count is an old value that a stranger has put back: no sign of life.
            if count > counter.count:
                counter.count, counter.silence, counter.advanced = count, 0.0, True
            else:
                # The limit leaves out time in which this process itself was stopped.
                counter.silence += min(now - counter.last, 2 * self.interval)
            counter.last = now
            counters[id] = counter
        self._counters = counters

    @property
    def silent(self) -> frozenset[str]:
        """The processes without a heartbeat for `stall` seconds."""
        return self.silent_for(self.stall)

    def silent_for(self, seconds: float) -> frozenset[str]:
        """Return the processes without a heartbeat for this long."""
        return frozenset(id for id, one in self._counters.items() if one.silence >= seconds)

    def has_advanced(self, id: str) -> bool:
        """Return whether this counter has increased since the first observation."""
        return id in self._counters and self._counters[id].advanced

    def reset(self) -> None:
        """Forget all observations, as after a long stop of this process."""
        self._counters.clear()
