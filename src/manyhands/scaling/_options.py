"""Options that change the numbers: set by the user, or loaded from a state dict.

Such an option belongs to the run, and therefore to its state dict. Its value comes from the first
of these places that has one:

    explicit   set by the user in this process
    recorded   loaded from a state dict, or worked out by the run itself
    default    used if neither of the two exists

Options of the loop (passes, the process group, the gradient scaler, `delayed`) describe this
process and are never taken from a state dict. Scale and smoothing follow the same order, in
`_batch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from torch import nn


class RuleOptions(TypedDict, total=False):
    """The options that every rule accepts by name; `ScalingRuleBase` documents them."""

    world_size: int | None
    scale: float | None
    smoothing: float | None
    num_gradients_to_accumulate: int
    is_scaled_loss: bool
    debias_ewma: bool | None
    process_group: Any
    grad_scaler: Any
    delayed: bool
    floor_each_step: bool | None
    var_floor: float | None
    model: nn.Module | None


@dataclass(frozen=True)
class Option:
    """An option that changes the numbers. `check` raises if a value makes no sense."""

    default: float | None
    explicit: float | None = None
    recorded: float | None = None
    check: Callable[[float], object] = lambda value: None

    def __post_init__(self) -> None:
        # also runs in `dataclasses.replace`, so a damaged state dict is caught here
        for value in (self.explicit, self.recorded):
            if value is not None:
                self.check(value)

    @property
    def value(self) -> Any:
        chosen = self.recorded if self.explicit is None else self.explicit
        return self.default if chosen is None else chosen


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


def load_options(
    options: Options, state: Mapping[str, Any]
) -> tuple[Options, list[OptionMismatch]]:
    """Return the options with those of a state dict, and where explicit values differ from it."""
    loaded = {name: replace(o, recorded=state.get(name)) for name, o in options.items()}
    # the values that would hold if nothing were set in this run
    saved = {name: replace(o, explicit=None).value for name, o in loaded.items()}
    return loaded, [
        OptionMismatch(name, o.value, saved[name])
        for name, o in loaded.items()
        if o.explicit is not None and o.value != saved[name] and saved[name] is not None
    ]


def describe_mismatches(mismatches: list[OptionMismatch], rule: str) -> str:
    """Return the text of the warning about mismatches."""
    return (
        f"{rule} was given options that differ from the state dict's: "
        f"{'; '.join(map(str, mismatches))}. The values given here are used. Leave an option out "
        "to take it from the state dict."
    )
