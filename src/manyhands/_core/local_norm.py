"""The norm of a gradient of which each rank holds a slice, for `torch.nn.utils.clip_grad_norm_`.

torch takes the norm of each gradient, stacks these norms, and takes the norm of the stack. A norm
of a sharded gradient is a `LocalNorm`: that of this rank's slices. Only the norm of all of them is
reduced over the ranks: with p the kind of norm and n_i the norm on rank i,

    (sum of n_i^p over the ranks)^(1 / p)        their maximum, if p is infinite

That is one small all_reduce, and the result is a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands._core.flat import norm

# Functions of a LocalNorm whose result is still the norm of this rank's slices.
KEEP_LOCAL = {torch.stack, Tensor.to, Tensor.device.__get__, Tensor.dtype.__get__}  # type: ignore[attr-defined]


class LocalNorm(Tensor):
    """Norms of this rank's slices of some gradients, not yet reduced over the ranks."""

    power: float
    group: Any  # of the ranks; None: this rank has all slices

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        norms = list(args[0]) if func is torch.stack else [args[0]] if args else []
        if _can_combine(norms):
            with torch._C.DisableTorchFunctionSubclass():
                if func in KEEP_LOCAL:
                    result = func(*args, **kwargs)
                    return (
                        _as_local_norm(result, norms[0]) if isinstance(result, Tensor) else result
                    )
                if func is torch.linalg.vector_norm and _power(*args[1:]) == norms[0].power:
                    # The norm of norms of one kind is the norm of all their elements.
                    here = torch.linalg.vector_norm(*args, **kwargs)
                    return norms[0].reduce(here)
        # Any other function needs the values, so they are reduced over the ranks first.
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = _reduce_all(args), _reduce_all(kwargs)
            return func(*args, **kwargs)

    def reduce(self, here: Tensor) -> Tensor:
        """Return the norms over all ranks, from the norms `here` of this rank's slices."""
        plain = here.as_subclass(Tensor).clone()
        if self.group is None:
            return plain
        if math.isinf(self.power):
            # A maximum may lose a nan, so whether there is one travels as a number of its own.
            is_nan = plain.isnan().to(plain.dtype)
            both = torch.stack([plain.nan_to_num(nan=0.0, posinf=math.inf), is_nan])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
            return torch.where(both[1] > 0, math.nan, both[0])
        # In float64 the power neither overflows nor rounds. mps has no float64.
        total = plain.double().pow(self.power) if plain.device.type != "mps" else plain
        dist.all_reduce(total, group=self.group)
        return total.pow(1 / self.power).to(plain.dtype)


def norm_of_slices(slices: Sequence[Tensor], power: float, group: Any) -> LocalNorm:
    """Return the norm of a gradient's slices on this rank; there is one at least."""
    norms = [_norm_of_one(each, power) for each in slices]
    here = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), power)
    result = here.as_subclass(LocalNorm)
    result.power, result.group = power, group
    return result


def _norm_of_one(elements: Tensor, power: float) -> Tensor:
    if power == 2:
        return norm(elements)  # one read of the memory
    # An empty slice has no maximum norm.
    return torch.linalg.vector_norm(elements, power) if elements.numel() else elements.new_zeros(())


def _as_local_norm(result: Tensor, like: LocalNorm) -> LocalNorm:
    local_norm = result.as_subclass(LocalNorm)
    local_norm.power, local_norm.group = like.power, like.group
    return local_norm


def _can_combine(norms: list[Any]) -> TypeGuard[list[LocalNorm]]:
    """Return whether all are norms of one kind, of slices among the same ranks."""
    return all(
        isinstance(each, LocalNorm) and (each.power, each.group) == (norms[0].power, norms[0].group)
        for each in norms
    ) and bool(norms)


def _reduce_all(value: Any) -> Any:
    if isinstance(value, LocalNorm):
        return value.reduce(value)
    if isinstance(value, list | tuple):
        return type(value)(_reduce_all(v) for v in value)
    if isinstance(value, dict):
        return {k: _reduce_all(v) for k, v in value.items()}
    return value


def _power(power: float = 2) -> float:
    return float(power)
