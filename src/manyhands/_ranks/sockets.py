"""Find the sockets that torch and gloo have opened in this process, which they do not hand out."""

from __future__ import annotations

import os
import re
import select
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

TCP_RTO_MAX_MS = 44  # of Linux 6.15; Python has no name for it
# States of a connection, of linux/tcp_states.h.
TCP_ESTABLISHED = 1
TCP_CLOSE = 7
TCP_LISTEN = 10


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
            with closing(end), suppress(OSError):  # not connected
                if end.getpeername()[1] == port:
                    survive_cuts(end, seconds)


def internet_sockets() -> Iterator[socket.socket]:
    """Yield the process's internet sockets, each under a second descriptor: close it."""
    for name in os.listdir("/dev/fd"):
        found = internet_socket(int(name))
        if found is not None:
            yield found


def internet_socket(descriptor: int) -> socket.socket | None:
    """Return the internet socket of a descriptor under a second one, which is to be closed."""
    try:
        # Closing any descriptor of a file drops the locks (`lockf`) that this process has on it.
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        second = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return None
    blocking = os.get_blocking(second)
    try:
        found = socket.socket(fileno=second)
    except OSError:  # another descriptor by now
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


def is_connected_to(port: int) -> bool:
    """Return whether a connection of this process to a port is open on both sides."""
    for end in internet_sockets():
        with closing(end):
            # The state is known on Linux only.
            is_open = sys.platform != "linux" or _state_of(end) == TCP_ESTABLISHED
            with suppress(OSError):  # not connected
                if is_open and end.getpeername()[1] == port:
                    return True
    return False


# -- the event loops of gloo ----------------------------------------------------------------------


@dataclass(frozen=True)
class WatchedSocket:
    """A TCP socket in the list of an epoll."""

    epoll: int  # a descriptor
    descriptor: int
    inode: str  # of the socket
    state: int  # of the connection, as TCP_LISTEN


def watched_sockets(epolls: Iterable[int]) -> set[WatchedSocket]:
    """Return the TCP sockets in the lists of these epolls."""
    found = set()
    for epoll in epolls:
        for descriptor, inode in _watched_by(epoll):
            end = _socket_with(inode, descriptor)
            if end is None:
                continue
            with closing(end):
                state = _state_of(end)
            if state is not None:
                found.add(WatchedSocket(epoll, descriptor, inode, state))
    return found


def _socket_with(inode: str, descriptor: int) -> socket.socket | None:
    """Return the socket of a descriptor under a second one, or None if it is another socket.

    gloo may close the socket at any moment, and the next socket, even the listening one of a new
    group, gets the number. A forked process has the epolls of its parent, and other sockets under
    the numbers in their lists.
    """
    end = internet_socket(descriptor)
    if end is not None and os.fstat(end.fileno()).st_ino != int(inode, 16):
        end.close()
        return None
    return end


def listening_sockets() -> dict[str, int]:
    """Return the listening sockets that this process watches: the inode of each, and its epoll."""
    found = {}
    for watched in watched_sockets(_epolls()):
        if watched.state == TCP_LISTEN:
            found[watched.inode] = watched.epoll
    return found


def shut_connections(epolls: Iterable[int]) -> set[WatchedSocket]:
    """Shut the connections that these epolls watch; return those that gloo has not closed yet.

    Each waiting message fails at once, at both ends. Data that has been sent still arrives.
    """
    connections = {each for each in watched_sockets(epolls) if each.state != TCP_LISTEN}
    for watched in connections:
        end = _socket_with(watched.inode, watched.descriptor)
        if end is not None:
            with closing(end), suppress(OSError):  # closed meanwhile, or never connected
                # Not close(): gloo owns the descriptor, and still waits on it.
                end.shutdown(socket.SHUT_RDWR)
    return connections


def forget_sockets(sockets: Iterable[WatchedSocket]) -> None:
    """Take sockets off the lists of epolls."""
    for watched in sockets:
        with suppress(OSError), select.epoll.fromfd(os.dup(watched.epoll)) as epoll:
            epoll.unregister(watched.descriptor)


def _epolls() -> list[int]:
    """Return the epolls of this process, by their descriptors; none outside Linux."""
    found = []
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else []:
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.append(int(name))
    return found


def _watched_by(epoll: int) -> list[tuple[int, str]]:
    """Return the descriptors in an epoll's list, each with its inode."""
    try:
        text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except OSError:  # closed meanwhile
        return []
    return [(int(fd), inode) for fd, inode in re.findall(r"tfd: *(\d+) .* ino:(\w+)", text)]


def _state_of(end: socket.socket) -> int | None:
    """Return the state of a TCP socket; None of another one."""
    try:
        return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return None
