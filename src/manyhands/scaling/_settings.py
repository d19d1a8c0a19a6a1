"""Define options of rules, and the protocol `Accumulation`.

An option is saved in the state dict. The value comes from the first of:

    explicit   set by the user in this process
    recorded   loaded from a state dict, or determined by the run
    default

Properties of the process or the loop (passes, process group, gradient scaler) are never loaded.
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
    """Options that every rule accepts by name; see `ScalingRuleBase`."""

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
    """A saved option that affects the results. `check` raises for invalid values."""

    default: float | None
    explicit: float | None = None
    recorded: float | None = None
    check: Callable[[float], object] = lambda value: None

    def __post_init__(self) -> None:
        # `dataclasses.replace` calls this too, for values of a state dict.
        for value in (self.explicit, self.recorded):
            if value is not None:
                self.check(value)

    @property
    def value(self) -> float | None:
        chosen = self.recorded if self.explicit is None else self.explicit
        return self.default if chosen is None else chosen

    @property
    def number(self) -> float:
        number = self.value
        assert number is not None
        return number


@dataclass(frozen=True)
class OptionMismatch:
    """An option with different values in this run and in a state dict."""

    name: str
    here: float | None
    in_state_dict: float | None

    def __str__(self) -> str:
        return f"{self.name}={self.here} here, {self.in_state_dict} in the state dict"


Options = dict[str, Option]


def save_options(options: Options) -> dict[str, float | None]:
    # Defaults are not saved: the next run uses the current default.
    return {name: o.recorded if o.explicit is None else o.explicit for name, o in options.items()}


def load_options(options: Options, state: SavedState) -> tuple[Options, list[OptionMismatch]]:
    """Return the loaded options, and mismatches with explicit values."""
    loaded = {}
    mismatches = []
    for name, option in options.items():
        now = replace(option, recorded=state.get(name))
        loaded[name] = now
        saved = replace(now, explicit=None).value  # as without the explicit value
        if now.explicit is not None and saved is not None and now.value != saved:
            mismatches.append(OptionMismatch(name, now.value, saved))
    return loaded, mismatches


def describe_mismatches(mismatches: list[OptionMismatch], rule: str) -> str:
    listed = "; ".join(map(str, mismatches))
    return f"{rule} uses options that differ from the state dict's: {listed}."


# -- passes ----------------------------------------------------------------------------------------


@runtime_checkable
class Accumulation(Protocol):
    """A loop that chooses the number of backward passes per step, such as a trainer's.

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

    A rule reads `gradient_accumulation_steps` at the beginning of each step and `sync_gradients`
    at the end of each backward pass. All ranks must have equal values.
    """

    @property
    def gradient_accumulation_steps(self) -> int:
        """Passes of a full step. Each pass's loss is divided by this number."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current pass is the last of the step."""


# -- values ----------------------------------------------------------------------------------------


def check_smoothing(smoothing: float) -> float:
    return real("smoothing", smoothing, least=0.0, below=1.0, why="It is the weight of the past.")
