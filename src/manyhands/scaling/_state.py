"""The scaling entry of a state dict: the parts of a rule, each as it saves itself.

A wrapper's state dict is its inner optimizer's with one entry added, under `KEY`. The batch, the
options, the noise tracker and the tap each write their part of the entry and parse it. All of it is
parsed and checked before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from manyhands._core.state_parts import plain_optimizer
from manyhands._core.wrappers import unwrap
from manyhands.scaling._batch import Batch
from manyhands.scaling._noise_tracker import NoiseTracker, StepCounts, TrackerState
from manyhands.scaling._options import OptionMismatch, Options, load_options, save_options
from manyhands.scaling._tap import TapState

KEY = "manyhands"
VERSION = 2  # of the entry's format


@dataclass(frozen=True)
class ScalingState:
    """The scaling entry of a state dict, parsed and found to fit."""

    batch: Batch
    options: Options
    mismatches: list[OptionMismatch]
    tracker: TrackerState
    tap: TapState
    counts: StepCounts


def describe_origin(norm_kind: str, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a state dict records about the wrapper that it is from."""
    inner = unwrap(optimizer)[-1]  # the same name with and without blocks around it
    return {
        "version": VERSION,
        "gradients": norm_kind,
        "optimizer": type(plain_optimizer(inner)).__name__,  # with and without sharding
        "group_sizes": [len(group["params"]) for group in optimizer.param_groups],
    }


def save_parts(tracker: NoiseTracker, options: Options, counts: StepCounts) -> dict[str, Any]:
    """Return what the parts of a rule save."""
    tap = tracker.tap
    return {
        **counts.to_state(),
        **tracker.to_state(),
        **tap.to_state(),
        "batch": tap.batch.to_state(),
        "options": save_options(options),
    }


def get_entry(state_dict: Mapping[str, Any], rule: str) -> Mapping[str, Any]:
    """Return the scaling entry of a wrapper's state dict."""
    if KEY not in state_dict:
        raise ValueError(
            f"this state dict has no {KEY!r} entry: it is a bare optimizer's, or from another "
            "library. To continue a bare run under a scaling rule, load it before wrapping: "
            f"optimizer.load_state_dict(...), then mh.{rule}(optimizer)."
        )
    return state_dict[KEY]


def parse_entry(
    entry: Mapping[str, Any], origin: Mapping[str, Any], tracker: NoiseTracker, options: Options
) -> ScalingState:
    """Return the parsed entry; raise a ValueError if it does not fit this wrapper.

    `origin` describes this wrapper; its parts and options have what was set in this run.
    """
    for name, what, advice in (
        ("version", "format version", "Load it with the release that wrote it."),
        ("optimizer", "optimizer", "Build the optimizer that the run was saved with."),
        ("gradients", "kind of gradients", "Wrap with a rule that measures the same kind."),
        ("group_sizes", "numbers of parameters per group", "Build the same parameter groups."),
    ):
        if entry.get(name) != origin[name]:
            raise ValueError(
                f"the state dict's {what} is {entry.get(name)!r}, this wrapper's is "
                f"{origin[name]!r}. {advice}"
            )
    try:
        batch, batch_mismatches = tracker.tap.batch.parse_state(entry["batch"])
        loaded_options, mismatches = load_options(options, entry["options"])
        return ScalingState(
            batch=batch,
            options=loaded_options,
            mismatches=batch_mismatches + mismatches,
            tracker=tracker.parse_state(entry),
            tap=tracker.tap.parse_state(entry),
            counts=StepCounts.parse_state(entry),
        )
    # Whatever a damaged file can provoke: the user gets one kind of error for all of it. A
    # RuntimeError is torch's, for a tensor of several elements where a number is expected.
    except (
        KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError
    ) as error:  # fmt: skip
        raise ValueError(f"the state dict is damaged: its {KEY!r} entry, {error!r}.") from error
