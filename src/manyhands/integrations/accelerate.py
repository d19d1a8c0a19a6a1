"""Prepare manyhands models and optimizers for Accelerate.

Accelerate wraps every model in `DistributedDataParallel`, which is wrong for some models:

    ShardedDataParallel, FullyShardedDataParallel    these wrappers already average gradients
    a model with blocks as optimizer                 workers have separate gradients in a block

`prepare` passes `evaluation_mode=True` for such a model. Accelerate then moves the model to the
device and applies mixed precision, without DDP.

Saving and loading differ in two cases:

    slices of flat tensors        `save_state` and `save_model` omit tensors with shared memory, so
                                  `get_state_dict` copies the parameters of `OSS`
    blocks                        parameters differ between workers during a block, so a sync round
                                  precedes `save_state`

`save_state` writes rank 0's optimizer state, so it raises an error for FullyShardedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from accelerate.utils.constants import MODEL_NAME, SAFE_MODEL_NAME
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._optimizers.foreign import PreparedOptimizer
from manyhands._optimizers.modules import ModuleWrapper
from manyhands._optimizers.wrappers import find_layer
from manyhands.blocks._optimizer import Blocks
from manyhands.checkpoint.weights import load_weights
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

__all__ = ["RuleState", "prepare"]

UNSEEN = ("DEEPSPEED", "MEGATRON_LM", "XLA")  # a rule cannot observe their gradient reduction


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Prepare objects as `accelerator.prepare` does, including manyhands models and optimizers.

    >>> import torch, manyhands as mh
    >>> from accelerate import Accelerator
    >>> from manyhands.integrations.accelerate import prepare
    >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = mh.OSS(model.parameters(), optim=torch.optim.SGD, gather_state=True, lr=0.1)
    >>> model = mh.ShardedDataParallel(model, optimizer)
    >>> model, optimizer = prepare(accelerator, model, optimizer)
    >>> optimizer = mh.AdaScale(optimizer)
    >>> for x in torch.randn(2, 8, 4):
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(x).square().mean())
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> optimizer.scale
    2.0

    Models that average gradients, and models trained in blocks, are not wrapped in
    `DistributedDataParallel`. Pass blocks together with the model. `accelerator.save_state` and
    `load_state` also support parameters in flat memory. Files have the format of the plain model
    and optimizer. Save a `FullyShardedDataParallel` with `manyhands.save` instead.

    Args:
        accelerator: the `Accelerator`.
        objects: arguments of `accelerator.prepare`.
    """
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    in_blocks = any(find_layer(each, Blocks) is not None for each in optimizers)
    for each in optimizers:
        expect_slices(each)
    for each in objects:
        if isinstance(each, nn.Module) and (in_blocks or isinstance(each, ModuleWrapper)):
            prepare_without_ddp(accelerator, each)
    if not getattr(accelerator, "_manyhands_hooks", ()):
        accelerator._manyhands_hooks = (
            accelerator.register_save_state_pre_hook(partial(_as_accelerate_saves, accelerator)),
            accelerator.register_load_state_pre_hook(partial(_as_accelerate_loads, accelerator)),
        )
        get = accelerator.get_state_dict
        accelerator.get_state_dict = lambda *a, **k: _copy_slices(get(*a, **k))
    return accelerator.prepare(*objects)


def prepare_without_ddp(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Move a model to the device and apply mixed precision. Accelerate regards it as prepared."""
    if not hasattr(accelerator, "_manyhands_unwrap"):
        unwrap = accelerator.unwrap_model

        def unwrap_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = unwrap(model, *args, **kwargs)
            if isinstance(inner, ShardedDataParallel):
                return inner.module
            return inner

        accelerator._manyhands_unwrap = unwrap
        accelerator.unwrap_model = unwrap_model
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared


def expect_slices(optimizer: Optimizer) -> None:
    """Suppress the warning of an OSS about shared memory, because slices are saved as copies."""
    oss = find_layer(optimizer, OSS)
    if oss is not None:
        oss._is_accelerate_prepared = False


class RuleState:
    """A scaling rule's state, for `accelerator.register_for_checkpointing`.

    >>> import torch, manyhands as mh
    >>> from accelerate import Accelerator
    >>> from manyhands.integrations.accelerate import RuleState
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> optimizer = mh.AdaScale(optimizer)
    >>> accelerator.register_for_checkpointing(RuleState(optimizer))

    Required only for Accelerate's FSDP2, which saves the optimizer's state without additional
    entries. In other cases the optimizer's state includes the rule's state.
    """

    def __init__(self, rule: ScalingRuleBase) -> None:
        self._rule = rule

    def state_dict(self) -> dict[str, Any]:
        """Return the rule's statistics, progress and scale."""
        return self._rule.scaling_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._rule.load_scaling_state_dict(state_dict)


# -- rules and prepared optimizers -------------------------------------------------------------


class PreparedLoop:
    """The passes per step of Accelerate's loop (an `Accumulation`)."""

    def __init__(self, gradient_state: GradientState) -> None:
        self._state = gradient_state

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self._state.num_steps)

    @property
    def sync_gradients(self) -> bool:
        return bool(self._state.sync_gradients)


def describe(optimizer: Optimizer) -> PreparedOptimizer | None:
    """Describe an optimizer that Accelerate has prepared. Return None for other optimizers."""
    if not isinstance(optimizer, AcceleratedOptimizer):
        return None
    state = optimizer.accelerator_state
    kind = str(state.distributed_type.value)
    seen = state.fsdp_plugin.fsdp_version != 1 if kind == "FSDP" else kind not in UNSEEN
    loop = PreparedLoop(optimizer.gradient_state)
    return PreparedOptimizer(optimizer, loop, optimizer.scaler, None if seen else kind)


def take_back(step: Any) -> None:
    """Mark a step as skipped in Accelerate.

    Accelerate regards a step as skipped if the scaler did not call `optimizer.step`. The scaler
    calls our `step`, which skips by itself. During this call, `optimizer.step` is a function of
    Accelerate that records the call in the wrapper, an object in the function's closure.
    """
    for cell in step.__closure__ or ():
        if hasattr(cell.cell_contents, "_accelerate_step_called"):
            cell.cell_contents._accelerate_step_called = False


# -- save_state and load_state -----------------------------------------------------------------


def _copy_slices(state: dict[str, Any]) -> dict[str, Any]:
    """Replace slices of larger tensors by copies. Tied tensors remain tied."""
    copies: dict[tuple[object, ...], Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            same = value.data_ptr(), value.dtype, value.shape, value.stride()
            if same not in copies:
                copies[same] = value.clone()
            state[name] = copies[same]
    return state


def _as_accelerate_saves(
    accelerator: Accelerator, models: list[nn.Module], weights: list[dict[str, Any]], folder: str
) -> None:
    """Synchronize blocks before Accelerate writes the parameters of rank 0."""
    _check_complete(models, "save")
    synchronized = False
    for optimizer in accelerator._optimizers:
        blocks = find_layer(optimizer, Blocks)
        # Workers of a crew may save at different steps, but synchronize together.
        if blocks is not None and not blocks.in_crew:
            blocks.synchronize()
            synchronized = True
    if synchronized:
        weights[:] = [accelerator.get_state_dict(model, unwrap=False) for model in models]


def _as_accelerate_loads(accelerator: Accelerator, models: list[nn.Module], folder: str) -> None:
    """Load the models instead of Accelerate, which rejects parameters in flat memory."""
    _check_complete(models, "load")
    for number, model in enumerate(models):
        ending = f"_{number}" if number else ""
        file = Path(folder, f"{SAFE_MODEL_NAME}{ending}.safetensors")
        if not file.exists():
            file = Path(folder, f"{MODEL_NAME}{ending}.bin")
        load_weights(model, file)
    models.clear()  # Accelerate loads the remaining models


def _check_complete(models: list[nn.Module], action: str) -> None:
    """Raise if rank 0 has only shards of an optimizer's state."""
    for model in models:
        if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
            raise RuntimeError(
                f"accelerator.{action}_state() uses the state of rank 0, but the state of a "
                f"FullyShardedDataParallel is sharded. Write mh.{action}(path, model=model, "
                "optimizer=optimizer) on every rank."
            )
