"""The random generators of this worker, as tensors: Python's, torch's on the CPU and on the device.

numpy's is one of them if the program has imported numpy.

A generator's state holds its position in its own memory, and neither numpy nor torch asks whether a
position that it is given lies within. One that does not would let the next draws end the process,
or show what lies behind. So a state from a file is looked at first, and then given to a generator
that nobody draws from; `set_random_state` is for what has passed.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import torch
from torch import Tensor

WORDS = 624  # of a Mersenne Twister, which Python, numpy and torch on the CPU have
SEEN = 24  # bytes of torch's state that say where it is: seed, left, seeded, next


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


def check_random_state(state: dict[str, Tensor]) -> None:
    """Raise ValueError where a generator could not go on from there; none is touched."""
    try:
        if "python" in state:
            random.Random().setstate(_python(state))
        if "numpy" in state:
            _numpys(state)
        if "torch" in state:
            _check_torch(state["torch"])
        device = _device()
        if device is not None and (key := f"device.{device[0]}") in state:
            torch.Generator(device=device[0]).set_state(state[key])
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"the checkpoint's state of a random generator is none: {error}. Load the model alone, "
            "or another checkpoint."
        ) from error


def set_random_state(state: dict[str, Tensor]) -> None:
    """Let the generators go on from a state that has been checked."""
    if "python" in state:
        random.setstate(_python(state))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    device = _device()
    if device is not None and f"device.{device[0]}" in state:
        device[1].set_rng_state(state[f"device.{device[0]}"])
    numpy = _numpy()
    if numpy is not None and "numpy" in state:
        numpy.set_state(_numpys(state))


def _python(state: dict[str, Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    version, *words, place = _whole(state["python"], WORDS + 2, "Python's")
    if version != 3:
        raise ValueError(f"Python's has version {version}, and 3 is known")
    _check_twister(words, place, "Python's")
    gauss = _one(state["python.gauss"], "Python's")
    return 3, (*words, place), None if math.isnan(gauss) else gauss


def _numpys(state: dict[str, Tensor]) -> tuple[str, list[int], int, int, float]:
    *words, place, has_gauss = _whole(state["numpy"], WORDS + 2, "numpy's")
    _check_twister(words, place, "numpy's")
    if has_gauss not in (0, 1):
        raise ValueError(f"numpy's has_gauss is {has_gauss}")
    return "MT19937", words, place, has_gauss, _one(state["numpy.gauss"], "numpy's")


def _check_twister(words: list[int], place: int, whose: str) -> None:
    if not 0 <= min(words) <= max(words) < 2**32:
        raise ValueError(f"{whose} has words of more than 32 bits")
    if not 0 <= place <= WORDS:
        raise ValueError(f"{whose} is at place {place} of {WORDS}")


def _check_torch(state: Tensor) -> None:
    """`left` numbers less one are drawn from `next` on before the words are made anew."""
    torch.Generator().set_state(state)  # asks for the size, and for each of the two alone
    head = bytes(state[:SEEN].tolist())
    left, place = int.from_bytes(head[8:12], "little"), int.from_bytes(head[16:24], "little")
    if left + place > WORDS + 1:
        raise ValueError(f"torch's is at place {place} of {WORDS}, with {left} left")


def _whole(tensor: Tensor, length: int, whose: str) -> list[int]:
    if tensor.dtype != torch.int64 or tensor.shape != (length,):
        raise ValueError(f"{whose} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    numbers: list[int] = tensor.tolist()
    return numbers


def _one(tensor: Tensor, whose: str) -> float:
    if tensor.dtype != torch.float64 or tensor.shape != ():
        raise ValueError(f"the second number of {whose} is {tensor.dtype}, {tuple(tensor.shape)}")
    return float(tensor)


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
