"""How many bytes of state an optimizer keeps for a parameter, read off a small stand-in.

The stand-in has as many dimensions as the parameter, and their lengths are different primes. After
two steps, the lengths of a state tensor tell which dimensions of the parameter it has: Adam's
averages of a 5 × 7 parameter are 5 × 7, Adafactor's rows 5 × 1, a matrix over the columns 7 × 7,
and a step count is one number for any parameter. So no tensor of the parameter's size is needed.
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
STEPS = 2  # the first step may make less state than the second


@dataclass(frozen=True)
class StateTensor:
    """A state tensor: `constant` elements for each index into the parameter's `dims`."""

    constant: int
    dims: tuple[int, ...]
    itemsize: int

    def bytes(self, shape: Sequence[int]) -> int:
        return self.constant * prod(shape[dim] for dim in self.dims) * self.itemsize


class OptimizerStateSizes:
    """The size of one optimizer class's state, for parameters of any shape.

    Each combination of dimensions, dtype and options is tried once.
    """

    def __init__(self, kind: type[Optimizer], arguments: Mapping[str, Any]) -> None:
        self._kind = kind
        self._arguments = dict(arguments)
        self._known: dict[Any, list[StateTensor]] = {}

    def bytes(self, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> int:
        """Return the bytes of state of a parameter that is not cut."""
        return sum(tensor.bytes(shape) for tensor in self._tensors(len(shape), dtype, options))

    def by_element(self, dtype: torch.dtype, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the bytes for each flat shard, and for each element of it."""
        tensors = self._tensors(1, dtype, options)
        fixed = sum(tensor.bytes(()) for tensor in tensors if not tensor.dims)
        return fixed, sum(tensor.bytes((1,)) for tensor in tensors if tensor.dims)

    def _tensors(
        self, dims: int, dtype: torch.dtype, options: Mapping[str, Any]
    ) -> list[StateTensor]:
        # Options may hold lists or tensors, which cannot be keys; their text can.
        key = (dims, dtype, repr(sorted(options.items(), key=lambda option: option[0])))
        if key not in self._known:
            self._known[key] = self._try(dims, dtype, options)
        return self._known[key]

    def _try(self, dims: int, dtype: torch.dtype, options: Mapping[str, Any]) -> list[StateTensor]:
        """Step the optimizer on a small parameter, and read the shapes of its state."""
        if dims > len(PRIMES):
            raise ValueError(
                f"a parameter has {dims} dimensions; the planner supports up to {len(PRIMES)}."
            )
        shape = PRIMES[:dims]
        # With a generator of its own, and so without a change of the user's random numbers.
        generator = torch.Generator(device="cpu").manual_seed(0)
        random = torch.randn(shape, generator=generator, device="cpu")
        param = torch.nn.Parameter(random.to(dtype))
        # capturable=True raises for a parameter on the CPU, and changes no size.
        options = {**options, **({"capturable": False} if "capturable" in options else {})}
        try:
            optimizer = self._kind([{**options, "params": [param]}], **self._arguments)
            for _ in range(STEPS):
                param.grad = random.to(dtype)
                optimizer.step()
        except Exception as error:  # any class may be planned, and may raise anything
            raise ValueError(
                f"{self._kind.__name__} failed on a {dtype} parameter with {dims} dimension(s), "
                f"such as the model has: {error} If it needs other options, give them to plan(). "
                "If it is for some of the parameters only, make the optimizers as for training "
                "and give plan() a list of them."
            ) from error
        state = optimizer.state.get(param, {})
        return [_describe(value, shape) for value in _tensors_in(state)]


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors_in(each)]
    return []


def _describe(tensor: Tensor, shape: Sequence[int]) -> StateTensor:
    """Find the parameter's dimensions in the tensor's; any other length is a constant."""
    # Every product of different primes is unique, so a flattened dimension is recognised, too.
    products = {
        prod(shape[dim] for dim in chosen): chosen
        for count in range(1, len(shape) + 1)
        for chosen in combinations(range(len(shape)), count)
    }
    constant, dims = 1, list[int]()
    for length in tensor.shape:
        if length in products:
            dims += products[length]
        else:
            constant *= length
    return StateTensor(constant, tuple(dims), tensor.element_size())
