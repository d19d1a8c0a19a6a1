"""What besides parameters may be averaged: buffers, optimizer state, and, at first, gradients.

These are averaged as they are, not as differences from an anchor, and in full precision.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._dtensors import local
from manyhands._norms import summed_in
from manyhands.blocks._codec import CODECS, Codec
from manyhands.blocks._rows import Outcome
from manyhands.blocks._vector import Vector, by_type

MOMENTS = ("exp_avg", "exp_avg_sq")  # which fairseq averages: Adam's


class Values:
    """A row: tensors of one type on one device, as they are."""

    residual: Tensor | None = None
    codec: Codec = CODECS["float32"]

    def __init__(self, tensors: Sequence[Tensor], first_only: bool = False) -> None:
        first = local(tensors[0])
        self._vector = Vector(tensors)
        self.length, self.device = len(self._vector), first.device
        self.dtype = summed_in(first.real.dtype)
        self.first_only = first_only

    def read(self, start: int, out: Tensor) -> None:
        self._vector.read(start, out)

    def write(self, start: int, mean: Tensor, outcome: Outcome) -> None:
        if outcome.counted:  # of nobody's numbers there is no mean
            self._vector.write(start, mean)


class HeldValues:
    """The same as they were when they were sent; their mean is kept apart until `put`."""

    residual: Tensor | None = None

    def __init__(self, values: Values) -> None:
        self._values = values
        self.length, self.dtype, self.device = values.length, values.dtype, values.device
        self.codec, self.first_only = values.codec, values.first_only
        self._held = torch.empty(self.length, dtype=self.dtype, device=self.device)
        values.read(0, self._held)

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self._held[start : start + out.numel()])

    def write(self, start: int, mean: Tensor, outcome: Outcome) -> None:
        self._held[start : start + mean.numel()].copy_(mean)

    def put(self, outcome: Outcome) -> None:
        """Set the tensors to what has arrived."""
        self._values.write(0, self._held, outcome)


def rows_of(tensors: Sequence[Tensor], first_only: bool = False) -> list[Values]:
    """Tensors of any types; those that hold no real numbers are left out."""
    numbers = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    return [Values(same, first_only) for same in by_type(numbers)]


def state_of(optimizer: Optimizer, only: Sequence[str] | None = None) -> list[Tensor]:
    """The optimizer's tensors that are like their parameter, in an order all workers have."""
    found = []
    for param in trained(optimizer):
        state = optimizer.state.get(param, {})
        for name in sorted(state):
            value = state[name]
            if not isinstance(value, Tensor) or value.shape != param.shape:
                continue
            if only is None or name in only:
                found.append(value)
    return found


def trained(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that are trained."""
    return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]


class Buffers:
    """The buffers of the model that an optimizer trains.

    An optimizer does not know its model. Unless it is given, the garbage collector is asked for
    the smallest module that has all of the parameters, or for those that have some.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        modules = [model] if model is not None else _modules_of(params)
        self._modules = [weakref.ref(module) for module in modules]

    def tensors(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for reference in self._modules:
            module = reference()
            if module is not None:
                found.update((id(buffer), buffer) for buffer in module.buffers())
        return list(found.values())


def _modules_of(params: Sequence[Tensor]) -> list[nn.Module]:
    order = {id(param): i for i, param in enumerate(params)}
    having: list[tuple[nn.Module, set[int]]] = []
    for module in _alive():
        mine = {id(p) for p in module.parameters()} & order.keys()
        if mine:
            having.append((module, mine))
    whole = [module for module, mine in having if len(mine) == len(order)]
    if whole:
        return [min(whole, key=lambda module: sum(1 for _ in module.modules()))]
    inside = {id(child) for module, _ in having for child in module.children()}
    roots = [(module, mine) for module, mine in having if id(module) not in inside]
    roots.sort(key=lambda pair: min(order[i] for i in pair[1]))
    return [module for module, _ in roots]


def _alive() -> Iterator[nn.Module]:
    """Every module there is. (By type: an instance check may run a proxy's code.)"""
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and "_parameters" in vars(thing):
            yield thing
