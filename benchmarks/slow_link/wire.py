"""When a packet arrives at the other end of a slow line: a rate, a delay, a queue, losses.

Packets leave one after the other, each for as long as its bits take at `rate`; then each travels
for `delay`. A packet that would wait longer than `queue` is dropped, which is how TCP learns that
the line is full; so is a share of all packets, `loss`, whatever the queue. This is all arithmetic:
`relay.py` moves the packets.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Terms:
    """What a host's line promises, in each direction."""

    rate: float = 50e6  # bits a second
    delay: float = 0.010  # seconds, one way
    queue: float = 0.150  # seconds that a packet may wait for its turn
    mtu: int = 9000  # bytes of the largest packet
    loss: float = 0.0  # share of the packets that never arrive

    @property
    def round_trip(self) -> float:
        return 2 * self.delay


class Wire:
    """One direction of a line."""

    def __init__(self, terms: Terms, seed: int = 0) -> None:
        self._terms = terms
        self._lost = random.Random(seed)
        self._free = 0.0  # when the last packet so far will have left

    def left(self, now: float, size: int) -> float | None:
        """When a packet of so many bytes, sent now, will have left; None if it is dropped."""
        leaves = max(now, self._free)
        if leaves - now > self._terms.queue:
            return None
        if self._terms.loss and self._lost.random() < self._terms.loss:
            return None
        self._free = leaves + self.seconds(size)
        return self._free

    def seconds(self, size: int) -> float:
        """How long a packet of so many bytes takes to leave."""
        return 8 * size / self._terms.rate


class Switch:
    """What joins some hosts: each has a line of its own to it, in both directions.

    A packet goes on while its end still comes in, so that two lines without a queue take no longer
    than one. Losses are the first line's, and the delay is that of both together.
    """

    def __init__(self, terms: Terms, hosts: int) -> None:
        self._delay = terms.delay
        self._up = [Wire(terms, seed) for seed in range(hosts)]
        self._down = [Wire(replace(terms, loss=0.0)) for _ in range(hosts)]

    def arrival(self, now: float, size: int, source: int, target: int) -> float | None:
        """When a packet from one host, sent now, will be at another; None if it is dropped."""
        up, down = self._up[source], self._down[target]
        left = up.left(now, size)
        if left is None:
            return None
        arrived = down.left(left - up.seconds(size), size)
        return None if arrived is None else arrived + self._delay
