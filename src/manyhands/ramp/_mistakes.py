"""Errors of `Ramp`'s arguments, and warnings of what a growing batch does to a script."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from manyhands._core.modules import modules_holding
from manyhands.ramp._decision import Limits
from manyhands.ramp._micro_batches import StepLoader
from manyhands.scaling._rule_base import ScalingRuleBase

GOALS = ("time", "samples", "steps", None)
STEPS_IN_A_ROW = 20  # a rate that changes in so many follows a schedule that counts steps


def check_rule(optimizer: Optimizer) -> ScalingRuleBase:
    """Return the optimizer. Raise if it is no scaling rule, or if another `Ramp` has it."""
    if not isinstance(optimizer, ScalingRuleBase):
        raise TypeError(
            f"Ramp needs an optimizer under a scaling rule, got {type(optimizer).__name__}: "
            "the rule measures the noise, and scales the learning rate with the batch. Write "
            "mh.AdaScale(optimizer) for SGD, mh.AdamScale(optimizer) for Adam and AdamW."
        )
    if optimizer._observer is not None:
        raise ValueError(
            "this optimizer has a Ramp already. Use that one: a batch is decided by one Ramp only."
        )
    return optimizer


def check_goal_and_numbers(
    max_scale: float,
    limits: Limits,
    decay: str,
    numbers: Mapping[str, object],
) -> None:
    """Raise for an argument that makes no sense; `numbers` are numbers of steps, by name."""
    if limits.goal not in GOALS:
        raise ValueError(f"goal must be one of {', '.join(map(repr, GOALS))}, got {limits.goal!r}.")
    if decay not in ("rate", "batch"):
        raise ValueError(f"decay must be 'rate' or 'batch', got {decay!r}.")
    if limits.efficiency is not None and limits.goal != "samples":
        raise ValueError(f"efficiency needs goal='samples', got goal={limits.goal!r}.")
    if limits.efficiency is not None and not 0.0 < limits.efficiency <= 1.0:
        raise ValueError(f"efficiency must be above 0 and at most 1, got {limits.efficiency}.")
    for name, steps in numbers.items():
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"{name} must be a whole number of steps above 0, got {steps!r}.")
    if not (limits.growth > 1.0 and math.isfinite(limits.growth)):
        raise ValueError(f"growth must be a number above 1, such as 2.0, got {limits.growth}.")
    if not math.isfinite(max_scale):
        raise ValueError(f"max_scale must be a number, such as 64, got {max_scale}.")


def check_parts(loader: object, probe: object) -> None:
    """Raise if a loader or a probe is of another kind."""
    if loader is not None and not isinstance(loader, StepLoader):
        raise TypeError(
            f"loader= takes an AdaptiveDataLoader, got {type(loader).__name__}. Give any other "
            "loader of micro-batches to over()."
        )
    if probe is not None and not callable(probe):
        raise TypeError(
            f"probe must be a function without arguments, got {probe!r}: write probe=lambda: "
            "mh.probe_batch(...). Every how many steps it is called is probe_every."
        )


@dataclass
class ScheduleWatch:
    """Warns once if the learning rate follows a schedule that counts optimizer steps.

    One that counts micro-batches or samples is right, and moves further in a larger step. Where the
    size of a step changes, `follows` compares the change of the rate with that of the size: of
    this step, if the schedule is stepped in its passes, or of the step before.
    """

    rates: tuple[float, ...] = ()
    in_a_row: int = 0
    moved: float = 0.0  # by how much the rates have changed since the step before
    sizes: tuple[float, float] = (1.0, 1.0)  # of the last two steps
    follows: tuple[SizeFollower, SizeFollower] = field(
        default_factory=lambda: (SizeFollower(), SizeFollower())
    )
    warned: bool = False

    def see(self, rates: Sequence[float], growth: float) -> None:
        """Take note of a step's rates; its batch is `growth` times that of the first step."""
        pairs = zip(rates, self.rates, strict=False)
        moved = sum(abs(now - before) for now, before in pairs)
        sizes = (*self.sizes, growth)
        if moved and self.moved:
            for follower, (before, now) in zip(self.follows, (sizes[1:], sizes[:-1]), strict=True):
                follower.see(now / before, moved / self.moved)
        self.in_a_row = self.in_a_row + 1 if moved else 0
        self.rates, self.moved, self.sizes = tuple(rates), moved, (sizes[1], sizes[2])
        if self.in_a_row < STEPS_IN_A_ROW or growth <= 1.0 or self.warned:
            return
        if any(follower.follows for follower in self.follows):
            return
        self.warned = True
        warnings.warn(
            f"the learning rate has changed in each of the last {self.in_a_row} steps, and a step "
            f"has grown to {growth:g} times its first batch. A schedule that counts optimizer "
            "steps ends after the same number of them, and so after more data. Let it count "
            "progress: mh.ProgressScheduler(scheduler, optimizer, end=...).",
            stacklevel=2,
        )


@dataclass
class SizeFollower:
    """Whether one number changes by the same factor as another: the slope of their logarithms."""

    product: float = 0.0
    square: float = 0.0

    def see(self, size: float, other: float) -> None:
        """Take note of the factor by which the size has changed, and the other number."""
        self.product += math.log(size) * math.log(other)
        self.square += math.log(size) ** 2

    @property
    def follows(self) -> bool:
        """Whether the slope is nearer to 1 than to 0."""
        return self.product > 0.5 * self.square


def warn_of_batch_norm(
    model: nn.Module | None, params: Sequence[Tensor], smallest: int, largest: int
) -> None:
    """Warn if a model's normalisation would see micro-batches of several sizes.

    Without the model its layers are found by their parameters.
    """
    if largest <= smallest:
        return
    if model is None:
        found = modules_holding(params, lambda module: isinstance(module, _BatchNorm))
        names = [type(module).__name__ for module, _ in found]
    else:
        names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if names:
        warnings.warn(
            f"the statistics of {names[0] or type(model).__name__} "
            f"({len(names)} layer(s) of batch normalisation) are those of a micro-batch, which may "
            f"grow from {smallest} to {largest} samples on each rank. Leave max_local_batch_size "
            "out to keep micro-batches as they are: then only their number grows.",
            stacklevel=2,
        )
