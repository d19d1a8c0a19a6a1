"""What the wraps of a root do together, around its forward and in its backward.

`PrefetchOrder` decides which wrap is gathered while which other computes. It works on the numbers
of wraps only. The order in which wraps run is taken to be that of the last forward. torch's engine
is given this order, and begins to gather a wrap as soon as the one before has its parameters. (In
a backward the engine does so by itself.) A wrap that runs several times in a forward has no certain
successor.

If a forward takes another way than the last one, a wrap may be gathered and not run. Its parameters
have to be freed when the forward is over: they would be older than the optimizer's next step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from manyhands.sharding.fsdp._checks import check_inner_groups, check_root, check_same_model
from manyhands.sharding.fsdp._collectives import ReduceQueue
from manyhands.sharding.fsdp._engine import Engine, dereference, eager
from manyhands.sharding.fsdp._used_params import UsedParameters


class PrefetchOrder:
    """After each forward: `next`, the successor of each wrap, and `not_run`, gathered in vain."""

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.not_run: list[int] = []
        self._ran: list[int] = []  # in the forward in progress

    @property
    def in_forward(self) -> bool:
        """Whether wraps have run since the last forward was over."""
        return bool(self._ran)

    def run(self, wrap: int) -> None:
        """Note that this wrap has its parameters, and that its successor is being gathered."""
        self._ran.append(wrap)

    def end(self) -> bool:
        """End the forward, and return whether its order was another than the last one's."""
        times = Counter(self._ran)
        successors = {a: b for a, b in pairwise(self._ran) if times[a] == 1}
        last = {wrap: position for position, wrap in enumerate(self._ran)}
        # `b` was gathered when `a` ran, so only a run of `b` after that has used the gathering.
        self.not_run = [b for a, b in self.next.items() if a in last and last.get(b, -1) < last[a]]
        changed = successors != self.next
        self.next = successors
        self._ran.clear()
        return changed

    def forget(self) -> None:
        """Drop the order of a forward that raised an error."""
        self._ran.clear()


class RootState:
    """Coordinates the wraps of a root: their gradients, used parameters and prefetching."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        ranks = engines[0].ranks
        self._engines = list(engines)  # the root's first
        # The engines' hooks hold this object. Weak references back let reference counting free a
        # model, without the garbage collector.
        references = [weakref.ref(engine) for engine in engines]

        def params() -> list[Tensor]:
            return [param for reference in references for param in dereference(reference).params]

        def end() -> None:
            used.end()
            for reference in references:
                dereference(reference).check_all_reduced()

        self.used = used = UsedParameters(ranks, params)
        self.reduce_queue = ReduceQueue(ranks, used.begin, end)
        self._order = PrefetchOrder()
        # With NCCL the engine prefetches by itself, on streams of its own.
        self._prefetches = all(engine.on_gloo and engine.overlap for engine in engines)
        first = 0
        for number, engine in enumerate(engines):
            engine.connect(self.reduce_queue, self.used, first, partial(self._order.run, number))
            first += len(engine.places)

    @eager
    def start_forward(self) -> None:
        """Prepare for a forward of the root that is not inside a backward."""
        self.reduce_queue.forget()
        # The engine still expects the end of a backward, so that backward raised an error.
        if self._engines[0].in_backward:
            self.used.forget()
            self.recover()
            for engine in self._engines:
                engine.clear_unaveraged()
        # Parameters kept for a backward that never ran may be older than the last step.
        self.reshard()

    @eager
    def end_forward(self) -> None:
        """Let the next forward prefetch in the order of this one."""
        changed = self._order.end()
        if not (changed and self._prefetches):
            return
        for number, engine in enumerate(self._engines):
            successor = self._order.next.get(number)
            modules = [] if successor is None else [self._engines[successor].module]
            engine.module.set_modules_to_forward_prefetch(modules)
        for number in self._order.not_run:
            # A collective that was begun has to be awaited before its buffer can be freed.
            self._engines[number].gather()
            self._engines[number].reshard()

    @eager
    def reshard(self) -> None:
        """Free all full parameters."""
        for engine in self._engines:
            engine.reshard()

    @eager
    def recover(self) -> None:
        """Start afresh after an error in a forward or backward."""
        module = self._engines[0].module
        # torch 2.13 awaits and frees by itself, in reset_iter_state.
        if self._order.in_forward and not hasattr(module, "reset_iter_state"):
            self.end_forward()
        self._order.forget()
        self._engines[0].recover()


def become_root(wrap: Any) -> None:
    """Make a wrap the root of all wraps inside. The first wrap that runs is the root.

    `wrap` is a FullyShardedDataParallel.
    """
    # torch.compile must not trace it. On one rank there is little to trace, and `eager` would
    # import dynamo, and with it torch's engine, which one rank does not need.
    mark_root = _mark_root if wrap._engine is None else _mark_root_eagerly
    mark_root(wrap)


def _mark_root(wrap: Any) -> None:
    # Inner wraps in a group of one send nothing, and take no part.
    members = [each for each in wrap._wraps() if each.world_size > 1 or each is wrap]
    check_inner_groups(wrap._ranks, [each._ranks for each in members])
    check_root(wrap._ranks, [each._is_root for each in members])
    wrap._is_root = True
    for each in wrap._wraps():
        if each is not wrap:
            each._is_root = False
    if wrap._engine is not None:
        facts = [(each._places, each._compared_options()) for each in members]
        check_same_model(wrap._ranks, facts, wrap.compute_device)
        wrap._root_state = RootState([e._engine for e in members if e._engine is not None])


_mark_root_eagerly = eager(_mark_root)
