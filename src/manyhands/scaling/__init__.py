"""How far to step: scaling rules, and the noise of the gradient that they need.

In the order in which a gradient meets them:

_hooks.py           hooks where autograd adds to `param.grad`: |g| of each parameter in one pass
_preconditioned.py  the other kind of norm: of a gradient as Adam or RMSprop divides it;
                    and second moments that follow a batch whose size changes
_rotation.py        which part of long gradients a step measures, if not all (`measured=1/8`)
_measured_steps.py  which steps are measured, if not all (`measure_every=4`)
_fsdp_params.py     under `fully_shard`: the tensors that autograd computes on
_examples.py        hooks on layers: the gradient norms of single examples in one pass
_example_squares.py the arithmetic of that, from a layer's inputs and output gradients; `Examples`
_step_in_progress.py  what is known of the step whose passes are under way
_gradient_division.py  by what an accumulated gradient is divided, and by whom
_tap.py             counts backward passes, and turns those of a step into one `StepStats`
_mean_gradient.py   |G|^2 of the averaged gradient, or of the last two if a step has only one
_step_stats.py      one step's numbers, their way to the other ranks, and what must agree
_noise.py           norms to signal and noise, smoothed over steps, and to the gain (floats)
_noise_tracker.py   keeps the average up to date, one step at a time
_step_counts.py     counts steps, and adds up the progress
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
