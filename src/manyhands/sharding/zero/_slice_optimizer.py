"""Step slices of parameters with the optimizer that the user asked for.

May parameters be cut anywhere? They may if the optimizer treats each element by itself
(`_optimizers/optimizers.py`). Parameters of a class that is not torch's are left whole, which is
right for all classes that look at one parameter at a time. If the user asks for cut parameters, a
few steps on toy parameters must come out the same whole and cut.

The state of the optimizer is tied to the slices, and follows slices that get other memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from manyhands._arguments import one_of
from manyhands._optimizers.optimizers import can_be_divided, may_be_cut, traits_of
from manyhands.sharding.zero._flat_params import FlatBucket, Shards
from manyhands.sharding.zero._state import move_state

TURNS = 4  # parts of a step: buckets are in flight while the next part is computed


def step_slices(optim: Optimizer, shards: Shards, **kwargs: Any) -> None:
    """Update this rank's slices, and begin to send them."""
    for buckets in _turns(optim, shards):
        slices = [owned for bucket in buckets for owned, _ in bucket.slices]
        try:
            for owned in slices:
                owned.data.grad = shards.gradient(owned)
            optim.step(**kwargs)
        finally:
            for owned in slices:
                owned.data.grad = None
        shards.start_all_gather(buckets)  # in flight while the next buckets are stepped


def _turns(optim: Optimizer, shards: Shards) -> list[list[FlatBucket]]:
    """Return the buckets to step together: all of them, if calls of `step` may be counted."""
    buckets = shards.to_step
    # A step hook, or an optimizer that we do not know, would notice several calls per step.
    hooks = optim._optimizer_step_pre_hooks or optim._optimizer_step_post_hooks
    global_hooks = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    if hooks or global_hooks or not traits_of(type(optim)).elementwise:
        return [buckets]
    if shards.workers.shared_memory is not None:  # nothing is sent
        return [buckets]
    size = max(-(-len(buckets) // TURNS), 1)
    return [buckets[i : i + size] for i in range(0, len(buckets), size)]


def follow_moved(optim: Optimizer, shards: Shards) -> None:
    """Follow a model that was moved or converted, with memory and state."""
    before = shards.slices
    shards.rebuild_buffers()
    for old_slices, new_slices in zip(before, shards.slices, strict=True):
        for old, new in zip(old_slices, new_slices, strict=True):
            if old.data in optim.state:
                optim.state[new.data] = move_state(optim.state.pop(old.data), new.data, old.data)


# -- may parameters be cut? -----------------------------------------------------------------------


def choose_layout(
    kind: type[Optimizer], asked: str | None, options: Sequence[Mapping[str, object]]
) -> str:
    """Return the layout: the one that was asked for, or else the one that the optimizer needs."""
    # Raise a ValueError if its numbers would be wrong. `options` are those of each parameter group.
    one_of("layout", asked, (None, "even", "whole"))
    if asked == "even" and not may_be_cut(kind, options):
        raise ValueError(
            f'layout="even" cuts parameters anywhere, and {kind.__name__} looks at whole ones: '
            'its numbers would be wrong. Use layout="whole".'
        )
    if asked is None and not can_be_divided(kind, options):
        raise ValueError(
            f"{kind.__name__} looks at all parameters together, so its state cannot be divided. "
            'Use it without OSS. (If it only adds noise of its own, layout="whole" will do.)'
        )
    return asked or ("even" if traits_of(kind).elementwise else "whole")
