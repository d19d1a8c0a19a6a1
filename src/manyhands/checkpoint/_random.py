"""The random generators of this rank, as tensors: Python's, torch's on the CPU and on the device.

numpy's generator is included if the program has imported numpy.

A generator's state contains its position in its own memory, and neither numpy nor torch checks
that a position lies within it. A wrong one would let the next draws crash the process, or reveal
the memory behind. So a state from a file is checked first, and tried on a generator that nobody
draws from. `set_random_state` takes only states that have passed.
"""

from __future__ import annotations

import math
import random
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

WORDS = 624  # in the state of a Mersenne Twister, which Python, numpy and torch (CPU) use
HEAD = 24  # bytes at the beginning of torch's state: seed, left, seeded, next


def random_state() -> dict[str, Tensor]:
    """Return the state from which the generators will draw."""
    version, words, gauss = random.getstate()
    state = {
        "python": torch.tensor([version, *words]),  # the last word is the position
        "python.gauss": _gauss_tensor(gauss),
        "torch": torch.get_rng_state(),
    }
    device = _device()
    if device is not None:
        state[f"device.{device[0]}"] = device[1].get_rng_state()
    numpy = _numpy_random()
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.get_state()
        if name == "MT19937":  # a program may have put another generator there
            state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss])
            state["numpy.gauss"] = torch.tensor(gauss, dtype=torch.float64)
    return state


def check_random_state(state: dict[str, Tensor]) -> None:
    """Raise ValueError if a generator could not continue from a state; change no generator."""
    try:
        if "python" in state:
            random.Random().setstate(_python_state(state))
        if "numpy" in state:
            _numpy_state(state)
        if "torch" in state:
            _check_torch(state["torch"])
        device = _device()
        if device is not None and (key := f"device.{device[0]}") in state:
            torch.Generator(device=device[0]).set_state(state[key])
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"the checkpoint's state of a random generator is invalid: {error}. Load the model "
            "alone, or another checkpoint."
        ) from error


def set_random_state(state: dict[str, Tensor]) -> None:
    """Let the generators continue from a state that `check_random_state` has accepted."""
    if "python" in state:
        random.setstate(_python_state(state))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    device = _device()
    if device is not None and f"device.{device[0]}" in state:
        device[1].set_rng_state(state[f"device.{device[0]}"])
    numpy = _numpy_random()
    if numpy is not None and "numpy" in state:
        numpy.set_state(_numpy_state(state))


def _python_state(state: dict[str, Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    version, *words, position = _integers(state["python"], WORDS + 2, "Python's")
    if version != 3:
        raise ValueError(f"Python's has version {version}, and 3 is known")
    _check_twister(words, position, "Python's")
    gauss = _float(state["python.gauss"], "Python's")
    return 3, (*words, position), None if math.isnan(gauss) else gauss


def _numpy_state(state: dict[str, Tensor]) -> tuple[str, list[int], int, int, float]:
    *words, position, has_gauss = _integers(state["numpy"], WORDS + 2, "numpy's")
    _check_twister(words, position, "numpy's")
    if has_gauss not in (0, 1):
        raise ValueError(f"numpy's has_gauss is {has_gauss}")
    return "MT19937", words, position, has_gauss, _float(state["numpy.gauss"], "numpy's")


def _check_twister(words: list[int], position: int, whose: str) -> None:
    if not 0 <= min(words) <= max(words) < 2**32:
        raise ValueError(f"{whose} has words of more than 32 bits")
    if not 0 <= position <= WORDS:
        raise ValueError(f"{whose} is at position {position} of {WORDS}")


def _check_torch(state: Tensor) -> None:
    # A new generator checks the size, and the range of `left` and `next`, but not their sum.
    torch.Generator().set_state(state)
    head = bytes(state[:HEAD].tolist())
    left, position = int.from_bytes(head[8:12], "little"), int.from_bytes(head[16:24], "little")
    # torch draws `left` - 1 numbers from `next` on before it makes new words.
    if left + position > WORDS + 1:
        raise ValueError(f"torch's is at position {position} of {WORDS}, with {left} left")


def _integers(tensor: Tensor, length: int, whose: str) -> list[int]:
    if tensor.dtype != torch.int64 or tensor.shape != (length,):
        raise ValueError(f"{whose} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    numbers: list[int] = tensor.tolist()
    return numbers


def _float(tensor: Tensor, whose: str) -> float:
    if tensor.dtype != torch.float64 or tensor.shape != ():
        raise ValueError(f"the second normal of {whose} is {tensor.dtype}, {tuple(tensor.shape)}")
    return float(tensor)


def _gauss_tensor(gauss: float | None) -> Tensor:
    # Normal numbers are drawn in pairs; the second waits here. NaN stands for "none waits".
    return torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64)


def _device() -> tuple[str, ModuleType] | None:
    """Return the accelerator's name and torch's module for it if it is in use."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    # A program that has not used the GPU must not get a CUDA context from saving.
    in_use = getattr(module, "is_initialized", lambda: True)()
    return (device.type, module) if in_use and hasattr(module, "get_rng_state") else None


def _numpy_random() -> Any:
    # Never imported here: `import manyhands` needs only torch.
    return getattr(sys.modules.get("numpy"), "random", None)
