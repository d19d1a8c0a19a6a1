"""Accelerate: `prepare` for models and optimizers of this library.

Accelerate wraps every model in `DistributedDataParallel`. Some models must not be:

    ShardedDataParallel, FullyShardedDataParallel    they average their gradients themselves
    a model whose optimizer is blocks                nobody averages: each worker follows its own

Such a model is prepared with `evaluation_mode=True`: moved to the device and given Accelerate's
mixed precision, without DDP.

`save_state` writes safetensors, and leaves out tensors that share their memory, as the parameters
of `OSS` do: slices of one flat tensor. So copies are written, and read back into the parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.constants import MODEL_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.modules import ModuleWrapper
from manyhands._core.wrappers import find_layer
from manyhands.blocks._optimizer import Blocks
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel

__all__ = ["RuleState", "prepare"]


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
    `load_state` then work for parameters in flat memory too; for `FullyShardedDataParallel` they
    raise an error, as its state is sharded: use `mh.save` and `mh.load`.
    """
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    in_blocks = any(find_layer(each, Blocks) is not None for each in optimizers)
    for each in objects:
        if isinstance(each, nn.Module) and (in_blocks or isinstance(each, ModuleWrapper)):
            accelerator.prepare_model(each, evaluation_mode=True)  # now it counts as prepared
    if not getattr(accelerator, "_manyhands_hooks", ()):
        accelerator._manyhands_hooks = (
            accelerator.register_save_state_pre_hook(_copy_shared_memory),
            accelerator.register_load_state_pre_hook(_load_models),
        )
    return accelerator.prepare(*objects)


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


def _copy_shared_memory(
    models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str
) -> None:
    """Let Accelerate write copies of parameters that are slices of one tensor."""
    _check_not_sharded(models, "save")
    for state in weights:
        for name, tensor in state.items():
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                state[name] = tensor.clone()


def _load_models(models: list[nn.Module], folder: str) -> None:
    """Load the models in Accelerate's place, which refuses parameters in flat memory."""
    _check_not_sharded(models, "load")
    for number, model in enumerate(models):
        model.load_state_dict(_read_weights(Path(folder), f"_{number}" if number else ""))
    models.clear()  # Accelerate loads what is left


def _read_weights(folder: Path, ending: str) -> Mapping[str, Tensor]:
    safe = folder / f"{SAFE_MODEL_NAME}{ending}.safetensors"
    if safe.exists():
        weights: Mapping[str, Tensor] = load_file(safe)
        return weights
    pickled = folder / f"{MODEL_NAME}{ending}.bin"
    plain: Mapping[str, Tensor] = torch.load(os.fspath(pickled), "cpu", weights_only=True)
    return plain


def _check_not_sharded(models: list[nn.Module], what: str) -> None:
    if any(isinstance(m, FullyShardedDataParallel) for each in models for m in each.modules()):
        raise RuntimeError(
            f"accelerator.{what}_state() takes the state of rank 0, and that of a "
            f"FullyShardedDataParallel is sharded. Write mh.{what}(path, model=model, "
            "optimizer=optimizer) on every rank."
        )
