"""Schedule blocks: after which step a fragment is sent and merged, and the next block's length.

A block of `length` steps begins after step `start`. A model of F fragments sends fragment f (f+1)/F
of the way through it, so that the link is used evenly. Its mean is merged `overlap` steps later.

    length 6, 2 fragments, overlap 1     step  1  2  3  4  5  6  7  8  9 10 11 12 13
                                         send        0        1        0        1
                                         merge          0        1        0        1

The next block's length is fixed (`Every`), or follows from the time of a step (`Seconds`).

With `Seconds(..., own_steps=True)` workers take different numbers of steps in a block. The numbers
follow from the seconds that a step took on each worker. These are in the reports of a sync round,
so every worker knows all numbers when the block begins:

    s_w                     seconds of a step on worker w
    n_w = round(T / s_w)    its steps in a block of T seconds, at least `least`
    length                  the mean of n_w over the workers, by which the common count of steps
                            grows in the block. After i of its steps, worker w counts i length / n_w

        length 4, own 6     taken   1  2  3  4  5  6
                            count   0  1  2  2  3  4   after the block's start

Everything here is plain integers and floats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TypedDict

from manyhands._arguments import flag, real, whole
from manyhands.blocks.averaging._payload import RoundResult


class BlockPlan(TypedDict, total=False):
    """With own steps: the facts about the present block that all workers know."""

    plan: list[tuple[int, int]]  # every worker's number, and its steps
    pace: list[float]  # the schedule's `seconds` and `ahead`


LATE = 1.1  # times a block's expected seconds: a worker that takes longer ends the block early


class Schedule:
    """The current block: its start, its length, and its fragments."""

    def __init__(self, every: Every, fragments: int = 1, overlap: int = 0, warmup: int = 0) -> None:
        self.every = every
        self.fragments = fragments
        self.overlap = overlap
        self.start = every.first_start(warmup)
        self.length = every.first
        # The rest is for own steps.
        self.taken = 0  # steps of this worker in the block
        # Each worker's steps in the block, by number, from the last sync round. A worker that is
        # not in the plan takes `length` steps.
        self.plan: dict[int, int] = {}
        self.number = 0  # of this worker
        self.seconds = 0.0  # of the block on the slowest worker; 0: no step was timed yet
        # The mean of the workers' steps so far, minus the common count. The two differ because the
        # count is a whole number, and because a worker may end a block early. The next block makes
        # up for the difference.
        self.ahead = 0.0

    @property
    def own(self) -> int:
        """The steps of this worker in the block."""
        return self.plan.get(self.number, self.length)

    @property
    def unfinished(self) -> bool:
        """Whether other workers may be at another step of this block."""
        return self.taken > 0

    def into(self, step: int) -> int:
        """Return this worker's steps in the block after this common count."""
        return self.taken if self.every.own_steps else step - self.start

    def due(self, step: int) -> list[int]:
        """Return the fragments to send after this step."""
        # A state that another worker has saved may be further than this worker's last step.
        into = min(self.into(step), self.own)
        count = self.fragments
        return [f for f in range(count) if self.own * (f + 1) // count == into]

    def ends(self, step: int) -> bool:
        """Return whether the block ends with this step."""
        return self.into(step) >= self.own

    def count(self, step: int, *, in_flight: bool, elapsed: float) -> int:
        """Count a step of this worker; return the step count that all workers share after it."""
        # `in_flight`: the round that this block follows is not merged. `elapsed`: seconds since the
        # block began.
        if not self.every.own_steps:
            return step + 1
        if in_flight:  # until it is merged, the block's numbers are not known
            self.taken += 1
            return step
        if self.is_late(elapsed):
            return self.end()
        self.taken += 1
        # The count is start + length only after the last step: all workers have it as they send.
        return max(step, self.start + self.length * min(self.taken, self.own) // self.own)

    def is_late(self, seconds: float) -> bool:
        """Return whether a block that has taken this long so far should have ended."""
        return 0.0 < LATE * self.seconds < seconds

    def end(self) -> int:
        """End the block early; return the common count of steps at its end."""
        self.taken = self.own
        return self.start + self.length

    def begin(self, step: int, length: int) -> None:
        """Begin a block of this length after a step."""
        self.start = step
        self.length = length
        self.taken = 0
        self.plan = {}

    def begin_next(self, step: int, seconds: float) -> None:
        """Begin the next block after this step; `seconds` is the time of a step."""
        if not self.every.own_steps:
            self.begin(step, self.every.next(self.length, seconds))
            return
        # It has the numbers of this block until a round sets others.
        self.start += self.length
        self.ahead -= self.length
        self.taken = 0

    def steps_of(self, numbers: Sequence[int]) -> dict[int, int]:
        """Return the steps of each of these workers in the block."""
        return {number: self.plan.get(number, self.length) for number in numbers}

    def follow_round(self, result: RoundResult, numbers: Sequence[int], number: int) -> None:
        """Set the length of the block that has begun, from the round that was sent then."""
        # `numbers` are the workers', in the order of their reports; `number` is this worker's.
        if not isinstance(self.every, Seconds) or not self.every.own_steps:
            self.length = int(result.first_report.length)
            return
        paces = result.reports
        included = result.included
        timed = [pace.seconds for pace in paces if pace.taken > 0]
        if not included or not timed or min(timed) <= 0:
            return
        if len(numbers) != len(paces):  # a round that was restored from a checkpoint
            numbers = range(len(paces))
        # A new worker was not timed: it gets the mean time.
        mean = sum(timed) / len(timed)
        seconds = [pace.seconds if pace.taken > 0 else mean for pace in paces]
        steps = self.every.share(seconds)
        slowest = max(map(operator.mul, steps, seconds))
        taken = sum(paces[rank].taken for rank in included) / len(included)
        self.follow(dict(zip(numbers, steps, strict=True)), number, taken, slowest)

    def follow(self, plan: Mapping[int, int], number: int, taken: float, seconds: float) -> None:
        """Set the numbers of steps in the block that has begun."""
        # `number` is this worker's. `taken` is the mean of the workers' steps in the block before.
        self.plan = dict(plan)
        self.number = number
        self.seconds = seconds
        self.ahead += taken
        # Longer than the overlap, whose steps were not counted: the numbers were not known yet.
        mean = sum(plan.values()) / len(plan)
        self.length = max(self.overlap + 1, round(self.ahead + mean))

    def to_state(self) -> BlockPlan:
        """Return the facts about the block that all workers know, besides start and length."""
        if not self.every.own_steps:
            return {}
        return {"plan": list(self.plan.items()), "pace": [self.seconds, self.ahead]}

    def load_state(self, saved: BlockPlan, number: int) -> None:
        """Take over the numbers of a block that was saved, or that another worker is in."""
        if self.every.own_steps:
            self.plan = dict(saved.get("plan", []))
            self.seconds, self.ahead = saved.get("pace", [0.0, 0.0])
            self.number = number


class Every:
    """A fixed length for every block; base class of `Seconds`.

    `every=50` of `Blocks` means `Every(50)`.

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
            "It is the number of local steps from one sync round to the next; Seconds(...) chooses "
            "it during training.",
        )
        self.least = self.first

    def first_start(self, step: int) -> int:
        """Return where the block of this step began: fixed blocks begin at multiples."""
        return step // self.first * self.first

    def next(self, length: int, seconds: float) -> int:
        """Return the next block's length.

        From the last block's length and the seconds of a step on the slowest worker, which are
        equal on all workers, so that all choose the same length.
        """
        return self.first

    def __repr__(self) -> str:
        return str(self.first)


class Seconds(Every):
    """Synchronize about every `seconds`, measured by the slowest worker's time for a step.

    >>> import manyhands as mh
    >>> mh.Seconds(60, first=100)
    Seconds(60, first=100, least=1)

    `first` is the number of steps of the first block, when no step has been timed yet; no block has
    fewer than `least`.

    All workers take the same number of steps, unless `own_steps` is set. Then a faster worker takes
    more steps in that time. The mean of a sync round is weighted by these numbers, or by the
    samples if `count_samples` is used. The optimizer's `steps` is then the mean of the workers'
    steps: train until it has reached a number.

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
        """Return each worker's number of steps in a block, from the seconds of a step.

        >>> import manyhands as mh
        >>> mh.Seconds(6, own_steps=True).share([1.0, 2.0, 4.0])
        [6, 3, 2]
        """
        return [max(self.least, math.floor(self.seconds / each + 0.5)) for each in seconds]

    def __repr__(self) -> str:
        own = ", own_steps=True" if self.own_steps else ""
        return f"Seconds({self.seconds:g}, first={self.first}, least={self.least}{own})"


def check_schedule(every: Every, overlap: int, fragments: int, *, ranks_per_worker: int) -> None:
    """Raise, when blocks are made, if blocks of this length cannot have these options."""
    if overlap >= every.least:
        raise ValueError(
            f"overlap must be less than the steps between two sync rounds ({every.least}), got "
            f"{overlap}."
        )
    if fragments > every.least:
        raise ValueError(
            f"{fragments} fragments need at least as many steps in a block, and every={every} "
            f"may have {every.least}."
        )
    if fragments > 1 and every.own_steps:
        raise ValueError(
            f"every={every} sends the whole model at the end of a block, got fragments={fragments}."
        )
    if ranks_per_worker > 1 and type(every) is not Every:
        raise ValueError(
            f"every={every} follows from each sync round, and the ranks of one worker "
            "(inner_group) each have their own, which may differ. Give a number of steps."
        )
