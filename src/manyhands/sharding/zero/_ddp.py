"""Wrap a model to send gradients to their owners during backward (`_reducer.py`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from manyhands._optimizers.modules import (
    ModuleWrapper,
    check_has_memory,
    check_not_averaged_inside,
    inside_ddp,
)
from manyhands._optimizers.wrappers import params_of, wrapped_attribute
from manyhands._ranks.agreement import agree
from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._warn import warn
from manyhands.sharding._agreement import ADVICE, Facts, GroupLike, facts_of_model
from manyhands.sharding.zero._flat_params import Shards
from manyhands.sharding.zero._oss import OSS, find_oss
from manyhands.sharding.zero._reducer import Reducer


class ShardedDataParallel(ModuleWrapper):
    """Data parallelism that shards gradients and optimizer state: each of N ranks stores 1/N.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    >>> model = mh.ShardedDataParallel(model, optimizer)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> optimizer.step()

    After `backward`, `param.grad` represents the mean gradient, and each rank stores a shard. Clip
    with torch's `clip_grad_norm_`, and scale losses with `ShardedGradScaler`. Backward passes
    inside `no_sync()` accumulate full-size gradients on each rank. Every pass outside is averaged
    and added to the shards.

    Args:
        module: the model, on its device.
        optimizer: the `OSS` of the model's parameters, or a list. Scaling rules around an OSS are
            allowed.
        process_group: the ranks; default: the optimizer's group.
        broadcast_buffers: copy rank 0's buffers whenever gradients are averaged.
        sync_models_at_startup: copy rank 0's parameters and buffers in the constructor.
        reduce_buffer_size: ignored; `bucket_size` of `OSS` is the number of elements per message.
        auto_refresh_trainable: check before each forward whether parameters were frozen or
            unfrozen. If False, call `refresh_trainable` after each such change.
        reduce_fp16: send gradients as float16.
        warn_on_trainable_params_changed: warn when parameters were frozen or unfrozen.
        reduce_dtype: send gradients in this type, such as bfloat16. Sums are in float32.
        sharded_optimizer: fairscale's name for `optimizer`.
    """

    averages_gradients = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        process_group: GroupLike | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int | None = None,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
        *,
        reduce_dtype: torch.dtype | None = None,
        sharded_optimizer: Optimizer | Sequence[Optimizer] = (),
    ) -> None:
        super().__init__()
        optimizer = optimizer or sharded_optimizer
        given = optimizer if isinstance(optimizer, Iterable) else [optimizer]
        self._optimizers = list(map(find_oss, given))
        check_module_and_oss(module, self._optimizers, process_group)
        self.module = module
        self.process_group = process_group or self._optimizers[0].group
        self.broadcast_buffers = broadcast_buffers
        self.auto_refresh_trainable = auto_refresh_trainable
        self.warn_on_trainable_params_changed = warn_on_trainable_params_changed
        self.require_backward_grad_sync = True
        self._workers = self._optimizers[0]._workers
        self._reducer: Reducer | None = None
        # Our state dict omits `module.`, which a larger module expects.
        self.register_load_state_dict_pre_hook(_add_module_prefix)
        if reduce_fp16:
            reduce_dtype = torch.float16
        if self._workers.size == 1:
            return
        # Before other collectives, which could hang with different models.
        facts: Facts = {
            "values of reduce_dtype": str(reduce_dtype),
            "values of broadcast_buffers": broadcast_buffers,
            "values of sync_models_at_startup": sync_models_at_startup,
        }
        with_buffers = broadcast_buffers or sync_models_at_startup
        facts.update(facts_of_model(module, self._optimizers, with_buffers))
        agree(self._workers, facts, ADVICE)
        if sync_models_at_startup:
            self._workers.broadcast_from_first([*module.parameters(), *module.buffers()])
        # A shared group could confuse the buckets of two modules.
        workers = self._workers
        if workers.shared_memory is None:
            workers = workers.with_own_group(next(module.parameters()).device, pairs=True)
        self._reducer = Reducer(self._shards(), workers, weakref.ref(self), reduce_dtype)
        for one in self._optimizers:
            # Weak: the optimizer may outlive the module.
            one._run.reducer_ref = weakref.ref(self._reducer)

    def _shards(self) -> list[Shards]:
        return [one._shards for one in self._optimizers]

    # -- training ------------------------------------------------------------------------------

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Run the wrapped module's forward."""
        if self._reducer is None:
            return self.module(*inputs, **kwargs)
        # torch has no public way to detect a forward inside DDP's forward.
        outer = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if outer is not None and self in outer.modules():
            raise inside_ddp(self)
        # `to` or `half` may have moved parameters out of the buckets.
        for one in self._optimizers:
            one._follow_moved()
        trains = self.training and torch.is_grad_enabled()
        if trains and self.auto_refresh_trainable and self._reducer.trained_changed:
            if self.warn_on_trainable_params_changed:
                warn(
                    "parameters were frozen or unfrozen, so gradient buckets are rebuilt. "
                    "(warn_on_trainable_params_changed=False disables this warning.)",
                )
            self.refresh_trainable()
        try:
            return self.module(*inputs, **kwargs)
        except BaseException:
            self._reducer.gave_up |= trains
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank: backward passes inside are not averaged."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def reduce(self) -> None:
        """Average gradients accumulated inside `no_sync()`. Call it on every rank.

        A backward outside `no_sync()` includes these.
        """
        if self._reducer is not None:
            self._reducer.reduce()

    def refresh_trainable(self) -> None:
        """Follow parameters that were frozen or unfrozen. Call it on every rank."""
        if self._reducer is not None:
            self._reducer.follow_trained()

    def sync_buffers(self, blocking: bool = False) -> None:
        """Copy rank 0's buffers. The call blocks even with `blocking=False`."""
        self._workers.broadcast_from_first(list(self.module.buffers()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        super().zero_grad(set_to_none)
        if self._reducer is not None:
            self._reducer.forget(*self._shards())

    # -- as the wrapped module -----------------------------------------------------------------

    @property
    def device_type(self) -> str:
        """The type of the first parameter's device, such as "cuda"."""
        return next(self.module.parameters()).device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module's parameters are on more than one device."""
        return len({param.device for param in self.module.parameters()}) > 1

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # A lookup in `self.module` would recurse.
            if name == "module":
                raise
            return wrapped_attribute(self, self.module, name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a ShardedDataParallel cannot be copied: copy model.module instead.")

    def __getitem__(self, key: object) -> Any:
        return self.module[key]  # type: ignore[index]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the wrapped module's state dict."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> ShardedDataParallel:
        """Convert or move the module (`to`, `half`), and the sharded gradients."""
        # torch sets `param.grad.data`, which does not change the slices.
        sharded: dict[nn.Parameter, Tensor] = {}
        for param in self.parameters():
            if isinstance(param.grad, ShardedGradient):
                with torch.no_grad():
                    sharded[param] = fn(param.grad)
                param.grad = None
        super()._apply(fn, recurse)
        for param, grad in sharded.items():
            param.grad = grad
        return self


def _add_module_prefix(
    module: nn.Module, state_dict: dict[str, object], prefix: str, *_: object
) -> None:
    assert isinstance(module, ShardedDataParallel)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)


# -- checks ----------------------------------------------------------------------------------------


def check_module_and_oss(
    module: nn.Module, optimizers: Sequence[OSS], group: GroupLike | None
) -> None:
    """Raise unless the optimizers have exactly the module's trained parameters."""
    if not optimizers:
        raise ValueError("ShardedDataParallel needs at least one optimizer, got an empty list.")
    check_not_averaged_inside(module)
    check_has_memory(module)
    for one in optimizers:
        if one._run.reducer is not None:
            raise RuntimeError("this OSS already belongs to a ShardedDataParallel.")
        given = group or optimizers[0].group or dist.group.WORLD
        if given is not (one.group or dist.group.WORLD):
            raise ValueError("the process group differs from the optimizer's. Pass OSS this group.")
    held: set[int] = set()
    for one in optimizers:
        held.update(map(id, params_of(one.param_groups)))
    left_out = []
    inside = set()
    for name, param in module.named_parameters():
        inside.add(id(param))
        if param.requires_grad and id(param) not in held:
            left_out.append(name)
    foreign = len(held - inside)
    if left_out or foreign:
        raise ValueError(
            f"{len(left_out)} parameter(s) of the module are in no optimizer {left_out[:4]}, and "
            f"the optimizer has {foreign} parameter(s) that are not in the module. Make the OSS "
            "from module.parameters(), or freeze parameters with requires_grad_(False)."
        )
