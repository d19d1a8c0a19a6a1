"""Schedule of blocks: steps that send and merge fragments, and block lengths.

A block of `length` steps starts after step `start`. With F fragments, fragment f is sent after
(f+1)/F of the block, for an even load on the network. The mean is merged `overlap` steps later.

    length 6, 2 fragments, overlap 1     step  1  2  3  4  5  6  7  8  9 10 11 12 13
                                         send        0        1        0        1
                                         merge          0        1        0        1

The length is constant (`Every`) or depends on the time per step (`Seconds`).

With `Seconds(..., own_steps=True)`, each worker's number of steps in a block follows from the
seconds per step in the reports of a sync round, which all workers know:

    s_w                     seconds per step on worker w
    n_w = round(T / s_w)    steps of worker w in a block of T seconds, at least `least`
    length                  the mean of n_w over the workers: the increase of the common count of
                            steps in the block. After i steps, worker w counts i length / n_w

        length 4, own 6     steps  1  2  3  4  5  6
                            count  0  1  2  2  3  4   after the start of the block

This module uses plain integers and floats only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TypedDict

from manyhands._arguments import flag, real, whole
from manyhands.blocks.averaging._payload import RoundResult


class BlockPlan(TypedDict, total=False):
    """Saved facts about the current block with own steps, equal on all workers."""

    plan: list[tuple[int, int]]  # number and steps of each worker
    pace: list[float]  # the schedule's `seconds` and `ahead`


LATE_FACTOR = 1.1  # a worker that exceeds a block's expected seconds by this factor ends the block


class Schedule:
    def __init__(self, every: Every, fragments: int = 1, overlap: int = 0, warmup: int = 0) -> None:
        self.every = every
        self.fragments = fragments
        self.overlap = overlap
        self.start = every.first_start(warmup)
        self.length = every.first
        # The following attributes serve own steps.
        self.taken = 0  # steps of this worker in the block
        # Each worker's steps in the block, by number; absent workers take `length` steps.
        self.plan: dict[int, int] = {}
        self.number = 0  # of this worker
        self.seconds = 0.0  # of the block on the slowest worker; 0: no step was timed yet
        # The mean of the workers' steps minus the common count, from rounding and from blocks that
        # ended early. The next block compensates for it.
        self.ahead = 0.0

    @property
    def own(self) -> int:
        return self.plan.get(self.number, self.length)

    def into(self, step: int) -> int:
        return self.taken if self.every.own_steps else step - self.start

    def due(self, step: int) -> list[int]:
        # A state saved by another worker may be ahead of this worker's last step.
        into = min(self.into(step), self.own)
        count = self.fragments
        return [f for f in range(count) if self.own * (f + 1) // count == into]

    def ends(self, step: int) -> bool:
        return self.into(step) >= self.own

    def count(self, step: int, *, in_flight: bool, elapsed: float) -> int:
        """Count a step of this worker; return the new common count.

        `in_flight`: the round that started this block is not merged. `elapsed`: seconds since then.
        """
        if not self.every.own_steps:
            return step + 1
        if in_flight:  # the merge determines the block's numbers
            self.taken += 1
            return step
        if self.is_late(elapsed):
            return self.end()
        self.taken += 1
        # Only the last step reaches start + length, so all workers send at equal counts.
        return max(step, self.start + self.length * min(self.taken, self.own) // self.own)

    def is_late(self, seconds: float) -> bool:
        return 0.0 < LATE_FACTOR * self.seconds < seconds

    def end(self) -> int:
        self.taken = self.own
        return self.start + self.length

    def begin(self, step: int, length: int) -> None:
        self.start = step
        self.length = length
        self.taken = 0
        self.plan = {}

    def begin_next(self, step: int, seconds: float) -> None:
        if not self.every.own_steps:
            self.begin(step, self.every.next(self.length, seconds))
            return
        # Until a round replaces them, the numbers of the last block apply.
        self.start += self.length
        self.ahead -= self.length
        self.taken = 0

    def steps_of(self, numbers: Sequence[int]) -> dict[int, int]:
        return {number: self.plan.get(number, self.length) for number in numbers}

    def follow_round(self, result: RoundResult, numbers: Sequence[int], number: int) -> None:
        """Set the block's length from the round sent at the start.

        `numbers` are the workers' numbers by rank; `number` is this worker's.
        """
        if not isinstance(self.every, Seconds) or not self.every.own_steps:
            self.length = int(result.first_report.length)
            return
        paces = result.reports
        included = result.included
        timed = [pace.seconds for pace in paces if pace.taken > 0]
        if not included or not timed or min(timed) <= 0:
            return
        # A new worker has no time, and gets the mean time.
        mean = sum(timed) / len(timed)
        seconds = [pace.seconds if pace.taken > 0 else mean for pace in paces]
        steps = self.every.share(seconds)
        slowest = max(map(operator.mul, steps, seconds))
        taken = sum(paces[rank].taken for rank in included) / len(included)
        self.follow(dict(zip(numbers, steps, strict=True)), number, taken, slowest)

    def follow(self, plan: Mapping[int, int], number: int, taken: float, seconds: float) -> None:
        self.plan = dict(plan)
        self.number = number
        self.seconds = seconds
        self.ahead += taken
        # Exceed the uncounted steps of the overlap.
        mean = sum(plan.values()) / len(plan)
        self.length = max(self.overlap + 1, round(self.ahead + mean))

    def to_state(self) -> BlockPlan:
        if not self.every.own_steps:
            return {}
        return {"plan": list(self.plan.items()), "pace": [self.seconds, self.ahead]}

    def load_state(self, saved: BlockPlan, number: int) -> None:
        if self.every.own_steps:
            self.plan = dict(saved.get("plan", []))
            self.seconds, self.ahead = saved.get("pace", [0.0, 0.0])
            self.number = number


class Every:
    """A constant block length, and base class of `Seconds`. `every=50` means `Every(50)`.

    >>> from manyhands.blocks import Every
    >>> Every(50).next(50, seconds=0.1)  # the length of the next block
    50
    """

    own_steps = False  # whether workers take different numbers of steps

    def __init__(self, steps: int, name: str = "every") -> None:
        self.first = whole(
            name,
            steps,
            1,
            "It is the number of local steps between two sync rounds. To let manyhands choose it "
            "during training, pass Seconds(...).",
        )
        self.least = self.first

    def first_start(self, step: int) -> int:
        """Return the start of the block of this step, which is a multiple of the length."""
        return step // self.first * self.first

    def next(self, length: int, seconds: float) -> int:
        """Return the next block's length.

        `length` is the last block's length, and `seconds` the slowest worker's seconds per step;
        both are equal on all workers.
        """
        return self.first

    def __repr__(self) -> str:
        return str(self.first)


class Seconds(Every):
    """Synchronize about every `seconds`, measured on the slowest worker.

    >>> import manyhands as mh
    >>> mh.Seconds(60, first=100)
    Seconds(60, first=100, least=1)

    `first` is the length of the first block, before any step was timed. `least` is the minimum.

    With `own_steps=True`, faster workers take more steps per block. The mean of a sync round is
    then weighted by steps, or by samples if `count_samples` is used. The optimizer's `steps` is the
    workers' mean: train until it reaches the target.

    >>> mh.Seconds(60, own_steps=True)
    Seconds(60, first=10, least=1, own_steps=True)
    """

    def __init__(
        self, seconds: float, *, first: int = 10, least: int = 1, own_steps: bool = False
    ) -> None:
        self.seconds = real("seconds", seconds, above=0)
        self.own_steps = flag("own_steps", own_steps)
        self.first = whole("first", first, 1)
        self.least = whole("least", least, 1)
        if self.least > self.first:
            raise ValueError(f"least must be at most first, got least={least}, first={first}.")

    def first_start(self, step: int) -> int:
        return step

    def next(self, length: int, seconds: float) -> int:
        return max(self.least, round(self.seconds / seconds)) if seconds > 0 else length

    def share(self, seconds: Sequence[float]) -> list[int]:
        """Return each worker's number of steps in a block, from the seconds per step.

        >>> import manyhands as mh
        >>> mh.Seconds(6, own_steps=True).share([1.0, 2.0, 4.0])
        [6, 3, 2]
        """
        return [max(self.least, math.floor(self.seconds / each + 0.5)) for each in seconds]

    def __repr__(self) -> str:
        own = ", own_steps=True" if self.own_steps else ""
        return f"Seconds({self.seconds:g}, first={self.first}, least={self.least}{own})"


def check_schedule(every: Every, overlap: int, fragments: int, *, ranks_per_worker: int) -> None:
    if overlap >= every.least:
        raise ValueError(
            f"overlap must be less than the steps between two sync rounds ({every.least}), got "
            f"{overlap}. Reduce overlap, or use longer blocks."
        )
    if fragments > every.least:
        raise ValueError(
            f"every={every} allows blocks of {every.least} steps, which is less than "
            f"fragments={fragments}. Each fragment needs a step: reduce fragments."
        )
    if fragments > 1 and every.own_steps:
        raise ValueError(
            f"every={every} sends the model at the end of a block: leave out fragments={fragments}."
        )
    if ranks_per_worker > 1 and type(every) is not Every:
        raise ValueError(
            f"every={every} depends on measured times, which may differ between the ranks of a "
            "worker (inner_group). Pass a number of steps."
        )
