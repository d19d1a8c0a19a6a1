"""Step slices of parameters with the user's optimizer class.

Elementwise optimizers (`_optimizers/optimizers.py`) allow cuts anywhere in a parameter. For a class
that is not torch's, the default is uncut parameters. If the user asks for cuts, a few steps on toy
parameters must give equal results with and without cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from manyhands._arguments import one_of
from manyhands._optimizers.optimizers import can_be_divided, may_be_cut, traits_of
from manyhands.sharding.zero._flat_params import FlatBucket, Shards

TURNS = 4  # parts of a step, to send buckets during the next part


def step_slices(optim: Optimizer, shards: Shards, **kwargs: Any) -> None:
    for buckets in _turns(optim, shards):
        slices = [owned for bucket in buckets for owned, _ in bucket.slices]
        try:
            for owned in slices:
                owned.data.grad = shards.gradient(owned)
            optim.step(**kwargs)
        finally:
            for owned in slices:
                owned.data.grad = None
        shards.start_all_gather(buckets)


def _turns(optim: Optimizer, shards: Shards) -> list[list[FlatBucket]]:
    """Return groups of buckets to step together."""
    buckets = shards.to_step
    # A step hook, or an unknown optimizer, would notice repeated calls per step.
    hooks = optim._optimizer_step_pre_hooks or optim._optimizer_step_post_hooks
    global_hooks = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    if hooks or global_hooks or not traits_of(type(optim)).elementwise:
        return [buckets]
    if shards.workers.shared_memory is not None:  # no messages to overlap
        return [buckets]
    size = max(-(-len(buckets) // TURNS), 1)
    return [buckets[i : i + size] for i in range(0, len(buckets), size)]


# -- may parameters be cut? -----------------------------------------------------------------------


def choose_layout(
    kind: type[Optimizer], asked: str | None, options: Sequence[Mapping[str, object]]
) -> str:
    """Return the layout; raise if results would be wrong."""
    one_of("layout", asked, (None, "even", "whole"))
    if asked == "even" and not may_be_cut(kind, options):
        raise ValueError(
            f'layout="even" cuts parameters anywhere, but {kind.__name__} needs whole parameters: '
            'results would be wrong. Use layout="whole".'
        )
    if asked is None and not can_be_divided(kind, options):
        raise ValueError(
            f"{kind.__name__} combines all parameters in a step, so its state cannot be divided. "
            'Use it without OSS. (If it only adds random noise, layout="whole" works.)'
        )
    return asked or ("even" if traits_of(kind).elementwise else "whole")
