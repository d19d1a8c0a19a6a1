"""The scaling entry of a state dict: what it contains, and what must fit before it is loaded.

A wrapper's state dict is its inner optimizer's with one entry added, under `KEY`. The entry is
parsed and checked as a whole before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.state_parts import plain_optimizer
from manyhands._core.wrapper import unwrap
from manyhands.scaling._averages import NoiseAverage
from manyhands.scaling._batch import Batch
from manyhands.scaling._options import OptionMismatch, Options, load_options

KEY = "manyhands"
VERSION = 2  # of the entry's format


@dataclass(frozen=True)
class ScalingState:
    """The scaling entry of a state dict, parsed and found to fit."""

    average: NoiseAverage
    previous: list[Tensor | None]  # the last step's gradient, by parameter
    batch: Batch
    options: Options
    mismatches: list[OptionMismatch]
    loss_scale: float | None
    progress: float
    steps: int
    skipped: int
    nonfinite: int
    nonfinite_in_a_row: int
    norms: list[Any]  # of the norm kind: see `NormKind.to_state`


def describe_origin(norm_kind: str, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a state dict records about the wrapper that it is from."""
    inner = unwrap(optimizer)[-1]  # the same name with and without blocks around it
    return {
        "version": VERSION,
        "gradients": norm_kind,
        "optimizer": type(plain_optimizer(inner)).__name__,  # with and without sharding
        "group_sizes": [len(group["params"]) for group in optimizer.param_groups],
    }


def get_entry(state_dict: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """Return the scaling entry of a wrapper's state dict."""
    if KEY not in state_dict:
        raise ValueError(
            f"this state dict has no {KEY!r} entry: it is a bare optimizer's, or from another "
            "library. To continue a bare run under a scaling rule, load it before wrapping: "
            f"optimizer.load_state_dict(...), then mh.{rule}(optimizer)."
        )
    return state_dict[KEY]


def parse_entry(
    entry: Mapping[str, Any],
    norm_kind: str,
    optimizer: Optimizer,
    average: NoiseAverage,
    batch: Batch,
    options: Options,
) -> ScalingState:
    """Return the parsed entry; raise a ValueError if it does not fit this wrapper.

    `average`, `batch` and `options` are the wrapper's own, with what was set in this run.
    """
    expected = describe_origin(norm_kind, optimizer)
    for name, what, advice in (
        ("version", "format version", "Load it with the release that wrote it."),
        ("optimizer", "optimizer", "Build the optimizer that the run was saved with."),
        ("gradients", "kind of gradients", "Wrap with a rule that measures the same kind."),
        ("group_sizes", "numbers of parameters per group", "Build the same parameter groups."),
    ):
        if entry.get(name) != expected[name]:
            raise ValueError(
                f"the state dict's {what} is {entry.get(name)!r}, this wrapper's is "
                f"{expected[name]!r}. {advice}"
            )
    try:
        progress = float(entry["progress"])
        if not (math.isfinite(progress) and progress >= 0.0):
            raise ValueError(f"its progress is {progress}")
        loss_scale = entry["loss_scale"]
        loaded_batch, batch_mismatches = batch.from_state(entry["batch"])
        loaded_options, mismatches = load_options(options, entry["options"])
        return ScalingState(
            average=average.from_state(entry["average"]),
            previous=check_previous(
                entry["previous"], [p for group in optimizer.param_groups for p in group["params"]]
            ),
            batch=loaded_batch,
            options=loaded_options,
            mismatches=batch_mismatches + mismatches,
            loss_scale=None if loss_scale is None else float(loss_scale),
            progress=progress,
            steps=int(entry["steps"]),
            skipped=int(entry["skipped"]),
            nonfinite=int(entry["nonfinite"]),
            nonfinite_in_a_row=int(entry["nonfinite_in_a_row"]),
            norms=[[float(number) for number in numbers] for numbers in entry["norms"]],
        )
    # Whatever a damaged file can provoke: the user gets one kind of error for all of it. A
    # RuntimeError is torch's, for a tensor of several elements where a number is expected.
    except (
        KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError
    ) as error:  # fmt: skip
        raise ValueError(f"the state dict is damaged: its {KEY!r} entry, {error!r}.") from error


def check_previous(
    previous: Sequence[Tensor | None], params: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return a copy of the last step's gradient; raise if its shapes are not the parameters'."""
    for grad, param in zip(previous, params, strict=False):
        if grad is not None and (not isinstance(grad, Tensor) or grad.shape != param.shape):
            raise ValueError("the previous gradient has other shapes than the parameters")
    if len(previous) > len(params):
        raise ValueError("the previous gradient has more tensors than there are parameters")
    # a copy, because the gradient is later written to in place and the dict is the caller's
    return [None if grad is None else torch.clone(grad) for grad in previous]
