"""Shard the parameters of a wrap with torch's `fully_shard`; no other file calls it.

Some methods use the engine's private state, because it has few public switches, and note the
versions of torch.

The engine searches and rebuilds some containers of input and output tensors. It fails on a
`defaultdict`, ignores a `UserDict`, and drops non-field attributes of a `ModelOutput` of
transformers. Therefore the engine only gets lists of tensors, and our hooks rebuild the containers.
Our hooks also cast the inputs, because before torch 2.12 the engine omits casts in a recomputation:

    call ── _flatten_inputs ── the engine's hook ── _nest_inputs ── the module's hooks and forward
         ── _flatten_output ── the engine's hook ── _nest_output ── result
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands._optimizers.optimizers import fused_problem, problem_on_shards
from manyhands._optimizers.wrappers import params_of
from manyhands._ranks.presence import count_step
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.backward import current_task
from manyhands._tensors.flat import check_own_shards, is_dtensor
from manyhands._tensors.trees import as_type, tensors_in, tree_map_tensors
from manyhands._warn import warn
from manyhands.sharding.fsdp._collectives import AllGather, ReduceQueue, ReduceScatter
from manyhands.sharding.fsdp._places import (
    REPLACED,
    Place,
    Places,
    make_contiguous,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

F = TypeVar("F", bound=Callable[..., object])


def eager(fn: F) -> F:
    """Exclude a function from torch.compile."""
    uncompiled: Any = torch._compile._disable_dynamo(fn)
    return uncompiled


# A mesh for each group and device type.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


class Engine:
    """Shards the parameters at the given places of a module, in place.

    Attributes:
        params: the sharded parameters (DTensors), in the order of `places`.
        divide: divisors of gradients before and after the sum.
        on_gloo: whether our collectives replace the engine's.
    """

    def __init__(
        self,
        module: nn.Module,
        places: Places,
        ranks: RankGroup,
        device: torch.device,
        compute: torch.dtype | None,
        reduce: torch.dtype | None,
        *,
        reshard_after_forward: bool | None,
        offload: bool,
        overlap: bool,
        ignored: set[nn.Parameter],
    ) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        make_contiguous(places)
        # Each parameter once: the engine finds the other places of a tied parameter.
        distinct: dict[Tensor, Place] = {}
        for place in places.values():
            distinct[_param_at(place)] = place
        # fully_shard prepends a pre-hook and appends a forward hook, which our hooks must enclose.
        module.register_forward_pre_hook(eager(_nest_inputs), prepend=True, with_kwargs=True)
        module.register_forward_hook(eager(_flatten_output))
        # Pinned memory, which needs a GPU, lets copies overlap with computation.
        pinned = offload and torch.accelerator.is_available()
        self.module: Any = fully_shard(
            module,
            mesh=_find_mesh(ranks, device),
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
            ignored_params=ignored or None,
        )
        flatten_inputs = eager(partial(_flatten_inputs, dtype=compute))
        module.register_forward_pre_hook(flatten_inputs, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(_begin_another_run, prepend=True)
        module.register_forward_hook(eager(_nest_output))
        self.overlap = overlap
        if not overlap:
            # Naming this wrap disables prefetching in backward.
            self.module.set_modules_to_backward_prefetch([self.module])
        self.ranks = ranks
        self.places = list(distinct.values())
        self.on_gloo = ranks.on_gloo(device)
        self.divide: Sequence[float] = (1.0, float(ranks.size))
        # If ranks use different parameters, sizes of reduce_scatters would differ without this
        # call, which some torch versions lack.
        if hasattr(self.module, "set_reduce_scatter_unused_params"):
            self.module.set_reduce_scatter_unused_params(True, recurse=False)
        self.find_params()
        guard_optimizers(distinct, self.params)

    def find_params(self) -> None:
        self.params: list[nn.Parameter] = [_param_at(place) for place in self.places]
        _engines.add(self)

    def sharded_by_full(self) -> dict[int, nn.Parameter]:
        """Return sharded parameters, by the id of the module's current parameter."""
        pairs = zip(self.places, self.params, strict=True)
        return {id(_param_at(place)): sharded for place, sharded in pairs}

    def connect(
        self, queue: ReduceQueue, watch: Callable[[Sequence[Place]], None], run: Callable[[], None]
    ) -> None:
        """Send gradients through `queue`, and report forwards to the root.

        After gathering, a forward with gradients calls `watch` with the places, and a forward
        outside a backward calls `run`.
        """
        if self.on_gloo:
            self.module.set_custom_all_gather(AllGather(self.ranks.shards))
        # A strong reference from the engine would be a cycle.
        self.module.set_custom_reduce_scatter(ReduceScatter(queue, weakref.proxy(self)))
        places = self.places

        @eager
        def gathered(_: nn.Module, __: object) -> None:
            if torch.is_grad_enabled():
                watch(places)
            if current_task() == -1:
                run()

        # Registered last, to run after the engine's hook has gathered.
        self.module.register_forward_pre_hook(gathered)

    def clear_unaveraged(self) -> None:
        for each in self._engine_params():
            if "unsharded_accumulated_grad" in each.__dict__:  # until torch 2.14
                each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None

    def check_all_reduced(self) -> None:
        """Raise a RuntimeError if an averaged pass left an unreduced gradient."""
        if not all(group.reduce_grads for group in _param_groups_of(self.module)):
            return  # in no_sync()
        for each in self.unaveraged():
            raise RuntimeError(
                f"the backward pass has left a gradient of {each._param_fqn} unreduced: its "
                "wrap ran repeatedly under reentrant checkpoints, which this torch's "
                "fully_shard does not support. Use checkpoint(..., use_reentrant=False)."
            )

    def unaveraged(self) -> Iterator[Any]:
        """Yield the engine's record of each parameter with an unreduced gradient."""
        for each in self._engine_params():
            full = getattr(each, "_unsharded_param", None)
            left = getattr(each, "unsharded_accumulated_grad", None) is not None
            if left or (full is not None and full.grad is not None):
                yield each

    def _engine_params(self) -> Iterator[Any]:
        for group in _param_groups_of(self.module):
            yield from group.fsdp_params

    @property
    def state(self) -> str:
        groups = _param_groups_of(self.module) or [self.module._get_fsdp_state()]
        return str(groups[0]._training_state.name)

    @property
    def in_backward(self) -> bool:
        """Whether the engine expects a backward pass to end. Only for a root."""
        return bool(self.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)

    def recover(self) -> None:
        """Reset the engine after an error. Only for a root."""
        # After a failed backward, call `clear_unaveraged` on all wraps first.
        if hasattr(self.module, "reset_iter_state"):  # torch 2.13 and later
            self.module.reset_iter_state()
        elif self.in_backward:
            # Without gradients, this ends the pass without communication.
            self.module._get_fsdp_state()._root_post_backward_final_callback()


@eager
def refuse_second_order(result: object) -> None:
    """Make a backward with `create_graph` through these tensors raise a RuntimeError."""
    for tensor in tensors_in(result):
        if tensor.grad_fn is not None:
            tensor.register_hook(_check_first_order)


def _check_first_order(_: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward: only with create_graph
        raise RuntimeError(
            "FullyShardedDataParallel does not support second derivatives: parameters are freed "
            "after the first backward. Omit create_graph=True, or train with level 2 of mh.shard."
        )


@eager
def _begin_another_run(module: Any, _: object) -> None:
    """Prepare a wrap that runs again in a backward to be gathered and reduced again.

    A forward inside a backward recomputes a checkpoint. The engine then adds no hooks, because it
    expects the hooks of the wrap's current backward to reduce the gradients. But a reentrant
    checkpoint recomputes each run of a wrap before that run's backward. At the second run the
    engine has the state "reduced already", and would leave the gradients unreduced until the next
    step.
    """
    if current_task() == -1:
        return
    states = {group._training_state.name for group in _param_groups_of(module)}
    if states == {"POST_BACKWARD"}:
        state = module._get_fsdp_state()
        state._training_state = type(state._training_state).IDLE  # as before a first forward


def _param_groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _param_at(place: Place) -> nn.Parameter:
    """Return the current parameter: sharded, or full during a pass."""
    module, name = place
    param = module._parameters[name]
    assert param is not None
    return param


def _find_mesh(ranks: RankGroup, device: torch.device) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    if ranks.mesh is not None:
        return ranks.mesh
    group = ranks.group or dist.group.WORLD
    assert group is not None
    known = _meshes.setdefault(group, {})
    if device.type not in known:
        known[device.type] = DeviceMesh.from_group(group, device.type)
    return known[device.type]


# -- inputs and outputs ----------------------------------------------------------------------------


class _Nest:
    """A nested structure, to rebuild with different tensors.

    The engine does not search this class.
    """

    def __init__(self, tree: object, tensors: Sequence[Tensor]) -> None:
        self._tree = tree
        self._tensors = tensors

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        others = {id(old): new for old, new in zip(self._tensors, tensors, strict=True)}
        return tree_map_tensors(lambda tensor: others[id(tensor)], self._tree)


def _flatten_inputs(
    _: nn.Module, args: object, kwargs: object, *, dtype: torch.dtype | None
) -> tuple[tuple[list[Tensor], _Nest], dict[str, object]]:
    """Before the engine's hook: replace the inputs by a list of cast tensors and a nest."""
    tensors = tensors_in((args, kwargs))
    cast = tensors
    if dtype is not None:
        cast = as_type(dtype, tensors)
    return (cast, _Nest((args, kwargs), tensors)), {}


def _nest_inputs(_: nn.Module, args: tuple[Sequence[Tensor], _Nest], kwargs: object) -> Any:
    """After the engine's hook: restore the inputs with the engine's tensors."""
    tensors, nest = args
    return nest.rebuild(tensors)


def _flatten_output(
    module: nn.Module, _: object, output: object
) -> tuple[list[Tensor], _Nest] | None:
    """Before the engine's hook: replace the output by a list of tensors and a nest."""
    grad = torch.is_grad_enabled()
    if output is None:
        if grad:
            raise TypeError(
                f"the forward of a wrapped {type(module).__name__} returned None, which hides the "
                "backward. Return the output or the loss, or call it under torch.no_grad()."
            )
        return None  # a hook cannot replace the output by None
    if grad:
        tensors = tensors_in(output, partial(_check_leaf, module))
    else:
        tensors = tensors_in(output)
    own = []
    for tensor in tensors:
        # An in-place operation on a view would remove the engine's hook on the output, which
        # gathers parameters for backward. So a view becomes a separate tensor.
        if tensor.requires_grad and tensor._is_view():
            tensor = _NotAView.apply(tensor)
        own.append(tensor)
    return own, _Nest(output, tensors)


def _nest_output(_: nn.Module, __: object, output: tuple[Sequence[Tensor], _Nest] | None) -> object:
    """After the engine's hook: restore the output with the hooked tensors."""
    if output is None:
        return None
    tensors, nest = output
    return nest.rebuild(tensors)


class _NotAView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def _check_leaf(module: nn.Module, leaf: object) -> None:
    """Raise a TypeError if an object in an output contains a tensor that requires a gradient."""
    inside = dict(leaf) if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
    for name, value in inside.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise TypeError(
                f"the output of a wrapped {type(module).__name__} contains a "
                f"{type(leaf).__name__}, which hides its tensor {name!r}. Return "
                "tensors, or tuples, lists, dicts or dataclasses of tensors, or register the "
                "class with torch.utils._pytree.register_pytree_node."
            )


# -- optimizers, at their first step --------------------------------------------------------------

# A global pre-hook checks each optimizer before the first step. An unknown class must give equal
# results in a small example, sharded and unsharded.

SHARDED = "_manyhands_sharded"

# Number of parameters when an optimizer was checked; add_param_group() changes it.
_checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_state_calls: weakref.WeakKeyDictionary[Optimizer, _StateDictCalls] = weakref.WeakKeyDictionary()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def guard_optimizers(before: Iterable[Tensor], after: Iterable[Tensor]) -> None:
    """Mark sharded and replaced parameters, and check all optimizers."""
    # Tensors are the only link from an optimizer to the model.
    for param in before:
        setattr(param, REPLACED, True)
    for param in after:
        setattr(param, SHARDED, True)
    _check_optimizers_from_now_on()


@cache  # register the hook once
def _check_optimizers_from_now_on() -> None:
    register_optimizer_step_pre_hook(_check_at_step)


def guard_state(optimizer: Optimizer) -> None:
    """Reject another rank's shards in `load_state_dict`; notice a rank that saves alone."""
    if optimizer in _state_calls or type(optimizer).__module__.startswith("manyhands."):
        return  # our optimizers check this in their own methods

    def check(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        check_own_shards(state, params_of(optimizer.param_groups))

    optimizer.register_load_state_dict_pre_hook(check)
    for param in params_of(optimizer.param_groups):
        if is_dtensor(param):
            calls = _StateDictCalls(param.device_mesh, type(optimizer).__name__)
            _state_calls[optimizer] = calls
            optimizer.register_state_dict_post_hook(calls.note)
            return


class _StateDictCalls:
    """Warns if only some ranks call `state_dict()` of an optimizer with sharded state.

    The store counts all calls. A rank reads the count two steps after a call: by then a backward
    has synchronized all ranks.
    """

    _made: ClassVar[Counter[int]] = Counter()

    def __init__(self, mesh: DeviceMesh, kind: str) -> None:
        ranks = zlib.crc32(str(mesh.mesh.tolist()).encode())
        self._made[ranks] += 1
        self._key = f"manyhands state_dict {ranks} {self._made[ranks]}"
        self._kind = kind
        self._size = mesh.size()
        self._calls = 0
        self._steps_left = 0  # until the number of calls is compared

    def note(self, *_: object) -> None:
        dist.distributed_c10d._get_default_store().add(self._key, 1)
        self._calls += 1
        self._steps_left = 2

    def compare(self) -> None:
        """Before a step, warn if other ranks did not call `state_dict()`."""
        self._steps_left -= 1
        if self._steps_left != 0:
            return
        here = dist.distributed_c10d._get_default_store().add(self._key, 0)
        if here < self._calls * self._size:
            warn(
                f"{self._kind}.state_dict() was called on this rank, but not on every rank: it has "
                f"this rank's shard of {self._size}, and loads on no other rank. Save with "
                "mh.save(folder, model=model, optimizer=optimizer) on every rank.",
            )


def _check_at_step(optimizer: Optimizer, *_: object) -> None:
    """Before a step, raise if the optimizer has replaced parameters or cannot train shards."""
    if optimizer in _state_calls:
        _state_calls[optimizer].compare()
    params = params_of(optimizer.param_groups)
    if params and is_dtensor(params[0]):
        count_step(optimizer)
    sharded = [param for param in params if getattr(param, SHARDED, False)]
    if sharded:
        _check_all_averaged(sharded)
    if _checked.get(optimizer) == len(params):
        return
    if any(getattr(param, REPLACED, False) for param in params):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before the model was wrapped, and has "
            "parameters that are no longer used. Make it after wrapping, from model.parameters()."
        )
    if sharded:
        check_own_shards([optimizer.state.get(param) for param in params], params)
        guard_state(optimizer)
        problem = fused_problem(optimizer)
        if problem:
            raise TypeError(problem)
        like: Any = sharded[0]
        unable = problem_on_shards(optimizer, like)
        if unable is not None:
            kind = type(optimizer).__name__
            raise TypeError(
                f"{kind} cannot train parameters that FullyShardedDataParallel has sharded: "
                f"{unable}. Use manyhands.WholeTensorOptimizer(model.parameters(), optim={kind}), "
                "which assigns each full tensor to a rank."
            )
    _checked[optimizer] = len(params)


def _check_all_averaged(sharded: Sequence[Tensor]) -> None:
    unaveraged = {each.sharded_param for engine in _engines for each in engine.unaveraged()}
    if not unaveraged.isdisjoint(sharded):
        raise RuntimeError(
            "step() after backward passes that were all inside no_sync(): gradients are not "
            "averaged, and the step would ignore them. Run the last backward of each step "
            "outside no_sync(), or call model.zero_grad() to drop the gradients."
        )
