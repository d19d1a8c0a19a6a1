"""Save and restore the random generators of this rank: Python's, torch's on the CPU and device.

numpy's generator is included if the program has imported numpy.

A state from a file is first tried on unused generators. `set_random_state` takes
only states that have passed.
"""

from __future__ import annotations

import math
import random
import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

WORDS = 624  # in the state of a Mersenne Twister


def random_state() -> dict[str, Tensor]:
    """Return the state from which the generators will draw."""
    version, words, gauss = random.getstate()
    tensor = partial(torch.tensor, device="cpu")  # the default device may be another
    state = {
        "python": tensor([version, *words]),  # the last word is the position
        # Normal numbers are drawn in pairs; the second waits here. NaN stands for "none waits".
        "python.gauss": tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    device = _device_in_use()
    if device is not None:
        state[f"device.{device[0]}"] = device[1].get_rng_state()
    numpy = _numpy_random()
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.get_state()
        if name == "MT19937":  # a program may have put another generator there
            state["numpy"] = tensor([*keys.tolist(), position, has_gauss])
            state["numpy.gauss"] = tensor(gauss, dtype=torch.float64)
    return state


def check_random_state(state: dict[str, Tensor]) -> None:
    """Raise ValueError if a generator could not continue from a state; change no generator."""
    numpy = _numpy_random()
    device = _device_in_use()
    try:
        random.Random().setstate(_python_state(state))
        torch.Generator().set_state(state["torch"])
        if numpy is not None and ("numpy" in state or "numpy.gauss" in state):
            numpy.RandomState().set_state(_numpy_state(state))
        if device is not None and f"device.{device[0]}" in state:
            torch.Generator(device[0]).set_state(state[f"device.{device[0]}"])
    except (ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the state of a random generator is invalid: {error!r}.") from error


def set_random_state(state: dict[str, Tensor]) -> None:
    """Let the generators continue from a state that `check_random_state` has accepted."""
    random.setstate(_python_state(state))
    torch.set_rng_state(state["torch"])
    device = _device_in_use()
    if device is not None and f"device.{device[0]}" in state:
        device[1].set_rng_state(state[f"device.{device[0]}"])
    numpy = _numpy_random()
    if numpy is not None and "numpy" in state:
        numpy.set_state(_numpy_state(state))


def _python_state(state: dict[str, Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    version, *words = state["python"].tolist()
    gauss: float | None = state["python.gauss"].item()
    if gauss is not None and math.isnan(gauss):
        gauss = None
    return version, tuple(words), gauss


def _numpy_state(state: dict[str, Tensor]) -> tuple[str, list[int], int, int, float]:
    """Return the state in numpy's own form; raise a ValueError if numpy cannot go on from it."""
    *words, position, has_gauss = state["numpy"].tolist()
    if not 0 <= position <= WORDS:  # numpy trusts it, and would draw from other memory
        raise ValueError(f"numpy's position is {position}")
    return "MT19937", words, position, has_gauss, state["numpy.gauss"].item()


def _device_in_use() -> tuple[str, ModuleType] | None:
    """Return the name of the device that is in use beside the CPU, and torch's module for it."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    # A program that has not used the GPU must not get a CUDA context from saving.
    unused = hasattr(module, "is_initialized") and not module.is_initialized()
    if unused or not hasattr(module, "get_rng_state"):
        return None
    return device.type, module


def _numpy_random() -> Any:
    # Never imported here: `import manyhands` needs only torch.
    return getattr(sys.modules.get("numpy"), "random", None)
