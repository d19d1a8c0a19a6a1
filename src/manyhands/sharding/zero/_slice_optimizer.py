"""The optimizer that the user asked for, made for this rank's slices.

Its parameter groups are those of the `OSS` around it, with slices in place of parameters. Its state
is tied to the slices, and follows them when they get other memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from manyhands._core.state_parts import options_of
from manyhands.sharding._agreement import make_on_all_ranks
from manyhands.sharding.zero import _state
from manyhands.sharding.zero._elementwise import ELEMENTWISE
from manyhands.sharding.zero._flat_params import FlatBucket, ParamSlice, Shards

TURNS = 4  # of a step: the first buckets are in flight while the others are computed

Groups: TypeAlias = Sequence[dict[str, Any]]


class SliceOptimizer:
    """Makes and steps `optim`, an optimizer of slices. `groups` are those of the OSS around it."""

    def __init__(
        self, shards: Shards, kind: type[Optimizer], arguments: Mapping[str, Any], groups: Groups
    ) -> None:
        self._shards = shards
        self._kind = kind
        self._arguments = arguments
        self.optim = self._make(groups)

    def _make(self, groups: Groups) -> Optimizer:
        own = [self._own_group(groups, index) for index in range(len(groups))]
        make = partial(self._kind, own, **self._arguments)
        return make_on_all_ranks(self._shards.workers, make)

    def _own_group(self, groups: Groups, index: int) -> dict[str, Any]:
        """Return a parameter group's options, with this rank's slices of its parameters."""
        members = param_indices(groups, index)
        slices = [owned.data for i in members for owned in self._shards.slices[i]]
        return {**options_of(groups[index]), "params": slices}

    # -- following the parameters --------------------------------------------------------------

    def make_again(self, groups: Groups) -> None:
        """Start anew with other slices. Only possible before there is state."""
        self.optim = self._make(groups)

    def add_last_group(self, groups: Groups) -> None:
        """Add the last group, and give the others the slices that they have now."""
        self.optim.add_param_group(self._own_group(groups, len(groups) - 1))
        copy_options(self.optim.param_groups[-1], groups[-1])
        self.replace_slices(groups)

    def replace_slices(self, groups: Groups) -> None:
        """Put the present slices into the optimizer's groups."""
        for index, inner in enumerate(self.optim.param_groups):
            inner["params"] = self._own_group(groups, index)["params"]

    def begin_state_of(
        self, slices: Sequence[ParamSlice], groups: Groups, pending: dict[int, dict[str, Any]]
    ) -> None:
        """Give thawed parameters their state: the loaded one, or the optimizer's initial one."""
        begun = self._make(groups).state  # Adagrad makes its state when it is made
        for owned in slices:
            loaded = pending.get(owned.param)
            if loaded is not None:
                part = _state.slice_state(loaded, owned, self._shards.params[owned.param])
                self.optim.state[owned.data] = _state.move_state(part, owned.data)
            elif owned.data in begun:
                self.optim.state[owned.data] = begun[owned.data]
        for owned in slices:
            pending.pop(owned.param, None)

    def follow_moved(self, groups: Groups) -> None:
        """Follow a model that was moved or converted, with memory and state."""
        before = [owned.data for slices in self._shards.slices for owned in slices]
        self._shards.follow()
        after = [owned.data for slices in self._shards.slices for owned in slices]
        state = self.optim.state
        for old, new in zip(before, after, strict=True):
            if old in state:
                state[new] = _state.move_state(state.pop(old), new, old)
        self.replace_slices(groups)

    # -- options and steps ---------------------------------------------------------------------

    def push_options(self, groups: Groups) -> None:
        """Take over the options of the groups, which schedulers change."""
        for group, inner in zip(groups, self.optim.param_groups, strict=True):
            copy_options(group, inner)

    def pull_options(self, groups: Groups) -> None:
        """Set the options of the groups to those that the optimizer has now."""
        for group, inner in zip(groups, self.optim.param_groups, strict=True):
            copy_options(inner, group)

    def step(self, **kwargs: Any) -> None:
        """Update this rank's slices, and begin to send them."""
        for buckets in self._turns():
            with self._gradients_on_slices(buckets):
                self.optim.step(**kwargs)
            self._shards.start_all_gather(buckets)  # in flight while the next buckets are stepped

    def _turns(self) -> list[list[FlatBucket]]:
        """Return the buckets to step together: all of them, if calls of `step` may be counted."""
        buckets, optim = self._shards.to_step, self.optim
        # A step hook, or an optimizer that we do not know, would notice several calls per step.
        hooks = optim._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
        counts = type(optim) not in ELEMENTWISE or hooks or _global_optimizer_post_hooks
        in_memory = self._shards.workers.shared_memory is not None
        if counts or optim._optimizer_step_post_hooks or in_memory:
            return [buckets]
        size = max(-(-len(buckets) // TURNS), 1)
        return [buckets[i : i + size] for i in range(0, len(buckets), size)]

    @contextmanager
    def _gradients_on_slices(self, buckets: Iterable[FlatBucket]) -> Iterator[None]:
        """Set the gradients of the slices in these buckets, for the length of a step."""
        slices = [owned for bucket in buckets for owned, _ in bucket.slices]
        try:
            for owned in slices:
                owned.data.grad = self._shards.gradient(owned)
            yield
        finally:
            for owned in slices:
                owned.data.grad = None


def param_indices(groups: Groups, index: int) -> range:
    """Return the indices of a group's parameters, counted through all groups."""
    first = sum(len(group["params"]) for group in groups[:index])
    return range(first, first + len(groups[index]["params"]))


def copy_options(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Set the options of one parameter group to those of another."""
    target.update(options_of(source))
