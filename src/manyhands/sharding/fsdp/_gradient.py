"""What `param.grad` is after a sharded backward: a DTensor that torch's clipping understands.

`torch.nn.utils.clip_grad_norm_` takes the norm of each gradient, stacks the norms, and takes the
norm of these. With DTensors that is right, but one reduction for each parameter, and what comes
out is a DTensor, which cannot be formatted as a number. Here the norm of a gradient is a `Length`,
this worker's part of it, and only the norm of all of them is summed over the workers: one small
collective, and a plain tensor. Everything else is done as to any DTensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from manyhands._core.norms import norm

KEEPING = {torch.stack, Tensor.to, Tensor.device.__get__, Tensor.dtype.__get__}  # type: ignore[attr-defined]


class DTensorGradient(DTensor):
    """A gradient of which each worker holds a slice."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.linalg.vector_norm and len(args) <= 2 and not kwargs:
            return _length(args[0], *args[1:])
        if func is torch._foreach_norm and len(args) <= 2 and not kwargs:
            return [_length(grad, *args[1:]) for grad in args[0]]
        if func is Tensor.mul_ and _is_number(*args[1:]):
            args[0]._local_tensor.mul_(args[1])
            return args[0]
        if func is torch._foreach_mul_ and _is_number(*args[1:]):
            return torch._foreach_mul_([_local(grad) for grad in args[0]], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.detach().clone()
        copied.__class__ = DTensorGradient
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # as torch's class, which torch.load knows


class Length(Tensor):
    """This worker's part of the norms of some gradients, which are not yet summed over workers."""

    power: float
    group: Any

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        lengths = list(args[0]) if func is torch.stack else [args[0]] if args else []
        if _alike(lengths):
            with torch._C.DisableTorchFunctionSubclass():
                if func in KEEPING:
                    result = func(*args, **kwargs)
                    return _as_length(result, lengths[0]) if isinstance(result, Tensor) else result
                if func is torch.linalg.vector_norm and _power(*args[1:]) == lengths[0].power:
                    here = torch.linalg.vector_norm(*args, **kwargs)
                    return lengths[0].summed(here)
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = _summed(args), _summed(kwargs)
            return func(*args, **kwargs)

    def summed(self, here: Tensor) -> Tensor:
        """The norms over all workers, from this one's part of them."""
        plain = here.as_subclass(Tensor).clone()
        if math.isinf(self.power):
            unknown = plain.isnan().to(plain.dtype)
            both = torch.stack([plain.nan_to_num(nan=0.0, posinf=math.inf), unknown])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
            return torch.where(both[1] > 0, math.nan, both[0])
        total = plain.double().pow(self.power) if plain.device.type != "mps" else plain
        dist.all_reduce(total, group=self.group)
        return total.pow(1 / self.power).to(plain.dtype)


def mark(param: Tensor) -> None:
    """Make the gradient that the engine has left one of ours."""
    if type(param.grad) is DTensor:
        param.grad.__class__ = DTensorGradient


def _length(grad: Any, power: Any = 2) -> Any:
    local, number = _local(grad), _power(power)
    if number == 2:
        here = norm(local)
    else:
        here = torch.linalg.vector_norm(local, number) if local.numel() else local.new_zeros(())
    length = here.as_subclass(Length)
    length.power, length.group = number, grad.device_mesh.get_group()
    return length


def _as_length(result: Tensor, like: Length) -> Length:
    length = result.as_subclass(Length)
    length.power, length.group = like.power, like.group
    return length


def _alike(lengths: list[Any]) -> bool:
    """Whether all are parts of norms of one kind, among the same workers."""
    return all(
        isinstance(each, Length)
        and (each.power, each.group) == (lengths[0].power, lengths[0].group)
        for each in lengths
    ) and bool(lengths)


def _summed(value: Any) -> Any:
    if isinstance(value, Length):
        return value.summed(value)
    if isinstance(value, list | tuple):
        return type(value)(_summed(v) for v in value)
    if isinstance(value, dict):
        return {k: _summed(v) for k, v in value.items()}
    return value


def _power(power: Any = 2) -> float:
    return float(power)


def _local(grad: Any) -> Tensor:
    tensor: Tensor = grad._local_tensor if isinstance(grad, DTensor) else grad
    return tensor


def _is_number(value: Any = None) -> bool:
    """Whether this is one number, which is the same for all elements."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, DTensor)
    return isinstance(value, int | float)
