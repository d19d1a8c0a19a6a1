"""Shard parameters over the ranks: the documented wrapper around torch's `fully_shard`.

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
    hold_full_parameters,
    wraps_in,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
        reshard_after_forward: free the full parameters after each forward and gather them again
            in backward. Uses less memory and sends 1.5 times the bytes.
        disable_reshard_on_root: the root keeps its own full parameters until backward even so.
        mixed_precision: compute with parameters and inputs in `compute_dtype`, by default
            float16 (bfloat16 needs no loss scaling). The optimizer's parameters keep their type.
        fp32_reduce_scatter: with mixed precision, average gradients in float32.
        move_params_to_cpu: keep shards of parameters, gradients and optimizer state in CPU memory.
        compute_dtype: type to compute in.
        buffer_dtype: type of floating-point buffers, by default `compute_dtype`.
        compute_device: by default the parameters' device, or the group's accelerator.
        state_dict_device: device on which `state_dict()` puts full parameters.
        clear_autocast_cache: clear autocast's cache of casts after each forward.
        force_input_to_fp32: cast inputs to float32 in a wrap without mixed precision.
        verbose: show every option in `print(model)`.
        state_dict_on_rank_0_only: make `state_dict()` empty on all other ranks.
        gradient_predivide_factor: divide gradients by this factor before they are summed, and by
            N / factor after. By default they are divided after.
        allow_reset_parameters: let `reset_parameters()` call the wrapped module's method.
        overlap: gather the next wrap's parameters, and send the previous wrap's gradients, while
            one wrap computes. False needs one or two wraps' memory less, and is slower.
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
        # Mistakes are found before anything is changed or sent.
        check_module(module, FullyShardedDataParallel, _wrapped)
        check_precision(mixed_precision, fp32_reduce_scatter)
        self._ranks = find_ranks(process_group)
        self.rank = self._ranks.rank
        self.world_size = self._ranks.size
        check_inner_groups(self._ranks, [wrap._ranks for wrap in wraps_in(module, Wrap)])
        before = 1.0
        if gradient_predivide_factor is not None:
            before = real("gradient_predivide_factor", gradient_predivide_factor, above=0)
        # Shared with the engine, or with the hooks of the parameters.
        self._divide = [before, self.world_size / before]
        device = find_device(module, self._ranks, compute_device)
        self._places = find_places(module, FullyShardedDataParallel)
        check_parameters(self._places, self._ranks, device)
        if mixed_precision and compute_dtype is None:
            compute_dtype = torch.float16
        self._cast_to = compute_dtype  # None: compute in the parameters' own type
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
        self._hold(module)  # last, as attributes are looked up in it from now on

    def _make_engine(self, module: nn.Module) -> Engine:
        """Shard the parameters at this wrap's places."""
        # Modules in inner wraps in a group of one are private to the rank.
        private: set[nn.Module] = set()
        for wrap in wraps_in(module, Wrap):
            if wrap.world_size == 1:
                private.update(wrap.modules())
        shared = {name: each for name, each in module.named_modules() if each not in private}
        check_same_model(self._ranks, [(self._places, self._compared_options())], shared)
        # After the check, because a broadcast between different models would hang or crash.
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
            # On a CPU they are in CPU memory already.
            offload=self.move_params_to_cpu and self.compute_device.type != "cpu",
            overlap=self.overlap,
            ignored={param for each in private for param in each.parameters(recurse=False)},
        )

    # -- training ------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the wrapped module's forward, with its parameters gathered for it."""
        if self._holds_full:
            raise RuntimeError("forward() was called inside summon_full_params(). Leave it first.")
        if self._is_root is None:
            self._root_state = become_root(self)
        # A forward inside a backward recomputes a checkpoint: the root's own forward is over.
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
                # Show the first error, not that of a connection which it has broken.
                with suppress(RuntimeError):
                    root.recover()
            raise
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
            wrap._divide[:] = [pre, post]
            if wrap._engine is None and not wrap._has_divisor_hooks and pre * post != 1:
                # No hooks before a divisor is set: they would cost time in every backward. They
                # live as long as the parameters, and must not keep the wrap alive.
                wrap._has_divisor_hooks = True
                for param in distinct_params(wrap._places):
                    if param.requires_grad:
                        param.register_hook(partial(_divide_gradient, wrap._divide))

    @property
    def gradient_predivide_factor(self) -> float:
        """The divisor of gradients before they are summed over the ranks."""
        return self._divide[0]

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, pre: float) -> None:
        self.set_gradient_divide_factors(pre, self._divide[1], recursive=False)

    @property
    def gradient_postdivide_factor(self) -> float:
        """The divisor of gradients after they were summed over the ranks."""
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
        self._reshard()
        with ExitStack() as stack:
            for wrap in self._wraps() if recurse else [self]:
                if wrap._holds_full:
                    continue
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

    def check_can_save(self, model: nn.Module) -> None:
        """Raise a ValueError if ranks train different parameters: a checkpoint has room for one."""
        sharded = any(wrap.world_size > 1 for wrap in wraps_in(model, Wrap))
        if sharded and self.world_size == 1 and self.params:
            raise ValueError(
                f"a {type(self.module).__name__} is wrapped in a process group of one, so each "
                "rank has its own parameters there, and a checkpoint would hold those of one. "
                "Save each rank's state dicts in a file of its own."
            )

    def extra_repr(self) -> str:
        """Return the options, for `print(model)`."""
        if not self.verbose:
            return f"world_size={self.world_size}, mixed_precision={self.mixed_precision}"
        options = ", ".join(f"{name}={value}" for name, value in self._compared_options().items())
        return f"rank={self.rank}, world_size={self.world_size}, {options}"


def _divide_gradient(divisors: Sequence[float], grad: Tensor) -> Tensor:
    pre, post = divisors
    return grad / (pre * post)
