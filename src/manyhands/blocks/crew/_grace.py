"""How long to wait for a late member, judged by the time that earlier rounds took.

Waiting has a cost: each of the other n - 1 members loses a second for every second. Going on
without the late member has one, too: it loses its block, and all members regroup twice, to go on
without it and to let it in again. Members that wait until the first cost equals the second, and
then go on, lose at most twice as much as if they had known how late the member would be.

    usual      median + 4 MAD of the last waits; MAD is the median distance from the median
    worth      (block + 2 n regroup) / (n - 1): so long waiting costs less than going on
    window     the larger of the two, and at least SHORTEST

    block      median time of this member's last blocks
    regroup    median time of its last regroupings

Everything here is plain floats: no clock, no store.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

SHORTEST = 1.0  # seconds; on a busy host living members may be late by less than that
KNOWN = 3  # waits that are needed to say what is usual
REGROUP = 1.0  # seconds that a regrouping is assumed to take until one was timed


class GraceWindow:
    """The times that one member has seen, and how long it waits because of them."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=32)  # from its arrival until a round was kept
        self._blocks: deque[float] = deque(maxlen=8)  # from a kept round until its next arrival
        self._regroups: deque[float] = deque(maxlen=8)

    def add_round(self, block: float, waited: float) -> None:
        """Add the times of a round that was kept."""
        self._blocks.append(block)
        self._waits.append(waited)

    def add_regroup(self, seconds: float) -> None:
        self._regroups.append(seconds)

    def forget_rounds(self) -> None:
        """Forget earlier rounds, because later ones will take a different time."""
        self._waits.clear()
        self._blocks.clear()

    def seconds(self, members: int) -> float:
        """Return how long a crew of this size waits, in seconds; infinity if too little is known.

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
