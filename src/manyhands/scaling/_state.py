"""What a wrapper adds to its optimizer's state dict, and what must fit before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

KEY = "manyhands"
VERSION = 1
NEEDED = {
    "average", "previous", "loss_scale", "nonfinite", "nonfinite_in_a_row",
    "scale", "scale_per_pass", "small_batches", "smoothing",
    "progress", "steps", "skipped",
}  # fmt: skip


def identity(gradients: str, optimizer: Optimizer) -> dict[str, Any]:
    """What a state dict says of where it comes from; `gradients` says which were measured."""
    return {
        "version": VERSION,
        "gradients": gradients,
        "optimizer": type(optimizer).__name__,
        "group_sizes": [len(group["params"]) for group in optimizer.param_groups],
    }


def checked(
    state_dict: Mapping[str, Any], rule: str, gradients: str, optimizer: Optimizer
) -> dict[str, Any]:
    """Our part of `state_dict`; a ValueError where it does not belong to this wrapper."""
    if KEY not in state_dict:
        raise ValueError(
            f"this state dict has no {KEY!r} entry: it is a bare optimizer's, or from another "
            "library. To continue a bare run under a scaling rule, load it before wrapping: "
            f"optimizer.load_state_dict(...), then mh.{rule}(optimizer)."
        )
    ours: dict[str, Any] = state_dict[KEY]
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
    missing = NEEDED - set(ours)
    if missing:
        raise ValueError(f"the state dict is damaged: {KEY!r} lacks {sorted(missing)}.")
    return ours
