"""Define options that change the numbers, and the loop that decides about passes.

A setting belongs to the run, and therefore to its state dict. Its value comes from the
first of these places that has one:

    explicit   set by the user in this process
    recorded   loaded from a state dict, or worked out by the run itself
    default    used if neither of the two exists

An `Option` is one such number. What describes this process and its loop (passes, the process group,
the gradient scaler) is never taken from a state dict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

import torch.distributed as dist
from torch import nn

from manyhands._arguments import real
from manyhands._optimizers.state_parts import SavedState
from manyhands._optimizers.wrappers import LossScaler

ShortStep: TypeAlias = Literal["error", "count"]
PASSES = "num_gradients_to_accumulate"
PER_STEP = "It is the number of backward() calls between two step() calls."


# -- options ---------------------------------------------------------------------------------------


class RuleOptions(TypedDict, total=False):
    """The options that every rule accepts by name; `ScalingRuleBase` documents them."""

    world_size: int | None
    scale: float | None
    smoothing: float | None
    num_gradients_to_accumulate: int | Accumulation
    is_scaled_loss: bool
    debias_ewma: bool
    process_group: dist.ProcessGroup | None
    grad_scaler: LossScaler | None
    var_floor: float | None
    measure_every: int | None
    short_step: ShortStep | None
    model: nn.Module | None


@dataclass(frozen=True)
class Option:
    """An option that changes the numbers. `check` raises if a value makes no sense."""

    default: float | None
    explicit: float | None = None
    recorded: float | None = None
    check: Callable[[float], object] = lambda value: None

    def __post_init__(self) -> None:
        """Check the values, also in `dataclasses.replace`: a damaged state dict is caught here."""
        for value in (self.explicit, self.recorded):
            if value is not None:
                self.check(value)

    @property
    def value(self) -> float | None:
        chosen = self.recorded if self.explicit is None else self.explicit
        return self.default if chosen is None else chosen

    @property
    def number(self) -> float:
        """The value of an option that has a default."""
        number = self.value
        assert number is not None
        return number


@dataclass(frozen=True)
class OptionMismatch:
    """An option that has one value in this run and another in the state dict."""

    name: str
    here: float | None
    in_state_dict: float | None

    def __str__(self) -> str:
        return f"{self.name}={self.here} here, {self.in_state_dict} in the state dict"


Options = dict[str, Option]


def save_options(options: Options) -> dict[str, float | None]:
    """Return the options for a state dict; None for options that were never set."""
    # A default is not saved: the next run then has its own default, and no false mismatch.
    return {name: o.recorded if o.explicit is None else o.explicit for name, o in options.items()}


def load_options(options: Options, state: SavedState) -> tuple[Options, list[OptionMismatch]]:
    """Return the options with those of a state dict, and where explicit values differ from it."""
    loaded = {}
    mismatches = []
    for name, option in options.items():
        now = replace(option, recorded=state.get(name))
        loaded[name] = now
        saved = replace(now, explicit=None).value  # if nothing were set in this run
        if now.explicit is not None and saved is not None and now.value != saved:
            mismatches.append(OptionMismatch(name, now.value, saved))
    return loaded, mismatches


def describe_mismatches(mismatches: list[OptionMismatch], rule: str) -> str:
    """Return the text of the warning about mismatches."""
    listed = "; ".join(map(str, mismatches))
    return f"{rule} uses options that differ from the state dict's: {listed}."


# -- passes ----------------------------------------------------------------------------------------


@runtime_checkable
class Accumulation(Protocol):
    """A loop that decides how many backward passes a step has, such as a trainer's.

    >>> import torch, manyhands as mh
    >>> class Loop:
    ...     gradient_accumulation_steps = 4
    ...     sync_gradients = False
    >>> loop, model = Loop(), torch.nn.Linear(2, 1)
    >>> optimizer = mh.AdaScale(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=loop
    ... )
    >>> for number in range(3):  # the data ends after three of four passes
    ...     loop.sync_gradients = number == 2
    ...     (model(torch.randn(8, 2)).mean() / 4).backward()
    >>> optimizer.step()
    >>> optimizer.scale
    3.0

    A rule reads `gradient_accumulation_steps` at the beginning of each step, and `sync_gradients`
    at the end of each backward pass. Both must be the same on all ranks.
    """

    @property
    def gradient_accumulation_steps(self) -> int:
        """Passes of a whole step, by which the loss of each pass is divided."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the pass under way is its step's last."""


# -- values ----------------------------------------------------------------------------------------


def check_smoothing(smoothing: float) -> float:
    """Return the weight of the past, or raise if no average can be made with it."""
    return real("smoothing", smoothing, least=0.0, below=1.0, why="It is the weight of the past.")
