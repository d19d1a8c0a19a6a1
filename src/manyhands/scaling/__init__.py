"""How far to step: scaling rules, and the noise of the gradient that they need.

In the order in which a gradient meets them:

_hooks.py             hooks where autograd adds to `param.grad`
_fsdp_params.py       under `fully_shard`: the tensors that autograd computes on
_tap.py               counts backward passes, and takes |g|^2 of each micro-batch
_norm_kinds.py        the kinds of norm, and the plain one
_preconditioned.py    the other kind: the norm of a gradient as Adam or RMSprop divides it
_replicated_state.py  second moments on every rank, if each rank holds only a shard
_mean_gradient.py     |G|^2 of the averaged gradient, and the payload to the other ranks
_step_stats.py        one step's numbers, and what the ranks must agree on
_late_ranks.py        an error for the rank that the others wait for
_noise.py             norms to estimates of signal and noise, and to the gain (floats)
_averages.py          estimates smoothed over steps (floats)
_noise_tracker.py     keeps the average up to date, one step at a time
_batch.py             the scale: workers, passes, and what the user has set
_options.py           options from arguments and from state dicts
_state.py             what a state dict contains, and what must fit
_binding.py           ties a rule to an optimizer, its ranks and a scale
_optimizer.py         the rule as an optimizer: `ScalingRuleBase`, and its `step`
_rules.py             AdaScale, AdamScale, LinearScale, SqrtScale, LEGWScale
_adaptdl.py           `AdaptiveDataParallel`: a rule in adaptdl's way
_progress.py          `ProgressScheduler`: schedules by progress
_noise_scale.py       `NoiseScale`: measure only
"""
