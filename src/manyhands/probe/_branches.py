"""One branch: train on the given micro-batches at one scale, and take the held-out losses.

A branch of scale k has k times the passes in each step, and so 1/k of the steps. Its samples, their
order and its random numbers are those of every other branch of the repeat. The rule sets its rate.

Over the last part of a branch the rate falls in a straight line to zero, as at the end of a run:

    rate of step j of n:  min(1, (1 - m) / cooldown) times the rate, with m = (j + 1/2) / n

A larger batch averages more noise away, which lowers the loss at once, and which the run gets
anyway when its own rate falls. Without the cooldown, that would hide steps that are missing. (A
short cooldown shows how far a run has come: Hägele et al. 2024.)

A rank calls what the others call: a branch ends early, on all ranks, by the rule's statistics.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from manyhands.scaling._rule_base import ScalingRuleBase

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]

HOPELESS = 3  # steps in a row whose gradients are not finite: the parameters will not recover


@dataclass(frozen=True)
class Branches:
    """What all branches have in common."""

    model: nn.Module
    rule: ScalingRuleBase
    loss: LossFunction
    held_out: Sequence[Any]
    cooldown: float
    no_sync: Callable[[], AbstractContextManager[Any]]

    def train(self, passes: int, micro_batches: Sequence[Any]) -> bool:
        """Train with so many passes in each step; return whether the gradients stayed finite."""
        rule = self.rule
        if rule._batch.scale is not None:  # of the whole batch, which is another one now
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
    """Return what the rate of a step is multiplied by.

    >>> [round(cooled(step, 5, 0.4), 3) for step in range(5)]
    [1.0, 1.0, 1.0, 0.75, 0.25]
    """
    left = 1.0 - (step + 0.5) / steps
    return 1.0 if left >= cooldown else left / cooldown


def _set_rates(rule: ScalingRuleBase, rates: Sequence[Any], factor: float) -> None:
    for group, rate in zip(rule.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):  # in place: the optimizer may hold this tensor
            group["lr"].copy_(rate * factor)
        else:
            group["lr"] = rate * factor


def seed_generators(seed: int, repeat: int, rank: int) -> None:
    """Seed all random generators: alike for every branch of a repeat, otherwise on each rank."""
    number = random.Random(f"{seed} {repeat} {rank}").getrandbits(32)
    random.seed(number)
    torch.manual_seed(number)
    numpy = sys.modules.get("numpy")  # never imported here
    if numpy is not None:
        numpy.random.seed(number)
