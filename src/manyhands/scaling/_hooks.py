"""Measure |g| of every parameter in a backward pass, where autograd adds to `param.grad`.

`PlainNorm` takes the norm, or Adam's in `_preconditioned.py`.

A tensor's own hooks are no place to measure: a user's hooks that are registered later would change
the gradient afterwards. The hook is therefore on the parameter's `AccumulateGrad` node, which all
of the tensor's hooks come before, and DDP's averaging after. The node belongs to the tensor as it
is: `module.to(...)` gives a parameter a new one without our hook.

`GradientVersion` finds out, without reading values, whether anybody has changed a gradient since.

On a GPU a norm of one gradient costs the host more than the device. So gradients are held until
they have `TOGETHER` elements, and measured in one call. What is held is an alias: autograd makes
the gradient itself `.grad`, without a copy, only if nobody else has it. The last ones are measured
in a callback of autograd's that comes before DDP's, which writes the means into the same memory.

Tensors held, and when
    norms          parameter index -> |g|, from the pass's first gradient until `reset`
    held           parameter index -> a gradient on a device that is still to be measured
    partial_sums   parameter index -> the sum of its gradients, if one micro-batch has several:
                   inside `one_sample`, and for a parameter that several reentrant checkpoints share

**Under `fully_shard`** the optimizer holds DTensors, on which no hook of autograd ever fires.
Around forward and backward, `fully_shard` puts *unsharded* parameters into the modules in their
place. Each of these is always the same object, although its memory is allocated and freed. Its
gradient is that of one micro-batch on one rank.

Only public interfaces are used to find them. While a module is sharded, its parameters *are* the
optimizer's, by identity, so that names are certain. `unshard()` puts the unsharded ones in under
the same names, and `reshard()` takes them out. That is an all-gather of the parameters, one module
at a time, when the rule is made. Nothing stays behind in the modules: no forward hooks whose order,
repetition in checkpoints or effect on torch.compile would matter.

An optimizer does not know its modules. Unless the model is an argument, Python's garbage collector
is asked for the instances of the classes that `fully_shard` makes, which are few. (A global forward
hook would see the modules too, but only those that are called, and perhaps only after their
parameters have been replaced.)
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, float32, nn, strided
from torch.autograd.graph import Node, get_gradient_edge
from torch.linalg import vector_norm
from torch.utils.hooks import RemovableHandle

from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._tensors.backward import BackwardPasses, current_task, queue_callback
from manyhands._tensors.flat import SHORT, DTensorShards, is_dtensor, local_shard, norm

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# On a GPU norms stay there, as waiting for them would cost more than the work. On a CPU plain
# floats cost a fraction of what one-element tensors do.
Norm = Tensor | float

# (parameter index, elements of its gradient that this rank holds, a function that takes the same
# elements out of any tensor of the parameter's shape)
GradientSlice = tuple[int, Tensor, Callable[[Tensor], Tensor]]


# Elements of gradients on a device that go through an operation in one call. torch gives 65,536 of
# them to a block of threads: fewer do not keep an H200 busy (2**22: 3.1 ms for 124 M quotients,
# 2**24: 2.4 ms, 2**26: 2.1 ms), and more hold more memory.
TOGETHER = 16 * 2**20


class PlainNorm:
    """Norms of gradients: here the Euclidean ones. A subclass takes others (`_preconditioned.py`).

    An index says whose gradient it is. Each norm is a tensor without dimensions, or on a CPU also a
    float: every operation on a small tensor costs some microseconds. Norms are taken of a pass's
    gradients, of the mean and of differences of means, and in measured steps only. A rule's is made
    by `_make_norm`, anew for a copy, and saved and loaded with the rule.
    """

    columns = 0  # numbers in a row of `to_state`; none may be below 0

    def one(self, index: int, grad: Tensor) -> Norm:
        """Return the norm of one whole gradient."""
        return norm(grad)

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Sequence[Norm]:
        """Return the norm of each of several whole gradients.

        Short dense float32 gradients are taken in one call, and the others one by one.
        """
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
        """Return the norm of each slice."""
        return self.many([], [elements for _, elements, _ in slices])

    @property
    def norm_kind(self) -> str:
        """Which gradients the norms are of at present: "plain" or "preconditioned"."""
        return "plain"

    # A plain norm does not depend on the optimizer, so there is nothing to follow or to save.

    def optimizer_stepped(self) -> None:
        """React to a step that has changed the optimizer's state. Called on every rank."""

    def moments_changed(self) -> None:
        """Read the optimizer's state anew: `follow_batch` has changed it. Called on every rank."""

    def refresh(self) -> None:
        """Look at the optimizer again, after a group was added or its state was replaced."""

    def to_state(self) -> list[list[float]]:
        """Return what a bitwise continuation needs, in rows of `columns` numbers."""
        return []

    def load_state(self, state: list[list[float]]) -> None:
        """Continue from `to_state`."""


class GradientHooks:
    """Hooks on the tensors on which autograd computes; removed when this object is dropped.

    Every hook calls `passes`, which finds out when a backward pass begins and ends.
    """

    def __init__(self, norms: PlainNorm, passes: BackwardPasses) -> None:
        self.passes = passes
        self.norms: dict[int, Norm] = {}
        self.partial_sums: dict[int, Tensor] = {}
        self.held: dict[int, tuple[Tensor, int]] = {}  # with its version
        self.valid = True  # False if a gradient was seen only in part
        self.sums_gradients = False  # whether the gradients of several passes belong together
        self.idle = False  # whether the step under way is not measured
        self.first_index = 0  # of the parameter whose gradient came first in the pass
        self.trainable: list[int] = []
        self._params: Sequence[Tensor] = []
        self._kind = norms
        self._paused = False
        # parameters whose gradient has come in several parts, ever
        self._repeated: set[int] = set()
        self._elements = 0  # of the gradients that are held
        self._at_once: set[int] = set()  # parameters whose gradients others change within the pass
        self._handles: list[tuple[RemovableHandle, Tensor, Node]] = []

    def attach(self, params: Sequence[Tensor], unsharded: dict[int, Tensor]) -> None:
        """Measure the gradients of these parameters, and no others.

        Most `params` are what autograd computes on. For the DTensors of `fully_shard`, `unsharded`
        has the tensor that takes their place during forward and backward.
        """
        self.remove()
        self._on_cpu = all(param.device.type == "cpu" for param in params)
        self._params = [unsharded.get(i, p) for i, p in enumerate(params)]
        self.trainable = [i for i, p in enumerate(self._params) if p.requires_grad]
        plain = type(self._kind).one is PlainNorm.one
        self._plain_and_short: set[int] = set()
        receive = partial(_on_gradient, weakref.ref(self))
        self._handles = []  # with its node, which is compared in `parameters_moved`
        for index, param in enumerate(self._params):
            if plain and param.numel() <= SHORT:
                self._plain_and_short.add(index)
            if param.is_floating_point() or param.is_complex():
                node = _accumulator(param)
                handle = node.register_prehook(partial(receive, index))
                self._handles.append((handle, param, node))
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
        return any(_accumulator(param) is not node for _, param, node in self._handles)

    def replay(self, result: object, closure: Callable[[], object]) -> Callable[[], object]:
        """Return a closure that has run already, with this result; further calls are not measured.

        LBFGS evaluates the same samples again.
        """
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
        """Drop a pass's norms: they are in the step's sums by now, or they are not wanted."""
        self.norms = {}
        self.partial_sums = {}
        self.held = {}
        self.valid = True
        self._elements = 0

    def finish_pass(self, factor: float) -> dict[int, Norm]:
        """Return the norms of the pass, those of summed gradients included, times a factor."""
        self.measure_held()
        for index, partial_sum in self.partial_sums.items():
            self.norms[index] = self._kind.one(index, partial_sum)
        if factor != 1.0:
            self.norms = {index: each * factor for index, each in self.norms.items()}
        return self.norms

    def enter(self, index: int, task: int) -> None:
        """React to the first gradient of a backward pass (`task`), of the parameter `index`."""
        self.first_index = index
        self.passes.enter(task)
        if not self._on_cpu:
            queue_callback(self.measure_held)

    def hold(self, index: int, grad: Tensor) -> None:
        """Keep a gradient on a device until there are enough to measure them in one call."""
        alias = grad.detach()
        self.held[index] = alias, alias._version
        self._elements += alias.numel()
        # In its first pass a DDP with static_graph=True averages before our callback.
        first = self.passes.count == 1
        if first or self._elements >= TOGETHER or index in self._at_once:
            self.measure_held()

    def measure_held(self) -> None:
        """Measure the gradients that are held."""
        # If somebody has changed one meanwhile (a hook on `.grad`), this step's statistics are
        # spoiled, this once: from now on that parameter's gradient is measured as it comes.
        if not self.held:
            return
        changed = {i for i, (grad, version) in self.held.items() if grad._version != version}
        self.valid = self.valid and not changed
        self._at_once |= changed
        grads = [grad for grad, _ in self.held.values()]
        self.norms.update(zip(self.held, self._kind.many([*self.held], grads), strict=True))
        self.held = {}
        self._elements = 0

    def _on_repeated_gradient(self, index: int, grad: Tensor) -> None:
        """Add the second part of a gradient that comes in parts."""
        # A reentrant checkpoint that runs its parameter again causes this. The first part was
        # measured and not kept. If `.grad` has the norm that was measured, `.grad` is the first
        # part alone. If not, this step's statistics are spoiled, this once: from now on, parts of
        # this parameter's gradient are summed.
        self._repeated.add(index)
        first = self._params[index].grad
        measured = float(self.norms.pop(index))
        if first is not None:
            now = float(self._kind.one(index, first))
            if math.isclose(now, measured, rel_tol=1e-4, abs_tol=1e-8):
                self.partial_sums[index] = first + grad
                return
        self.valid = False


def _on_gradient(
    hooks_ref: weakref.ref[GradientHooks], index: int, grads: tuple[Tensor | None]
) -> None:
    """Measure a parameter's gradient. (Called for each parameter: every microsecond counts.)"""
    hooks = hooks_ref()
    grad = grads[0]
    if hooks is None or grad is None or hooks._paused:
        return
    task = current_task()
    if task != hooks.passes.task:
        hooks.enter(index, task)
    if hooks.idle:
        hooks.norms[index] = 0.0  # that there is a gradient is all that counts
        return
    if grad.requires_grad:  # with create_graph=True
        grad = grad.detach()
    if hooks.sums_gradients or index in hooks._repeated:
        partial_sum = hooks.partial_sums.get(index)
        # a copy, because autograd may reuse the memory of `grad` for `.grad`
        hooks.partial_sums[index] = grad.clone() if partial_sum is None else partial_sum + grad
        return
    if index in hooks.norms or index in hooks.held:
        hooks.measure_held()
        hooks._on_repeated_gradient(index, grad)
        return
    if not hooks._on_cpu:
        hooks.hold(index, grad)
        return
    if index in hooks._plain_and_short and grad.dtype is float32 and grad.layout is strided:
        # What `one` would do, without a Python call: most parameters of most models end here.
        measured: Norm = vector_norm(grad)
    else:
        measured = hooks._kind.one(index, grad)
    hooks.norms[index] = float(measured)


def _accumulator(param: Tensor) -> Node:
    """Return the node that adds to `param.grad`."""
    # A frozen parameter gets one too, so that it is measured once it is unfrozen.
    frozen = not param.requires_grad
    if frozen:  # torch makes the node only for a tensor that requires a gradient
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
    """A parameter's gradient at one moment: which tensor it was, and its version.

    Comparing versions tells whether anybody has touched the gradient, without reading its values.
    """

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.grad = param.grad
        self._version = _version(param.grad)

    @property
    def unchanged(self) -> bool:
        grad = self.param.grad
        return grad is self.grad and _version(grad) == self._version


def _version(grad: Tensor | None) -> int:
    """Return a number that changes with every in-place operation."""
    if grad is None:
        return -1
    if type(grad) is Tensor or not is_dtensor(grad):
        return grad._version
    # Operations on a DTensor may count on the DTensor or on its local tensor, so add both.
    return grad._version + local_shard(grad)._version


def any_values(params: Sequence[Tensor]) -> bool:
    """Return whether any gradient has an element that is not zero. Waits for a GPU."""
    return any(_has_values(local_shard(p.grad)) for p in params if p.grad is not None)


def _has_values(grad: Tensor) -> bool:
    if isinstance(grad, ShardedGradient):  # this rank may hold no element of it
        return not grad.zeroed
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    return bool(grad.any())


# -- under `fully_shard` --------------------------------------------------------------------------


def unsharded_parameters(
    params: Sequence[Tensor], model: nn.Module | None = None
) -> dict[int, Tensor]:
    """Return index in `params` -> the unsharded parameter that the model computes with.

    Call it on every rank: it gathers the parameters.
    """
    index_of: dict[int, int] = {}
    for i, param in enumerate(params):
        if is_dtensor(param):
            DTensorShards.of(param)  # raises before any collective if it cannot be measured
            index_of[id(param)] = i
    if not index_of:
        return {}
    modules = fsdp_modules(model)
    owned, missing = _names_by_module(modules, index_of)
    if missing:
        # After a forward without backward the outermost module is still unsharded.
        for module in modules:
            module.reshard()
        owned, missing = _names_by_module(modules, index_of)
    if missing:
        first = params[min(missing.values())]
        raise ValueError(
            f"{len(missing)} of {len(index_of)} sharded parameters (the first has shape "
            f"{tuple(first.shape)}) are in no module that fully_shard was called on. "
            "Make the optimizer after fully_shard, or pass the rule model=..."
        )
    found: dict[int, Tensor] = {}
    # Each unshard() is a collective, so the order must be the same on every rank. The garbage
    # collector's is not; the parameters' is.
    for module, names in sorted(owned, key=lambda item: min(item[1])):
        module.unshard()
        for i, (holder, name) in names.items():
            replacement = holder._parameters[name]
            if replacement is None or is_dtensor(replacement):
                raise ValueError("scaling works over fully_shard, not over tensor parallelism.")
            found[i] = replacement
        module.reshard()
    return found


def find_unaveraged_gradients(
    params: Sequence[Tensor], unsharded: dict[int, Tensor], measured: Collection[int]
) -> str | None:
    """Return an error message if `fully_shard` has not averaged all gradients of the last pass.

    `measured` are the indices of the parameters that had a gradient in that pass.
    """
    if any(i in unsharded and params[i].grad is None for i in measured):
        return (
            "after the step's last backward() there are gradients that fully_shard has not "
            "averaged. Was that pass inside no_sync(), or after "
            "set_requires_gradient_sync(False)? Only the passes before it may be."
        )
    if any(param.grad is not None for param in unsharded.values()):
        return (
            "the step's last backward() has left gradients that fully_shard has not averaged: "
            "a module that it was called on ran several times under reentrant checkpoints, "
            "which torch's fully_shard does not support. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint, or wrap the module with mh.FSDP."
        )
    return None


def fsdp_modules(model: nn.Module | None) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was called on: in the model, or, without one, all."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # never imported, and so never called
        return []
    if model is not None:
        return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    # `fully_shard` gives each module a class of its own that derives from FSDPModule. An instance
    # refers to its class, so the class's referrers are a short list to search.
    classes = _with_subclasses(fsdp.FSDPModule)
    return [thing for thing in gc.get_referrers(*classes) if type(thing) in classes]


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


def _names_by_module(
    modules: Sequence[FSDPModule], index_of: dict[int, int]
) -> tuple[list[tuple[FSDPModule, dict[int, tuple[nn.Module, str]]]], dict[int, int]]:
    """Return each `fully_shard` module's parameters, with holder and name; and those missing."""
    missing = dict(index_of)
    owned = []
    # The innermost modules first: each shards the parameters that no module inside it shards.
    for fsdp_module in sorted(modules, key=_count_modules):
        names = {}
        for module in cast(nn.Module, fsdp_module).modules():
            for name, param in module._parameters.items():
                if id(param) in missing:
                    names[missing.pop(id(param))] = module, name
        if names:
            owned.append((fsdp_module, names))
    return owned, missing


def _count_modules(module: FSDPModule) -> int:
    return len(list(cast(nn.Module, module).modules()))
