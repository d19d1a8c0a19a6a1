"""One wrap's share of torch's `fully_shard`: the one file that calls it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands._core.backward import current_task
from manyhands._core.ranks import RankGroup
from manyhands.sharding.fsdp._collectives import Gather, ReduceQueue, ReduceScatter
from manyhands.sharding.fsdp._options import Precision
from manyhands.sharding.fsdp._outputs import (
    flatten_inputs,
    flatten_output,
    nest_inputs,
    nest_output,
)
from manyhands.sharding.fsdp._used_params import Place, UsedParameters

eager: Any = torch._compile._disable_dynamo  # what sends is not to be compiled

_meshes: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


class Engine:
    """Shards the parameters at these places (each once) of a module, in place."""

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[Place],
        workers: RankGroup,
        device: torch.device,
        precision: Precision,
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

        # The engine's hooks come between these: its own goes before all others.
        module.register_forward_pre_hook(eager(nest_inputs), prepend=True, with_kwargs=True)
        module.register_forward_hook(eager(flatten_output))
        pinned = offload and torch.accelerator.is_available()
        self.module: Any = fully_shard(
            module,
            mesh=_mesh(workers, device),
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(precision.compute, precision.reduce),
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
            ignored_params=ignored or None,
        )
        module.register_forward_pre_hook(eager(flatten_inputs), prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(_begin_another_run, prepend=True)
        module.register_forward_hook(eager(nest_output))
        self.overlap = overlap
        if not overlap:
            # The engine gathers whom it is told to, else the next; itself it has gathered already.
            self.module.set_modules_to_backward_prefetch([self.module])
        self.workers = workers
        self.places = list(places)
        self.on_gloo = workers.on_gloo(device)
        self.divide: tuple[float, float] | None = None
        if hasattr(self.module, "set_reduce_scatter_unused_params"):  # not in every torch
            self.module.set_reduce_scatter_unused_params(True, recurse=False)
        self.remember()

    def remember(self) -> None:
        """Look up the sharded parameters, after they were made or replaced."""
        self.params: list[Tensor] = [_held(place) for place in self.places]

    def kept_whole(self) -> dict[int, Tensor]:
        """The sharded parameter of each whole one that its module has now, by the latter's id."""
        now = [_held(place) for place in self.places]
        if not now or now[0] is self.params[0]:
            return {}
        return {id(whole): sharded for whole, sharded in zip(now, self.params, strict=True)}

    def connect(
        self, averaging: ReduceQueue, used: UsedParameters, first: int, run: Callable[[], None]
    ) -> None:
        """Send through `averaging`; our parameters are numbered from `first` in `used`.

        `run` is called in each forward, with the parameters there.
        """
        me = weakref.ref(self)
        if self.on_gloo:
            self.module.set_custom_all_gather(Gather(self.workers))
        average = ReduceScatter(
            averaging,
            lambda: of(me).params,
            divide=lambda: of(me).divide,
            on_gloo=self.on_gloo,
            overlap=self.overlap,
        )
        self.module.set_custom_reduce_scatter(average)
        places = self.places

        @eager
        def watch(_: nn.Module, __: Any) -> None:
            if torch.is_grad_enabled():
                used.watch(first, places)
            if current_task() == -1:  # not recomputed in a backward
                run()

        self.module.register_forward_pre_hook(watch)  # after the engine's own

    def synchronise(self, on: bool) -> None:
        """Whether backward passes average gradients."""
        self.module.set_requires_gradient_sync(on, recurse=False)

    def gather(self) -> None:
        """Have the whole parameters there."""
        self.module.unshard()

    def reshard(self) -> None:
        """Let the whole parameters go, if they are there."""
        self.module.reshard()

    def clear_unaveraged(self) -> None:
        """Drop the whole gradients that passes without averaging have left."""
        for each in self._engine_params():
            if "unsharded_accumulated_grad" in vars(each):  # no more in torch 2.15
                each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None

    def check_all_reduced(self) -> None:
        """Raise where a backward pass that reduces gradients has left one behind."""
        if not all(group.reduce_grads for group in _groups(self.module)):
            return  # in no_sync()
        for each in self._engine_params():
            whole = getattr(each, "_unsharded_param", None)
            if each.unsharded_accumulated_grad is not None or (
                whole is not None and whole.grad is not None
            ):
                raise RuntimeError(
                    f"the backward pass has left a gradient of {each._param_fqn} unreduced: its "
                    "wrap ran several times under reentrant checkpoints, and this torch's "
                    "fully_shard does not follow. The step would be wrong. Pass "
                    "use_reentrant=False to torch.utils.checkpoint.checkpoint (for "
                    "checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)."
                )

    def _engine_params(self) -> Iterator[Any]:
        """The engine's own record of each parameter."""
        for group in _groups(self.module):
            yield from group.fsdp_params

    @property
    def state(self) -> str:
        """What the engine is doing with this wrap, in its own words."""
        groups = _groups(self.module) or [self.module._get_fsdp_state()]
        name: str = groups[0]._training_state.name
        return name

    @property
    def in_backward(self) -> bool:
        """Whether the engine takes a backward pass for running. (On a root.)"""
        return bool(self.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)

    def recover(self) -> None:
        """Begin anew after an error in a forward or backward. (On a root.)"""
        if hasattr(self.module, "reset_iter_state"):  # torch 2.13
            self.module.reset_iter_state()


@eager
def _begin_another_run(module: Any, _: Any) -> None:
    """Let a wrap that runs anew in a backward be gathered and reduced anew.

    A wrap that runs in a backward is recomputed by a checkpoint. The engine takes it for recomputed
    in the middle of its own backward, whose hooks will reduce the gradients, and adds none. That
    holds under checkpoints that are not reentrant. A reentrant one recomputes each run of a wrap
    before that run's backward: the second finds the engine where the first run's backward has
    left it, reduced already, and its gradients would stay unreduced until the next step.
    """
    if current_task() == -1:
        return
    groups = _groups(module)
    if groups and all(group._training_state.name == "POST_BACKWARD" for group in groups):
        state = module._get_fsdp_state()
        state._training_state = type(state._training_state).IDLE


def _groups(module: Any) -> list[Any]:
    """What the engine reduces together of one wrap: one group, or none without parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13 has at most one
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def of(reference: Callable[[], Engine | None]) -> Engine:
    """The engine that is referred to."""
    engine = reference()
    assert engine is not None
    return engine


def _held(place: Place) -> Tensor:
    module, name = place
    param = module._parameters[name]
    assert param is not None
    return param


def _mesh(workers: RankGroup, device: torch.device) -> Any:
    """The workers as the engine wants them, made once for each group and kind of device."""
    from torch.distributed.device_mesh import DeviceMesh

    group = workers.group or dist.group.WORLD
    assert group is not None
    known = _meshes.setdefault(group, {})
    if device.type not in known:
        known[device.type] = DeviceMesh.from_group(group, device.type)
    return known[device.type]
