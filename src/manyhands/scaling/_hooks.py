"""Measure |g| of every parameter in a backward pass, where autograd adds to `param.grad`.

`PlainNorm` computes Euclidean norms; `_preconditioned.py` computes Adam's.

The hooks are on each parameter's `AccumulateGrad` node, which runs after all hooks of the tensor
and before DDP averages. `module.to(...)` may give a parameter a new node without our hook.

On a GPU, a norm of a single gradient takes more time on the host than on the device. Gradients are
therefore queued and measured together. The queue contains aliases: autograd copies a gradient into
`.grad` if another reference to the tensor exists. An autograd callback measures the rest before
DDP's callback writes the means into the same memory.

Memory
    norms          parameter index -> |g|, from the pass's first gradient until `reset`
    queued         parameter index -> an unmeasured gradient on a device
    partial_sums   parameter index -> the sum of gradients, inside `one_sample`
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, float32, strided
from torch.autograd.graph import Node, get_gradient_edge
from torch.linalg import vector_norm
from torch.utils.hooks import RemovableHandle

from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._tensors.backward import BackwardPasses, current_task, queue_callback
from manyhands._tensors.flat import SHORT, is_dtensor, local_shard, norm
from manyhands._tensors.profiler import Range

# Floats on a CPU, where tensors are slower; on a GPU, a float would synchronize.
Norm = Tensor | float

# (parameter index, local elements of the gradient, a function that selects these elements of any
# tensor of the parameter's shape)
GradientSlice = tuple[int, Tensor, Callable[[Tensor], Tensor]]


# Elements of gradients on a device per operation. Fewer do not saturate an H200 (2**22: 3.1 ms for
# 124 M quotients, 2**24: 2.4 ms, 2**26: 2.1 ms), and more need more memory.
TOGETHER = 16 * 2**20


class PlainNorm:
    """Euclidean norms of gradients. Subclasses define other norms (`_preconditioned.py`).

    Methods identify a gradient by the parameter's index.
    """

    columns = 0  # numbers in a row of `to_state`

    def one(self, index: int, grad: Tensor) -> Norm:
        return norm(grad)

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Sequence[Norm]:
        """Return norms of full gradients, in one operation for all short or GPU gradients."""
        norms: list[Norm] = []
        together = {}
        for position, grad in enumerate(grads):
            dense = grad.dtype is float32 and grad.layout is strided
            if dense and (grad.numel() <= SHORT or grad.device.type != "cpu"):
                together[position] = grad
                norms.append(0.0)
            else:
                norms.append(norm(grad))
        if together:
            lengths = torch._foreach_norm([*together.values()])
            for position, length in zip(together, lengths, strict=True):
                norms[position] = length
        return norms

    def slices(self, slices: Sequence[GradientSlice]) -> Sequence[Norm]:
        return self.many([], [elements for _, elements, _ in slices])

    @property
    def norm_kind(self) -> str:
        """The gradients of the current norms: "plain" or "preconditioned"."""
        return "plain"

    def optimizer_stepped(self) -> None:
        """Update after a step that changed the optimizer's state. Called on every rank."""

    def moments_changed(self) -> None:
        """Read the optimizer's state after `follow_batch` changed it. Called on every rank."""

    def refresh(self) -> None:
        """Update references to the optimizer after a new group or replaced state."""

    def to_state(self) -> list[list[float]]:
        """Return the state, in rows of `columns` numbers."""
        return []

    def load_state(self, state: list[list[float]]) -> None:
        """Restore a state from `to_state`."""


class GradientHooks:
    """Hooks that measure gradients in a backward pass. Deleting this object removes the hooks."""

    def __init__(self, norms: PlainNorm, passes: BackwardPasses) -> None:
        self.passes = passes
        self.norms: dict[int, Norm] = {}
        self.partial_sums: dict[int, Tensor] = {}
        self.queued: dict[int, tuple[Tensor, int]] = {}
        self.valid = True  # False if a gradient was measured incompletely
        self.repeated = False  # whether a parameter had a second gradient in the pass
        self.sums_gradients = False  # whether to sum the gradients of consecutive passes
        self.idle = False  # whether the current step is not measured
        self.first_index = 0  # of the parameter with the pass's first gradient
        self.trainable: list[int] = []
        self._params: Sequence[Tensor] = []
        self._kind = norms
        self._paused = False
        self._elements = 0  # of the queued gradients
        self._never_queued: set[int] = set()  # indices with gradients that other code modifies
        self._handles: list[tuple[RemovableHandle, Tensor, Node]] = []

    def attach(self, params: Sequence[Tensor], unsharded: dict[int, Tensor]) -> None:
        """Measure these parameters; `unsharded` contains the tensors that replace DTensors."""
        self.remove()
        self._on_cpu = all(param.device.type == "cpu" for param in params)
        self._params = [unsharded.get(i, p) for i, p in enumerate(params)]
        self.trainable = [i for i, p in enumerate(self._params) if p.requires_grad]
        plain = type(self._kind).one is PlainNorm.one
        self._plain_and_short: set[int] = set()
        receive = partial(_on_gradient, weakref.ref(self))
        self._handles = []
        for index, param in enumerate(self._params):
            if plain and param.numel() <= SHORT:
                self._plain_and_short.add(index)
            if param.is_floating_point() or param.is_complex():
                node = _accumulator(param)
                handle = node.register_prehook(partial(receive, index))
                self._handles.append((handle, param, node))
        # The finalizer's argument is the list, because `self` would then stay alive.
        weakref.finalize(self, _remove_hooks, self._handles)

    def remove(self) -> None:
        _remove_hooks(self._handles)

    @property
    def active(self) -> bool:
        return bool(self._handles)

    @property
    def parameters_moved(self) -> bool:
        """Whether parameters were moved or converted, which removes their hooks."""
        return any(_accumulator(param) is not node for _, param, node in self._handles)

    def replay(self, result: object, closure: Callable[[], object]) -> Callable[[], object]:
        """Return a closure that first returns `result`, and measures no further calls (LBFGS)."""
        results = [result]

        def replayed() -> object:
            if results:
                return results.pop()
            self._paused = True
            try:
                return closure()
            finally:
                self._paused = False

        return replayed

    def reset(self) -> None:
        self.norms = {}
        self.partial_sums = {}
        self.queued = {}
        self.valid = True
        self.repeated = False
        self._elements = 0

    def finish_pass(self, factor: float) -> dict[int, Norm]:
        self.measure_queued()
        for index, partial_sum in self.partial_sums.items():
            with Range("manyhands::norm"):
                self.norms[index] = self._kind.one(index, partial_sum)
        if factor != 1.0:
            self.norms = {index: each * factor for index, each in self.norms.items()}
        return self.norms

    def enter(self, index: int, task: int) -> None:
        self.first_index = index
        self.passes.enter(task)
        if not self._on_cpu:
            queue_callback(self.measure_queued)

    def queue(self, index: int, grad: Tensor) -> None:
        alias = grad.detach()
        self.queued[index] = alias, alias._version
        self._elements += alias.numel()
        # In the first pass, a DDP with static_graph=True averages before our callback.
        first = self.passes.count == 1
        if first or self._elements >= TOGETHER or index in self._never_queued:
            self.measure_queued()

    def measure_queued(self) -> None:
        # If other code (a hook on `.grad`) has changed a gradient, the step's statistics are
        # invalid, and later gradients of that parameter are measured immediately.
        if not self.queued:
            return
        changed = {i for i, (grad, version) in self.queued.items() if grad._version != version}
        self.valid = self.valid and not changed
        self._never_queued |= changed
        grads = [grad for grad, _ in self.queued.values()]
        with Range("manyhands::norm"):
            norms = self._kind.many([*self.queued], grads)
        self.norms.update(zip(self.queued, norms, strict=True))
        self.queued = {}
        self._elements = 0


def _on_gradient(
    hooks_ref: weakref.ref[GradientHooks], index: int, grads: tuple[Tensor | None]
) -> None:
    # Called for each parameter, so speed is essential.
    hooks = hooks_ref()
    grad = grads[0]
    if hooks is None or grad is None or hooks._paused:
        return
    task = current_task()
    if task != hooks.passes.task:
        hooks.enter(index, task)
    if hooks.idle:
        hooks.norms[index] = 0.0  # only the presence of a gradient is recorded
        return
    if grad.requires_grad:  # with create_graph=True
        grad = grad.detach()
    if hooks.sums_gradients:
        partial_sum = hooks.partial_sums.get(index)
        # Copy, because autograd may use the memory of `grad` for `.grad`.
        hooks.partial_sums[index] = grad.clone() if partial_sum is None else partial_sum + grad
        return
    if index in hooks.norms or index in hooks.queued:
        hooks.repeated = True
        return
    if not hooks._on_cpu:
        hooks.queue(index, grad)
        return
    with Range("manyhands::norm"):
        if index in hooks._plain_and_short and grad.dtype is float32 and grad.layout is strided:
            # Repeats `one`, to save a Python call.
            measured: Norm = vector_norm(grad)
        else:
            measured = hooks._kind.one(index, grad)
        hooks.norms[index] = float(measured)


def _accumulator(param: Tensor) -> Node:
    # Frozen parameters get a node too, and are measured after unfreezing.
    frozen = not param.requires_grad
    if frozen:  # torch creates the node only for a tensor that requires a gradient
        param.requires_grad_(True)
    node = get_gradient_edge(param).node
    if frozen:
        param.requires_grad_(False)
    return node


def _remove_hooks(handles: list[tuple[RemovableHandle, Tensor, Node]]) -> None:
    for handle, *_ in handles:
        handle.remove()
    handles.clear()


class GradientVersion:
    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.grad = param.grad
        self._version = _version(param.grad)

    @property
    def unchanged(self) -> bool:
        grad = self.param.grad
        return grad is self.grad and _version(grad) == self._version


def _version(grad: Tensor | None) -> int:
    if grad is None:
        return -1
    if type(grad) is Tensor or not is_dtensor(grad):
        return grad._version
    # Operations on a DTensor may increment the version of the DTensor or of the local tensor.
    return grad._version + local_shard(grad)._version


def any_values(params: Sequence[Tensor]) -> bool:
    """Return whether any gradient is nonzero. Synchronizes with a GPU."""
    return any(_has_values(local_shard(p.grad)) for p in params if p.grad is not None)


def _has_values(grad: Tensor) -> bool:
    if isinstance(grad, ShardedGradient):
        return not grad.zeroed
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    return bool(grad.any())
