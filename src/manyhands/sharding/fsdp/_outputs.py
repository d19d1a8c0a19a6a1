"""Show the engine only the tensors of a wrapped module's inputs and outputs.

The engine casts input tensors and puts a node of autograd on each, and a hook on each output
tensor. It looks into the containers that it knows, and rebuilds some of them as others: a
`defaultdict` fails, a `UserDict` is not looked into, a `ModelOutput` of transformers loses what is
not a field. So the engine gets a list of the tensors, and our hooks rebuild the containers:

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
    """A nested structure and its tensors, to be rebuilt with other tensors."""

    def __init__(self, tree: Any, tensors: Sequence[Tensor]) -> None:
        self._tree = tree
        self._tensors = tensors

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        # By id, as a structure may contain a tensor several times.
        others = {id(old): new for old, new in zip(self._tensors, tensors, strict=True)}
        return tree_map_tensors(lambda tensor: others[id(tensor)], self._tree)


def flatten_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before the engine's hook: replace the inputs by a list of tensors and a nest."""
    tensors = tensors_in((args, kwargs))
    return (tensors, _Nest((args, kwargs), tensors)), {}


def nest_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """After the engine's hook: restore the inputs, with the engine's tensors in them."""
    tensors, nest = args
    return nest.rebuild(tensors)


def flatten_output(module: nn.Module, _: Any, output: Any) -> Any:
    """Before the engine's hook: replace the output by a list of tensors and a nest."""
    tensors = tensors_in(output, check_output(module))
    # The engine gathers parameters for backward in a hook on the output. An in-place operation on a
    # view would remove that hook (torch warns), so a view becomes a tensor of its own.
    own = [_NotAView.apply(t) if t.requires_grad and t._is_view() else t for t in tensors]
    return own, _Nest(output, tensors)


def nest_output(_: nn.Module, __: Any, output: Any) -> Any:
    """After the engine's hook: restore the output, with the hooked tensors in it."""
    tensors, nest = output
    return nest.rebuild(tensors)


class _NotAView(torch.autograd.Function):
    """Returns a tensor of its own with the same memory, for autograd no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def check_output(module: nn.Module) -> Callable[[Any], None]:
    """Return a check of leaves of an output, which raises a TypeError if one hides a tensor.

    The engine would put no hook on a hidden tensor, and miss the backward through it.
    """

    def check(leaf: Any) -> None:
        if not torch.is_grad_enabled():
            return  # there will be no backward
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
