"""Has anybody touched the gradients? Without a look at their values where none is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands._dtensors import is_dtensor, local
from manyhands.sharding._gradient import ShardedGradient


@dataclass(frozen=True)
class Mark:
    """A parameter's gradient as it was: the same tensor, at the same version."""

    param: Tensor
    grad: Tensor | None
    version: int

    @classmethod
    def of(cls, param: Tensor) -> Mark:
        return cls(param, param.grad, -1 if param.grad is None else _version(param.grad))

    @property
    def unchanged(self) -> bool:
        grad = self.param.grad
        return grad is self.grad and (grad is None or _version(grad) == self.version)


def _version(grad: Tensor) -> int:
    """Changes with every operation in place; on a DTensor, or on what it holds."""
    return grad._version + (local(grad)._version if is_dtensor(grad) else 0)


def has_values(grad: Tensor) -> bool:
    grad = local(grad)
    if isinstance(grad, ShardedGradient):  # of which this worker may hold nothing
        return not grad.zeroed
    return bool((grad.coalesce().values() if grad.layout == torch.sparse_coo else grad).any())
