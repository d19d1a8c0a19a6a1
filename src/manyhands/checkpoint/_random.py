"""The random generators of this worker, as tensors: Python's, torch's on the CPU and on the device.

numpy's is one of them if the program has imported numpy.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """What the generators will draw from now on."""
    version, words, gauss = random.getstate()
    state = {
        "python": torch.tensor([version, *words]),
        "python.gauss": _number(gauss),
        "torch": torch.get_rng_state(),
    }
    device = _device()
    if device is not None:
        state[f"device.{device[0]}"] = device[1].get_rng_state()
    numpy = _numpy()
    if numpy is not None:
        name, keys, place, has_gauss, gauss = numpy.get_state()
        if name == "MT19937":
            state["numpy"] = torch.tensor([*keys.tolist(), place, has_gauss])
            state["numpy.gauss"] = torch.tensor(gauss, dtype=torch.float64)
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Let the generators go on from there."""
    if "python" in state:
        version, *words = state["python"].tolist()
        gauss = float(state["python.gauss"])
        random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    device = _device()
    if device is not None and f"device.{device[0]}" in state:
        device[1].set_rng_state(state[f"device.{device[0]}"])
    numpy = _numpy()
    if numpy is not None and "numpy" in state:
        *keys, place, has_gauss = state["numpy"].tolist()
        numpy.set_state(("MT19937", keys, place, has_gauss, float(state["numpy.gauss"])))


def _number(value: float | None) -> Tensor:
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)


def _device() -> tuple[str, Any] | None:
    """The accelerator's name and torch's module for it, if it is in use."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    in_use = getattr(module, "is_initialized", lambda: True)()
    return (device.type, module) if in_use and hasattr(module, "get_rng_state") else None


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)
