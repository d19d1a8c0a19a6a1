"""Estimate how long a crew should wait for a late member.

While a member is late, each of the other n - 1 members loses a second per second. Proceeding
without the late member also has a cost: the block of the late member is lost, and all members
regroup twice, to exclude and to readmit the member. Waiting until the first cost equals the second
loses no more than twice the optimum, which would require knowing the delay in advance.

    usual      median + 4 MAD of the last waits; MAD is the median distance from the median
    worth      (block + 2 n regroup) / (n - 1): waiting for this long costs less than proceeding
    window     maximum of usual, worth and SHORTEST

    block      median duration of this member's last blocks
    regroup    median duration of its last regroupings
"""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median

SHORTEST = 1.0  # seconds; on a busy host, living members may be late by up to this time
KNOWN = 3  # number of waits required for an estimate
REGROUP = 1.0  # seconds: estimate before the first regrouping


class GraceWindow:
    """The durations that a member has measured, and the resulting patience."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=32)  # from arrival until the round was kept
        self._blocks: deque[float] = deque(maxlen=8)  # from a round until the next arrival
        self._regroups: deque[float] = deque(maxlen=8)
        self._began = 0.0  # start of the current block
        self._arrived = 0.0  # arrival at the current round

    def begin_block(self) -> None:
        self._began = time.monotonic()

    def arrive(self) -> None:
        self._arrived = time.monotonic()

    def keep_round(self) -> None:
        """Add the durations of the current round."""
        self.add_round(self._arrived - self._began, time.monotonic() - self._arrived)

    def add_round(self, block: float, waited: float) -> None:
        """Add the durations of a successful round."""
        self._blocks.append(block)
        self._waits.append(waited)

    def add_regroup(self, seconds: float) -> None:
        self._regroups.append(seconds)

    def forget_rounds(self) -> None:
        """Discard the durations of earlier rounds."""
        self._waits.clear()
        self._blocks.clear()

    def seconds(self, members: int) -> float:
        """Return the patience of a crew of this size, in seconds; infinity without enough data.

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
        regroup = median(self._regroups or [REGROUP])
        worth = (median(self._blocks) + 2 * members * regroup) / (members - 1)
        return max(usual, worth, SHORTEST)
