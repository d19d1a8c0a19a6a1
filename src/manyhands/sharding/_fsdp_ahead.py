"""Which wrap's gathering is begun while which other computes? Numbers of wraps in and out.

The order in which wraps run is taken to be that of the last forward. torch's engine is told which
wrap comes after which, and begins to gather it as soon as the one before has its parameters. (In
a backward the engine does so by itself.) A wrap that runs several times in a forward is followed
by no certain one.

Where a forward takes another way than the last one, a wrap may be gathered and not run. It has to
be let go when the forward is over: what it has would be older than the optimizer's next step.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise


class Ahead:
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
