"""One wrap's share of torch's `fully_shard`: the one file that calls it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyhands._comm import Workers
from manyhands._nested import changed
from manyhands._passes import current_task
from manyhands.sharding._fsdp_ahead import Ahead
from manyhands.sharding._fsdp_comm import Average, Averaging, Gather
from manyhands.sharding._fsdp_options import Precision
from manyhands.sharding._fsdp_used import Place, Used

eager: Any = torch._compile._disable_dynamo  # what sends is not to be compiled

_meshes: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


class Engine:
    """Shards the parameters at these places (each once) of a module, in place."""

    def __init__(
        self,
        module: nn.Module,
        places: Sequence[Place],
        workers: Workers,
        device: torch.device,
        precision: Precision,
        *,
        reshard_after_forward: bool | None,
        offload: bool,
    ) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        module.register_forward_hook(_visible)  # before the engine's own
        module.register_forward_hook(_no_views)
        pinned = offload and torch.accelerator.is_available()
        self.module: Any = fully_shard(
            module,
            mesh=_mesh(workers, device),
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(precision.compute, precision.reduce),
            offload_policy=CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
        )
        self.workers = workers
        self.places = list(places)
        self.on_gloo = workers.on_gloo(device)
        self.divide: tuple[float, float] | None = None
        if hasattr(self.module, "set_reduce_scatter_unused_params"):  # torch 2.12
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
        self, averaging: Averaging, used: Used, first: int, run: Callable[[], None]
    ) -> None:
        """Send through `averaging`; our parameters are numbered from `first` in `used`.

        `run` is called in each forward, with the parameters there.
        """
        me = weakref.ref(self)
        if self.on_gloo:
            self.module.set_custom_all_gather(Gather(self.workers))
        average = Average(
            averaging, lambda: _of(me).params, divide=lambda: _of(me).divide, on_gloo=self.on_gloo
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
        state = self.module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.13 has one
        for group in [state._fsdp_param_group] if groups is None else groups:
            for each in group.fsdp_params if group is not None else ():
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None

    @property
    def in_backward(self) -> bool:
        """Whether the engine takes a backward pass for running. (On a root.)"""
        return bool(self.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)

    def recover(self) -> None:
        """Begin anew after an error in a forward or backward. (On a root.)"""
        if hasattr(self.module, "reset_iter_state"):  # torch 2.13
            self.module.reset_iter_state()


class Team:
    """What the wraps of a root do together: average gradients, and agree on which there are."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        workers = engines[0].workers
        self._engines = list(engines)  # the root's first
        members = [weakref.ref(engine) for engine in engines]

        def params() -> list[Tensor]:
            return [param for member in members for param in _of(member).params]

        self.used = Used(workers, params)
        self.averaging = Averaging(workers, self.used.begin, self.used.end)
        self._ahead = Ahead()
        self._gathers_ahead = all(engine.on_gloo for engine in engines)  # else it has streams
        first = 0
        for number, engine in enumerate(engines):
            engine.connect(self.averaging, self.used, first, partial(self._ahead.run, number))
            first += len(engine.places)

    @eager
    def start_forward(self) -> None:
        """Before a forward of the root, which is not in a backward."""
        self.averaging.forget()
        if self._engines[0].in_backward:  # one that raised an error
            self.used.forget()
            self.recover()
            for engine in self._engines:
                engine.clear_unaveraged()
        self.reshard()  # what was kept whole for a backward that did not come may be old

    @eager
    def end_forward(self) -> None:
        """The root's forward is over: gather in this order in the next one."""
        changed = self._ahead.end()
        if not (changed and self._gathers_ahead):
            return
        for number, engine in enumerate(self._engines):
            after = self._ahead.next.get(number)
            modules = [] if after is None else [self._engines[after].module]
            engine.module.set_modules_to_forward_prefetch(modules)
        for number in self._ahead.begun:
            self._engines[number].gather()  # what was begun has to be waited for
            self._engines[number].reshard()

    @eager
    def reshard(self) -> None:
        """Let all whole parameters go."""
        for engine in self._engines:
            engine.reshard()

    @eager
    def recover(self) -> None:
        """Begin anew after an error in a forward or backward."""
        engine = self._engines[0].module
        if self._ahead.going_on and not hasattr(engine, "reset_iter_state"):
            self.end_forward()  # lets go what was begun, which torch 2.13 does by itself
        self._ahead.forget()
        self._engines[0].recover()


class _Whole(torch.autograd.Function):
    """The same memory as a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _visible(module: nn.Module, _: Any, output: Any) -> None:
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


def _no_views(_: nn.Module, __: Any, output: Any) -> Any:
    """The engine gathers parameters for backward in a hook on the output, which an in-place
    operation on a view would take away; of these it warns. A tensor of its own keeps its hooks."""

    def own(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and tensor._is_view():
            return _Whole.apply(tensor)
        return tensor

    return changed(output, own)


def _of(reference: Callable[[], Engine | None]) -> Engine:
    engine = reference()
    assert engine is not None
    return engine


def _held(place: Place) -> Tensor:
    module, name = place
    param = module._parameters[name]
    assert param is not None
    return param


def _mesh(workers: Workers, device: torch.device) -> Any:
    """The workers as the engine wants them, made once for each group and kind of device."""
    from torch.distributed.device_mesh import DeviceMesh

    group = workers.group or dist.group.WORLD
    assert group is not None
    known = _meshes.setdefault(group, {})
    if device.type not in known:
        known[device.type] = DeviceMesh.from_group(group, device.type)
    return known[device.type]
