"""One worker: nothing is sharded, and mixed precision is a cast around each forward.

With several workers torch's engine casts the parameters as it gathers them. With one there is
nothing to gather, and every module of a wrap gets hooks: whichever runs first puts casts in
front of the parameters beneath it, and takes them away when it is done. Autograd
brings the gradients back to the parameters in their own type. As each module has the hooks, the
recomputation of a checkpointed one, long after the wrap's forward, sees the casts again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._core.trees import as_type
from manyhands.sharding.fsdp._used_params import Place


class GradientDivision:
    """Divides the gradients of parameters that are not sharded, once it is told by what."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = [weakref.ref(param) for param in params]
        self._divisor: list[float] = []  # shared with the hooks, which do not hold this

    def by(self, divisor: float) -> None:
        """Divide by this from now on."""
        if not self._divisor and divisor != 1:
            params = [param for reference in self._params if (param := reference()) is not None]
            for param in params:
                if param.requires_grad:
                    param.register_hook(partial(_divided, self._divisor))
        self._divisor[:] = [divisor] if self._divisor or divisor != 1 else []


def _divided(divisor: list[float], grad: Tensor) -> Tensor:
    return grad / divisor[0]


def cast_in_forward(module: nn.Module, places: list[Place], dtype: torch.dtype) -> None:
    """Let `module` compute with casts of the parameters at these places, and of its inputs."""
    swapped: set[Place] = set()
    module.register_forward_pre_hook(_inputs_as(dtype), with_kwargs=True)
    names: dict[nn.Module, list[str]] = {}
    for holder, name in places:
        names.setdefault(holder, []).append(name)
    for each in module.modules():
        beneath = [(m, name) for m in each.modules() for name in names.get(m, ())]
        if beneath:
            own: list[Place] = []
            each.register_forward_pre_hook(_swap(beneath, swapped, own, dtype))
            each.register_forward_hook(_restore(swapped, own), always_call=True)


def _inputs_as(dtype: torch.dtype) -> Any:
    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return as_type(dtype, args), as_type(dtype, kwargs)

    return cast


def _swap(places: list[Place], swapped: set[Place], own: list[Place], dtype: torch.dtype) -> Any:
    def swap(_: nn.Module, __: Any) -> None:
        casts: dict[int, Tensor] = {}  # a tied parameter is cast once
        for module, name in places:
            param = module._parameters.get(name)
            if param is None or (module, name) in swapped:
                continue
            if id(param) not in casts:
                casts[id(param)] = param.to(dtype)
            object.__setattr__(module, name, casts[id(param)])  # seen before the parameter
            swapped.add((module, name))
            own.append((module, name))
        _refresh(own)

    return swap


def _restore(swapped: set[Place], own: list[Place]) -> Any:
    def restore(_: nn.Module, __: Any, ___: Any = None) -> None:
        for module, name in own:
            object.__delattr__(module, name)
            swapped.discard((module, name))
        _refresh(own)
        own.clear()

    return restore


def _refresh(places: list[Place]) -> None:
    """Recurrent modules keep a list of their parameters."""
    for module in {id(m): m for m, _ in places}.values():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
