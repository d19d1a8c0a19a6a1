"""What besides parameters may be averaged: buffers, optimizer state, and, at first, gradients.

These are averaged as they are, not as differences from an anchor, and in full precision.

Each tensor has a *key*, which is the same on all workers and in a later run: the number of a buffer
in its model, the number of a parameter and the name of its state. A mean that arrives while
training goes on (`HeldValues`) is of keys, not of tensors: it is written to what stands there by
then, which may be another tensor, or belong to a run that has been resumed in the meantime.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.dtensor import local
from manyhands._core.flat import FlatTensors, group_by_type
from manyhands._core.norms import accumulation_dtype
from manyhands.blocks._codec import CODECS, Codec
from manyhands.blocks.averaging._payload import Outcome

MOMENTS = ("exp_avg", "exp_avg_sq")  # which fairseq averages: Adam's


class Values:
    """A row: tensors of one type on one device, as they are."""

    residual: Tensor | None = None
    codec: Codec = CODECS["float32"]

    def __init__(self, tensors: Mapping[str, Tensor], first_only: bool = False) -> None:
        first = local(next(iter(tensors.values())))
        self.tensors = tensors
        self._vector = FlatTensors(list(tensors.values()))
        self.length, self.device = len(self._vector), first.device
        self.dtype = accumulation_dtype(first.real.dtype)
        self.first_only = first_only

    @property
    def sizes(self) -> list[int]:
        """How many numbers each tensor has."""
        return [stop - start for start, stop in self._vector.spans]

    def read(self, start: int, out: Tensor) -> None:
        self._vector.read(start, out)

    def write(self, start: int, mean: Tensor, outcome: Outcome) -> None:
        if outcome.counted:  # of nobody's numbers there is no mean
            self._vector.write(start, mean)


class ArrivedValues:
    """The mean of `Values`, kept apart from the tensors until `put`."""

    def __init__(self, keys: Sequence[str], sizes: Sequence[int], mean: Tensor) -> None:
        self.keys, self.sizes, self.mean = list(keys), list(sizes), mean

    def put(self, outcome: Outcome, tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors of these keys to the mean; what is not there any more is left out."""
        if not outcome.counted:
            return
        for key, mean in zip(self.keys, self.mean.split(self.sizes), strict=True):
            vector = FlatTensors([tensors[key]] if key in tensors else [])
            if len(vector) == len(mean):
                vector.write(0, mean)

    def saved(self) -> dict[str, Any]:
        return {"keys": self.keys, "sizes": self.sizes, "mean": self.mean}


class HeldValues(ArrivedValues):
    """A row: values as they were when they were sent. Their mean takes their place."""

    residual: Tensor | None = None

    def __init__(self, values: Values) -> None:
        held = torch.empty(values.length, dtype=values.dtype, device=values.device)
        values.read(0, held)
        super().__init__(list(values.tensors), values.sizes, held)
        self.length, self.dtype, self.device = values.length, values.dtype, values.device
        self.codec, self.first_only = values.codec, values.first_only

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self.mean[start : start + out.numel()])

    def write(self, start: int, mean: Tensor, outcome: Outcome) -> None:
        self.mean[start : start + mean.numel()].copy_(mean)


def rows_of(tensors: Mapping[str, Tensor], first_only: bool = False) -> list[Values]:
    """Tensors of any types; those that hold no real numbers are left out."""
    numbers = {k: t for k, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    names = {id(tensor): key for key, tensor in numbers.items()}
    rows = [{names[id(t)]: t for t in same} for same in group_by_type(list(numbers.values()))]
    return [Values(same, first_only) for same in rows]


def numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors by their place."""
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def state_of(optimizer: Optimizer, only: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The optimizer's tensors that are like their parameter, in an order all workers have."""
    found = {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        state = optimizer.state.get(param, {}) if param.requires_grad else {}
        for name in sorted(state):
            value = state[name]
            if not isinstance(value, Tensor) or value.shape != param.shape:
                continue
            if only is None or name in only:
                found[f"{number}.{name}"] = value
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

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that they are of."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def tensors(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for module in self.modules:
            found.update((id(buffer), buffer) for buffer in module.buffers())
        return list(found.values())


def _modules_of(params: Sequence[Tensor]) -> list[nn.Module]:
    order = {id(param): i for i, param in enumerate(params)}
    having: list[tuple[nn.Module, set[int]]] = []
    for module in alive():
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


def alive() -> Iterator[nn.Module]:
    """Every module there is. (By type: an instance check may run a proxy's code.)"""
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and "_parameters" in vars(thing):
            yield thing
