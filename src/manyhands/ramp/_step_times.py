"""How long steps take: `a + b p` seconds for p passes, and what is left out of it.

A step of p passes takes a + b p seconds on the slowest worker. This includes everything:
data, backward, communication, the optimizer. `StepTimes` keeps the last `WINDOW` steps. For each p
it takes the mean, in which a pause (an evaluation, a checkpoint, a compilation) counts as no more
than `CUT_OFF` times the usual deviation from the median. The slope b is the weighted median of the
slopes between two numbers of passes (Theil and Sen), and a is the weighted median of what is left.
So neither a pause nor one number of passes can spoil them.

Ranks that average gradients take equally long in the long run. The longest time of a single step is
more than that: it is mostly the time of a rank that was early in the step before, and is late in
this one. So `SlowestRank` chooses one rank, whose times count until another is slower by `SLOWER`.

In blocks, a few steps have a sync round after them, and most have none. `SyncRounds` divides the
time of the rounds evenly among all steps. A larger batch takes fewer steps for the same samples,
and therefore fewer rounds.

`StepTimer` is the clock of one rank, and has the three.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from itertools import combinations
from statistics import fmean, median

from manyhands._core.state_parts import SavedState
from manyhands.ramp._decision import StepTime
from manyhands.scaling._step_stats import RankReport

WINDOW = 240  # steps
LOOK_BACK = 1000  # steps over which the time of sync rounds is averaged
ENOUGH = 3  # the fewest steps with one number of passes whose times count
CUT_OFF = 4.5  # median deviations, which are three standard deviations of a normal distribution
SLOWER = 1.1  # how much slower another rank has to be for its times to count
FADING = 0.99  # the weight of the past times of ranks, in each step


class StepTimer:
    """Times this rank's steps, and keeps the times of the slowest rank's."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.sync_rounds = SyncRounds()
        self._slowest = SlowestRank()
        self._last = (0.0, 0)  # seconds and units of this rank's last step, for its next report
        self._began: float | None = None

    def skip(self) -> None:
        """Leave out the time since the last step: it is no part of the next one."""
        self._began = None

    def step_ended(self, units: int, counts: bool) -> None:
        """Take the time of a step of so many units, if it counts."""
        now = time.perf_counter()
        correction = self.sync_rounds.correct_step()
        if self._began is not None and counts:
            self._last = (now - self._began + correction, units)
        self._began = now

    @property
    def last(self) -> tuple[float, int]:
        """Seconds and units of this rank's last step that counted."""
        return self._last

    def add_reports(self, reports: Sequence[RankReport]) -> None:
        """Add the time of a step, as the ranks have reported it."""
        slowest = reports[self._slowest.find([report.seconds for report in reports])]
        if slowest.seconds > 0.0:
            self.times.add(int(slowest.timed_passes), slowest.seconds)

    def state_dict(self) -> dict[str, object]:
        """Return the times in plain values."""
        return {
            "times": [[passes, seconds] for passes, seconds in self.times.steps],
            "timed": list(self._last),
            "slowest": [self._slowest.rank, self._slowest.seconds],
            "sync_rounds": list(astuple(self.sync_rounds)),
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue with the times of a `state_dict`, in a timer that has none yet."""
        for timed_passes, seconds in state_dict["times"]:
            self.times.add(int(timed_passes), float(seconds))
        seconds, timed_passes = state_dict["timed"]
        self._last = float(seconds), int(timed_passes)
        rank, of_ranks = state_dict["slowest"]
        self._slowest = SlowestRank(int(rank), [float(each) for each in of_ranks])
        self.sync_rounds = SyncRounds(*map(float, state_dict["sync_rounds"]))


@dataclass
class StepTimes:
    """The last steps' passes and seconds."""

    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, passes: int, seconds: float) -> None:
        """Add a step. All ranks add the same seconds: those of the slowest."""
        self.steps.append((passes, seconds))

    def levels(self) -> dict[int, tuple[float, int]]:
        """Return for each number of passes its usual seconds, and how many steps it had."""
        by_passes: dict[int, list[float]] = {}
        for passes, seconds in self.steps:
            by_passes.setdefault(passes, []).append(seconds)
        return {
            passes: (usual(values), len(values))
            for passes, values in sorted(by_passes.items())
            if len(values) >= ENOUGH
        }

    def fit(self) -> StepTime | None:
        """Return the fitted time of a step; None until two numbers of passes were seen."""
        levels = self.levels()
        if len(levels) < 2:
            return None
        slopes = [
            # Numbers of passes that are far apart, and seen often, have more weight.
            ((t2 - t1) / (p2 - p1), (p2 - p1) * min(n1, n2))
            for (p1, (t1, n1)), (p2, (t2, n2)) in combinations(levels.items(), 2)
        ]
        shortest = min(seconds / passes for passes, (seconds, _) in levels.items())
        # A pass takes some time, and at most its part of a whole step. Else noise in the levels
        # could make `fixed` negative.
        per_pass = min(max(weighted_median(slopes), 1e-3 * shortest), shortest)
        rest = [(max(t - per_pass * p, 0.0), n) for p, (t, n) in levels.items()]
        return StepTime(weighted_median(rest), per_pass)


@dataclass
class SyncRounds:
    """A step's share of the time of sync rounds: their mean over the last `LOOK_BACK` steps."""

    seconds: float = 0.0  # of all rounds, older ones with less weight
    steps: float = 0.0  # all steps, weighted in the same way
    latest: float = 0.0  # seconds of the rounds since the last step

    def correct_step(self) -> float:
        """Return what to add to a step's time: its share of all rounds, minus its own rounds.

        >>> rounds = SyncRounds()
        >>> rounds.latest = 8.0  # a round
        >>> [round(rounds.correct_step(), 1) for _ in range(2)]
        [0.0, 4.0]
        """
        seen, fading = self.latest, 1.0 - 1.0 / LOOK_BACK
        self.seconds = fading * self.seconds + seen
        self.steps = fading * self.steps + 1.0
        self.latest = 0.0
        return self.seconds / self.steps - seen


@dataclass
class SlowestRank:
    """The rank whose steps take the longest."""

    rank: int = 0
    seconds: list[float] = field(default_factory=list)  # of each rank's steps, fading

    def find(self, seconds: Sequence[float]) -> int:
        """Return the rank whose times count, after a step that took so long on each.

        >>> slowest = SlowestRank()
        >>> [slowest.find(step) for step in ([1.0, 1.02], [1.02, 1.0], [1.0, 2.0])]
        [0, 0, 1]
        """
        sums = self.seconds or [0.0] * len(seconds)
        self.seconds = [FADING * s + new for s, new in zip(sums, seconds, strict=True)]
        slowest = max(range(len(seconds)), key=self.seconds.__getitem__)
        if self.seconds[slowest] > SLOWER * self.seconds[self.rank]:
            self.rank = slowest
        return self.rank


def usual(values: Sequence[float]) -> float:
    """Return the mean of the values, of which those far from the median are cut off.

    A mean, because times have a tail: the next steps have it, too.

    >>> round(usual([1.0, 1.1, 1.2, 1.1, 9.0]), 2)
    1.19
    """
    middle = median(values)
    deviation = CUT_OFF * median(abs(value - middle) for value in values)
    return fmean(min(max(v, middle - deviation), middle + deviation) for v in values)


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Return the value that half of the weight is below, and half above.

    >>> weighted_median([(1.0, 1.0), (2.0, 1.0), (9.0, 1.0)])
    2.0
    >>> weighted_median([(1.0, 1.0), (9.0, 3.0)])
    9.0
    """
    ordered = sorted(values)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        below += weight
        if below >= half:
            return value
    raise ValueError("a weighted median needs at least one value.")
