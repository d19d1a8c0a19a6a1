"""What the wraps of a root do together, around its forward and in its backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor

from manyhands.sharding.fsdp._collectives import ReduceQueue
from manyhands.sharding.fsdp._engine import Engine, eager, of
from manyhands.sharding.fsdp._used_params import UsedParameters


class PrefetchOrder:
    """After each forward: `next`, who follows whom, and `begun`, what nobody has run."""

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.begun: list[int] = []
        self._ran: list[int] = []  # in the forward that is going on

    @property
    def going_on(self) -> bool:
        """Whether wraps have run since the last forward was over."""
        return bool(self._ran)

    def run(self, wrap: int) -> None:
        """This wrap has its parameters, and the one after it is being gathered."""
        self._ran.append(wrap)

    def end(self) -> bool:
        """The forward is over; returns whether it went another way than the last one."""
        times = Counter(self._ran)
        following = {a: b for a, b in pairwise(self._ran) if times[a] == 1}
        last = {wrap: place for place, wrap in enumerate(self._ran)}
        self.begun = [b for a, b in self.next.items() if a in last and last.get(b, -1) < last[a]]
        changed = following != self.next
        self.next = following
        self._ran.clear()
        return changed

    def forget(self) -> None:
        """The forward has raised an error."""
        self._ran.clear()


class RootState:
    """What the wraps of a root do together: average gradients, and agree on which there are."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        workers = engines[0].workers
        self._engines = list(engines)  # the root's first
        members = [weakref.ref(engine) for engine in engines]

        def params() -> list[Tensor]:
            return [param for member in members for param in of(member).params]

        def end() -> None:
            used.end()
            for member in members:
                of(member).check_all_reduced()

        self.used = used = UsedParameters(workers, params)
        self.averaging = ReduceQueue(workers, used.begin, end)
        self._ahead = PrefetchOrder()
        # Without gloo the engine has streams.
        self._gathers_ahead = all(engine.on_gloo and engine.overlap for engine in engines)
        first = 0
        for number, engine in enumerate(engines):
            engine.connect(self.averaging, self.used, first, partial(self._ahead.run, number))
            first += len(engine.places)

    @eager
    def start_forward(self) -> None:
        """Before a forward of the root, which is not in a backward."""
        self.averaging.forget()
        if self._engines[0].in_backward:  # one that raised an error
            self.used.forget()
            self.recover()
            for engine in self._engines:
                engine.clear_unaveraged()
        self.reshard()  # what was kept whole for a backward that did not come may be old

    @eager
    def end_forward(self) -> None:
        """The root's forward is over: gather in this order in the next one."""
        changed = self._ahead.end()
        if not (changed and self._gathers_ahead):
            return
        for number, engine in enumerate(self._engines):
            after = self._ahead.next.get(number)
            modules = [] if after is None else [self._engines[after].module]
            engine.module.set_modules_to_forward_prefetch(modules)
        for number in self._ahead.begun:
            self._engines[number].gather()  # what was begun has to be waited for
            self._engines[number].reshard()

    @eager
    def reshard(self) -> None:
        """Let all whole parameters go."""
        for engine in self._engines:
            engine.reshard()

    @eager
    def recover(self) -> None:
        """Begin anew after an error in a forward or backward."""
        engine = self._engines[0].module
        if self._ahead.going_on and not hasattr(engine, "reset_iter_state"):
            self.end_forward()  # lets go what was begun, which torch 2.13 does by itself
        self._ahead.forget()
        self._engines[0].recover()
