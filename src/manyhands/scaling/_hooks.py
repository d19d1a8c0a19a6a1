"""Hooks where autograd adds to `param.grad`: they see every gradient once, before any reduction.

A tensor's own hooks are no place to measure: a user's hooks that are registered later would change
the gradient afterwards. The hook is therefore on the parameter's `AccumulateGrad` node, which all
of the tensor's hooks come before, and DDP's averaging after. The node belongs to the tensor as it
is: `module.to(...)` gives a parameter a new one without our hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from manyhands._core.dtensor import is_dtensor, local_shard
from manyhands._core.sharded_gradient import ShardedGradient

# called with a parameter's index and the gradient, in a tuple as autograd passes it
Deliver = Callable[[int, tuple[Tensor | None]], None]


class ParameterHooks:
    """Hooks on the tensors on which autograd computes; removed when this object is dropped.

    Most `params` are such tensors themselves. For the DTensors of `fully_shard`, `unsharded` has
    the tensor that takes their place during forward and backward.
    """

    def __init__(
        self, params: Sequence[Tensor], unsharded: dict[int, Tensor], deliver: Deliver
    ) -> None:
        self.autograd_params = [unsharded.get(i, p) for i, p in enumerate(params)]
        # with its node, which is compared in `parameters_moved`
        self._handles: list[tuple[Any, Any]] = []
        for index, param in enumerate(self.autograd_params):
            if _can_have_gradient(param):
                node = _accumulator(param)
                self._handles.append((node.register_prehook(partial(deliver, index)), node))
        self.trainable = [i for i, p in enumerate(self.autograd_params) if p.requires_grad]
        # The list is the finalizer's argument, not `self`, which could then never be dropped.
        weakref.finalize(self, _remove_hooks, self._handles)

    def remove(self) -> None:
        """Remove the hooks."""
        _remove_hooks(self._handles)

    @property
    def active(self) -> bool:
        """Whether the hooks have not been removed."""
        return bool(self._handles)

    @property
    def parameters_moved(self) -> bool:
        """Whether parameters were moved or converted since, which takes their hooks away."""
        if not self.active:
            return False
        nodes = [node for _, node in self._handles]
        params = filter(_can_have_gradient, self.autograd_params)
        return any(_accumulator(p) is not node for p, node in zip(params, nodes, strict=True))


def _can_have_gradient(param: Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()


def _accumulator(param: Tensor) -> Any:
    """Return the node that adds to `param.grad`.

    A frozen parameter gets one too, so that it is measured once it is unfrozen.
    """
    frozen = not param.requires_grad
    if frozen:  # torch makes the node only for a tensor that requires a gradient
        param.requires_grad_(True)
    node = get_gradient_edge(param).node
    if frozen:
        param.requires_grad_(False)
    return node


def _remove_hooks(handles: list[tuple[Any, Any]]) -> None:
    for handle, _ in handles:
        handle.remove()
    handles.clear()


class GradientVersion:
    """A parameter's gradient at one moment: which tensor it was, and its version.

    Comparing versions tells whether anybody has touched the gradient, without reading its values.
    """

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.grad = param.grad
        self._version = -1 if param.grad is None else _version(param.grad)

    @property
    def unchanged(self) -> bool:
        grad = self.param.grad
        return grad is self.grad and (grad is None or _version(grad) == self._version)


def _version(grad: Tensor) -> int:
    """Return a number that changes with every in-place operation."""
    # Operations on a DTensor may count on the DTensor or on its local tensor, so add both.
    return grad._version + (local_shard(grad)._version if is_dtensor(grad) else 0)


def has_values(grad: Tensor) -> bool:
    """Return whether a gradient has an element that is not zero. Waits for a GPU."""
    grad = local_shard(grad)
    if isinstance(grad, ShardedGradient):  # this rank may hold no element of it
        return not grad.zeroed
    return bool((grad.coalesce().values() if grad.layout == torch.sparse_coo else grad).any())
