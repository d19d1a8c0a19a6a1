"""When to send what, and when the answer is due: integers only.

A block of `length` steps begins after step `start`. A model of F fragments sends fragment f
(f+1)/F of the way through it, so that the link is used evenly; what was sent is merged `overlap`
steps later.

    length 6, 2 fragments, overlap 1     step  1  2  3  4  5  6  7  8  9 10 11 12 13
                                         send        0        1        0        1
                                         merge          0        1        0        1
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from manyhands.blocks._arguments import real, whole
from manyhands.blocks._drift import Drift


@dataclass
class Schedule:
    """Where in its block a worker is."""

    length: int
    fragments: int = 1
    overlap: int = 0
    start: int = 0

    def due(self, step: int) -> list[int]:
        """The fragments to send after this step."""
        into, parts = step - self.start, self.fragments
        return [f for f in range(parts) if self.length * (f + 1) // parts == into]

    def ends(self, step: int) -> bool:
        """Whether the block ends with this step."""
        return step - self.start >= self.length

    def begin(self, step: int, length: int) -> None:
        """A block of this length begins after a step."""
        self.start, self.length = step, length


class Every:
    """How long the next block is to be. Base of the rules, and the rule for a fixed number."""

    def __init__(self, steps: int, name: str = "every") -> None:
        self.first = self.least = whole(
            name,
            steps,
            1,
            "It is how many steps each worker takes on its own from one meeting to the next; "
            "Seconds(...) and ByDrift(...) choose it as they go.",
        )

    def first_start(self, step: int) -> int:
        """Where the block began that this step is in: blocks begin at multiples."""
        return step // self.first * self.first

    def next(self, length: int, seconds: float, drift: Drift) -> int:
        """From the last block's length, what a step takes on the slowest worker, and the drift."""
        return self.first

    def __repr__(self) -> str:
        return str(self.first)


class Seconds(Every):
    """Meet about every so many seconds, by the time that the slowest worker takes for a step.

    >>> import manyhands as mh
    >>> mh.Seconds(60, first=100)
    Seconds(60, first=100, least=1)

    `first` is the number of steps of the first block, when nothing is known of their time.
    """

    def __init__(self, seconds: float, *, first: int = 10, least: int = 1) -> None:
        self.seconds = real("seconds", seconds, above=0)
        self.first, self.least = whole("first", first, 1), whole("least", least, 1)
        if self.least > self.first:
            raise ValueError(f"least must be at most first, got least={least}, first={first}.")

    def first_start(self, step: int) -> int:
        return step

    def next(self, length: int, seconds: float, drift: Drift) -> int:
        return max(self.least, round(self.seconds / seconds)) if seconds > 0 else length

    def __repr__(self) -> str:
        return f"Seconds({self.seconds:g}, first={self.first}, least={self.least})"


class ByDrift(Every):
    """Meet more often where workers go different ways, and less where they agree.

    >>> import manyhands as mh
    >>> mh.ByDrift(cosine=0.3, least=8, most=256)
    ByDrift(cosine=0.3, least=8, most=256)

    After each block its length is multiplied by the cosine between the workers' differences over
    the one that is wanted, by 2 at most and by 1/2 at least.
    """

    def __init__(self, cosine: float = 0.3, *, least: int = 8, most: int = 256) -> None:
        self.cosine = real(
            "cosine",
            cosine,
            above=0,
            below=1,
            why="Workers that all go the same way have 1, and workers that know nothing of each "
            "other 0.",
        )
        self.least, self.most = whole("least", least, 1), whole("most", most, 1)
        if self.least > self.most:
            raise ValueError(f"least must be at most `most`, got least={least}, most={most}.")
        self.first = self.least

    def first_start(self, step: int) -> int:
        return step

    def next(self, length: int, seconds: float, drift: Drift) -> int:
        if math.isnan(drift.cosine):
            return length
        factor = max(0.5, min(2.0, drift.cosine / self.cosine))
        return max(self.least, min(self.most, round(length * factor)))

    def __repr__(self) -> str:
        return f"ByDrift(cosine={self.cosine:g}, least={self.least}, most={self.most})"
