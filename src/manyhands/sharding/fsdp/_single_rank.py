"""One rank: nothing is sharded, and mixed precision is a cast around each forward.

With several ranks torch's engine casts the parameters as it gathers them. With one rank there is
nothing to gather, and every module of a wrap gets hooks. The module that runs first hides the
parameters inside it behind casts, and removes the casts when it is done. Autograd carries
the gradients back to the parameters in their own type. Because each module has the hooks, a
checkpointed module that is recomputed long after the wrap's forward sees the casts again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._core.trees import as_type
from manyhands.sharding.fsdp._places import Place


class GradientDivision:
    """Divides the gradients of parameters that are not sharded, once a divisor is set."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = [weakref.ref(param) for param in params]
        # A list, which the hooks share: they live as long as the parameters and must not keep this
        # object alive.
        self._divisor: list[float] = []

    def set_divisor(self, divisor: float) -> None:
        """Divide by this number from now on."""
        # No hooks before a divisor is set: they would cost time in every backward.
        if not self._divisor and divisor != 1:
            params = [param for reference in self._params if (param := reference()) is not None]
            for param in params:
                if param.requires_grad:
                    param.register_hook(partial(_divide, self._divisor))
        self._divisor[:] = [divisor] if self._divisor or divisor != 1 else []


def _divide(divisor: list[float], grad: Tensor) -> Tensor:
    return grad / divisor[0]


def cast_in_forward(module: nn.Module, places: list[Place], dtype: torch.dtype) -> None:
    """Let `module` compute with casts of the parameters at these places, and of its inputs."""
    swapped: set[Place] = set()  # places whose parameter is hidden by a cast now
    module.register_forward_pre_hook(_cast_inputs(dtype), with_kwargs=True)
    names: dict[nn.Module, list[str]] = {}
    for holder, name in places:
        names.setdefault(holder, []).append(name)
    for each in module.modules():
        inside = [(m, name) for m in each.modules() for name in names.get(m, ())]
        if inside:
            own: list[Place] = []  # places that this module has swapped, and so must restore
            each.register_forward_pre_hook(_swap(inside, swapped, own, dtype))
            # always_call: an error in forward must not leave the casts behind.
            each.register_forward_hook(_restore(swapped, own), always_call=True)


def _cast_inputs(dtype: torch.dtype) -> Any:
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
            # Python looks in the instance's dict before it calls Module.__getattr__, which would
            # find the parameter.
            object.__setattr__(module, name, casts[id(param)])
            swapped.add((module, name))
            own.append((module, name))
        _refresh_rnns(own)

    return swap


def _restore(swapped: set[Place], own: list[Place]) -> Any:
    def restore(_: nn.Module, __: Any, ___: Any = None) -> None:
        for module, name in own:
            object.__delattr__(module, name)
            swapped.discard((module, name))
        _refresh_rnns(own)
        own.clear()

    return restore


def _refresh_rnns(places: list[Place]) -> None:
    """Renew the list of parameters that recurrent modules keep."""
    for module in {id(m): m for m, _ in places}.values():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
