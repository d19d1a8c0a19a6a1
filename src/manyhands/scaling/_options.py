"""The options that every rule takes, as types for those that pass them on."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import nn


class RuleOptions(TypedDict, total=False):
    """The options that every rule takes, by name: see `ScalingRuleBase`."""

    world_size: int | None
    scale: float | None
    smoothing: float | None
    num_gradients_to_accumulate: int
    is_scaled_loss: bool
    debias_ewma: bool
    process_group: Any
    grad_scaler: Any
    delayed: bool
    floor_each_step: bool
    var_floor: float
    model: nn.Module | None
