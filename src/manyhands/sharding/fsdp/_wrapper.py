"""Parameters sharded over the workers: the documented wrapper around torch's `fully_shard`.

    between steps   each worker holds a slice of every parameter, of its gradient and state
    in a forward    each wrap gathers its parameters, computes, and lets them go
    in a backward   it gathers them again, and gives every worker its slice of the mean gradient

`fully_shard` does this for the module inside (`.module`), whose parameters become DTensors. The
wrapper adds what the engine leaves out: the documented names and options, cheaper collectives on
gloo (`_collectives.py`), gradients of parameters that only some workers use (`_used_params.py`),
whole parameters and state dicts of the plain model (`_full_tensors.py`), and one worker without an
engine or a process group (`_single_rank.py`).

Words used here
    wrap      one FullyShardedDataParallel, with the parameters that no wrap inside it has
    root      the outermost wrap, which sees to what wraps do together
    place     where a parameter is found: a module, and the parameter's name in it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.backward import current_task
from manyhands._core.dtensor import is_dtensor, local
from manyhands._core.trees import as_type
from manyhands.sharding._agreement import wait_for_all_ranks
from manyhands.sharding._clip import combine_norms, norm_of_shard
from manyhands.sharding.fsdp._checks import (
    begin_alike,
    check_inside,
    check_module,
    check_parameters,
    check_root,
    check_same_model,
    contiguous,
    distinct,
    held,
    own_buffers,
    places_of,
)
from manyhands.sharding.fsdp._engine import Engine, eager
from manyhands.sharding.fsdp._full_tensors import (
    consolidated,
    full_optimizer_state,
    sharded_optimizer_state,
    whole_parameters,
)
from manyhands.sharding.fsdp._optimizer_guard import guard_optimizers
from manyhands.sharding.fsdp._options import (
    Precision,
    check_offload,
    device_of,
    group_of,
    workers_of,
)
from manyhands.sharding.fsdp._root import RootState
from manyhands.sharding.fsdp._single_rank import GradientDivision, cast_in_forward
from manyhands.sharding.fsdp._state_hooks import after_load, from_plain, to_plain, with_our_versions
from manyhands.sharding.fsdp._training_state import OF_ENGINE, TrainingState, check_state
from manyhands.sharding.fsdp._transparent import INNER, AsWrapped, plain

_wrapped: WeakSet[nn.Module] = WeakSet()  # what is in a wrap, which a second one would not shard


class FullyShardedDataParallel(AsWrapped):
    """Each of N workers holds 1/N of the parameters, of their gradients and optimizer state.

    Make the optimizer after wrapping, from the wrapped module's parameters. Everything else of a
    loop stays as it is:

    >>> import torch, manyhands as mh
    >>> layers = [mh.FSDP(torch.nn.Linear(4, 4)) for _ in range(3)]
    >>> model = mh.FSDP(torch.nn.Sequential(*layers))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> norm = model.clip_grad_norm_(1.0)
    >>> optimizer.step()
    >>> sorted(model.state_dict())[:2]  # names and tensors of the plain model
    ['0.bias', '0.weight']

    A wrap's parameters are gathered together, so wrap the layers of a large model each, and the
    whole around them (or let `auto_wrap` do it): at most the largest wrap is then ever whole.
    With one worker nothing is sharded.

    Surprises: `state_dict()` gathers the parameters and must be called on every worker. With
    several workers, `parameters()` are DTensors of which this worker holds a slice; an optimizer
    that needs whole tensors (Adafactor, Rprop) is refused: use `OSS` for it.

    Args:
        module: to be sharded, in place.
        process_group: the workers; by default all. A group of one inside a wrap of several keeps
            what is in it whole and a worker's own, as an expert of a mixture has to be.
        process_group_reduce_scatter: has no effect; gradients travel apart anyway.
        reshard_after_forward: let the whole parameters go after each forward, to be gathered
            again in backward. Less memory, half as many bytes more.
        disable_reshard_on_root: the root keeps its own until backward all the same.
        mixed_precision: compute with parameters and inputs in `compute_dtype`, by default
            float16 (bfloat16 needs no loss scaling), and keep those of the optimizer as they are.
        fp32_reduce_scatter: with mixed precision, average gradients in float32.
        flatten_parameters: has no effect; a wrap's parameters always travel together.
        move_params_to_cpu: keep slices of parameters, gradients and state in the host's memory.
        compute_dtype: type to compute in.
        buffer_dtype: of floating-point buffers, by default `compute_dtype`.
        move_grads_to_cpu: as `move_params_to_cpu`, whose value it must have.
        bucket_cap_mb: has no effect.
        compute_device: by default the parameters', or the group's accelerator.
        no_broadcast_optim_state: has no effect; the state of a group of one stays its worker's.
        state_dict_device: where `state_dict()` puts whole parameters.
        clear_autocast_cache: clear autocast's cache of casts after each forward.
        force_input_to_fp32: give inputs as float32 to a module without mixed precision.
        verbose: show every option in `print(model)`.
        cpu_offload: an older name of `move_params_to_cpu`.
        state_dict_on_rank_0_only: other workers' `state_dict()` is empty.
        gradient_predivide_factor: divide gradients by it before they are summed, and by
            N / factor after; by default after.
        allow_reset_parameters: let `reset_parameters()` call the module's.
        sync_module_states: begin with rank 0's parameters and buffers.
        overlap: gather the next wrap's parameters, and send the last one's gradients, while one
            computes. Without, about two wraps' memory less, and slower.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        process_group_reduce_scatter: Any = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | str | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | str | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
        *,
        sync_module_states: bool = True,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        check_module(module, FullyShardedDataParallel, _wrapped)
        self._workers = workers_of(process_group)
        check_inside(self._workers, [wrap._workers for wrap in _wraps_in(module)])
        self._precision = Precision.of(
            mixed_precision, compute_dtype, buffer_dtype, fp32_reduce_scatter
        )
        self.compute_device = device_of(module, self._workers, compute_device)
        moved = move_params_to_cpu or cpu_offload
        offload = check_offload(self.compute_device, moved, move_grads_to_cpu)
        if gradient_predivide_factor is not None and not gradient_predivide_factor > 0:
            raise ValueError(
                f"gradient_predivide_factor must be positive, got {gradient_predivide_factor}."
            )
        self.process_group = group_of(process_group)
        self.process_group_reduce_scatter = process_group_reduce_scatter
        self.rank, self.world_size = self._workers.rank, self._workers.size
        self.reshard_after_forward = reshard_after_forward
        self.disable_reshard_on_root = disable_reshard_on_root
        self.mixed_precision = mixed_precision
        self.fp32_reduce_scatter = fp32_reduce_scatter
        self.flatten_parameters = flatten_parameters
        self.move_params_to_cpu = moved
        self.compute_dtype = self._precision.compute or torch.float32
        self.buffer_dtype = self._precision.buffers or self.compute_dtype
        self.move_grads_to_cpu = moved if move_grads_to_cpu is None else move_grads_to_cpu
        self.bucket_cap_mb = bucket_cap_mb
        self.no_broadcast_optim_state = no_broadcast_optim_state
        self.state_dict_device = torch.device(state_dict_device or self.compute_device)
        self.clear_autocast_cache = clear_autocast_cache
        self.force_input_to_fp32 = force_input_to_fp32
        self.verbose = verbose
        self.state_dict_on_rank_0_only = state_dict_on_rank_0_only
        self._divide: tuple[float, float] | None = None
        if gradient_predivide_factor is not None:
            self._divide = gradient_predivide_factor, self.world_size / gradient_predivide_factor
        self.allow_reset_parameters = allow_reset_parameters
        self.sync_module_states = sync_module_states
        self.overlap = overlap
        self.require_backward_grad_sync = True
        self._whole = False  # while summon_full_params is open
        self._local = False  # while local_state_dict or load_local_state_dict run
        self._asked = False  # while state_dict of a wrap around this one runs
        self._running = 0  # forwards that are going on
        self._is_root: bool | None = None
        self._team: RootState | None = None
        self._places = places_of(module, FullyShardedDataParallel)
        check_parameters(self._places, self._workers)
        self._buffer_dtypes = self._cast_buffers(module)
        self._division = GradientDivision(distinct(self._places))
        self._engine = self._shard(module, offload, sync_module_states)
        _wrapped.add(module)
        self.register_module(INNER, module)
        self._register_state_dict_hook(to_plain)
        self._register_load_state_dict_pre_hook(from_plain, with_module=True)
        self.register_load_state_dict_post_hook(after_load)

    def _shard(self, module: nn.Module, offload: bool, sync: bool) -> Engine | None:
        compute = self._precision.compute
        if self.world_size == 1:
            if compute is not None:
                cast_in_forward(module, list(self._places.values()), compute)
            return None
        contiguous(self._places)
        own = {
            each for wrap in _wraps_in(module) if wrap.world_size == 1 for each in wrap.modules()
        }
        once = {id(m._parameters[name]): (m, name) for m, name in self._places.values()}
        before = [param for _, param in held(self._places)]
        shared = {name: each for name, each in module.named_modules() if each not in own}
        check_same_model(
            self._workers, [(self._places, self._options())], self.compute_device, shared
        )
        if sync:
            begin_alike(shared.values(), self._workers, self.compute_device)
        root_keeps = self.disable_reshard_on_root and self.reshard_after_forward
        engine = Engine(
            module,
            list(once.values()),
            self._workers,
            self.compute_device,
            self._precision,
            reshard_after_forward=None if root_keeps else self.reshard_after_forward,
            offload=offload,
            overlap=self.overlap,
            ignored={param for each in own for param in each.parameters(recurse=False)},
        )
        guard_optimizers(before, engine.params)
        engine.divide = self._divide
        return engine

    def _cast_buffers(self, module: nn.Module) -> dict[str, torch.dtype]:
        """Convert floating-point buffers; returns what they were, by name."""
        dtypes = {}
        for name, buffer in own_buffers(module, FullyShardedDataParallel):
            if self._precision.buffers is not None and buffer.is_floating_point():
                dtypes[plain(name)] = buffer.dtype
                buffer.data = buffer.data.to(self._precision.buffers)
        return dtypes

    # -- training ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, with its parameters gathered for it."""
        if self._whole:
            raise RuntimeError(
                "forward() was called inside summon_full_params(), where parameters are for "
                "reading and writing only. Leave it first."
            )
        if self._is_root is None:
            self._become_root()
        if self._team is not None and current_task() == -1:
            self._team.start_forward()
        if self.force_input_to_fp32 and self._precision.compute is None:
            args, kwargs = as_type(torch.float32, args), as_type(torch.float32, kwargs)
        self._running += 1
        try:
            with self._outside_inference():
                result = self.module(*args, **kwargs)
        except BaseException:
            if self._team is not None and current_task() == -1:
                # The first error is the one to be seen, not that of a connection it has cost.
                with suppress(RuntimeError):
                    self._team.recover()
            raise
        finally:
            self._running -= 1
        if self._team is not None and current_task() == -1:
            self._team.end_forward()
        if self._team is not None and not torch.is_grad_enabled():
            self._team.reshard()  # what a root keeps is for a backward, and none will come
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return result

    @contextmanager
    def _outside_inference(self) -> Iterator[None]:
        """What is gathered first in inference_mode would be of no use in training."""
        if self._engine is None or not torch.is_inference_mode_enabled():
            yield
        else:
            with torch.inference_mode(False), torch.no_grad():
                yield

    def _become_root(self) -> None:
        """The first wrap that runs has all others inside, and all that they do together."""
        wraps = [wrap for wrap in self._wraps() if wrap.world_size > 1 or wrap is self]
        check_inside(self._workers, [wrap._workers for wrap in wraps])
        check_root(self._workers, [wrap._is_root for wrap in wraps])
        self._is_root = True
        for wrap in self._wraps():
            if wrap is not self:
                wrap._is_root = False
        if self._engine is not None:
            self._make_team(wraps)

    @eager
    def _make_team(self, wraps: Sequence[FullyShardedDataParallel]) -> None:
        facts = [(wrap._places, wrap._options()) for wrap in wraps]
        check_same_model(self._workers, facts, self.compute_device)
        self._team = RootState([wrap._engine for wrap in wraps if wrap._engine is not None])

    def _wraps(self) -> list[FullyShardedDataParallel]:
        """This wrap and those inside, each once."""
        return _wraps_in(self)

    def _reshard(self) -> None:
        for wrap in self._wraps():
            if wrap._engine is not None:
                wrap._engine.reshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are not averaged: whole gradients add up on each worker.

        The first pass outside averages the sum. Without `no_sync`, accumulated gradients are
        sharded: less memory, more bytes.
        """
        wraps = self._wraps()
        before = [wrap.require_backward_grad_sync for wrap in wraps]
        try:
            for wrap in wraps:
                wrap._synchronise(False)
            yield
        finally:
            for wrap, on in zip(wraps, before, strict=True):
                wrap._synchronise(on)

    def _synchronise(self, on: bool) -> None:
        self.require_backward_grad_sync = on
        if self._engine is not None:
            self._engine.synchronise(on)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, those of passes in `no_sync` that were not averaged too."""
        super().zero_grad(set_to_none)
        for wrap in self._wraps():
            if wrap._engine is not None:
                wrap._engine.clear_unaveraged()
            if wrap._team is not None:
                wrap._team.used.forget()

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by `pre` before they are summed over the workers, by `post` after."""
        for wrap in self._wraps() if recursive else [self]:
            wrap._divide = pre, post
            if wrap._engine is not None:
                wrap._engine.divide = pre, post
            else:
                wrap._division.by(pre * post)

    @property
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed over the workers."""
        return self._divide[0] if self._divide is not None else 1.0

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, pre: float) -> None:
        self.set_gradient_divide_factors(pre, self.gradient_postdivide_factor, recursive=False)

    @property
    def gradient_postdivide_factor(self) -> float:
        """What gradients are divided by after they were summed over the workers."""
        return self._divide[1] if self._divide is not None else float(self.world_size)

    @gradient_postdivide_factor.setter
    def gradient_postdivide_factor(self, post: float) -> None:
        self.set_gradient_divide_factors(self.gradient_predivide_factor, post, recursive=False)

    @property
    def training_state(self) -> TrainingState:
        """What this wrap is doing."""
        if self._whole:
            return TrainingState.SUMMON_FULL_PARAMS
        if self._engine is not None:
            return OF_ENGINE[self._engine.state]
        if self._running:
            return TrainingState.FORWARD
        return TrainingState.IDLE if current_task() == -1 else TrainingState.BACKWARD_PRE

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise a ValueError if this wrap is not in the state, or in one of them."""
        check_state(self.training_state, state)

    @property
    def params(self) -> list[nn.Parameter]:
        """This wrap's own parameters, without those of wraps inside; each once."""
        if self._engine is not None and not self._whole:
            return list(self._engine.params)  # type: ignore[arg-type]
        return distinct(self._places)

    @property
    def cpu_offload(self) -> bool:
        """An older name of `move_params_to_cpu`."""
        return self.move_params_to_cpu

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients down to this norm, over all parameters and workers.

        To be called on every worker, after the last backward before a step. Returns what the norm
        was.
        """
        if self.world_size == 1:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        grads = [local(p.grad) for p in self.parameters() if p.grad is not None]
        lengths = [norm_of_shard(grad, float(norm_type)) for grad in grads if grad.numel()]
        total = combine_norms(lengths, float(norm_type), self._workers, self.compute_device)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.device))
        return total

    # -- whole parameters ----------------------------------------------------------------------

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Inside, parameters are whole, on every worker, and may be read and changed.

        Changes stay unless `volatile`; make the same ones on every worker. To be called on every
        worker, and not inside a forward or backward.
        """
        wraps = [wrap for wrap in (self._wraps() if recurse else [self]) if not wrap._whole]
        self._reshard()
        with ExitStack() as stack:
            for wrap in wraps:
                if wrap._engine is not None:
                    places = list(wrap._places.values())
                    stack.enter_context(whole_parameters(places, keep=not volatile))
                wrap._whole = True
                stack.callback(setattr, wrap, "_whole", False)
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module inside, whose parameters are whole meanwhile."""
        with self.summon_full_params(recurse=False):
            super().apply(fn)
        return self

    def reset_parameters(self) -> None:
        """Call the wrapped module's, with whole parameters (if `allow_reset_parameters`)."""
        if not self.allow_reset_parameters:
            raise RuntimeError(
                "reset_parameters() is the wrapped module's. Pass allow_reset_parameters=True to "
                "FullyShardedDataParallel to call it."
            )
        with self.summon_full_params():
            self.module.reset_parameters()  # type: ignore[operator]

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain model's: whole tensors, by its names. To be called on every worker."""
        if self._asked:
            return super().state_dict(*args, **kwargs)
        self._reshard()
        if not self._local and self._engine is not None:
            wait_for_all_ranks(self._workers, "state_dict()")
        with self._throughout("_asked"):
            return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the plain model's: every worker takes its slices. Nothing is sent."""
        return super().load_state_dict(with_our_versions(self, state_dict), strict, assign)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This worker's slices, by the plain model's names. Nothing is sent."""
        with self._throughout("_local"):  # whatever a subclass calls by the name of the other
            return FullyShardedDataParallel.state_dict(self, *args, **kwargs)

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what `local_state_dict()` gave on this worker, of as many workers."""
        with self._throughout("_local"):
            return FullyShardedDataParallel.load_state_dict(self, state_dict, strict=strict)

    @contextmanager
    def _throughout(self, flag: str) -> Iterator[None]:
        """Inside, this attribute of all wraps is True."""
        before = [(wrap, getattr(wrap, flag)) for wrap in self._wraps()]
        try:
            for wrap, _ in before:
                setattr(wrap, flag, True)
            yield
        finally:
            for wrap, value in before:
                setattr(wrap, flag, value)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What `consolidate_shard_weights` has to know about this worker's slices."""
        self._reshard()
        tied: dict[int, str] = {}
        params = {}
        for name, param in self.named_parameters(remove_duplicate=False):
            first = tied.setdefault(id(param), name)
            params[name] = {
                "shape": list(param.shape),
                "same_as": first,
                "sharded": is_dtensor(param),
            }
        buffers = [plain(name) for name, _ in self.named_buffers()]
        return {"param_metadata": params, "buffer_names": buffers}

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Tensor]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Tensor]:
        """The plain model's state dict from every worker's `local_state_dict()`, without workers.

        `shard_metadata` are their `local_metadata_dict()`s, in rank order, too. Buffers are rank
        0's. Without `strict`, parameters that are not there are left out.
        """
        return consolidated(shard_weights, shard_metadata, with_module_buffers, strict)

    def gather_full_optim_state_dict(
        self, optim: Optimizer, **ignored: Any
    ) -> dict[str, Any] | None:
        """The plain optimizer's state dict, on rank 0; None on others. Call it on every worker.

        Of parameters in a group of one, whose numbers are its `uncollected_local_ids`, it is rank
        0's own: other workers have to save theirs.
        """
        self._reshard()
        names = {id(param): name for name, param in self.named_parameters()}
        own = self._own_parameters()
        return full_optimizer_state(optim, names, own, here=self.rank == 0)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: Mapping[str, Any]) -> Any:
        """This worker's part of the plain optimizer's state, for `optim.load_state_dict`.

        What rank 0 has for itself (in a group of one) is left out on other workers.
        """
        self._reshard()
        own = set() if self.rank == 0 else self._own_parameters()
        params = dict(self.named_parameters())
        return sharded_optimizer_state(full_optim_state_dict, params, own)

    def _own_parameters(self) -> set[int]:
        """Ids of parameters that each worker has for itself, in groups of one inside."""
        if self.world_size == 1:
            return set()
        return {id(p) for wrap in self._wraps() if wrap.world_size == 1 for p in wrap.params}

    # -- as the wrapped module -----------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters, by the plain model's names; the sharded ones between forward and backward,
        too, when the root's are whole."""
        sharded: dict[int, Any] = {}
        for wrap in self._wraps():
            if wrap._engine is not None and not wrap._whole:
                sharded.update(wrap._engine.kept_whole())
        for name, param in super().named_parameters(*args, **kwargs):
            yield plain(name), sharded.get(id(param), param)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "a FullyShardedDataParallel is not copied: a copy would have no workers. Copy the "
            "plain model before wrapping, or load state_dict() into one."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a FullyShardedDataParallel is not pickled: a file cannot hold its workers. Save "
            "state_dict(), or use manyhands.save."
        )

    def _look_again(self) -> None:
        """After what may have guard_optimizers parameters."""
        if self._engine is not None and not self._whole:
            self._engine.remember()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """`to`, `half` and the like."""
        result = super()._apply(fn, recurse)
        for wrap in self._wraps():
            wrap._look_again()
        return result

    def extra_repr(self) -> str:
        """The options, in `print(model)`."""
        if not self.verbose:
            return f"world_size={self.world_size}, mixed_precision={self.mixed_precision}"
        options = ", ".join(f"{name}={value}" for name, value in self._options().items())
        return f"rank={self.rank}, world_size={self.world_size}, {options}"

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTIONS}


def _wraps_in(module: nn.Module) -> list[FullyShardedDataParallel]:
    return [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]


OPTIONS = (
    *("mixed_precision", "reshard_after_forward", "disable_reshard_on_root", "fp32_reduce_scatter"),
    *("flatten_parameters", "move_params_to_cpu", "compute_dtype", "buffer_dtype"),
    *("move_grads_to_cpu", "bucket_cap_mb", "compute_device", "state_dict_device"),
    *("clear_autocast_cache", "force_input_to_fp32", "state_dict_on_rank_0_only"),
    *("gradient_predivide_factor", "sync_module_states", "overlap"),
)
