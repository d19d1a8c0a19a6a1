"""Find the sockets that torch and gloo have opened in this process, which they do not hand out."""

from __future__ import annotations

import os
import re
import select
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

TCP_RTO_MAX_MS = 44  # of Linux 6.15; Python has no name for it
TCP_CLOSE = 7  # a state, of linux/tcp_states.h

Address = tuple[str, int]  # host and port
Endpoints = tuple[Address, Address]  # of a connected socket: its own, and the other side's


def survive_cuts(end: socket.socket, seconds: float) -> None:
    """Let a connection survive a network cut of this length, and continue soon after the cut.

    TCP doubles the pause before each retry: after a cut of 10 s it waits for up to 10 s more. So
    limit the pause to a second. TCP gives up after 15 retries, which then take only 15 s. So set
    the time after which it gives up as well.
    """
    if sys.platform == "linux":
        milliseconds = {socket.TCP_USER_TIMEOUT: round(1000 * seconds), TCP_RTO_MAX_MS: 1000}
        for option, value in milliseconds.items():
            with suppress(OSError):  # an older Linux, or a datagram socket of another thread
                end.setsockopt(socket.IPPROTO_TCP, option, value)


def survive_cuts_to(port: int, seconds: float) -> None:
    """Do so on the connections of this process to a port: torch has no option for its own."""
    if sys.platform == "linux":
        for end in internet_sockets():
            with closing(end):
                if (ends := endpoints_of(end)) is not None and ends[1][1] == port:
                    survive_cuts(end, seconds)


def internet_sockets() -> Iterator[socket.socket]:
    """Yield the process's internet sockets, each under a second descriptor: close it."""
    for name in os.listdir("/dev/fd"):
        if (found := internet_socket(int(name))) is not None:
            yield found


def internet_socket(descriptor: int) -> socket.socket | None:
    """Return the internet socket of a descriptor under a second one, which is to be closed."""
    try:
        second = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return None
    blocking = os.get_blocking(second)
    try:
        found = socket.socket(fileno=second)
    except OSError:  # a file, not a socket
        os.close(second)
        return None
    # That makes it non-blocking, for its owner too, if a script has set a default timeout. If not,
    # leave it alone: its owner may be about to change it.
    if socket.getdefaulttimeout() is not None:
        os.set_blocking(second, blocking)
    if found.family in (socket.AF_INET, socket.AF_INET6):
        return found
    found.close()
    return None


def endpoints_of(end: socket.socket) -> Endpoints | None:
    """Return both addresses of a connection; None of a socket that is not connected."""
    try:
        return end.getsockname()[:2], end.getpeername()[:2]  # without IPv6's flow and scope
    except OSError:  # not connected
        return None


def listening_ports() -> list[int]:
    """Return the ports on which this process listens."""
    ports = []
    for end in internet_sockets():
        with closing(end):
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.append(int(end.getsockname()[1]))
    return ports


def connected_endpoints() -> Iterator[Endpoints]:
    """Yield the two endpoints of each connection of this process."""
    for end in internet_sockets():
        with closing(end):
            if (endpoints := endpoints_of(end)) is not None:
                yield endpoints


# -- sockets that nobody waits for any more --------------------------------------------------------


@dataclass(frozen=True)
class WatchedSocket:
    """A socket in the list of an epoll, by their descriptors and the socket's inode."""

    epoll: int
    descriptor: int
    inode: str


def closed_in_epolls() -> set[WatchedSocket]:
    """Return the TCP sockets that epolls of this process wait for and that are not connected."""
    found = set()
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else []:
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                lines = Path("/proc/self/fdinfo", name).read_text().splitlines()
                watched = (re.search(r"tfd: *(\d+) .* ino:(\w+)", line) for line in lines)
                found |= {WatchedSocket(int(name), int(w[1]), w[2]) for w in watched if w}
    return {watched for watched in found if _is_closed(watched.descriptor)}


def forget_sockets(sockets: Iterable[WatchedSocket]) -> None:
    """Take sockets off the lists of epolls."""
    for watched in sockets:
        with suppress(OSError), select.epoll.fromfd(os.dup(watched.epoll)) as epoll:
            epoll.unregister(watched.descriptor)


def _is_closed(descriptor: int) -> bool:
    found = internet_socket(descriptor)
    if found is None:
        return False
    with closing(found):
        try:
            return found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
        except OSError:  # not of TCP
            return False
