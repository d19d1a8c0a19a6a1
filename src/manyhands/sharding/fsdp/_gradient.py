"""What `param.grad` is after a sharded backward: a DTensor that torch's clipping understands.

`torch.nn.utils.clip_grad_norm_` takes the norm of each gradient, stacks the norms, and takes the
norm of these. With plain DTensors that is right, but costs one all_reduce for each parameter, and
the result is a DTensor, which cannot be formatted as a number. Here the norm of one gradient is a
`LocalNorm`, the norm of this rank's slice. Only the norm of all of them is reduced over the ranks:
one small all_reduce, and a plain tensor. All other functions treat the gradient as a DTensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from manyhands._core.flat import norm

# Functions of a LocalNorm whose result is still the norm of this rank's slices.
KEEP_LOCAL = {torch.stack, Tensor.to, Tensor.device.__get__, Tensor.dtype.__get__}  # type: ignore[attr-defined]


class DTensorGradient(DTensor):
    """A gradient of which each rank holds a slice."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # With further arguments (dim, dtype) these are other functions, left to DTensor.
        if func is torch.linalg.vector_norm and len(args) <= 2 and not kwargs:
            return _norm_of_slice(args[0], *args[1:])
        if func is torch._foreach_norm and len(args) <= 2 and not kwargs:
            return [_norm_of_slice(grad, *args[1:]) for grad in args[0]]
        # Clipping multiplies by one number, the same on all ranks, so the slice is enough.
        if func is Tensor.mul_ and _is_number(*args[1:]):
            args[0]._local_tensor.mul_(args[1])
            return args[0]
        if func is torch._foreach_mul_ and _is_number(*args[1:]):
            return torch._foreach_mul_([_local(grad) for grad in args[0]], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Tensor]) -> Tensor:
        copied = self.detach().clone()  # a DTensor: detach() loses the subclass
        copied.__class__ = DTensorGradient
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return self.detach().__reduce_ex__(protocol)  # as torch's class, which torch.load knows


class LocalNorm(Tensor):
    """Norms of this rank's slices of some gradients, not yet reduced over the ranks."""

    power: float
    group: dist.ProcessGroup

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


def use_our_class(param: Tensor) -> None:
    """Turn the DTensor that the engine left in `param.grad` into a DTensorGradient."""
    # Changing the class keeps the object, its memory and its hooks, and costs nothing.
    if type(param.grad) is DTensor:
        param.grad.__class__ = DTensorGradient


def _norm_of_slice(grad: DTensor, power: float = 2) -> LocalNorm:
    local, number = _local(grad), float(power)
    if number == 2:
        here = norm(local)  # one read of the memory
    else:
        # An empty slice has no maximum norm.
        here = torch.linalg.vector_norm(local, number) if local.numel() else local.new_zeros(())
    result = here.as_subclass(LocalNorm)
    result.power, result.group = number, grad.device_mesh.get_group()
    return result


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


def _local(grad: Tensor) -> Tensor:
    tensor: Tensor = grad._local_tensor if isinstance(grad, DTensor) else grad
    return tensor


def _is_number(value: object = None) -> bool:
    """Return whether the value is one number for all elements, and no tensor of their shape."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, DTensor)
    return isinstance(value, int | float)
