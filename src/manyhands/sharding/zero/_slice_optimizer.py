"""Step slices of parameters with the optimizer that the user asked for.

May parameters be cut anywhere? They may if the optimizer treats each element by itself
(`_optimizers/optimizers.py`). Parameters of a class that is not torch's are left whole, which is
right for all classes that look at one parameter at a time. If the user asks for cut parameters, a
few steps on toy parameters must come out the same whole and cut.

`SliceOptimizer` makes the optimizer for this rank's slices. Its parameter groups are those of the
`OSS` around it, with slices in place of parameters. Its state is tied to the slices, and follows
them when they get other memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from manyhands._arguments import one_of
from manyhands._optimizers.optimizers import can_be_divided, may_be_cut, traits_of
from manyhands._optimizers.state_parts import options_of
from manyhands._ranks.agreement import run_on_all
from manyhands.sharding._divided import copy_options
from manyhands.sharding.zero._flat_params import FlatBucket, ParamSlice, Shards
from manyhands.sharding.zero._state import (
    Groups,
    ParamState,
    move_state,
    param_indices,
    slice_state,
)

TURNS = 4  # parts of a step: buckets are in flight while the next part is computed


class SliceOptimizer:
    """Makes and steps `optim`, an optimizer of slices. `groups` are those of the OSS around it."""

    def __init__(
        self, shards: Shards, kind: type[Optimizer], arguments: Mapping[str, object], groups: Groups
    ) -> None:
        self._shards = shards
        self._kind = kind
        self._arguments: dict[str, Any] = dict(arguments)
        self.optim = self.make(groups)

    def make(self, groups: Groups) -> Optimizer:
        own = [self._own_group(groups, index) for index in range(len(groups))]
        make = partial(self._kind, own, **self._arguments)
        return run_on_all(self._shards.workers, make)

    def _own_group(self, groups: Groups, index: int) -> dict[str, object]:
        members = param_indices(groups, index)
        slices = [owned.data for i in members for owned in self._shards.slices[i]]
        return {**options_of(groups[index]), "params": slices}

    # -- following the parameters --------------------------------------------------------------

    def add_last_group(self, groups: Groups) -> None:
        """Add the last group, and renew the slices of all other groups."""
        self.optim.add_param_group(self._own_group(groups, len(groups) - 1))
        copy_options(self.optim.param_groups[-1:], groups[-1:])
        self.replace_slices(groups)

    def replace_slices(self, groups: Groups) -> None:
        for index, inner in enumerate(self.optim.param_groups):
            inner["params"] = self._own_group(groups, index)["params"]

    def begin_state_of(
        self, slices: Sequence[ParamSlice], groups: Groups, pending: dict[int, ParamState]
    ) -> None:
        """Give thawed parameters their state: the loaded one, or the optimizer's initial one."""
        begun = self.make(groups).state  # Adagrad makes its state when it is made
        for owned in slices:
            if owned.param in pending:
                part = slice_state(pending[owned.param], owned, self._shards.params[owned.param])
                self.optim.state[owned.data] = move_state(part, owned.data)
            elif owned.data in begun:
                self.optim.state[owned.data] = begun[owned.data]
        for owned in slices:
            pending.pop(owned.param, None)

    def follow_moved(self, groups: Groups) -> None:
        """Follow a model that was moved or converted, with memory and state."""
        before = self._shards.slices
        self._shards.rebuild_buffers()
        state = self.optim.state
        for old_slices, new_slices in zip(before, self._shards.slices, strict=True):
            for old, new in zip(old_slices, new_slices, strict=True):
                if old.data in state:
                    state[new.data] = move_state(state.pop(old.data), new.data, old.data)
        self.replace_slices(groups)

    # -- options and steps ---------------------------------------------------------------------

    def step(self, **kwargs: Any) -> None:
        """Update this rank's slices, and begin to send them."""
        for buckets in self._turns():
            slices = [owned for bucket in buckets for owned, _ in bucket.slices]
            try:
                for owned in slices:
                    owned.data.grad = self._shards.gradient(owned)
                self.optim.step(**kwargs)
            finally:
                for owned in slices:
                    owned.data.grad = None
            self._shards.start_all_gather(buckets)  # in flight while the next buckets are stepped

    def _turns(self) -> list[list[FlatBucket]]:
        """Return the buckets to step together: all of them, if calls of `step` may be counted."""
        buckets = self._shards.to_step
        optim = self.optim
        # A step hook, or an optimizer that we do not know, would notice several calls per step.
        hooks = optim._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        counts = not traits_of(type(optim)).elementwise or hooks or _global_optimizer_post_hooks
        in_memory = self._shards.workers.shared_memory is not None
        if counts or optim._optimizer_step_post_hooks or in_memory:
            return [buckets]
        size = max(-(-len(buckets) // TURNS), 1)
        return [buckets[i : i + size] for i in range(0, len(buckets), size)]


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
