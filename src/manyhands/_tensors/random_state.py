"""Save and restore this rank's random generators: Python, torch on the CPU and device, numpy.

`check_random_state` tests a state on separate generators, before `set_random_state`.
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
    version, words, gauss = random.getstate()
    tensor = partial(torch.tensor, device="cpu")  # regardless of the default device
    state = {
        "python": tensor([version, *words]),  # the last word is the position
        # Normal numbers are generated in pairs. This is the stored second number, NaN if none.
        "python.gauss": tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    device = _device_in_use()
    if device is not None:
        state[f"device.{device[0]}"] = device[1].get_rng_state()
    numpy = _numpy_random()
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.get_state()
        if name == "MT19937":  # the program may use another generator
            state["numpy"] = tensor([*keys.tolist(), position, has_gauss])
            state["numpy.gauss"] = tensor(gauss, dtype=torch.float64)
    return state


class RandomSnapshot:
    """A fast `random_state` that is not saved."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._device = _device_in_use()
        if self._device is not None:
            self._device_state = self._device[1].get_rng_state()
        numpy = _numpy_random()
        self._numpy = None if numpy is None else numpy.get_state()

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._device is not None:
            self._device[1].set_rng_state(self._device_state)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)


def check_random_state(state: dict[str, Tensor]) -> None:
    """Raise ValueError if a state is invalid, without changing a generator."""
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
    """Return the state in numpy's format; raise a ValueError if it is invalid."""
    *words, position, has_gauss = state["numpy"].tolist()
    if not 0 <= position <= WORDS:  # numpy would read other memory
        raise ValueError(f"numpy's position is {position}")
    return "MT19937", words, position, has_gauss, state["numpy.gauss"].item()


def _device_in_use() -> tuple[str, ModuleType] | None:
    """Return the name of the device in use and torch's module for it, or None."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    # Saving must not create a CUDA context in a program that has not used the GPU.
    unused = hasattr(module, "is_initialized") and not module.is_initialized()
    if unused or not hasattr(module, "get_rng_state"):
        return None
    return device.type, module


def _numpy_random() -> Any:
    # Not imported here, because `import manyhands` needs only torch.
    return getattr(sys.modules.get("numpy"), "random", None)
