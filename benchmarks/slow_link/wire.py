"""When a packet arrives at the other end of a slow line: a rate, a delay, a queue that overflows.

Packets leave one after the other, each for as long as its bits take at `rate`; then each travels
for `delay`. A packet that would wait longer than `queue` is dropped, which is how TCP learns that
the line is full. This is all arithmetic: `relay.py` moves the packets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """What a line promises, in each direction."""

    rate: float = 50e6  # bits a second
    delay: float = 0.010  # seconds, one way
    queue: float = 0.150  # seconds that a packet may wait for its turn
    mtu: int = 9000  # bytes of the largest packet

    @property
    def round_trip(self) -> float:
        return 2 * self.delay


class Wire:
    """One direction of a line."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._free = 0.0  # when the last packet so far will have left

    def arrival(self, now: float, size: int) -> float | None:
        """When a packet of so many bytes, sent now, will be there; None if it is dropped."""
        leaves = max(now, self._free)
        if leaves - now > self._terms.queue:
            return None
        self._free = leaves + 8 * size / self._terms.rate
        return self._free + self._terms.delay
