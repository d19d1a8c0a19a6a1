"""Scaling rules: learning rates for larger batches, from measured gradient noise.

To understand AdaScale, read five files in this order:

_hooks.py           autograd hooks that measure |g| of each parameter in a backward pass
_step.py            passes of a step, divisor of the gradient
_optimizer.py       `RuleCore`, the state of a rule, and `step`
_noise.py           norms to signal and noise, moving averages, gain (floats only)
_rules.py           AdaScale, AdamScale, LinearScale, SqrtScale, LEGWScale

Supporting files:

_unsharded.py       unsharded parameters of `fully_shard`
_mean_gradient.py   |G|^2 of the averaged gradient
_previous_gradient.py  comparison of two consecutive gradients
_payload.py         the collective of a step, with checks that ranks agree
_preconditioned.py  norms of gradients after Adam's or RMSprop's division, and second moments
                    after a change of the batch size
_rule_base.py       `ScalingRuleBase`, the public interface: arguments, statistics, state
_port.py            training loops that decide which pass is the last, and `LoopPort`
_binding.py         changes to a wrapped optimizer
_batch.py           number of passes and size of a step, the `Accumulation` protocol
_progress.py        `ProgressScheduler`: schedules by progress
_weighted_mean.py   `WeightedMean`: the mean loss over micro-batches of different sizes
_noise_scale.py     `NoiseScale`: measure only
"""

from manyhands.scaling._batch import Accumulation
from manyhands.scaling._noise import NoiseAverage
from manyhands.scaling._port import LoopPort
from manyhands.scaling._rule_base import ScalingRuleBase

__all__ = ["Accumulation", "LoopPort", "NoiseAverage", "ScalingRuleBase"]

for _public in (Accumulation, LoopPort, NoiseAverage, ScalingRuleBase):
    _public.__module__ = __name__  # for tracebacks and help()
