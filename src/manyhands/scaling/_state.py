"""What a wrapper adds to its optimizer's state dict, and what must fit before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.wrapper import unwrap
from manyhands.scaling._averages import NoiseAverage
from manyhands.scaling._batch import Batch
from manyhands.scaling._options import OptionChange, Options, with_found

KEY = "manyhands"
VERSION = 1


@dataclass(frozen=True)
class ScalingState:
    """A state dict's scaling part, read and found to fit."""

    average: NoiseAverage
    previous: list[Tensor | None]
    batch: Batch
    options: Options
    changes: list[OptionChange]
    loss_scale: float | None
    progress: float
    steps: int
    skipped: int
    nonfinite: int
    nonfinite_in_a_row: int
    norms: list[Any]


def identity(gradients: str, optimizer: Optimizer) -> dict[str, Any]:
    """What a state dict says of where it comes from; `gradients` says which were measured."""
    inner = unwrap(optimizer)[-1]  # in blocks or not
    return {
        "version": VERSION,
        "gradients": gradients,
        "optimizer": type(getattr(inner, "optim", inner)).__name__,  # sharded or not
        "group_sizes": [len(group["params"]) for group in optimizer.param_groups],
    }


def part_of(state_dict: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """The scaling part of a wrapper's state dict."""
    if KEY not in state_dict:
        raise ValueError(
            f"this state dict has no {KEY!r} entry: it is a bare optimizer's, or from another "
            "library. To continue a bare run under a scaling rule, load it before wrapping: "
            f"optimizer.load_state_dict(...), then mh.{rule}(optimizer)."
        )
    return state_dict[KEY]


def parsed(
    ours: Mapping[str, Any],
    gradients: str,
    optimizer: Optimizer,
    average: NoiseAverage,
    batch: Batch,
    options: Options,
) -> ScalingState:
    """The scaling part as this wrapper's; a ValueError where it does not belong to it.

    `average`, `batch` and `options` are the wrapper's own, with what was said in this run.
    """
    mine = identity(gradients, optimizer)
    for name, what, advice in (
        ("version", "format version", "Load it with the release that wrote it."),
        ("optimizer", "optimizer", "Build the optimizer that the run was saved with."),
        ("gradients", "kind of gradients", "Wrap with a rule that measures the same ones."),
        ("group_sizes", "numbers of parameters per group", "Build the same parameter groups."),
    ):
        if ours.get(name) != mine[name]:
            raise ValueError(
                f"the state dict's {what} is {ours.get(name)!r}, this wrapper's is "
                f"{mine[name]!r}. {advice}"
            )
    try:
        progress = float(ours["progress"])
        if not (math.isfinite(progress) and progress >= 0.0):
            raise ValueError(f"its progress is {progress}")
        loss_scale = ours["loss_scale"]
        loaded_batch, batch_changes = batch.loaded(ours["batch"])
        loaded_options, changes = with_found(options, ours["options"])
        return ScalingState(
            average=average.restored(ours["average"]),
            previous=fitting(
                ours["previous"], [p for group in optimizer.param_groups for p in group["params"]]
            ),
            batch=loaded_batch,
            options=loaded_options,
            changes=batch_changes + changes,
            loss_scale=None if loss_scale is None else float(loss_scale),
            progress=progress,
            steps=int(ours["steps"]),
            skipped=int(ours["skipped"]),
            nonfinite=int(ours["nonfinite"]),
            nonfinite_in_a_row=int(ours["nonfinite_in_a_row"]),
            norms=[[float(number) for number in entry] for entry in ours["norms"]],
        )
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the state dict is damaged: its {KEY!r} entry, {error!r}.") from error


def fitting(previous: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
    """The last step's gradient, checked against the parameters' shapes."""
    for grad, param in zip(previous, params, strict=False):
        if grad is not None and (not isinstance(grad, Tensor) or grad.shape != param.shape):
            raise ValueError("the previous gradient has other shapes than the parameters")
    if len(previous) > len(params):
        raise ValueError("the previous gradient has more tensors than there are parameters")
    return [None if grad is None else torch.clone(grad) for grad in previous]
