"""Who has fallen silent, told from counters that the living count up.

Clocks are not compared between hosts: each worker looks at the others' counters, and judges by its
own clock for how long it has *watched* one stand still. The time between two looks counts for no
more than a look should take, so that workers that were all stopped together, as when a machine
sleeps, do not take each other for lost when they wake up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class _Heard:
    count: int
    last: float  # when we looked
    silence: float = 0.0
    moved: bool = False


@dataclass
class HeartbeatMonitor:
    """What was heard of each; lost is who has been watched standing still for `stall` seconds."""

    stall: float
    _heard: dict[str, _Heard] = field(default_factory=dict)

    @property
    def interval(self) -> float:
        """Seconds between two beats, and between two looks."""
        return min(1.0, self.stall / 5)

    def look(self, beats: Mapping[str, int], now: float) -> None:
        """Take in the present counters of those who matter; the others are forgotten.

        A counter that has gone down is an old one that a stranger has put back: no sign of life.
        """
        heard = {}
        for id, count in beats.items():
            one = self._heard.get(id) or _Heard(count, now)
            if count > one.count:
                one.count, one.silence, one.moved = count, 0.0, True
            else:
                one.silence += min(now - one.last, 2 * self.interval)
            one.last = now
            heard[id] = one
        self._heard = heard

    @property
    def silent(self) -> frozenset[str]:
        return self.silent_for(self.stall)

    def silent_for(self, seconds: float) -> frozenset[str]:
        return frozenset(id for id, one in self._heard.items() if one.silence >= seconds)

    def moved(self, id: str) -> bool:
        """Whether it was seen to count since we first looked."""
        return id in self._heard and self._heard[id].moved

    def forget(self) -> None:
        self._heard.clear()
