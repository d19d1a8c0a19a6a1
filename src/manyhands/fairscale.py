"""Provide fairscale's names, arguments and defaults: a script changes only its imports.

>>> from manyhands.fairscale import OSS, AdaScale, ShardedDataParallel, wrap

`OSS` and `FullyShardedDataParallel` derive from the classes in `manyhands`, and also accept
fairscale's arguments without effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from manyhands._tensors.backward import current_task
from manyhands.scaling._batch import Accumulation
from manyhands.scaling._rule_base import RuleOptions
from manyhands.scaling._rules import AdaScale
from manyhands.sharding._agreement import GroupLike
from manyhands.sharding._gradients import ShardedGradScaler
from manyhands.sharding.fsdp import _wrapper, _wrapping
from manyhands.sharding.fsdp._options import DummyProcessGroup
from manyhands.sharding.fsdp._wrapping import (
    Classes,
    Policy,
    auto_wrap,
    default_auto_wrap_policy,
    wrap,
)
from manyhands.sharding.zero import _oss
from manyhands.sharding.zero._ddp import ShardedDataParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "OSS",
    "AdaScale",
    "AdaScaleWrapper",
    "DummyProcessGroup",
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "TrainingState",
    "auto_wrap",
    "auto_wrap_bn",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]

for _public in (DummyProcessGroup, auto_wrap, default_auto_wrap_policy, wrap):
    _public.__module__ = __name__  # for tracebacks and help()


class AdaScaleWrapper(AdaScale):
    """`AdaScale` that creates the inner optimizer, for code that expects an optimizer class.

    >>> import torch
    >>> from manyhands.fairscale import AdaScaleWrapper
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = AdaScaleWrapper(
    ...     model.parameters(), optim_cls=torch.optim.SGD, lr=0.1, num_gradients_to_accumulate=8
    ... )

    The argument names are fairscale's. For another rule, write a function that returns
    `mh.SqrtScale(Muon(params, ...))`. With `OSS`, use `AdaScale(OSS(params, ...))`: a rule inside
    `OSS` would measure only the local shard.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        optim_cls: class of the inner optimizer.
        additional_optim_args: keyword arguments of the inner optimizer and of `AdaScale`.
    """

    def __init__(
        self,
        params: ParamsT,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int | Accumulation = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        **additional_optim_args: Any,
    ) -> None:
        if not (isinstance(optim_cls, type) and issubclass(optim_cls, Optimizer)):
            raise TypeError(
                f"optim_cls must be an optimizer class, such as torch.optim.SGD, got {optim_cls!r}."
                " For an existing optimizer, write AdaScale(optimizer)."
            )
        names = RuleOptions.__annotations__.keys() & additional_optim_args.keys()
        options = {name: additional_optim_args.pop(name) for name in names}
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            debias_ewma=debias_ewma,
            **options,
        )


class OSS(_oss.OSS):
    """`manyhands.OSS` with fairscale's arguments `broadcast_fp16` and `force_broadcast_object`.

    >>> import torch
    >>> from manyhands.fairscale import OSS
    >>> params = torch.nn.Linear(3, 1).parameters()
    >>> optimizer = OSS(params, torch.optim.SGD, force_broadcast_object=True, lr=0.1)

    Args:
        params: parameters or parameter groups.
        optim: class of the optimizer.
        group: the ranks that share the state; default: all.
        broadcast_buffer_size: elements per message; ignored unless positive.
        broadcast_fp16: ignored; parameters are sent in their type.
        force_broadcast_object: ignored; no objects are sent.
        **defaults: arguments of `manyhands.OSS` and of the optimizer.
    """

    def __init__(
        self,
        params: ParamsT,
        optim: type[Optimizer] = SGD,
        group: GroupLike | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **defaults: Any,
    ) -> None:
        super().__init__(params, optim, group, broadcast_buffer_size, **defaults)
        self.broadcast_fp16 = broadcast_fp16
        self.force_broadcast_object = force_broadcast_object


class TrainingState(Enum):
    """The state of a `FullyShardedDataParallel`, in the attribute `training_state`.

    >>> import torch
    >>> from manyhands.fairscale import FullyShardedDataParallel, TrainingState
    >>> model = FullyShardedDataParallel(torch.nn.Linear(2, 2))
    >>> model.assert_state(TrainingState.IDLE)
    >>> with model.summon_full_params():
    ...     print(model.training_state.name)
    SUMMON_FULL_PARAMS

    On a single rank, the state is `BACKWARD_PRE` throughout a backward.
    """

    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()  # parameters are being gathered, or used, in a backward
    BACKWARD_POST = auto()  # gradients are being sent
    SUMMON_FULL_PARAMS = auto()


class FullyShardedDataParallel(_wrapper.FullyShardedDataParallel):
    """`manyhands.FullyShardedDataParallel` with fairscale's order of arguments.

    >>> import torch
    >>> from manyhands.fairscale import FullyShardedDataParallel
    >>> model = FullyShardedDataParallel(torch.nn.Linear(2, 2), flatten_parameters=True)

    `process_group_reduce_scatter`, `flatten_parameters`, `move_grads_to_cpu`, `bucket_cap_mb` and
    `no_broadcast_optim_state` have no effect. `cpu_offload` is a former name of
    `move_params_to_cpu`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: GroupLike | DeviceMesh | None = None,
        process_group_reduce_scatter: GroupLike | None = None,
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
        overlap: bool = True,
    ) -> None:
        super().__init__(
            module,
            process_group,
            reshard_after_forward=reshard_after_forward,
            disable_reshard_on_root=disable_reshard_on_root,
            mixed_precision=mixed_precision,
            fp32_reduce_scatter=fp32_reduce_scatter,
            move_params_to_cpu=move_params_to_cpu or cpu_offload,
            compute_dtype=compute_dtype,
            buffer_dtype=buffer_dtype,
            compute_device=compute_device,
            state_dict_device=state_dict_device,
            clear_autocast_cache=clear_autocast_cache,
            force_input_to_fp32=force_input_to_fp32,
            verbose=verbose,
            state_dict_on_rank_0_only=state_dict_on_rank_0_only,
            gradient_predivide_factor=gradient_predivide_factor,
            allow_reset_parameters=allow_reset_parameters,
            overlap=overlap,
        )
        self.process_group_reduce_scatter = process_group_reduce_scatter
        self.flatten_parameters = flatten_parameters
        self.move_grads_to_cpu = move_grads_to_cpu
        if move_grads_to_cpu is None:
            self.move_grads_to_cpu = self.move_params_to_cpu
        self.bucket_cap_mb = bucket_cap_mb
        self.no_broadcast_optim_state = no_broadcast_optim_state
        self.cpu_offload = self.move_params_to_cpu
        self._forwards = 0  # in progress

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the wrapped module's forward with gathered parameters."""
        self._forwards += 1
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._forwards -= 1

    @property
    def training_state(self) -> TrainingState:
        """The current state of this wrap."""
        if self._has_full_params:
            return TrainingState.SUMMON_FULL_PARAMS
        if self._engine is not None:
            # The engine's names for a backward are PRE_BACKWARD and POST_BACKWARD.
            return TrainingState["_".join(reversed(self._engine.state.split("_")))]
        if self._forwards:
            return TrainingState.FORWARD
        return TrainingState.IDLE if current_task() == -1 else TrainingState.BACKWARD_PRE

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise a ValueError unless this wrap is in the state, or in any of the states."""
        states = state if isinstance(state, Iterable) else [state]
        names = [each.name for each in states]  # by name, to accept fairscale's enum
        if self.training_state.name not in names:
            raise ValueError(f"expected {' or '.join(names)}, not {self.training_state.name}.")


def config_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool
) -> bool:
    """The policy by attribute: wrap the modules with an attribute `wrapper_config`.

    >>> import torch.nn as nn
    >>> from manyhands.fairscale import config_auto_wrap_policy
    >>> layer = nn.Linear(10, 10)
    >>> layer.wrapper_config = {"mixed_precision": False}
    >>> config_auto_wrap_policy(layer, False, unwrapped_params=110, module_is_root=False)
    True

    The attribute is a dict of options for the module's wrapper, which may include `wrapper_cls`.
    """
    return recurse or hasattr(module, "wrapper_config")


@contextmanager
def enable_wrap(
    auto_wrap_policy: Policy | Classes | None = None, **wrapper_kwargs: Any
) -> Iterator[None]:
    """Let `wrap` and `auto_wrap` wrap inside; outside they return the module unchanged.

    >>> import torch.nn as nn
    >>> from manyhands.fairscale import FullyShardedDataParallel, enable_wrap, wrap
    >>> with enable_wrap(flatten_parameters=True):
    ...     layer = wrap(nn.Linear(5, 5))
    >>> isinstance(layer, FullyShardedDataParallel)
    True

    A nested `enable_wrap` inherits all settings that it does not change. Threads have separate
    settings. `enable_wrap` also works as a decorator.

    Args:
        auto_wrap_policy: the policy, as described in `auto_wrap`; default: by size.
        wrapper_kwargs: `wrapper_cls`, the wrapper class (default: `FullyShardedDataParallel`) or a
            function of a module and options; keywords of the policy; options of the wrapper.
    """
    if not _wrapping.in_scope():
        wrapper_kwargs = {"wrapper_cls": FullyShardedDataParallel, **wrapper_kwargs}
    with _wrapping.enable_wrap(auto_wrap_policy, **wrapper_kwargs):
        yield


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: GroupLike | None = None,
    fsdp_config: Mapping[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap each BatchNorm separately in full precision, in a model of lower precision.

    >>> import torch.nn as nn
    >>> from manyhands.fairscale import FullyShardedDataParallel, auto_wrap_bn
    >>> model = auto_wrap_bn(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> isinstance(model[1], FullyShardedDataParallel)
    True

    Call it before wrapping modules that contain BatchNorms. Settings of `enable_wrap` apply.

    Args:
        module: the model.
        single_rank_pg: ignored: in single-rank groups, BatchNorms would differ between ranks.
        process_group: the ranks that share the BatchNorms; default: as in `enable_wrap`, or all.
        fsdp_config: options that win over the full-precision options.
        wrap_it: False only sets `wrapper_config` attributes, for `config_auto_wrap_policy`.
        assert_on_collision: raise an error if a BatchNorm already has a `wrapper_config`.
    """
    config: dict[str, Any] = {
        "mixed_precision": False,
        "fp32_reduce_scatter": False,
        "force_input_to_fp32": False,
        "compute_dtype": torch.float32,
        "buffer_dtype": torch.float32,
        "reshard_after_forward": False,
    }
    if process_group is not None:
        config["process_group"] = process_group
    config.update(fsdp_config or {})
    # The private base class of BatchNorm1d to 3d and SyncBatchNorm.
    norms: list[Any] = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    if assert_on_collision and any(hasattr(norm, "wrapper_config") for norm in norms):
        raise ValueError(
            "a BatchNorm already has a wrapper_config. Call auto_wrap_bn once, or with "
            "assert_on_collision=False to replace it."
        )
    for norm in norms:
        norm.wrapper_config = dict(config)
    if not wrap_it:
        return module
    with enable_wrap():  # works without an outer enable_wrap
        return auto_wrap(module, (_BatchNorm,))
