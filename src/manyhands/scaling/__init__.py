"""How far to step: scaling rules, and the noise of the gradient that they need.

In the order in which a gradient meets them:

_hooks.py           hooks where autograd adds to `param.grad`: |g| of each parameter in one pass;
                    under `fully_shard`, the tensors that autograd computes on
_preconditioned.py  the other kind of norm: of a gradient as Adam or RMSprop divides it;
                    and second moments that follow a batch whose size changes
_step_in_progress.py  the step whose passes are under way: what is known of it, whether it is
                    measured (`measure_every=4`), and by what its gradient is divided
_tap.py             counts backward passes, and turns those of a step into one `StepStats`
_mean_gradient.py   |G|^2 of the averaged gradient, or of the last two if a step has only one
_step_stats.py      one step's numbers, their way to the other ranks, and what must agree
_noise.py           norms to signal and noise, smoothed over steps, and to the gain (floats)
_noise_tracker.py   keeps the average up to date, counts steps, and adds up the progress
_settings.py        options, the passes of a step, and the size of its batch
_binding.py         a rule's hold on an optimizer, and what was changed on it
_optimizer.py       the rule as an optimizer: binds these parts, and steps: `ScaledOptimizer`
_rule_base.py       the rule as a user meets it: arguments, readings, state: `ScalingRuleBase`
_rules.py           AdaScale, AdamScale, LinearScale, SqrtScale, LEGWScale
_adaptdl.py         `AdaptiveDataParallel`: a rule in adaptdl's way
_progress.py        `ProgressScheduler`: schedules by progress
_weighted_mean.py   `WeightedMean`: the mean loss over micro-batches of different sizes
_noise_scale.py     `NoiseScale`: measure only
"""

from manyhands.scaling._noise import NoiseAverage
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._settings import Accumulation

__all__ = ["Accumulation", "NoiseAverage", "ScalingRuleBase"]

for _public in (Accumulation, NoiseAverage, ScalingRuleBase):
    _public.__module__ = __name__  # what tracebacks and help() show
