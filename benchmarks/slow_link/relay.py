"""The slow line: a process that takes packets from each host and gives them to another, later."""

from __future__ import annotations

import ctypes
import heapq
import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from slow_link.hosts import DIE_WITH_PARENT, Host, make_hosts
from slow_link.wire import Switch, Terms

PACKETS, BYTES, DROPPED = range(3)  # what is counted
TARGET = slice(16, 20)  # where an IPv4 packet names the host that it is for


@dataclass(frozen=True)
class Link:
    """Hosts with a line each, which `carried` tells about."""

    hosts: list[Host]
    terms: Terms
    relay: Any
    counters: Any

    def enter(self, rank: int) -> None:
        """Make this process a process of the host with that number."""
        self.hosts[rank].enter()

    def carried(self) -> dict[str, float]:
        """So far, of all hosts; and the relay's CPU seconds."""
        return {
            "packets": self.counters[PACKETS],
            "bytes": self.counters[BYTES],
            "dropped": self.counters[DROPPED],
            "cpu": _cpu_seconds(self.relay.pid),
        }


@contextmanager
def slow_link(terms: Terms, count: int = 2) -> Iterator[Link]:
    """Hosts with lines on these terms, for as long as the block is left."""
    context = multiprocessing.get_context("fork")
    counters = RawArray(ctypes.c_longlong, 3)
    with make_hosts(count, terms.mtu) as hosts:
        relay = context.Process(target=_carry, args=(hosts, terms, counters), daemon=True)
        relay.start()
        try:
            yield Link(hosts, terms, relay, counters)
        finally:
            relay.kill()
            relay.join()


def _carry(hosts: list[Host], terms: Terms, counters: Any) -> None:
    """Until killed."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees to the end
    switch = Switch(terms, len(hosts))
    ends = [host.packets for host in hosts]
    numbers = {socket.inet_aton(host.address): number for number, host in enumerate(hosts)}
    waiting: list[tuple[float, int, int, bytes]] = []  # a heap: arrival, order, target, packet
    order = 0
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ends, [], [], patience)
        now = time.monotonic()
        for source, end in enumerate(ends):
            for packet in _packets(end) if end in readable else ():
                target = numbers.get(packet[TARGET])
                if target is None:
                    continue  # to nobody: a multicast of the system's
                arrival = switch.arrival(now, len(packet), source, target)
                counters[PACKETS if arrival is not None else DROPPED] += 1
                if arrival is not None:
                    counters[BYTES] += len(packet)
                    heapq.heappush(waiting, (arrival, order, target, packet))
                    order += 1
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            os.write(ends[target], packet)


def _packets(end: int) -> Iterator[bytes]:
    """Whatever a host has sent meanwhile."""
    with suppress(BlockingIOError):
        while True:
            yield os.read(end, 65_536)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
