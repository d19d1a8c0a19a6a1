"""Tensors in nested lists, tuples, dicts and dataclasses: what modules take and give."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The like, with each tensor changed; what is of another kind stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        result = copy.copy(value)  # of its class, with what it has besides items
        result.update((k, changed(v, change)) for k, v in value.items())
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(changed(v, change) for v in value))
    if type(value) in (list, tuple):
        return type(value)(changed(v, change) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(other, field.name, changed(getattr(value, field.name), change))
        return other
    return value


def as_type(dtype: torch.dtype, value: Any) -> Any:
    """The like, with floating-point tensors of this type."""
    return changed(value, lambda t: t.to(dtype) if t.is_floating_point() else t)
