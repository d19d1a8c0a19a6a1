"""Shard parameters over the ranks: the public wrapper around torch's `fully_shard`.

    between steps   each rank stores a slice of every parameter, gradient and optimizer state
    in a forward    each wrap gathers parameters, computes, and frees them
    in a backward   each wrap gathers again, and gives every rank a slice of the mean gradient

`fully_shard` implements this for the wrapped module, with DTensors. The wrapper adds options
(`_options.py`), cheaper collectives on gloo (`_collectives.py`), gradients of parameters that only
some ranks use (`_root.py`), the plain model's names and state dicts (`_transparent.py`), and
support for single processes.

Glossary
    wrap      a FullyShardedDataParallel, with the parameters outside inner wraps
    root      the outermost wrap, which coordinates all wraps inside
    engine    torch's `fully_shard`, as `_engine.py` uses it
    place     the location of a parameter: a module and an attribute name
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from manyhands._arguments import real
from manyhands._tensors.backward import current_task
from manyhands._tensors.flat import local_shard
from manyhands._tensors.trees import as_type
from manyhands.sharding._agreement import GroupLike
from manyhands.sharding._gradients import clip
from manyhands.sharding.fsdp._engine import Engine, refuse_second_order
from manyhands.sharding.fsdp._options import find_device, find_group, find_ranks
from manyhands.sharding.fsdp._places import (
    cast_buffers,
    cast_in_forward,
    check_inner_groups,
    check_module,
    check_parameters,
    check_precision,
    check_same_model,
    copy_from_rank_0,
    distinct_params,
    find_places,
)
from manyhands.sharding.fsdp._root import RootState, become_root
from manyhands.sharding.fsdp._transparent import (
    Wrap,
    summon_parameters,
    wraps_in,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Modules inside a wrap.
_wrapped: WeakSet[nn.Module] = WeakSet()


class FullyShardedDataParallel(Wrap):
    """Shard a model: each of N ranks stores 1/N of parameters, gradients and optimizer state.

    Make the optimizer after wrapping, from the wrapped module's parameters:

    >>> import torch, manyhands as mh
    >>> layers = [mh.FSDP(torch.nn.Linear(4, 4)) for _ in range(3)]
    >>> model = mh.FSDP(torch.nn.Sequential(*layers))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> norm = model.clip_grad_norm_(1.0)
    >>> optimizer.step()
    >>> sorted(model.state_dict())[:2]  # names and tensors of the plain model
    ['0.bias', '0.weight']

    A wrap gathers all wrapped parameters together. Wrap each layer of a large model and then the
    model (or use `auto_wrap`), so that a rank stores full parameters of no more than the largest
    wrap. A single rank does not shard.

    `state_dict()` gathers the parameters: call it on every rank. On several ranks, `parameters()`
    are DTensors. Optimizers that need full tensors (Adafactor, Rprop) raise an error: use
    `WholeTensorOptimizer`.

    Args:
        module: the module to shard, in place.
        process_group: the ranks that shard the parameters; default: all. A group with a single rank
            inside a wrap with several ranks leaves parameters unsharded and private to the rank, as
            for an expert of a mixture. A two-dimensional `DeviceMesh` stores copies of the model,
            each sharded over the second dimension.
        reshard_after_forward: free the full parameters after each forward and gather them again in
            backward. Uses less memory and sends 1.5 times the bytes.
        disable_reshard_on_root: keep the root's full parameters until backward.
        mixed_precision: compute with parameters and inputs in `compute_dtype`, by default float16
            (bfloat16 needs no loss scaling). The optimizer's parameters keep their type.
        fp32_reduce_scatter: with mixed precision, average gradients in float32.
        move_params_to_cpu: store shards of parameters, gradients and optimizer state in CPU memory.
        compute_dtype: type to compute in.
        buffer_dtype: type of floating-point buffers; default: `compute_dtype`.
        compute_device: device to compute on; default: the parameters' device, or the group's
            accelerator.
        state_dict_device: device of the full parameters in `state_dict()`.
        clear_autocast_cache: clear autocast's cache of casts after each forward.
        force_input_to_fp32: cast inputs to float32 in a wrap without mixed precision.
        verbose: show every option in `print(model)`.
        state_dict_on_rank_0_only: return an empty `state_dict()` on all other ranks.
        gradient_predivide_factor: divide gradients by this factor before the sum over N ranks, and
            by N / factor after the sum. By default, divide only after the sum.
        allow_reset_parameters: let `reset_parameters()` call the wrapped module's method.
        overlap: while a wrap computes, gather the next wrap's parameters, and send the previous
            wrap's gradients. False is slower, and saves memory for one or two wraps.
    """

    require_backward_grad_sync = True
    _root_state: RootState | None = None
    _has_divisor_hooks = False

    def __init__(
        self,
        module: nn.Module,
        process_group: GroupLike | DeviceMesh | None = None,
        *,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        compute_device: torch.device | str | None = None,
        state_dict_device: torch.device | str | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        # Raise errors before changing or sending data.
        check_module(module, FullyShardedDataParallel, _wrapped)
        check_precision(mixed_precision, fp32_reduce_scatter)
        self._ranks = find_ranks(process_group)
        self.rank = self._ranks.rank
        self.world_size = self._ranks.size
        check_inner_groups(self._ranks, [wrap._ranks for wrap in wraps_in(module, Wrap)])
        before = 1.0
        if gradient_predivide_factor is not None:
            before = real("gradient_predivide_factor", gradient_predivide_factor, above=0)
        self._divide = [before, self.world_size / before]
        device = find_device(module, self._ranks, compute_device)
        self._places = find_places(module, FullyShardedDataParallel)
        check_parameters(self._places, self._ranks, device)
        if mixed_precision and compute_dtype is None:
            compute_dtype = torch.float16
        self._cast_to = compute_dtype  # None: compute in the parameters' type
        buffer_dtype = buffer_dtype or compute_dtype
        self._former_buffer_dtypes = cast_buffers(module, FullyShardedDataParallel, buffer_dtype)
        self.process_group = find_group(process_group)
        self.reshard_after_forward = reshard_after_forward
        self.disable_reshard_on_root = disable_reshard_on_root
        self.mixed_precision = mixed_precision
        self.fp32_reduce_scatter = fp32_reduce_scatter
        self.move_params_to_cpu = move_params_to_cpu
        self.compute_dtype = compute_dtype or torch.float32
        self.buffer_dtype = buffer_dtype or torch.float32
        self.compute_device = device
        self.state_dict_device = torch.device(state_dict_device or device)
        self.clear_autocast_cache = clear_autocast_cache
        self.force_input_to_fp32 = force_input_to_fp32
        self.verbose = verbose
        self.state_dict_on_rank_0_only = state_dict_on_rank_0_only
        self.allow_reset_parameters = allow_reset_parameters
        self.overlap = overlap
        self._begin(module)

    def _begin(self, module: nn.Module) -> None:
        self._engine = None
        if self.world_size > 1:
            self._engine = self._make_engine(module)
            self._engine.divide = self._divide
        elif self._cast_to is not None:
            cast_in_forward(module, list(self._places.values()), self._cast_to)
        _wrapped.add(module)
        self._register_inner(module)  # last: then attribute lookups reach the module

    def _make_engine(self, module: nn.Module) -> Engine:
        # Modules in inner single-rank wraps.
        private: set[nn.Module] = set()
        for wrap in wraps_in(module, Wrap):
            if wrap.world_size == 1:
                private.update(wrap.modules())
        shared = {name: each for name, each in module.named_modules() if each not in private}
        check_same_model(self._ranks, [(self._places, self._compared_options())], shared)
        # A broadcast between different models could hang.
        copy_from_rank_0(shared.values(), self._ranks, self.compute_device)
        reshard: bool | None = self.reshard_after_forward
        if reshard and self.disable_reshard_on_root:
            reshard = None  # the engine's value for "except on the root"
        return Engine(
            module,
            self._places,
            self._ranks,
            self.compute_device,
            self._cast_to,
            torch.float32 if self.fp32_reduce_scatter else None,
            reshard_after_forward=reshard,
            offload=self.move_params_to_cpu and self.compute_device.type != "cpu",
            overlap=self.overlap,
            ignored={param for each in private for param in each.parameters(recurse=False)},
        )

    # -- training ------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the wrapped module's forward with gathered parameters."""
        if self._has_full_params:
            raise RuntimeError("forward() was called inside summon_full_params(). Leave it first.")
        if self._is_root is None:
            self._root_state = become_root(self)
        # A forward inside a backward recomputes a checkpoint.
        root = self._root_state
        if current_task() != -1:
            root = None
        if root is not None:
            root.start_forward()
        if self.force_input_to_fp32 and self._cast_to is None:
            args = as_type(torch.float32, args)
            kwargs = as_type(torch.float32, kwargs)
        try:
            with self._outside_inference_mode():
                result = self.module(*args, **kwargs)
        except BaseException:
            if root is not None:
                # Do not hide the error by an error of the broken connection.
                with suppress(RuntimeError):
                    root.recover()
            raise
        if root is not None:
            root.end_forward()
            if torch.is_grad_enabled():
                refuse_second_order(result)
        if self._root_state is not None and not torch.is_grad_enabled():
            self._root_state.reshard()  # the root would wait for a backward
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return result

    @contextmanager
    def _outside_inference_mode(self) -> Iterator[None]:
        """Leave inference mode: the engine reuses the first forward's tensors for training."""
        if self._engine is None or not torch.is_inference_mode_enabled():
            yield
        else:
            with torch.inference_mode(False), torch.no_grad():
                yield

    def _wraps(self) -> list[FullyShardedDataParallel]:
        return wraps_in(self, FullyShardedDataParallel)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate full gradients on each rank: backward passes inside are not averaged.

        The first pass outside averages the sum. Without `no_sync`, gradients accumulate in shards:
        less memory, more bytes sent.
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
        """Clear all gradients, including gradients of `no_sync` passes."""
        super().zero_grad(set_to_none)
        for wrap in self._wraps():
            if wrap._engine is not None:
                wrap._engine.clear_unaveraged()
            if wrap._root_state is not None:
                wrap._root_state.used.forget()

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by `pre` before the sum over the ranks, and by `post` after the sum."""
        for wrap in self._wraps() if recursive else [self]:
            wrap._divide[:] = [pre, post]
            if wrap._engine is None and not wrap._has_divisor_hooks and pre * post != 1:
                # Only if necessary, because hooks cost time.
                wrap._has_divisor_hooks = True
                for param in distinct_params(wrap._places):
                    if param.requires_grad:
                        param.register_hook(partial(_divide_gradient, wrap._divide))

    @property
    def gradient_predivide_factor(self) -> float:
        """The divisor of gradients before the sum over the ranks."""
        return self._divide[0]

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, pre: float) -> None:
        self.set_gradient_divide_factors(pre, self._divide[1], recursive=False)

    @property
    def gradient_postdivide_factor(self) -> float:
        """The divisor of gradients after the sum over the ranks."""
        return self._divide[1]

    @gradient_postdivide_factor.setter
    def gradient_postdivide_factor(self, post: float) -> None:
        self.set_gradient_divide_factors(self._divide[0], post, recursive=False)

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the norm of all gradients on all ranks, and return the norm before clipping.

        Call it on every rank, between the last backward and the step.
        """
        if self.world_size == 1:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        grads = [local_shard(p.grad) for p in self.parameters() if p.grad is not None]
        shards = self._ranks.shards
        return clip(grads, grads, max_norm, float(norm_type), shards, self.compute_device)

    # -- full parameters -----------------------------------------------------------------------

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Provide full parameters inside the context.

        Call it on every rank, outside forward and backward. With `volatile`, changes are discarded;
        otherwise make equal changes on every rank.
        """
        self._reshard()
        with ExitStack() as stack:
            for wrap in self._wraps() if recurse else [self]:
                if wrap._has_full_params:
                    continue
                if wrap._engine is not None:
                    places = list(wrap._places.values())
                    stack.enter_context(summon_parameters(places, keep=not volatile))
                wrap._has_full_params = True
                stack.callback(setattr, wrap, "_has_full_params", False)
            yield

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module inside, with full parameters."""
        # This calls apply() of inner wraps.
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

    def extra_repr(self) -> str:
        """Return the options, for `print(model)`."""
        if not self.verbose:
            return f"world_size={self.world_size}, mixed_precision={self.mixed_precision}"
        options = ", ".join(f"{name}={value}" for name, value in self._compared_options().items())
        return f"rank={self.rank}, world_size={self.world_size}, {options}"


def _divide_gradient(divisors: Sequence[float], grad: Tensor) -> Tensor:
    pre, post = divisors
    return grad / (pre * post)
