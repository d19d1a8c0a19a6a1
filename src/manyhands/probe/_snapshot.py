"""What every branch starts from, and what the run gets back: all state that training changes.

    parameters, buffers     this rank's part of them, copied into place
    optimizer               the state of this rank, and the options of the groups
    rule                    batch, statistics, progress, factors
    random generators       Python's, numpy's, torch's
    modules                 whether each is training

Tensors keep their identity and their memory: modules, buckets and schedulers hold references to
them. An attribute that a module or a loss keeps outside all of these is not seen here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._core.modules import ModuleWrapper
from manyhands._core.sharded import local_shard
from manyhands._core.state_parts import OptimizerLayers, ShardedOptimizer, state_parts
from manyhands.checkpoint._random import random_state, set_random_state
from manyhands.scaling._fsdp_params import fsdp_modules
from manyhands.scaling._rule_base import ScalingRuleBase

PLAIN = (int, float, str, type(None))  # attributes of an optimizer, such as a count of its steps


class TrainingSnapshot:
    """The state of a run between two steps; `restore` brings it back, any number of times."""

    def __init__(self, model: nn.Module, rule: ScalingRuleBase) -> None:
        self._model, self._rule = model, rule
        self._layers = OptimizerLayers.of(rule)
        self._settle()
        stepped = {id(param) for group in rule.param_groups for param in group["params"]}
        # Parameters of another optimizer, whose gradients this one's zero_grad() leaves.
        self._not_stepped = [p for p in model.parameters() if id(p) not in stepped]
        # A module may put a new tensor in a buffer's place: `self.mean = 0.9 * self.mean + ...`.
        self._buffers = [(m._buffers, dict(m._buffers)) for m in model.modules()]
        self._tensors = [(tensor, tensor.clone()) for tensor in self._held_tensors()]
        self._groups = [(group, _copy_dict(group)) for group in self._all_groups()]
        plain = self._layers.plain
        self._state = [
            (param, entries, _copy_dict(entries)) for param, entries in plain.state.items()
        ]
        self._attributes = {k: v for k, v in vars(plain).items() if isinstance(v, PLAIN)}
        self._modes = [(module, module.training) for module in model.modules()]
        self._random = random_state()
        self._batch = replace(rule._batch)
        self._factors = rule._factors
        self._scaling = copy.deepcopy(rule.scaling_state_dict())

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back, bit for bit. Called on every rank."""
        rule, plain = self._rule, self._layers.plain
        rule.zero_grad()
        for other in self._not_stepped:
            other.grad = None
        self._settle()
        for buffers, tensors in self._buffers:
            if any(buffers.get(name) is not tensors.get(name) for name in {*buffers, *tensors}):
                buffers.clear()
                buffers.update(tensors)
        for tensor, elements in self._tensors:
            tensor.copy_(elements)
        for group, options in self._groups:
            _restore_dict(group, options)
        plain.state.clear()
        for param, entries, before in self._state:
            _restore_dict(entries, before)
            plain.state[param] = entries
        for name in [k for k, v in vars(plain).items() if isinstance(v, PLAIN)]:
            if name not in self._attributes:
                del vars(plain)[name]
        vars(plain).update(self._attributes)
        for module, training in self._modes:
            module.training = training
        rule._batch.load_state(replace(self._batch))
        rule.load_scaling_state_dict(self._scaling)  # parsed into copies
        rule._factors = self._factors
        set_random_state(self._random)

    def _settle(self) -> None:
        """Wait for what is under way, and free gathered parameters: copies would be stale."""
        for module in self._model.modules():
            if isinstance(module, ModuleWrapper):
                module.settle()
        for module in fsdp_modules(self._model):
            module.reshard()
        if isinstance(self._layers.inner, ShardedOptimizer):
            self._layers.inner.prepare()

    def _held_tensors(self) -> Iterator[Tensor]:
        """Yield the memory of this rank's parameters and buffers, each once."""
        found: set[int] = set()
        groups = self._layers.inner.param_groups
        in_optimizer = (param for group in groups for param in group["params"])
        everything: Iterable[Tensor] = (
            *self._model.parameters(),
            *self._model.buffers(),
            *in_optimizer,
        )
        for tensor in everything:
            if id(tensor) not in found:
                found.add(id(tensor))
                yield local_shard(tensor).detach()
        if self._layers.sharded is not None:
            # Under `broadcast_fp16`, parameters are rounded, and their owner has the exact values.
            for part in state_parts(self._layers.inner, include_empty=True)[0]:
                if part.exact is not None:
                    yield part.exact.detach()

    def _all_groups(self) -> list[dict[str, Any]]:
        both = (*self._layers.inner.param_groups, *self._layers.plain.param_groups)
        return list({id(group): group for group in both}.values())


def _copy_dict(entries: dict[str, Any]) -> dict[str, Any]:
    """Return each entry with a copy of its value, or of this rank's part of it."""
    return {
        name: (value, local_shard(value).detach().clone())
        if isinstance(value, Tensor)
        else (None, copy.deepcopy(value))
        for name, value in entries.items()
        if name != "params"
    }


def _restore_dict(entries: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in entries if name not in before and name != "params"]:
        del entries[name]
    for name, (tensor, value) in before.items():
        if tensor is None:
            entries[name] = copy.deepcopy(value)
        else:
            local_shard(tensor).detach().copy_(value)
            entries[name] = tensor
