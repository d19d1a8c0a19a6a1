"""Estimate a gradient's noise from norms, average it over steps, and compute the gain.

n small batches have gradients g_1 ... g_n with the mean G. Then

    E |g_i|^2 = sqr + var          sqr = |true gradient|^2
    E |G|^2   = sqr + var / n      var = trace of the covariance of one g_i

`estimate` solves these equations, and converts `var` to scale 1. If n small batches form a batch of
scale S, var(scale 1) = var(one small batch) * S / n.

`gain` is AdaScale's r (Johnson et al. 2020, eq. 5): the number of scale-1 steps that a step at
scale S is worth. It is 1 if the gradients agree, and S if they are pure noise.

The estimate of a step is unbiased but noisy. A rule averages over roughly 1 / (1 - smoothing)
steps. With `measure_every=k`, every k-th step is measured and counts like k equal estimates:

    average = smoothing^k average + (1 - smoothing^k) estimate

Within its memory, an average must contain at least `LEAST` small batches and `LEAST_STEPS` measured
steps. Every step is measured until the averages have filled their memory, and after non-finite
gradients.

A single exploded gradient can have a thousand times the usual noise. The gain would then be nearly
maximal for many steps, and training would end early. `limit_noise` prevents this
(`docs/benchmarks/collapse.md`).

Averages are immutable, so `gain()` can include gradients before their step. This file uses only
floats: no tensors, no process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from manyhands._arguments import one_of
from manyhands._optimizers.state_parts import BELOW, SQUARES, SavedEntries

if TYPE_CHECKING:
    from typing_extensions import Self

# Floors as in fairscale and adaptdl: the gain is defined even without measured noise.
VAR_FLOOR = 1e-6
SQR_FLOOR = 0.0

# A step's noise is limited to the average plus this number of standard deviations, and at least
# plus half of the average. Without outliers this changes the average by less than 1 %, even with
# noise in a single direction, which has the longest tail.
OUTLIER_DEVIATIONS = 4.0
LEAST_EXCESS = 0.5
MOST_GROWTH = 4.0
STEPS_BEFORE_LIMIT = 10

LEAST = 100
LEAST_STEPS = 4


@dataclass(frozen=True)
class NormSums:
    """The squared norms measured in a step, per parameter group.

    `small_squares` is the sum of |g_i|^2 over all `small_batches`; `mean_square` is |G|^2.
    """

    small_squares: tuple[float, ...]
    mean_square: tuple[float, ...]
    small_batches: float  # fractional for short steps
    scale: float
    consecutive: bool = False  # the "small batches" are the gradients of two consecutive steps
    norm_kind: str = "plain"  # or "preconditioned": see `PlainNorm` in `_hooks.py`
    steps: int = 1  # represented by this measured step

    def unscale(self, loss_scale: float) -> NormSums:
        squared = loss_scale * loss_scale
        return replace(
            self,
            small_squares=tuple(value / squared for value in self.small_squares),
            mean_square=tuple(value / squared for value in self.mean_square),
        )

    @property
    def all_finite(self) -> bool:
        return all(map(math.isfinite, (*self.small_squares, *self.mean_square)))


@dataclass(frozen=True)
class Estimate:
    """Unbiased estimates from a single step, per parameter group; both can be negative."""

    sqr: tuple[float, ...]
    var: tuple[float, ...]


def estimate(sums: NormSums) -> Estimate:
    n = sums.small_batches
    scale = sums.scale
    if n < 2:
        raise ValueError(f"noise needs at least 2 gradients to compare, got {n}.")
    sqr = []
    var = []
    for total, mean in zip(sums.small_squares, sums.mean_square, strict=True):
        small = total / n
        sqr.append((n * mean - small) / (n - 1))
        # (small - mean) * n / (n - 1) is the noise of a small batch; scale / n converts to scale 1.
        var.append((small - mean) * scale / (n - 1))
    return Estimate(tuple(sqr), tuple(var))


def limit_noise(
    new: Estimate, sqr: Sequence[float], var: Sequence[float], small_batches: float
) -> Estimate:
    """Limit the noise of a step's estimate relative to the averages.

    The noise estimate from n gradients has a relative deviation of about 1 / sqrt(n - 1), with a
    longer tail for small n. If |true gradient|^2 also exceeds the average, the limit grows by the
    same factor, up to `MOST_GROWTH`. The signal is not limited, because a gain that is too small
    for some steps is harmless. A negative signal estimate is reduced like the noise. If the average
    has no signal, there is no limit.

    >>> limit_noise(Estimate(sqr=(1.0,), var=(700.0,)), [1.0], [5.0], small_batches=5)
    Estimate(sqr=(1.0,), var=(17.5,))
    >>> limit_noise(Estimate(sqr=(4.0,), var=(700.0,)), [1.0], [5.0], small_batches=5)
    Estimate(sqr=(4.0,), var=(70.0,))
    """
    deviation = small_batches / (small_batches - 1.0) ** 1.5
    limit = 1.0 + max(OUTLIER_DEVIATIONS * deviation, LEAST_EXCESS)
    limited_sqr = []
    limited_var = []
    for s, v, old_s, old_v in zip(new.sqr, new.var, sqr, var, strict=True):
        over = 1.0
        if old_s > 0.0 and old_v > 0.0:
            growth = min(max(s / old_s, 1.0), MOST_GROWTH)
            over = max(v / (limit * old_v * growth), 1.0)
        if s < 0.0:
            s /= over
        limited_sqr.append(s)
        limited_var.append(v / over)
    return Estimate(tuple(limited_sqr), tuple(limited_var))


def gain(sqr: float, var: float, scale: float) -> float:
    """Return the number of steps at scale 1 that a step at `scale` is worth.

    >>> gain(sqr=1.0, var=3.0, scale=4.0)
    2.2857142857142856
    >>> gain(sqr=1.0, var=0.0, scale=4.0)  # no noise
    1.0
    >>> gain(sqr=0.0, var=1.0, scale=4.0)  # pure noise
    4.0
    >>> gain(sqr=0.0, var=0.0, scale=4.0)  # no gradient
    1.0
    """
    large_batch = var / scale + sqr
    if scale == 1.0 or large_batch == 0.0:
        return 1.0
    least, most = sorted((1.0, scale))
    return min(max((var + sqr) / large_batch, least), most)  # despite rounding errors


def ratio_of_squares(sqr: float, var: float, before: float, now: float) -> float:
    """Return the ratio of E g^2 at scale `now` to E g^2 at scale `before`.

    >>> ratio_of_squares(sqr=1.0, var=16.0, before=1.0, now=16.0)  # 2 / 17
    0.11764705882352941
    >>> ratio_of_squares(sqr=0.0, var=0.0, before=1.0, now=16.0)
    1.0
    """
    squares = sqr + var / before
    if not squares > 0.0:
        return 1.0
    return (sqr + var / now) / squares


def apply_floor(values: Sequence[float], floor: float) -> tuple[float, ...]:
    return tuple(max(value, floor) for value in values)


def extend(values: tuple[float, ...], start: float, groups: int) -> tuple[float, ...]:
    return values + (start,) * (groups - len(values))


@dataclass(frozen=True)
class MovingAverage:
    """An average of values per parameter group."""

    mean: tuple[float, ...] = ()
    seen: tuple[float, ...] = ()  # accumulated weights or number of values

    def value(self, start: float, groups: int) -> tuple[float, ...]:
        return extend(self.mean, start, groups)

    def add(self, values: Sequence[float], smoothing: float, steps: int = 1) -> Self:
        """Return the average with a further value per group, which represents `steps` steps."""
        means = []
        seen = []
        old_means = extend(self.mean, 0.0, len(values))
        old_seen = extend(self.seen, 0.0, len(values))
        for mean, before, value in zip(old_means, old_seen, values, strict=True):
            now, share = self._count(before, smoothing, steps)
            means.append(mean + share * (value - mean))
            seen.append(now)
        return type(self)(tuple(means), tuple(seen))

    def _count(self, seen: float, smoothing: float, steps: int) -> tuple[float, float]:
        """Return `seen` after a value, with the value's share of the average."""
        raise NotImplementedError

    def steps_of(self, seen: float, smoothing: float) -> float:
        raise NotImplementedError

    def to_state(self) -> dict[str, list[float]]:
        return {"mean": list(self.mean), "seen": list(self.seen)}

    def steps_held(self, smoothing: float, groups: int) -> float:
        return self.steps_of(min(extend(self.seen, 0.0, groups)), smoothing)


class DebiasedAverage(MovingAverage):
    """A moving average divided by the accumulated weight, as in Adam."""

    def _count(self, seen: float, smoothing: float, steps: int) -> tuple[float, float]:
        new = 1.0 - smoothing**steps
        weight = (1.0 - new) * seen + new
        return weight, new / weight

    def steps_of(self, seen: float, smoothing: float) -> float:
        # seen = 1 - smoothing ** steps
        if seen == 0.0:
            return 0.0
        if seen >= 1.0 or smoothing == 0.0:
            return math.inf
        return math.log1p(-seen) / math.log(smoothing)


class PaperAverage(MovingAverage):
    """The AdaScale paper's appendix B.3.

    A plain mean for the first 1 / (1 - smoothing) steps, then a moving average.
    """

    def _count(self, seen: float, smoothing: float, steps: int) -> tuple[float, float]:
        count = seen + steps
        if count < 1 / (1 - smoothing) or seen == 0:
            return count, steps / count
        return count, 1 - smoothing**steps

    def steps_of(self, seen: float, smoothing: float) -> float:
        return seen


def load_average(kind: type[MovingAverage], state: SavedEntries, groups: int) -> MovingAverage:
    mean = state.reals("mean", least=-SQUARES, below=SQUARES)
    if len(mean) > groups:
        raise state.wrong("mean", f"of at most {groups} parameter groups", mean)
    # Rounding may raise a weight above 1. No step adds less than the smallest 1 - smoothing.
    most = BELOW if kind is PaperAverage else 1.001
    return kind(tuple(mean), tuple(state.reals("seen", len(mean), least=1e-16, below=most)))


def _of_group(values: Sequence[float], floor: float, group: int | None) -> float:
    values = apply_floor(values, floor)
    if group is None:
        return sum(values)
    return values[group]


@dataclass(frozen=True)
class NoiseAverage:
    """Averages of |true gradient|^2 and of the noise at scale 1, per parameter group.

    Floors apply to the averages. Floors for each step's estimate, as in fairscale, would bias both
    averages upwards.

    The `noise` of a rule is a NoiseAverage:

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = mh.AdaScale(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2
    ... )
    >>> for _ in range(2):
    ...     (model(torch.randn(4, 2)).square().mean() / 2).backward()
    >>> optimizer.step()
    >>> optimizer.noise.measured, optimizer.noise.var_of() > 0.0
    (True, True)
    """

    groups: int
    sqr: MovingAverage = DebiasedAverage()
    var: MovingAverage = DebiasedAverage()
    consecutive: bool = False
    norm_kind: str = "plain"
    mix_norm_kinds: bool = False
    var_floor: float = VAR_FLOOR

    def add(self, sums: NormSums, smoothing: float) -> NoiseAverage:
        """Return the average with a further step, which must have finite norms."""
        old = self._before(sums)
        new = estimate(sums)
        # adaptdl averages both kinds, which have different magnitudes.
        mixed = self.mix_norm_kinds and sums.norm_kind == "preconditioned"
        if not mixed and old.steps_held(smoothing) >= STEPS_BEFORE_LIMIT:
            new = limit_noise(new, old.raw_sqr, old.raw_var, sums.small_batches)
        return replace(
            self,
            sqr=old.sqr.add(new.sqr, smoothing, sums.steps),
            var=old.var.add(new.var, smoothing, sums.steps),
            consecutive=sums.consecutive,
            norm_kind=sums.norm_kind,
        )

    def _before(self, sums: NormSums) -> NoiseAverage:
        """Return this average, or an empty one if the step's norms do not match."""
        # The worse estimate from consecutive gradients is dropped after the first step with more
        # gradients. Plain and preconditioned norms differ by orders of magnitude. adaptdl mixes
        # both when preconditioning starts, but a return to plain norms, after a reset of the
        # optimizer, restarts the average.
        kinds_must_match = sums.norm_kind != "preconditioned" or not self.mix_norm_kinds
        kind_changed = sums.norm_kind != self.norm_kind and kinds_must_match
        if kind_changed or (self.consecutive and not sums.consecutive):
            return self.restarted()
        return self

    def restarted(self) -> NoiseAverage:
        """Return an empty average of this kind."""
        return replace(self, sqr=type(self.sqr)(), var=type(self.var)())

    @property
    def raw_sqr(self) -> tuple[float, ...]:
        """Averages of |true gradient|^2 without the floor; 1 before the first step."""
        return self.sqr.value(1.0, self.groups)

    @property
    def raw_var(self) -> tuple[float, ...]:
        """Averages of the noise without the floor; 0 before the first step."""
        return self.var.value(0.0, self.groups)

    def sqr_of(self, group: int | None = None) -> float:
        """Return |true gradient|^2 of a group, or the sum over all groups."""
        return _of_group(self.raw_sqr, SQR_FLOOR, group)

    def var_of(self, group: int | None = None) -> float:
        """Return the noise at scale 1 of a group, or the sum over all groups."""
        return _of_group(self.raw_var, self.var_floor, group)

    def gain(self, scale: float, group: int | None = None) -> float:
        """Return the number of steps at scale 1 that a step at `scale` is worth."""
        return gain(self.sqr_of(group), self.var_of(group), scale)

    def steps_held(self, smoothing: float) -> float:
        """Return the number of steps in the average, for the group with the fewest."""
        return self.var.steps_held(smoothing, self.groups)

    @property
    def measured(self) -> bool:
        return self.sqr != type(self.sqr)()

    def noise_scale(self, group: int | None = None) -> float | None:
        """Return noise / |true gradient|^2 in batches of scale 1; None if there is no signal.

        Values much larger than the scale have a large relative error; the gain does not.
        """
        sqr = self.sqr_of(group)
        if not (self.measured and sqr > 0.0):
            return None
        return self.var_of(group) / sqr

    def to_state(self) -> dict[str, object]:
        """Return the averages for a state dict, without the floors, which are options."""
        return {
            "debiased": isinstance(self.sqr, DebiasedAverage),
            "sqr": self.sqr.to_state(),
            "var": self.var.to_state(),
            "consecutive": self.consecutive,
            "norm_kind": self.norm_kind,
        }

    def from_state(self, state: SavedEntries) -> NoiseAverage:
        """Return the average with values from `to_state`."""
        kind = DebiasedAverage if state.flag("debiased") else PaperAverage
        one_of("norm_kind", state["norm_kind"], ("plain", "preconditioned"))
        return replace(
            self,
            sqr=load_average(kind, state.part("sqr"), self.groups),
            var=load_average(kind, state.part("var"), self.groups),
            consecutive=state.flag("consecutive"),
            norm_kind=state["norm_kind"],
        )


# -- the history of a rule -------------------------------------------------------------------------


@dataclass
class MeasuredSteps:
    """The position of a run between two measured steps."""

    left: int = 0  # steps until the next measured step; 0: the current step
    passed: int = 0  # steps since the last measured step

    @property
    def due(self) -> bool:
        return self.left <= 0

    @property
    def weight_in_steps(self) -> int:
        """Number of steps that a measurement in the current step represents."""
        return self.passed + 1

    def count(self, period: int) -> None:
        """Count a step. `period` is the number of steps until the next measured step."""
        if self.due:
            self.passed = 0
            self.left = period - 1
        else:
            self.passed += 1
            self.left = min(self.left, period) - 1

    def to_state(self) -> list[int]:
        return [self.left, self.passed]


def default_steps_between(memory: float) -> int:
    """Return the default of `measure_every`: 4, or up to 8 if the memory has 60 measured steps.

    >>> default_steps_between(500), default_steps_between(250)
    (8, 4)
    """
    return max(4, min(8, int(memory / 60)))


def steps_between(k: int, memory: float, held: float, small_batches: int) -> int:
    """Return the number of steps that a measured step may represent, up to k.

    The averages contain `held` steps of `small_batches` each.

    >>> steps_between(4, 500, held=500, small_batches=2), steps_between(4, 500, 499, 2)
    (4, 1)
    >>> steps_between(4, 10, held=10, small_batches=2), steps_between(4, 10, 10, 100)
    (1, 2)
    """
    if held < memory - 0.5:
        return 1
    return max(1, min(k, int(memory * min(small_batches / LEAST, 1 / LEAST_STEPS) + 1e-6)))


COUNTS = ("steps", "skipped", "short", "nonfinite", "nonfinite_in_a_row")


@dataclass
class History:
    """The results of a rule's completed steps. The owner of the progress."""

    average: NoiseAverage
    factors: tuple[float, ...] = ()  # of the last step, by parameter group
    progress: float = 0.0  # the sum of the gains
    steps: int = 0
    skipped: int = 0
    short: int = 0  # steps with fewer passes than declared
    nonfinite: int = 0  # steps with gradients that were not finite
    nonfinite_in_a_row: int = 0
    sums: NormSums | None = None  # of the last step in the average, if it was measured

    def average_with(self, sums: NormSums | None, smoothing: float) -> NoiseAverage:
        if sums is None or not sums.all_finite:
            return self.average
        return self.average.add(sums, smoothing)

    def add(self, sums: NormSums | None, smoothing: float, *, skipped: bool) -> None:
        """Count a step, and add finite gradients to the average."""
        self.steps += 1
        self.skipped += skipped
        if skipped or not (sums is None or sums.all_finite):
            self.nonfinite += 1
            self.nonfinite_in_a_row += 1
        else:
            self.nonfinite_in_a_row = 0
            self.average = self.average_with(sums, smoothing)
            self.sums = sums

    @property
    def checksum(self) -> float:
        average = self.average
        return self.progress + sum(average.raw_sqr) + sum(average.raw_var) + sum(self.factors)

    def to_state(self) -> dict[str, object]:
        return {
            "average": self.average.to_state(),
            "progress": self.progress,
            **{name: getattr(self, name) for name in COUNTS},
        }

    def load(self, saved: History) -> None:
        self.average = saved.average
        self.progress = saved.progress
        for name in COUNTS:
            setattr(self, name, getattr(saved, name))

    def parse_state(self, entry: SavedEntries) -> History:
        """Return the saved history with the current settings, or raise."""
        counts: dict[str, Any] = {name: entry.whole(name) for name in COUNTS}
        average = self.average.from_state(entry.part("average"))
        return replace(self, average=average, progress=entry.real("progress"), **counts)
