"""What a run has set: options that change the numbers, and the loop that decides about passes.

**Options.** A setting belongs to the run, and therefore to its state dict. Its value comes from the
first of these places that has one:

    explicit   set by the user in this process
    recorded   loaded from a state dict, or worked out by the run itself
    default    used if neither of the two exists

An `Option` is one such number. What describes this process and its loop (passes, the process group,
the gradient scaler) is never taken from a state dict.

**Passes.** In a loop of one's own, the number of passes is declared, and every step has it. The
loops of trainers decide it themselves, and take the last step of an epoch with the passes that are
left:

    N     passes of a whole step; trainers divide every pass's loss by it
    m     passes of a short step, m < N; its gradient is then m / N times the mean of m passes

An `Accumulation` says both while the loop runs, so nothing is declared twice. Its names are those
of Accelerate, whose `Accelerator` is one. Other trainers have adapters (`manyhands.integrations`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import (
    Literal,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    runtime_checkable,
)

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from manyhands._core.arguments import real, whole
from manyhands._core.state_parts import SavedState
from manyhands._core.wrappers import LossScaler, find_prepared

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
        # also runs in `dataclasses.replace`, so a damaged state dict is caught here
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
        chosen = self.recorded if self.explicit is None else self.explicit
        number = self.default if chosen is None else chosen
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
    listed = "; ".join(map(str, mismatches))
    return f"{rule} uses options that differ from the state dict's: {listed}."


# -- passes ----------------------------------------------------------------------------------------


@runtime_checkable
class Accumulation(Protocol):
    """A loop that decides how many backward passes a step has; Accelerate's `Accelerator` is one.

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


class GatedAccumulation:
    """The accumulation of an optimizer that Accelerate has prepared.

    Accelerate's loop calls `step()` and `zero_grad()` in every pass. A prepared optimizer ignores
    these calls, except after the step's last pass. A rule around it does the same.
    """

    def __init__(self, gradient_state: object) -> None:
        self._gradient_state = gradient_state

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self._gradient_state.num_steps)  # type: ignore[attr-defined]

    @property
    def sync_gradients(self) -> bool:
        return bool(self._gradient_state.sync_gradients)  # type: ignore[attr-defined]


def check_prepared(prepared: Optimizer, rule: str) -> None:
    """Raise if the gradients of a prepared optimizer cannot be measured."""
    state = getattr(prepared, "accelerator_state", None)
    kind = getattr(getattr(state, "distributed_type", None), "value", None)
    first_fsdp = kind == "FSDP" and state.fsdp_plugin.fsdp_version == 1  # type: ignore[union-attr]
    if first_fsdp or kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise TypeError(f"{rule} cannot measure gradients under {kind}. Use DDP, FSDP2 or OSS.")


def accumulation_of(optimizer: Optimizer, declared: int) -> GatedAccumulation | None:
    """Return the accumulation of a prepared optimizer, or None if it has none.

    If the prepared optimizer does not accumulate, and a number of passes was declared, the loop
    accumulates by itself. The declared number counts then.
    """
    prepared = find_prepared(optimizer)
    if prepared is None:
        return None
    found = GatedAccumulation(vars(prepared)["gradient_state"])
    passes = found.gradient_accumulation_steps
    if declared not in (1, passes):
        if passes == 1:
            return None
        raise ValueError(
            f"{PASSES}={declared}, but the Accelerator accumulates {passes} passes. "
            "Leave the argument out."
        )
    return found


def passes_and_loop(passes: SupportsIndex | Accumulation) -> tuple[int, Accumulation | None]:
    """Return how many passes a step has, and the loop that decides it, if one was given."""
    if isinstance(passes, Accumulation):
        return passes.gradient_accumulation_steps, passes
    return whole(PASSES, passes, least=1, why=PER_STEP), None


# -- values ----------------------------------------------------------------------------------------


def check_smoothing(smoothing: float) -> float:
    """Return the weight of the past, or raise if no average can be made with it."""
    return real("smoothing", smoothing, least=0.0, below=1.0, why="It is the weight of the past.")
