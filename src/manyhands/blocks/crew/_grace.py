"""How long a late member is waited for, by what the members took before.

Waiting for it costs: each of the other n - 1 members loses a second for every second. Going on
without it costs too: it loses its block, and all of them regroup, once without it and once more to
let it in again. A member that waits until the first has become as expensive as the second, and then
goes on, loses at most twice of what it would have lost if it had known how late the other is.

    usual     median + 4 MAD of the last waits; MAD is the median distance from the median
    worth     (block + 2 n regroup) / (n - 1): as long as waiting is the cheaper of the two
    window    the larger of the two, and at least SHORTEST

    block     the time of this member's last blocks, and `regroup` of its last regroupings: medians

Everything here is plain floats: no clock, no store.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SHORTEST = 1.0  # seconds: below that a busy host makes living members late
KNOWN = 3  # rounds after which the waits say what is usual
REGROUP = 1.0  # seconds, until one was seen


class GraceWindow:
    """What one member has seen, and how long it waits because of it."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=32)  # from its arrival until a round was kept
        self._blocks: deque[float] = deque(maxlen=8)  # from a kept round until its next arrival
        self._regroups: deque[float] = deque(maxlen=8)

    def add_round(self, block: float, waited: float) -> None:
        """Take in a round that was kept."""
        self._blocks.append(block)
        self._waits.append(waited)

    def add_regroup(self, seconds: float) -> None:
        self._regroups.append(seconds)

    def forget_rounds(self) -> None:
        """Begin anew, because later rounds will take another time."""
        self._waits.clear()
        self._blocks.clear()

    def seconds(self, members: int) -> float:
        """Return the seconds for which this many members wait; infinity if too little is known.

        >>> window = GraceWindow()
        >>> for waited in (0.1, 0.3, 0.2):
        ...     window.add_round(block=12.0, waited=waited)
        >>> window.seconds(5)  # (12 + 2 * 5 * 1) / 4
        5.5
        """
        if len(self._waits) < KNOWN or members < 2:
            return math.inf
        middle = median(self._waits)
        usual = middle + 4 * median(abs(wait - middle) for wait in self._waits)
        regroup = median(self._regroups) if self._regroups else REGROUP
        worth = (median(self._blocks) + 2 * members * regroup) / (members - 1)
        return max(usual, worth, SHORTEST)
