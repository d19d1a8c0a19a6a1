"""What a user may record: numbers, and tensors of one element wherever they are."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch


class OnItsWay:
    """A number on a GPU, copied to the host without anybody waiting for it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = value.to("cpu", non_blocking=True)  # into pinned memory
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(value.device))

    def is_here(self) -> bool:
        return bool(self._copied.query())

    def number(self) -> int | float:
        self._copied.synchronize()
        return _plain(self._host.item())


def number(value: Any) -> int | float | OnItsWay:
    if isinstance(value, torch.Tensor):
        return OnItsWay(value.detach()) if value.is_cuda else _plain(value.item())
    return _plain(value)


def _plain(value: Any) -> int | float:
    return int(value) if isinstance(value, Integral) else float(value)


def is_number(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, Real)
    # A DTensor's value takes a collective, and only one worker would call it.
    return value.numel() == 1 and not value.is_complex() and not hasattr(value, "full_tensor")


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of {value.dtype} and shape {list(value.shape)}"
    return f"{value!r:.50} of type {type(value).__name__}"
