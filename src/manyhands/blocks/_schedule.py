"""After which step a fragment is sent and its mean merged, and how long the next block is.

A block of `length` steps begins after step `start`. A model of F fragments sends fragment f
(f+1)/F of the way through it, so that the link is used evenly. Its mean is merged `overlap` steps
later.

    length 6, 2 fragments, overlap 1     step  1  2  3  4  5  6  7  8  9 10 11 12 13
                                         send        0        1        0        1
                                         merge          0        1        0        1

The next block's length is fixed (`Every`), or follows from the time of a step (`Seconds`) or from
how far the workers drifted apart (`ByDrift`). Everything here is plain integers and floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.blocks._checks import real, whole


@dataclass
class Schedule:
    """The current block: its start, its length, and its fragments."""

    length: int
    fragments: int = 1
    overlap: int = 0
    start: int = 0

    def due(self, step: int) -> list[int]:
        """Return the fragments to send after this step."""
        into, count = step - self.start, self.fragments
        return [f for f in range(count) if self.length * (f + 1) // count == into]

    def ends(self, step: int) -> bool:
        """Return whether the block ends with this step."""
        return step - self.start >= self.length

    def begin(self, step: int, length: int) -> None:
        """Begin a block of this length after a step."""
        self.start, self.length = step, length


@dataclass(frozen=True)
class Drift:
    """How far the workers went in a block, and how far apart, from the lengths of a few vectors.

    n workers have moved by d_i from the anchor, and their mean is D. With a mean over workers
    written as < >,

        spread^2    <|d_i - D|^2>  =  <|d_i|^2> - |D|^2
        cosine      mean of d_i . d_j over all pairs, in units of <|d_i|^2>
                    =  (n |D|^2 - <|d_i|^2>) / ((n - 1) <|d_i|^2>)

    The cosine is 1 if all workers moved the same way, and 0 if their ways are unrelated.
    """

    distance: float = math.nan  # of the mean from the anchor
    spread: float = math.nan  # of the workers around their mean
    cosine: float = math.nan

    @classmethod
    def of(cls, squares: Sequence[float], square_of_mean: float) -> Drift:
        """Return the drift from each worker's squared distance and the mean's.

        >>> Drift.of([25.0, 25.0], 16.0)  # (4, 3) and (4, -3)
        Drift(distance=4.0, spread=3.0, cosine=0.28)
        """
        n = len(squares)
        if n == 0:
            return cls()
        mean = sum(squares) / n
        if not math.isfinite(mean + square_of_mean):  # the square of 1e20 overflows a float32
            return cls()
        # Variance = mean square - square of the mean; rounding may make it negative.
        spread = math.sqrt(max(mean - square_of_mean, 0.0))
        if n == 1 or mean == 0.0:
            return cls(math.sqrt(square_of_mean), spread)
        # From |sum|^2 = sum of the squares + sum over the pairs, both divided by n.
        # Rounding may lead slightly out of [-1, 1].
        cosine = (n * square_of_mean - mean) / ((n - 1) * mean)
        return cls(math.sqrt(square_of_mean), spread, max(-1.0, min(1.0, cosine)))


class Every:
    """A fixed length for every block; base class of `Seconds` and `ByDrift`.

    `every=50` of `Blocks` means `Every(50)`.

    >>> import manyhands as mh
    >>> mh.Every(50).next(50, seconds=0.1, drift=None)  # the length of the next block
    50
    """

    def __init__(self, steps: int, name: str = "every") -> None:
        self.first = self.least = whole(
            name,
            steps,
            1,
            "It is the number of local steps from one sync round to the next; Seconds(...) and "
            "ByDrift(...) choose it during training.",
        )

    def first_start(self, step: int) -> int:
        """Return where the block of this step began: fixed blocks begin at multiples."""
        return step // self.first * self.first

    def next(self, length: int, seconds: float, drift: Drift) -> int:
        """Return the next block's length.

        From the last block's length, the seconds of a step on the slowest worker, and the drift:
        numbers that are equal on all workers, so that all choose the same length.
        """
        return self.first

    def __repr__(self) -> str:
        return str(self.first)


class Seconds(Every):
    """Synchronize about every `seconds`, measured by the slowest worker's time for a step.

    >>> import manyhands as mh
    >>> mh.Seconds(60, first=100)
    Seconds(60, first=100, least=1)

    `first` is the number of steps of the first block, when no step has been timed yet.
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
    """Synchronize more often if workers move different ways, and less often if they agree.

    >>> import manyhands as mh
    >>> mh.ByDrift(cosine=0.3, least=8, most=256)
    ByDrift(cosine=0.3, least=8, most=256)

    After each block the length is multiplied by measured cosine / wanted cosine, but by 2 at most
    and by 1/2 at least.
    """

    def __init__(self, cosine: float = 0.3, *, least: int = 8, most: int = 256) -> None:
        self.cosine = real(
            "cosine",
            cosine,
            above=0,
            below=1,
            why="It is 1 if all workers move the same way, and 0 if their ways are unrelated.",
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


def check_schedule(every: Every, overlap: int, fragments: int, ranks_per_worker: int) -> None:
    """Raise if blocks of this length cannot have this overlap, or as many fragments."""
    if overlap >= every.least:
        raise ValueError(
            f"overlap must be less than the steps between two sync rounds ({every.least}), got "
            f"{overlap}. It is the number of steps for which a mean may be in flight."
        )
    if fragments > every.least:
        raise ValueError(
            f"{fragments} fragments need at least as many steps in a block, and every={every} "
            f"may have {every.least}. Each fragment is synchronized once in a block."
        )
    if ranks_per_worker > 1 and type(every) is not Every:
        raise ValueError(
            f"every={every} follows from each sync round's result, and the ranks of an inner_group "
            "have separate sync rounds. Give a number of steps."
        )
