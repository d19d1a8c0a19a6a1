"""The branches of a probe: the state they start from, their training, and their held-out losses.

**The state** (`TrainingSnapshot`) is all that training changes. Every branch starts from it, and
the run gets it back:

    parameters, buffers     this rank's part of them, copied into place
    optimizer               the state of this rank, and the options of the groups
    rule                    batch, statistics, progress, factors
    random generators       Python's, numpy's, torch's
    modules                 whether each is training

Tensors keep their identity and their memory, because modules, buckets and schedulers hold
references to them. Attributes that a module or a loss keeps outside all of these are not restored.

**A branch** of scale k has k times as many passes in each step, and so 1/k of the steps. It has the
samples, their order and the random numbers of every other branch of its repeat. The rule sets its
learning rate.

Over the last part of a branch the learning rate falls in a straight line to zero, as at the end of
a run:

    rate of step j of n:  min(1, (1 - m) / cooldown) times the rate, with m = (j + 1/2) / n

A larger batch averages more noise away. That lowers the loss at once, and the run gets this part
anyway when its own learning rate falls. Without the cooldown it would hide the loss from fewer
steps. (A short cooldown shows how far a run has come: Hägele et al. 2024.)

All ranks make the same calls. A branch that diverges ends early on all ranks together, because each
decides by the rule's statistics, which are the same on all.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from manyhands._core.modules import ModuleWrapper
from manyhands._core.sharded import local_shard
from manyhands._core.state_parts import OptimizerLayers, ShardedOptimizer, state_parts
from manyhands._core.wrappers import ParamGroup
from manyhands.checkpoint._random import random_state, set_random_state
from manyhands.scaling._fsdp_params import fsdp_modules
from manyhands.scaling._rule_base import ScalingRuleBase

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]

PLAIN = (int, float, str, type(None))  # attributes of an optimizer, such as a count of its steps
HOPELESS = 3  # steps in a row whose gradients are not finite: the parameters will not recover


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
        self._schedule = replace(rule._tap.schedule)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back, bit for bit. Call it on every rank."""
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
        rule._tap.schedule = replace(self._schedule)  # which loading keeps: this is on all ranks
        rule._factors = self._factors
        set_random_state(self._random)

    def _settle(self) -> None:
        """Wait for collectives under way, and free gathered parameters, which would be stale."""
        for module in self._model.modules():
            if isinstance(module, ModuleWrapper):
                module.settle()
        for sharded in fsdp_modules(self._model):
            sharded.reshard()
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

    def _all_groups(self) -> list[ParamGroup]:
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


@dataclass(frozen=True)
class Branches:
    """Trains and evaluates branches: what all of them have in common."""

    model: nn.Module
    rule: ScalingRuleBase
    loss: LossFunction
    held_out: Sequence[object]
    cooldown: float
    no_sync: Callable[[], AbstractContextManager[object]]

    def train(self, passes: int, micro_batches: Sequence[object]) -> bool:
        """Train with `passes` passes in each step; return whether the gradients stayed finite."""
        rule = self.rule
        if rule._batch.scale is not None:  # the scale of a whole batch, which changes now
            rule._batch.set_scale(per_pass=rule._batch.scale / rule._batch.passes)
        before = rule.scale
        rule._batch.passes = passes
        rule._follow_batch(before, rule.scale)  # as under a `Ramp`
        divided_by = passes if rule._batch.loss_is_divided else 1
        rates = [group["lr"] for group in rule.param_groups]
        rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
        steps = len(micro_batches) // passes
        for step in range(steps):
            factor = cooled(step, steps, self.cooldown)
            if factor < 1.0:
                _set_rates(rule, rates, factor)
            for number in range(passes):
                last = number == passes - 1
                with nullcontext() if last else self.no_sync():
                    loss = self.loss(self.model, micro_batches[step * passes + number])
                    (loss / divided_by).backward()
            if not rule._batch.loss_is_divided and passes > 1:
                rule.scale_grad_by_num_grads_to_accum()
            rule.step()
            rule.zero_grad()
            # The rule's statistics are those of all ranks, so that all leave together.
            if rule._tracker.nonfinite_in_a_row >= HOPELESS:
                return False
        return True

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """Return the loss of each held-out micro-batch, averaged over the ranks."""
        self.model.eval()
        losses = [float(self.loss(self.model, batch)) for batch in self.held_out]
        ranks = self.rule._ranks
        everyone = ranks.all_gather(losses, ranks.any_device)
        return [fmean(of_ranks) for of_ranks in zip(*everyone, strict=True)]


def cooled(step: int, steps: int, cooldown: float) -> float:
    """Return the factor of the learning rate in a step.

    >>> [round(cooled(step, 5, 0.4), 3) for step in range(5)]
    [1.0, 1.0, 1.0, 0.75, 0.25]
    """
    left = 1.0 - (step + 0.5) / steps
    return 1.0 if left >= cooldown else left / cooldown


def _set_rates(rule: ScalingRuleBase, rates: Sequence[float | Tensor], factor: float) -> None:
    for group, rate in zip(rule.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):  # in place: the optimizer may hold this tensor
            group["lr"].copy_(rate * factor)
        else:
            group["lr"] = rate * factor


def seed_generators(seed: int, repeat: int, rank: int) -> None:
    """Seed all random generators: the same for all branches of a repeat, another on each rank."""
    number = random.Random(f"{seed} {repeat} {rank}").getrandbits(32)
    random.seed(number)
    torch.manual_seed(number)
    numpy = sys.modules.get("numpy")  # never imported here
    if numpy is not None:
        numpy.random.seed(number)
