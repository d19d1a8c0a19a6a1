"""The sockets of this process, whichever library has opened them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, suppress

TCP_RTO_MAX_MS = 44  # of Linux 6.15; Python has no name for it

Address = tuple[str, int]  # host and port
Endpoints = tuple[Address, Address]  # of a connected socket: its own, and the other side's


def resend_often(end: socket.socket) -> None:
    """Have what was lost sent again each second, so that a connection goes on soon after a cut.

    By itself TCP waits twice as long each time: after a cut of 10 s for up to 10 s more.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # an older Linux
            end.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)


def resend_often_to(port: int) -> None:
    """Do so on the connections of this process to a port: torch has no option for its own."""
    if sys.platform == "linux":
        for end in internet_sockets():
            with closing(end):
                if (ends := endpoints_of(end)) is not None and ends[1][1] == port:
                    resend_often(end)


def internet_sockets() -> Iterator[socket.socket]:
    """Yield the process's internet sockets, each under a second descriptor: close it."""
    for name in os.listdir("/dev/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # closed since the listing
            continue
        blocking = os.get_blocking(descriptor)
        try:
            found = socket.socket(fileno=descriptor)
        except OSError:  # a file, not a socket
            os.close(descriptor)
            continue
        # `socket.setdefaulttimeout` of a script would make it non-blocking, for its owner too.
        os.set_blocking(descriptor, blocking)
        if found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()


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
