"""How far to step: scaling rules, and the noise of the gradient that they need.

In the order in which a gradient meets them:

_hooks.py              hooks where autograd adds to `param.grad`: |g| of each parameter in one pass
_fsdp_params.py        under `fully_shard`: the tensors that autograd computes on
_tap.py                counts backward passes, and turns those of a step into one `StepStats`
_norm_kinds.py         the kinds of norm, and the plain one
_preconditioned.py     the other kind: the norm of a gradient as Adam or RMSprop divides it
_replicated_state.py   second moments on every rank, if each rank holds only a shard
_mean_gradient.py      |G|^2 of the averaged gradient
_previous_gradient.py  the owner of the last step's gradient, if nothing else can be compared
_step_stats.py         one step's numbers, their way to the other ranks, and what must agree
_late_ranks.py         an error for the rank that the others wait for
_noise.py              norms to estimates of signal and noise, and to the gain (floats)
_averages.py           estimates smoothed over steps (floats)
_noise_tracker.py      keeps the average and the progress up to date, one step at a time
_batch.py              the scale, the owner of the number of passes, and what the user has set
_options.py            options from arguments and from state dicts
_state.py              the state dict of a rule, which its parts write and parse
_binding.py            a rule's hold on an optimizer, and what was changed on it
_optimizer.py          the rule as an optimizer, which holds these parts: `ScalingRuleBase`
_rules.py              AdaScale, AdamScale, LinearScale, SqrtScale, LEGWScale
_adaptdl.py            `AdaptiveDataParallel`: a rule in adaptdl's way
_progress.py           `ProgressScheduler`: schedules by progress
_noise_scale.py        `NoiseScale`: measure only
"""
