"""Prepare models and optimizers of this library for Accelerate.

Accelerate wraps every model in `DistributedDataParallel`. Some models must not be wrapped so:

    ShardedDataParallel, FullyShardedDataParallel    they average their gradients themselves
    a model whose optimizer is blocks                each worker follows separate gradients

Such a model is prepared with `evaluation_mode=True`: moved to the device and given Accelerate's
mixed precision, without DDP.

`save_state` and `save_model` write safetensors, and leave out tensors that share their memory, as
the parameters of `OSS` do: slices of one flat tensor. So `get_state_dict` returns copies of those.

Accelerate asks every rank for an optimizer's state, and writes rank 0's. With a
FullyShardedDataParallel that would be rank 0's shards. So the prepared optimizer answers with the
plain optimizer's whole state, and takes this rank's shards of it in `load_state`.

In the middle of a block each worker has other parameters. So a sync round comes before
`save_state` writes rank 0's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from accelerate.utils.constants import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._optimizers.foreign import PreparedOptimizer
from manyhands._optimizers.modules import (
    TORCH_WRAPPERS,
    WRAPPER_NAMES,
    ModuleWrapper,
    plain_modules,
    plain_name,
)
from manyhands._optimizers.state_parts import OptimizerLayers
from manyhands._optimizers.wrappers import find_layer, params_of
from manyhands.blocks._optimizer import Blocks
from manyhands.integrations._whole_state import load_whole_state, whole_state
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

__all__ = ["RuleState", "prepare"]

UNSEEN = ("DEEPSPEED", "MEGATRON_LM", "XLA")  # they reduce gradients where a rule does not see it


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """Do what `accelerator.prepare(*objects)` does, also for models and optimizers of manyhands.

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

    A model that averages its gradients itself, and one whose optimizer is blocks, is not wrapped in
    `DistributedDataParallel`. Give blocks together with their model. `accelerator.save_state` and
    `load_state` then work for parameters in flat memory too, and for `FullyShardedDataParallel`,
    whose whole state is gathered. The files are those of the plain model and optimizer.
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
    prepared = accelerator.prepare(*objects)
    for optimizer in accelerator._optimizers:
        root = _root_of(optimizer, accelerator._models)
        if root is not None and not hasattr(optimizer, WHOLE):
            _answer_with_whole_state(optimizer, root)
    return prepared


def prepare_without_ddp(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Move a model to its device, with Accelerate's mixed precision; then it counts as prepared."""
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
    """Keep an OSS from warning when it is prepared, as slices of memory are saved as copies."""
    oss = find_layer(optimizer, OSS)
    if oss is not None:
        oss._is_accelerate_prepared = False


class RuleState:
    """The state that a rule adds to its optimizer's, for `accelerator.register_for_checkpointing`.

    >>> import torch, manyhands as mh
    >>> from accelerate import Accelerator
    >>> from manyhands.integrations.accelerate import RuleState
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> optimizer = mh.AdaScale(optimizer)
    >>> accelerator.register_for_checkpointing(RuleState(optimizer))

    Accelerate's FSDP2 needs it: there `save_state` writes an optimizer's state without what others
    have added. Otherwise the rule's state is in the optimizer's.
    """

    def __init__(self, rule: ScalingRuleBase) -> None:
        self._rule = rule

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, the progress and the scale."""
        return self._rule.scaling_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._rule.load_scaling_state_dict(state_dict)


# -- a rule around a prepared optimizer, or inside it ------------------------------------------


class PreparedLoop:
    """The number of passes of a step in Accelerate's loop: see `Accumulation`."""

    def __init__(self, gradient_state: GradientState) -> None:
        self._state = gradient_state

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self._state.num_steps)

    @property
    def sync_gradients(self) -> bool:
        return bool(self._state.sync_gradients)


def describe(optimizer: Optimizer) -> PreparedOptimizer | None:
    """Return what a rule is to know of this optimizer, if Accelerate has prepared it."""
    if not isinstance(optimizer, AcceleratedOptimizer):
        return None
    state = optimizer.accelerator_state
    kind = str(state.distributed_type.value)
    seen = state.fsdp_plugin.fsdp_version != 1 if kind == "FSDP" else kind not in UNSEEN
    loop = PreparedLoop(optimizer.gradient_state)
    return PreparedOptimizer(optimizer, loop, optimizer.scaler, None if seen else kind)


def take_back(step: Any) -> None:
    """Take back that a step was taken.

    Accelerate says that a step was skipped if its scaler has not called `optimizer.step`. Ours is
    called, and skips by itself. While the scaler steps, `step` is a function of Accelerate's, which
    notes in its wrapper that it was called. The wrapper is in that function's closure.
    """
    for cell in step.__closure__ or ():
        if hasattr(cell.cell_contents, "_accelerate_step_called"):
            cell.cell_contents._accelerate_step_called = False


# -- save_state and load_state -----------------------------------------------------------------


def _copy_slices(state: dict[str, Any]) -> dict[str, Any]:
    """Replace tensors that are slices of a larger one by copies. What is tied stays tied."""
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
    """End a block, so that all workers' parameters are those that Accelerate writes."""
    _check_whole(accelerator, "save")
    in_blocks = [find_layer(each, Blocks) for each in accelerator._optimizers]
    # the workers of a crew end a block together, and do not all save at the same step
    ending = [blocks for blocks in in_blocks if blocks is not None and not blocks.in_crew]
    for blocks in ending:
        blocks.synchronize()
    if ending:
        weights[:] = [accelerator.get_state_dict(model, unwrap=False) for model in models]


def _as_accelerate_loads(accelerator: Accelerator, models: list[nn.Module], folder: str) -> None:
    """Load the models in Accelerate's place, which refuses parameters in flat memory."""
    _check_whole(accelerator, "load")
    for number, model in enumerate(models):
        _load_weights(model, _read_weights(Path(folder), f"_{number}" if number else ""))
    models.clear()  # Accelerate loads what is left


def _load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load a state dict, in which tied tensors have only one of their names."""
    tensors = {}
    for prefix, module in plain_modules(model):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            tensors[f"{prefix}{name}"] = id(tensor)
    in_ddp = any(isinstance(each, TORCH_WRAPPERS) for each in model.modules())

    def tensor_of(name: str) -> int | None:
        plain = plain_name(name, WRAPPER_NAMES)
        return tensors.get(plain.removeprefix("module.") if in_ddp else plain)

    result = model.load_state_dict(weights, strict=False)
    loaded = set(map(tensor_of, weights)) - {None}
    missing = set(map(tensor_of, result.missing_keys))
    if not missing <= loaded or result.unexpected_keys:
        model.load_state_dict(weights)  # raises torch's error, which names them


def _read_weights(folder: Path, ending: str) -> Mapping[str, Tensor]:
    """Return the weights that Accelerate has saved in this folder, in either format."""
    safe = folder / f"{SAFE_MODEL_NAME}{ending}.safetensors"
    if safe.exists():
        weights: Mapping[str, Tensor] = load_file(safe)
        return weights
    pickled = folder / f"{MODEL_NAME}{ending}.bin"
    plain: Mapping[str, Tensor] = torch.load(os.fspath(pickled), "cpu", weights_only=True)
    return plain


def _check_whole(accelerator: Accelerator, what: str) -> None:
    """Raise if an optimizer would answer with this rank's shards."""
    for optimizer in accelerator._optimizers:
        if _root_of(optimizer, accelerator._models) is None:
            continue
        if not hasattr(optimizer, WHOLE) or accelerator.project_configuration.save_on_each_node:
            raise RuntimeError(
                f"accelerator.{what}_state() takes the state of rank 0, and that of a "
                "FullyShardedDataParallel is sharded. It is gathered if model and optimizer were "
                "prepared by manyhands.integrations.accelerate.prepare before a rule was put around"
                " them, and without blocks and save_on_each_node. Otherwise write "
                f"mh.{what}(path, model=model, optimizer=optimizer) on every rank."
            )


def _root_of(optimizer: Optimizer, models: list[nn.Module]) -> FullyShardedDataParallel | None:
    """Return the outermost FullyShardedDataParallel of an optimizer's parameters, if any."""
    own = set(map(id, params_of(optimizer.param_groups)))
    for model in models:
        for module in model.modules():  # the outermost comes first
            if not isinstance(module, FullyShardedDataParallel):
                continue
            if not own.isdisjoint(map(id, module.parameters())):
                return module
    return None


WHOLE = "_manyhands_whole_state"  # marks a prepared optimizer that answers with the whole state


def _answer_with_whole_state(prepared: Any, root: FullyShardedDataParallel) -> None:
    """Let a prepared optimizer give and take the plain optimizer's whole state.

    A rule that is put around it later adds its own state to that.
    """
    in_blocks = OptimizerLayers.of(prepared.optimizer).blocks is not None
    if in_blocks or "state_dict" in prepared.__dict__:  # of a rule around it
        return
    prepared.state_dict = partial(whole_state, root, prepared.optimizer)
    prepared.load_state_dict = partial(load_whole_state, root, prepared.optimizer)
    setattr(prepared, WHOLE, True)
