"""Scaling rules, and the noise of the gradient that they need.

To understand AdaScale, read five files in this order:

_hooks.py           hooks where autograd adds to `param.grad`: |g| of each parameter in one pass;
                    under `fully_shard`, the tensors that autograd computes on
_step.py            one step as a value that grows: its passes, their squares, who divides; and the
                    size of its batch
_optimizer.py       `RuleCore`, all that a rule holds, and `step`
_noise.py           norms to signal and noise, smoothed over steps, and to the gain (floats)
_rules.py           AdaScale, AdamScale, LinearScale, SqrtScale, LEGWScale

Beside them:

_mean_gradient.py   |G|^2 of the averaged gradient, or of the last two if a step has only one
_payload.py         what a rank sends at the end of a step, what comes back, what must agree
_preconditioned.py  the other kind of norm: of a gradient as Adam or RMSprop divides it;
                    and second moments that follow a batch whose size changes
_rule_base.py       the rule as a user meets it: arguments, readings, state: `ScalingRuleBase`
_binding.py         what is changed on an optimizer that a rule holds, and what is checked before
_settings.py        options, and the loop that decides about passes
_progress.py        `ProgressScheduler`: schedules by progress
_weighted_mean.py   `WeightedMean`: the mean loss over micro-batches of different sizes
_noise_scale.py     `NoiseScale`: measure only
"""

from manyhands.scaling._noise import NoiseAverage
from manyhands.scaling._rule_base import LoopPort, ScalingRuleBase
from manyhands.scaling._settings import Accumulation

__all__ = ["Accumulation", "LoopPort", "NoiseAverage", "ScalingRuleBase"]

for _public in (Accumulation, LoopPort, NoiseAverage, ScalingRuleBase):
    _public.__module__ = __name__  # what tracebacks and help() show
