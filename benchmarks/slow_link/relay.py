"""The slow line: a process that takes packets from one host and gives them to the other, later."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from slow_link.hosts import DIE_WITH_PARENT, Host, two_hosts
from slow_link.wire import Terms, Wire

PACKETS, BYTES, DROPPED = range(3)  # what is counted in each direction


@dataclass(frozen=True)
class Link:
    """Two hosts with a line between them, which `carried` tells about."""

    hosts: tuple[Host, Host]
    terms: Terms
    relay: Any
    counters: Any

    def enter(self, rank: int) -> None:
        """Make this process a process of the host with that number."""
        self.hosts[rank].enter()

    def carried(self) -> dict[str, float]:
        """So far, in both directions; and the relay's CPU seconds."""
        counts = list(self.counters)
        return {
            "packets": counts[PACKETS] + counts[3 + PACKETS],
            "bytes": counts[BYTES] + counts[3 + BYTES],
            "dropped": counts[DROPPED] + counts[3 + DROPPED],
            "cpu": _cpu_seconds(self.relay.pid),
        }


@contextmanager
def slow_link(terms: Terms) -> Iterator[Link]:
    """A line on these terms, for as long as the block is left."""
    context = multiprocessing.get_context("fork")
    counters = RawArray(ctypes.c_longlong, 6)
    with two_hosts(terms.mtu) as hosts:
        ends = (hosts[0].packets, hosts[1].packets)
        relay = context.Process(target=_carry, args=(ends, terms, counters), daemon=True)
        relay.start()
        try:
            yield Link(hosts, terms, relay, counters)
        finally:
            relay.kill()
            relay.join()


def _carry(ends: tuple[int, int], terms: Terms, counters: Any) -> None:
    """Until killed."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees to the end
    wires = Wire(terms), Wire(terms)
    waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    while True:
        due = [queue[0][0] for queue in waiting if queue]
        patience = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select(ends, [], [], patience)
        now = time.monotonic()
        for side, end in enumerate(ends):
            if end in readable:
                _take(end, wires[side], waiting[side], now, counters, 3 * side)
            queue = waiting[side]
            while queue and queue[0][0] <= now:
                os.write(ends[1 - side], queue.popleft()[1])


def _take(
    end: int, wire: Wire, queue: deque[tuple[float, bytes]], now: float, counters: Any, at: int
) -> None:
    """Whatever a host has sent meanwhile."""
    while True:
        try:
            packet = os.read(end, 65_536)
        except BlockingIOError:
            return
        arrival = wire.arrival(now, len(packet))
        if arrival is None:
            counters[at + DROPPED] += 1
            continue
        counters[at + PACKETS] += 1
        counters[at + BYTES] += len(packet)
        queue.append((arrival, packet))


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
