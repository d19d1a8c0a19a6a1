"""Convert `param.grad` of a sharded backward into a DTensor that works with torch's clipping.

`torch.nn.utils.clip_grad_norm_` stacks the norms of all gradients and takes the norm of the stack.
With plain DTensors, the result cannot be formatted as a number, and a maximum norm hangs if a rank
has an empty slice. Here, the norm of a gradient is a `LocalNorm` (`_ranks/sharded_gradient.py`): a
single small all_reduce in total, with a plain tensor as the result.

A reduction of a plain DTensor, such as `grad.sum()`, returns a partial result on each rank, and
`item()` and `bool()` ignore the other ranks' parts. This class combines the parts immediately. All
other functions treat the gradient as a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from manyhands._ranks.presence import RollCall
from manyhands._ranks.sharded_gradient import NOT_LIKE_IT, LocalNorm, norm_of_slices
from manyhands._tensors.flat import local_shard

# Undefined on a rank without elements.
OF_SOME = {"max", "min", "amax", "amin", "argmax", "argmin", "norm", "linalg_vector_norm"}
NORMS = {torch.linalg.vector_norm, torch.norm, Tensor.norm}


class DTensorGradient(DTensor):
    """A sharded gradient: each rank stores a slice."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # With further arguments (dim, dtype), DTensor computes.
        if func in NORMS and len(args) <= 2 and not kwargs and _is_number(*args[1:], 2.0):
            return _norm_of_slice(args[0], *args[1:])
        if func is torch._foreach_norm and len(args) <= 2 and not kwargs:
            return [_norm_of_slice(grad, *args[1:]) for grad in args[0]]
        if func is Tensor.mul_ and _is_number(*args[1:]):
            args[0]._local_tensor.mul_(args[1])
            return args[0]
        if func is torch._foreach_mul_ and _is_number(*args[1:]):
            return torch._foreach_mul_([local_shard(grad) for grad in args[0]], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in OF_SOME and _is_empty_somewhere(args[0]):
                return func(_put_together(func.__name__, args[0]), *args[1:], **kwargs)
            result = func(*args, **kwargs)
            given = any(result is each for each in (*args, *kwargs.values()))
            if type(result) is not DTensor or given:
                return result
            is_part = any(placement.is_partial() for placement in result.placements)
            if is_part and result.numel() == 1:
                return _put_together(func.__name__, result)
            if func.__name__ != "clone":  # optimizers store a clone as state
                result.__class__ = DTensorGradient
            return result

    @property
    def data(self) -> Tensor:
        """The gradient without history. Assigning replaces this rank's slice."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        # torch would replace the DTensor's memory, but not this rank's slice.
        if not isinstance(other, DTensor) or _layout(other) != _layout(self):
            raise RuntimeError(NOT_LIKE_IT)
        self._local_tensor = other._local_tensor

    def __deepcopy__(self, memo: dict[int, Tensor]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = self.detach().clone()
        copied.__class__ = DTensorGradient
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Pickle a plain DTensor, which torch.load accepts."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)


def use_our_class(param: Tensor) -> None:
    # Changing the class preserves the object and its hooks.
    if type(param.grad) is DTensor:
        param.grad.__class__ = DTensorGradient


def _layout(grad: DTensor) -> object:
    return grad.shape, grad.dtype, grad.device_mesh, grad.placements


def _put_together(call: str, result: DTensor) -> Tensor:
    mesh = result.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    roll = RollCall(group.get_group_store(), group.rank(), group.size())
    roll.wait(f"{call}() of a sharded gradient")
    return result.full_tensor()


def _is_empty_somewhere(grad: object) -> bool:
    place = grad.placements[-1] if isinstance(grad, DTensor) else None
    if not isinstance(grad, DTensor) or not isinstance(place, Shard):
        return False
    length = grad.shape[place.dim]
    ranks = grad.device_mesh.size(-1)
    return -(-length // ranks) * (ranks - 1) >= length


def _norm_of_slice(grad: DTensor, power: float = 2) -> LocalNorm:
    mesh = grad.device_mesh  # shards of a copy are in the last dimension
    return norm_of_slices([grad._local_tensor], float(power), mesh.get_group(mesh.ndim - 1))


def _is_number(value: object = None, *_: object) -> bool:
    """Return whether the value is a single number for all elements."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, DTensor)
    return isinstance(value, int | float)
