"""How many bytes an optimizer keeps for a parameter, read off a small stand-in.

The stand-in has as many sides as the parameter, of lengths that are different primes. After two
steps each side of a state tensor tells which sides of the parameter it stands for: Adam's averages
of a 5 × 7 parameter are 5 × 7, Adafactor's rows 5 × 1, a matrix over the columns 7 × 7, and a
step count is one number whatever the parameter. So no tensor of the parameter's size is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

PRIMES = (5, 7, 11, 13, 17, 19)
STEPS = 2


@dataclass(frozen=True)
class Entry:
    """A tensor of the state: `constant` elements for each index of the parameter's `sides`."""

    constant: int
    sides: tuple[int, ...]
    itemsize: int

    def bytes(self, shape: Sequence[int]) -> int:
        return self.constant * prod(shape[side] for side in self.sides) * self.itemsize


class States:
    """The state of an optimizer class, for parameters of any shape; each kind is tried once."""

    def __init__(self, kind: type[Optimizer], given: Mapping[str, Any]) -> None:
        self._kind = kind
        self._given = dict(given)
        self._known: dict[Any, list[Entry]] = {}

    def bytes(self, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> int:
        """Of a parameter that stays in one piece."""
        return sum(entry.bytes(shape) for entry in self._entries(len(shape), dtype, options))

    def by_element(self, dtype: torch.dtype, options: Mapping[str, Any]) -> tuple[int, int]:
        """Bytes for each flat piece, and for each element of it."""
        entries = self._entries(1, dtype, options)
        fixed = sum(entry.bytes(()) for entry in entries if not entry.sides)
        return fixed, sum(entry.bytes((1,)) for entry in entries if entry.sides)

    def _entries(self, sides: int, dtype: torch.dtype, options: Mapping[str, Any]) -> list[Entry]:
        key = (sides, dtype, repr(sorted(options.items(), key=lambda option: option[0])))
        if key not in self._known:
            self._known[key] = self._tried(sides, dtype, options)
        return self._known[key]

    def _tried(self, sides: int, dtype: torch.dtype, options: Mapping[str, Any]) -> list[Entry]:
        if sides > len(PRIMES):
            raise ValueError(
                f"a parameter has {sides} dimensions; the planner takes up to {len(PRIMES)}."
            )
        shape = PRIMES[:sides]
        generator = torch.Generator(device="cpu").manual_seed(0)
        random = torch.randn(shape, generator=generator, device="cpu")
        param = torch.nn.Parameter(random.to(dtype))
        options = {**options, **({"capturable": False} if "capturable" in options else {})}
        try:
            optimizer = self._kind([{**options, "params": [param]}], **self._given)
            for _ in range(STEPS):
                param.grad = random.to(dtype)
                optimizer.step()
        except Exception as error:
            raise ValueError(
                f"{self._kind.__name__} was tried on a {dtype} parameter with {sides} "
                f"dimension(s), as the model has, and said: {error} If it needs other options, "
                "give them to plan(). If it is for some of the parameters only, make the "
                "optimizers as for training and give plan() a list of them."
            ) from error
        state = optimizer.state.get(param, {})
        return [_read(value, shape) for value in _tensors(state)]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _read(tensor: Tensor, shape: Sequence[int]) -> Entry:
    """Which sides of the parameter those of the tensor are; any other length is a constant."""
    products = {
        prod(shape[side] for side in chosen): chosen
        for count in range(1, len(shape) + 1)
        for chosen in combinations(range(len(shape)), count)
    }
    constant, sides = 1, list[int]()
    for length in tensor.shape:
        if length in products:
            sides += products[length]
        else:
            constant *= length
    return Entry(constant, tuple(sides), tensor.element_size())
