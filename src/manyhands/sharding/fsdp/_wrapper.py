"""Parameters sharded over the ranks: the documented wrapper around torch's `fully_shard`.

    between steps   each rank holds a slice of every parameter, its gradient and optimizer state
    in a forward    each wrap gathers its parameters, computes, and frees them
    in a backward   it gathers them again, and gives every rank its slice of the mean gradient

`fully_shard` does this for the module inside (`.module`), whose parameters become DTensors. The
wrapper adds what the engine lacks: the documented names and options (`_options.py`), cheaper
collectives on gloo (`_collectives.py`), gradients of parameters that only some ranks use
(`_root.py`), names and state dicts of the plain model (`_transparent.py`), and one rank without an
engine or a process group.

Words used here
    wrap      one FullyShardedDataParallel, with the parameters outside its inner wraps
    root      the outermost wrap, which coordinates all wraps inside it
    engine    torch's `fully_shard`, as `_engine.py` uses it
    place     where a parameter is found: a module, and the parameter's name in it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._arguments import real
from manyhands._tensors.backward import current_task
from manyhands._tensors.flat import local_shard
from manyhands._tensors.trees import as_type
from manyhands.sharding._gradients import clip
from manyhands.sharding.fsdp._engine import TrainingState, refuse_second_order, shard_wrap
from manyhands.sharding.fsdp._options import FSDPOptions, find_device, find_ranks, takes_options
from manyhands.sharding.fsdp._places import (
    cast_buffers,
    cast_in_forward,
    check_inner_groups,
    check_module,
    check_parameters,
    distinct_params,
    find_places,
)
from manyhands.sharding.fsdp._root import RootState, become_root
from manyhands.sharding.fsdp._transparent import (
    Wrap,
    consolidate_slices,
    full_optimizer_state,
    hold_full_parameters,
    sharded_optimizer_state,
    wraps_in,
)

# Modules inside a wrap. A second wrap around one would find its parameters sharded already. Weak,
# so that a module is freed with the last user of its model.
_wrapped: WeakSet[nn.Module] = WeakSet()


class FullyShardedDataParallel(Wrap):
    """Each of N ranks holds 1/N of the parameters, of their gradients and optimizer state.

    Make the optimizer after wrapping, from the wrapped module's parameters. Everything else in a
    training loop stays as it is:

    >>> import torch, manyhands as mh
    >>> layers = [mh.FSDP(torch.nn.Linear(4, 4)) for _ in range(3)]
    >>> model = mh.FSDP(torch.nn.Sequential(*layers))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> norm = model.clip_grad_norm_(1.0)
    >>> optimizer.step()
    >>> sorted(model.state_dict())[:2]  # names and tensors of the plain model
    ['0.bias', '0.weight']

    A wrap's parameters are gathered together. Wrap each layer of a large model, and then the whole
    model (or let `auto_wrap` do it), so that a rank holds at most the largest wrap in full. With
    one rank nothing is sharded.

    Surprises: `state_dict()` gathers the parameters, so call it on every rank. On several ranks,
    `parameters()` are DTensors of which this rank holds a slice. An optimizer that needs full
    tensors (Adafactor, Rprop) is refused: use `WholeTensorOptimizer` for it.

    Args:
        module: the module to shard, in place.
        process_group: the ranks that shard the parameters; by default all. A group of one rank
            inside a wrap of several keeps its parameters whole and private to the rank, as an
            expert of a mixture needs. A `DeviceMesh` of two dimensions has copies of the model,
            each sharded over the ranks of the second dimension.
        process_group_reduce_scatter: has no effect; gradients travel apart anyway.
        reshard_after_forward: free the full parameters after each forward and gather them again
            in backward. Uses less memory and sends 1.5 times the bytes.
        disable_reshard_on_root: the root keeps its own full parameters until backward even so.
        mixed_precision: compute with parameters and inputs in `compute_dtype`, by default
            float16 (bfloat16 needs no loss scaling). The optimizer's parameters keep their type.
        fp32_reduce_scatter: with mixed precision, average gradients in float32.
        flatten_parameters: has no effect; a wrap's parameters always travel together.
        move_params_to_cpu: keep shards of parameters, gradients and optimizer state in CPU memory.
        compute_dtype: type to compute in.
        buffer_dtype: type of floating-point buffers, by default `compute_dtype`.
        move_grads_to_cpu: has no effect; gradients stay with the parameters.
        bucket_cap_mb: has no effect.
        compute_device: by default the parameters' device, or the group's accelerator.
        no_broadcast_optim_state: has no effect; the state of a group of one stays with its rank.
        state_dict_device: device on which `state_dict()` puts full parameters.
        clear_autocast_cache: clear autocast's cache of casts after each forward.
        force_input_to_fp32: cast inputs to float32 in a wrap without mixed precision.
        verbose: show every option in `print(model)`.
        cpu_offload: older name of `move_params_to_cpu`.
        state_dict_on_rank_0_only: make `state_dict()` empty on all other ranks.
        gradient_predivide_factor: divide gradients by this factor before they are summed, and by
            N / factor after. By default they are divided after.
        allow_reset_parameters: let `reset_parameters()` call the wrapped module's method.
        overlap: gather the next wrap's parameters, and send the previous wrap's gradients, while
            one wrap computes. False needs one or two wraps' memory less, and is slower.
    """

    @takes_options(FSDPOptions)
    def __init__(self, module: nn.Module, options: FSDPOptions) -> None:
        super().__init__()
        # Everything that can be a mistake is checked before anything is changed or sent.
        check_module(module, FullyShardedDataParallel, _wrapped)
        self._ranks = find_ranks(options.process_group)
        inside = wraps_in(module, FullyShardedDataParallel)
        check_inner_groups(self._ranks, [wrap._ranks for wrap in inside])
        precision = options.precision()
        self._precision = precision
        device = find_device(module, self._ranks, options.compute_device)
        self.rank = self._ranks.rank
        self.world_size = self._ranks.size
        in_effect = options.resolve(precision, device)
        self._show(in_effect)
        self._divide: tuple[float, float] | None = None  # None: by the world size, after the sum
        if options.gradient_predivide_factor is not None:
            before = real("gradient_predivide_factor", options.gradient_predivide_factor, above=0)
            self._divide = before, self.world_size / before
        self.require_backward_grad_sync = True
        self._holds_full = False
        self._forwards = 0  # forwards in progress
        self._is_root = None
        self._root_state: RootState | None = None
        self._places = find_places(module, FullyShardedDataParallel)
        check_parameters(self._places, self._ranks, device)
        buffers = precision.buffers
        self._former_buffer_dtypes = cast_buffers(module, FullyShardedDataParallel, buffers)
        self._divisor: list[float] = []  # a list, which the hooks of `_divide_by` share
        self._engine = None
        if self.world_size > 1:
            self._engine = shard_wrap(
                module,
                self._places,
                self._ranks,
                device,
                precision,
                in_effect,
                compared=self._compared_options(),
                private={m for wrap in inside if wrap.world_size == 1 for m in wrap.modules()},
                # On a CPU they are in CPU memory already.
                offload=device.type != "cpu" and in_effect.move_params_to_cpu,
            )
            self._engine.divide = self._divide
        elif precision.compute is not None:
            cast_in_forward(module, list(self._places.values()), precision.compute)
        _wrapped.add(module)
        self._hold(module)  # last, as attributes are looked up in it from now on

    def _show(self, options: FSDPOptions) -> None:
        """Show the options in attributes of the same names."""
        for name, value in vars(options).items():
            # These two are properties, which follow `_divide` and `move_params_to_cpu`.
            if name not in ("gradient_predivide_factor", "cpu_offload"):
                setattr(self, name, value)

    # -- training ------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the wrapped module's forward, with its parameters gathered for it."""
        if self._holds_full:
            raise RuntimeError("forward() was called inside summon_full_params(). Leave it first.")
        if self._is_root is None:
            self._root_state = become_root(self)
        # A forward inside a backward recomputes a checkpoint: the root's own forward is over.
        root = self._root_state if current_task() == -1 else None
        if root is not None:
            root.start_forward()
        if self.force_input_to_fp32 and self._precision.compute is None:
            args = as_type(torch.float32, args)
            kwargs = as_type(torch.float32, kwargs)
        self._forwards += 1
        try:
            with self._outside_inference_mode():
                result = self.module(*args, **kwargs)
        except BaseException:
            if root is not None:
                # Show the first error, not that of a connection which it has broken.
                with suppress(RuntimeError):
                    root.recover()
            raise
        finally:
            self._forwards -= 1
        if root is not None:
            root.end_forward()
            if torch.is_grad_enabled():
                refuse_second_order(result)
        if self._root_state is not None and not torch.is_grad_enabled():
            self._root_state.reshard()  # a root keeps parameters for a backward; none will come
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return result

    @contextmanager
    def _outside_inference_mode(self) -> Iterator[None]:
        """Leave inference mode: the engine keeps the first forward's tensors, for training too."""
        if self._engine is None or not torch.is_inference_mode_enabled():
            yield
        else:
            with torch.inference_mode(False), torch.no_grad():
                yield

    def _wraps(self) -> list[FullyShardedDataParallel]:
        """Return this wrap and those inside, each once."""
        return wraps_in(self, FullyShardedDataParallel)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average gradients of backward passes inside; full gradients add up on each rank.

        The first pass outside averages the sum. Without `no_sync`, accumulated gradients are
        sharded: less memory, more bytes.
        """
        wraps = self._wraps()
        former = [wrap.require_backward_grad_sync for wrap in wraps]
        try:
            for wrap in wraps:
                wrap._set_gradient_sync(False)
            yield
        finally:
            for wrap, on in zip(wraps, former, strict=True):
                wrap._set_gradient_sync(on)

    def _set_gradient_sync(self, on: bool) -> None:
        self.require_backward_grad_sync = on
        if self._engine is not None:
            self._engine.module.set_requires_gradient_sync(on, recurse=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those of `no_sync` passes that were not averaged yet."""
        super().zero_grad(set_to_none)
        for wrap in self._wraps():
            if wrap._engine is not None:
                wrap._engine.clear_unaveraged()
            if wrap._root_state is not None:
                wrap._root_state.used.forget()

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by `pre` before they are summed over the ranks, by `post` after."""
        for wrap in self._wraps() if recursive else [self]:
            wrap._divide = pre, post
            if wrap._engine is not None:
                wrap._engine.divide = pre, post
            else:
                wrap._divide_by(pre * post)

    def _divide_by(self, divisor: float) -> None:
        """Divide gradients that are not sharded by this number from now on."""
        # No hooks before a divisor is set: they would cost time in every backward. They live as
        # long as the parameters, and must not keep this object alive.
        if not self._divisor and divisor != 1:
            for param in distinct_params(self._places):
                if param.requires_grad:
                    param.register_hook(partial(_divide_gradient, self._divisor))
        self._divisor[:] = [divisor] if self._divisor or divisor != 1 else []

    @property
    def gradient_predivide_factor(self) -> float:
        """The divisor of gradients before they are summed over the ranks."""
        return self._divide[0] if self._divide is not None else 1.0

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, pre: float) -> None:
        self.set_gradient_divide_factors(pre, self.gradient_postdivide_factor, recursive=False)

    @property
    def gradient_postdivide_factor(self) -> float:
        """The divisor of gradients after they were summed over the ranks."""
        return self._divide[1] if self._divide is not None else float(self.world_size)

    @gradient_postdivide_factor.setter
    def gradient_postdivide_factor(self, post: float) -> None:
        self.set_gradient_divide_factors(self.gradient_predivide_factor, post, recursive=False)

    @property
    def training_state(self) -> TrainingState:
        """What this wrap is doing."""
        if self._holds_full:
            return TrainingState.SUMMON_FULL_PARAMS
        if self._engine is not None:
            return self._engine.state
        if self._forwards:
            return TrainingState.FORWARD
        return TrainingState.IDLE if current_task() == -1 else TrainingState.BACKWARD_PRE

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise a ValueError unless this wrap is in the state, or in one of several."""
        states = state if isinstance(state, Iterable) else [state]
        names = [each.name for each in states]  # so that members of fairscale's enum are accepted
        if self.training_state.name not in names:
            raise ValueError(f"expected {' or '.join(names)}, not {self.training_state.name}.")

    @property
    def params(self) -> list[nn.Parameter]:
        """This wrap's own parameters, without those of wraps inside; each once."""
        if self._engine is not None and not self._holds_full:
            return list(self._engine.params)
        return distinct_params(self._places)

    @property
    def cpu_offload(self) -> bool:
        """Older name of `move_params_to_cpu`."""
        return bool(self.move_params_to_cpu)

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients on all ranks, and return the norm before clipping.

        Call it on every rank, after the last backward before a step.
        """
        if self.world_size == 1:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        grads = [local_shard(p.grad) for p in self.parameters() if p.grad is not None]
        shards = self._ranks.shards
        return clip(grads, grads, max_norm, float(norm_type), shards, self.compute_device)

    # -- full parameters -----------------------------------------------------------------------

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Give every rank the full parameters inside, to be read and changed.

        Changes stay unless `volatile`; make the same ones on every rank. Call it on every rank,
        and not inside a forward or backward.
        """
        wraps = [wrap for wrap in (self._wraps() if recurse else [self]) if not wrap._holds_full]
        self._reshard()
        with ExitStack() as stack:
            for wrap in wraps:
                if wrap._engine is not None:
                    places = list(wrap._places.values())
                    stack.enter_context(hold_full_parameters(places, keep=not volatile))
                wrap._holds_full = True
                stack.callback(setattr, wrap, "_holds_full", False)
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module inside, with full parameters."""
        # nn.Module.apply calls the apply() of inner wraps, which summon their own parameters.
        with self.summon_full_params(recurse=False):
            super().apply(fn)
        return self

    def reset_parameters(self) -> None:
        """Call the wrapped module's method, with full parameters (if `allow_reset_parameters`)."""
        if not self.allow_reset_parameters:
            raise RuntimeError(
                "reset_parameters() needs allow_reset_parameters=True in the constructor."
            )
        with self.summon_full_params():
            self.module.reset_parameters()  # type: ignore[operator]

    # -- state ---------------------------------------------------------------------------------

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Tensor]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Tensor]:
        """Return the plain model's state dict from the `local_state_dict()` of every rank.

        `shard_metadata` are the ranks' `local_metadata_dict()`. Both are in rank order. Buffers
        are rank 0's. Without `strict`, missing parameters are left out. Needs no process group.
        """
        return consolidate_slices(shard_weights, shard_metadata, with_module_buffers, strict)

    def gather_full_optim_state_dict(self, optim: Optimizer, **ignored: object) -> StateDict | None:
        """Return the plain optimizer's state dict on rank 0, and None on other ranks.

        Call it on every rank. Parameters in a group of one, listed as `uncollected_local_ids`, get
        rank 0's own state: other ranks have to save theirs.
        """
        self._reshard()
        names = {id(param): name for name, param in self.named_parameters()}
        return full_optimizer_state(optim, names, self._private_params(), keep=self.rank == 0)

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: Mapping[str, Any]
    ) -> StateDict:
        """Return this rank's slices of the plain optimizer's state, for `load_state_dict`.

        Rank 0's own state of parameters in a group of one is left out on other ranks.
        """
        self._reshard()
        left_out = set() if self.rank == 0 else self._private_params()
        params = dict(self.named_parameters())
        return sharded_optimizer_state(full_optim_state_dict, params, left_out)

    def check_can_save(self, model: nn.Module) -> None:
        """Raise a ValueError if ranks train different parameters: a checkpoint has room for one."""
        if (
            self.world_size == 1
            and self.params
            and any(wrap.world_size > 1 for wrap in wraps_in(model, Wrap))
        ):
            raise ValueError(
                f"a {type(self.module).__name__} is wrapped in a process group of one, so each "
                "rank has its own parameters there, and a checkpoint would hold those of one. "
                "Save each rank's state dicts in a file of its own."
            )

    def _private_params(self) -> set[int]:
        """Return the ids of parameters that each rank has for itself, in inner groups of one."""
        if self.world_size == 1:
            return set()
        return {id(p) for wrap in self._wraps() if wrap.world_size == 1 for p in wrap.params}

    def extra_repr(self) -> str:
        """Return the options, for `print(model)`."""
        if not self.verbose:
            return f"world_size={self.world_size}, mixed_precision={self.mixed_precision}"
        options = ", ".join(f"{name}={value}" for name, value in self._compared_options().items())
        return f"rank={self.rank}, world_size={self.world_size}, {options}"


def _divide_gradient(divisor: Sequence[float], grad: Tensor) -> Tensor:
    return grad / divisor[0]
