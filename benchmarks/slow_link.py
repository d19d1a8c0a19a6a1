"""Two hosts on this machine, joined by a slow simulated network.

Hosts are network namespaces without names, each with a TUN interface. A process that enters a host
sees one network only, and on it the other's address. What it sends there comes out of a file
descriptor of ours (`packets`), and what is written to that arrives: a relay process carries packets
from one to the other, at a rate, after a delay, and with a queue that overflows.

Namespaces and interfaces live as long as a process holds their descriptors. Nothing is registered
anywhere, so nothing is left behind, however the benchmark ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from team import Team
from torch import Tensor

INTERFACE = "tun0"
DEVICE = "/dev/net/tun"
NETWORK = "10.77.0."
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl.h
# Of if_tun.h and sockios.h: name the interface; set its address, netmask, MTU and flags.
TUNSETIFF, SIOCSIFADDR, SIOCSIFNETMASK = 0x400454CA, 0x8916, 0x891C
SIOCSIFMTU, SIOCSIFFLAGS = 0x8922, 0x8914
TUN_WITHOUT_HEADER, UP_AND_RUNNING = 0x1001, 0x41

TARGET = slice(16, 20)  # where an IPv4 packet names the host that it is for
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of one's own network
PINGS = 20
WARM, SENT = 4_000_000, 25_000_000  # bytes: until TCP is up to speed, and those that count

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Terms:
    """The properties of the network, in each direction."""

    rate: float = 50e6  # bits a second
    delay: float = 0.010  # seconds, one way
    queue: float = 0.150  # seconds that a packet may wait for its turn
    mtu: int = 9000  # bytes of the largest packet


class NoSlowLink(RuntimeError):
    """This machine does not let us make hosts."""


@dataclass(frozen=True)
class Host:
    """A network of its own; both are file descriptors of this process and of those it forks."""

    address: str
    network: int
    packets: int

    def enter(self) -> None:
        """Move this process (of one thread) into the host, for good; it ends with its parent."""
        _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        _move_to(self.network)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _host(address: str, mtu: int, home: int, stack: ExitStack) -> Host:
    if _libc.unshare(NEW_NETWORK) != 0:
        raise NoSlowLink(
            f"a network namespace cannot be made here ({os.strerror(ctypes.get_errno())}): run it "
            f"with sudo, or with unshare --user --map-root-user --net python {sys.argv[0]}."
        )
    try:
        network = os.open("/proc/self/ns/net", os.O_RDONLY)
        stack.callback(os.close, network)
        packets = _interface(address, mtu)
        stack.callback(os.close, packets)
    finally:
        _move_to(home)
    return Host(address, network, packets)


def _interface(address: str, mtu: int) -> int:
    """A TUN interface in the namespace that we are in; the descriptor of its packets."""
    try:
        packets = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise NoSlowLink(
            f"{DEVICE} cannot be opened ({error.strerror}): load the module (modprobe tun), or "
            f"give it to the container (docker run --cap-add NET_ADMIN --device {DEVICE})."
        ) from error
    fcntl.ioctl(packets, TUNSETIFF, _request("H22x", TUN_WITHOUT_HEADER))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for what, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
            given = _request("HH4s16x", socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(any_socket, what, given)
        fcntl.ioctl(any_socket, SIOCSIFMTU, _request("i20x", mtu))
        for name in (INTERFACE, "lo"):
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, _request("H22x", UP_AND_RUNNING, name=name))
    return packets


def _request(fields: str, *values: object, name: str = INTERFACE) -> bytes:
    return struct.pack("=16s" + fields, name.encode(), *values)


def _move_to(network: int) -> None:
    if _libc.setns(network, NEW_NETWORK) != 0:
        raise NoSlowLink(f"setns failed: {os.strerror(ctypes.get_errno())}.")


@dataclass(frozen=True)
class Link:
    hosts: list[Host]

    def enter(self, rank: int) -> None:
        self.hosts[rank].enter()


@contextmanager
def slow_link(terms: Terms) -> Iterator[Link]:
    """Two hosts on these terms, until the block is left.

    To be called where this process has a single thread that matters.
    """
    context = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        stack.callback(os.close, home)
        hosts = [_host(f"{NETWORK}{1 + number}", terms.mtu, home, stack) for number in range(2)]
        relay = context.Process(target=_carry, args=(hosts, terms), daemon=True)
        relay.start()
        try:
            yield Link(hosts)
        finally:
            relay.kill()
            relay.join()


def _carry(hosts: list[Host], terms: Terms) -> None:
    _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees to the end
    ends = [host.packets for host in hosts]
    free = [0.0, 0.0]  # of each direction: when the last packet so far will have left
    addresses = [socket.inet_aton(host.address) for host in hosts]
    waiting: list[tuple[float, int, int, bytes]] = []  # a heap: arrival, order, target, packet
    order = 0
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ends, [], [], patience)
        now = time.monotonic()
        for source, end in enumerate(ends):
            target = 1 - source
            for packet in _packets(end) if end in readable else ():
                if packet[TARGET] != addresses[target]:
                    continue  # to nobody: a multicast of the system's
                leaves = max(now, free[source])
                if leaves - now > terms.queue:
                    continue  # dropped, which is how TCP learns that the network is full
                free[source] = leaves + 8 * len(packet) / terms.rate
                heapq.heappush(waiting, (free[source] + terms.delay, order, target, packet))
                order += 1
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            os.write(ends[target], packet)


def _packets(end: int) -> Iterator[bytes]:
    """Yield the packets that a host has sent."""
    with suppress(BlockingIOError):
        while True:
            yield os.read(end, 65_536)


def probe(link: Link) -> dict[str, Any]:
    """Measure a TCP connection of gloo: the round trip of a byte in ms, and Mbit/s."""
    with Team(2, lambda rank: lambda order: _probed(rank), link.enter) as team:
        found: dict[str, Any] = team.ask({})[0]
    return found


def _probed(rank: int) -> dict[str, Any]:
    """Send to the other rank and receive from it, one after the other or at the same time."""
    other, byte = 1 - rank, torch.zeros(1, dtype=torch.uint8)

    def there_and_back(message: Tensor) -> float:
        began = time.perf_counter()
        if rank == 0:
            dist.send(message, other)
            dist.recv(byte, other)
        else:
            dist.recv(message, other)
            dist.send(byte, other)
        return time.perf_counter() - began

    def both_at_once(message: Tensor) -> float:
        began = time.perf_counter()
        received = torch.empty_like(message)
        # The first is asked for before the second fills the connection.
        for work in (dist.irecv(received, other), dist.isend(message, other)):
            work.wait()  # type: ignore[union-attr]
        return time.perf_counter() - began

    pings = [there_and_back(byte) for _ in range(PINGS)]
    messages = [torch.zeros(size, dtype=torch.uint8) for size in (WARM, SENT)]
    _, one_way = map(there_and_back, messages)
    _, both_ways = map(both_at_once, messages)
    return {
        "congestion_control": CONGESTION_CONTROL.read_text().strip(),
        "round_trip_ms": 1e3 * median(pings),
        "one_way": 8e-6 * SENT / one_way,
        "both_ways": 8e-6 * SENT / both_ways,
    }
