"""What a wrapped module takes and returns: the engine must see its tensors, and only these.

The engine puts a node of autograd on every tensor that comes in and a hook on every one that goes
out, and casts what comes in. It looks into the containers that it knows, and rebuilds some of
them as others: a `defaultdict` fails, a `UserDict` is not looked into, a `ModelOutput` of
transformers loses what is not a field. So it is shown a list of the tensors, and the containers
are put together around it:

    call ── flatten_inputs ── the engine's hook ── nest_inputs ── the module's hooks and forward
         ── flatten_output ── the engine's hook ── nest_output ── result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._core.trees import tensors_in, tree_map_tensors


class _Nest:
    """A nested structure and the tensors in it, for which others are to be put in."""

    def __init__(self, tree: Any, tensors: Sequence[Tensor]) -> None:
        self._tree = tree
        self._tensors = tensors

    def around(self, tensors: Sequence[Tensor]) -> Any:
        others = {id(old): new for old, new in zip(self._tensors, tensors, strict=True)}
        return tree_map_tensors(lambda tensor: others[id(tensor)], self._tree)


def flatten_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before the engine's hook: a list of tensors, and what was around them."""
    tensors = tensors_in((args, kwargs))
    return (tensors, _Nest((args, kwargs), tensors)), {}


def nest_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """After the engine's hook: the call as it was, with the engine's tensors in it."""
    tensors, nest = args
    return nest.around(tensors)


def flatten_output(module: nn.Module, _: Any, output: Any) -> Any:
    """Before the engine's hook: a list of tensors, and what was around them.

    The engine gathers parameters for backward in a hook on the output, which an in-place
    operation on a view would take away; of these it warns. A tensor of its own keeps its hooks.
    """
    tensors = tensors_in(output, _check_seen(module))
    own = [_Whole.apply(t) if t.requires_grad and t._is_view() else t for t in tensors]
    return own, _Nest(output, tensors)


def nest_output(_: nn.Module, __: Any, output: Any) -> Any:
    """After the engine's hook: what the module returned, with the hooked tensors in it."""
    tensors, nest = output
    return nest.around(tensors)


class _Whole(torch.autograd.Function):
    """The same memory as a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _check_seen(module: nn.Module) -> Callable[[Any], None]:
    """Raise where the engine would not see the tensors of an output, and so no backward."""

    def check(leaf: Any) -> None:
        if not torch.is_grad_enabled():
            return
        inside = dict(leaf) if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
        for name, value in inside.items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise TypeError(
                    f"the output of a wrapped {type(module).__name__} is a "
                    f"{type(leaf).__name__}, and its tensor {name!r} would not be seen. Return "
                    "tensors, or tuples, lists, dicts and dataclasses of them, or register the "
                    "class with torch.utils._pytree.register_pytree_node."
                )

    return check
