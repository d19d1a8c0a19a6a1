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
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

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
PORT = 7700
PINGS = 20
WARM, SENT = 4_000_000, 25_000_000  # bytes: until TCP is up to speed, and those that count

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Terms:
    """What the network promises, in each direction."""

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
    """A struct ifreq."""
    return struct.pack("=16s" + fields, name.encode(), *values)


def _move_to(network: int) -> None:
    if _libc.setns(network, NEW_NETWORK) != 0:
        raise NoSlowLink(f"setns failed: {os.strerror(ctypes.get_errno())}.")


@dataclass(frozen=True)
class Link:
    """Two hosts with a network between them."""

    hosts: list[Host]

    def enter(self, rank: int) -> None:
        """Make this process a process of the host with that number."""
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
    """Until killed."""
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
    """Whatever a host has sent meanwhile."""
    with suppress(BlockingIOError):
        while True:
            yield os.read(end, 65_536)


def probe(link: Link) -> dict[str, Any]:
    """What TCP gets: the round trip of a byte in ms, Mbit/s one way and in both at once."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    answers = context.Process(target=_answer, args=(link,), daemon=True)
    processes = [answers, context.Process(target=_ask, args=(link, theirs), daemon=True)]
    try:
        for process in processes:
            process.start()
        if not ours.poll(60):
            raise RuntimeError("the slow link carries nothing: its probe had no answer in 60 s.")
        found: dict[str, Any] = ours.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _answer(link: Link) -> None:
    link.enter(1)
    with socket.create_server((link.hosts[1].address, PORT)) as server:
        connection, _ = server.accept()
        _prompt(connection)
        for _ in range(PINGS):
            connection.sendall(connection.recv(1))
        for size in (WARM, SENT):
            _receive(connection, size)
            connection.sendall(b"!")
        _exchange(connection, WARM)
        _exchange(connection, SENT)
        connection.recv(1)


def _ask(link: Link, result: Connection) -> None:
    link.enter(0)
    connection = _connected(link.hosts[1].address)
    _prompt(connection)
    pings = []
    for _ in range(PINGS):
        began = time.perf_counter()
        connection.sendall(b"?")
        connection.recv(1)
        pings.append(time.perf_counter() - began)
    for size in (WARM, SENT):
        began = time.perf_counter()
        connection.sendall(bytes(size))
        connection.recv(1)
    one_way = time.perf_counter() - began
    _exchange(connection, WARM)
    began = time.perf_counter()
    _exchange(connection, SENT)
    both_ways = time.perf_counter() - began
    result.send(
        {
            "congestion_control": CONGESTION_CONTROL.read_text().strip(),
            "round_trip_ms": 1e3 * median(pings),
            "one_way": 8e-6 * SENT / one_way,
            "both_ways": 8e-6 * SENT / both_ways,
        }
    )


def _connected(address: str) -> socket.socket:
    """A connection, once the other side listens."""
    for _ in range(100):
        try:
            return socket.create_connection((address, PORT), timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise RuntimeError("the probe's other side does not listen.")


def _prompt(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, size: int) -> None:
    buffer = bytearray(1 << 20)
    while size:
        size -= connection.recv_into(buffer, min(size, len(buffer)))


def _exchange(connection: socket.socket, size: int) -> None:
    """Send and receive so many bytes at the same time."""
    sender = threading.Thread(target=connection.sendall, args=(bytes(size),))
    sender.start()
    _receive(connection, size)
    sender.join()
