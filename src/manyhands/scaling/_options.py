"""What the user said, what a state dict says, and which of the two counts.

An option that changes the numbers belongs to the run, and so to its state dict. There are three
places that its value may come from, the first that has one counts:

    said       by the user in this process
    found      in the state dict that was loaded, or worked out by the run itself
    default    where nobody has said anything

Options of the loop (passes, the process group, the gradient scaler, `delayed`) describe this
process and are never taken from a state dict. Scale and smoothing follow the same order in
`_batch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from torch import nn


class RuleOptions(TypedDict, total=False):
    """The options that every rule takes, by name: see `ScalingRuleBase`."""

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
    """An option that changes the numbers. `check` returns a value that makes sense, or raises."""

    default: Any
    said: Any = None
    found: Any = None
    check: Callable[[Any], Any] = lambda value: value

    def __post_init__(self) -> None:
        for value in (self.said, self.found):
            if value is not None:
                self.check(value)

    @property
    def value(self) -> Any:
        given = self.found if self.said is None else self.said
        return self.default if given is None else given


@dataclass(frozen=True)
class OptionChange:
    """An option of which this run says something else than the state dict."""

    name: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.name}={self.here} here, {self.there} in the state dict"


Options = dict[str, Option]


def saved(options: Options) -> dict[str, Any]:
    """What a state dict says of them; None where nobody has said anything."""
    return {name: o.found if o.said is None else o.said for name, o in options.items()}


def with_found(options: Options, state: Mapping[str, Any]) -> tuple[Options, list[OptionChange]]:
    """The options after a state dict was loaded, and where this run says something else."""
    loaded = {name: replace(o, found=state.get(name)) for name, o in options.items()}
    there = {name: replace(o, said=None).value for name, o in loaded.items()}
    return loaded, [
        OptionChange(name, o.value, there[name])
        for name, o in loaded.items()
        if o.said is not None and o.value != there[name] and there[name] is not None
    ]


def explained(changes: list[OptionChange], rule: str) -> str:
    """The warning about them."""
    return (
        f"{rule} was given other options than the state dict has: "
        f"{'; '.join(map(str, changes))}. What was given here is used. Leave an option out to "
        "take it from the state dict."
    )
