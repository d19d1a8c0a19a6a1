"""What a wrapped module returns: the engine must see its tensors and keep its hooks on them."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyhands._nested import changed


class _Whole(torch.autograd.Function):
    """The same memory as a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def visible(module: nn.Module, _: Any, output: Any) -> None:
    """Raise where the engine would not see the tensors of an output, and so no backward."""
    for leaf in tree_leaves(output) if torch.is_grad_enabled() else ():
        if isinstance(leaf, Tensor | str | int | float | nn.Module) or is_dataclass(leaf):
            continue
        for name, value in getattr(leaf, "__dict__", {}).items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise TypeError(
                    f"the output of a wrapped {type(module).__name__} is a "
                    f"{type(leaf).__name__}, and its tensor {name!r} would not be seen. Return "
                    "tensors, or tuples, lists, dicts and dataclasses of them."
                )


def no_views(_: nn.Module, __: Any, output: Any) -> Any:
    """The engine gathers parameters for backward in a hook on the output, which an in-place
    operation on a view would take away; of these it warns. A tensor of its own keeps its hooks."""

    def own(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and tensor._is_view():
            return _Whole.apply(tensor)
        return tensor

    return changed(output, own)
