"""Create gloo groups for the exclusive use of manyhands, and end each group with its last user.

Rules, sharded modules and blocks have separate gloo groups, at the cost of a few descriptors and
three threads each. In a shared group, ranks might issue the collectives of two rules in different
orders (hooks of two optimizers on a model fire in the order of creation). A rank that misses a pass
would send the next message to the wrong object. Exceptions with a fixed order share a group:
the stop votes of a process group, and an `OSS` in shared memory with its module.

    connect   all ranks agree on a serial number, and connect
    Lease     owned by each user of the group; the group ends with the last reference to the lease
    end       in a thread, because ending a gloo group waits for pending messages

By default, gloo connects all pairs of ranks, with N requests per rank for N addresses of N bytes.
Our groups connect two ranks at the first message. `connect` opens a ring or all pairs immediately,
so that no rank waits for a connection to a rank that has died.

`torch.distributed.new_group` is not suitable: torch names groups by ranks and by the *number* of
groups in the process. If garbage collectors drop groups at different times, ranks would wait for
each other under different names, or find the addresses of an ended group. torch has no record of
our groups, so `destroy_process_group()` does not end these groups.

torch and gloo do not expose sockets. The second half of this file finds them.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import re
import select
import socket
import stat
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from manyhands._ranks.dry_run import DryGroup, dry_group

Gather: TypeAlias = Callable[[list[float]], list[list[float]]]  # numbers, over some ranks
FIRST_PAUSE = 0.001  # seconds between two checks for users of a group: initial value,
LONGEST_PAUSE = 1.0  # and maximum
STUCK = 0.3  # seconds between two checks for sockets that prevent the end of a group
SHUT_WITHIN = 1.0  # seconds within which gloo closes connections after a shutdown
TAG = 7060  # of messages that open connections

# States of a connection, from linux/tcp_states.h.
TCP_ESTABLISHED = 1
TCP_CLOSE = 7
TCP_LISTEN = 10

_making_devices = threading.Lock()

# Last serial number per name. Weak, because a store owns the port of a server.
_serials: weakref.WeakKeyDictionary[Store, Counter[str]] = weakref.WeakKeyDictionary()


def name_of_ranks(ranks: Sequence[int]) -> str:
    return hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]


def new_prefix(store: Store, kind: str, ranks: Sequence[int], gather: Gather) -> str:
    """Return an unused prefix for keys, equal on all of these ranks."""
    serials = _serials.setdefault(store, Counter())
    name = f"manyhands/{kind}/{name_of_ranks(ranks)}"
    newest = gather([float(serials[name])])  # may differ after a failure on a rank
    serial = int(max(number for (number,) in newest)) + 1
    serials[name] = serial
    return f"{name}/{serial}"


@dataclass
class HeldGroup:
    """A group of ours, from creation until `GroupCloser` drops the group."""

    group: Any  # None after the group was dropped
    epolls: frozenset[int] = frozenset()  # epolls on which gloo's threads wait for sockets
    process: int = field(default_factory=os.getpid)


class Lease:
    """Prevents the end of a group. Users of `group` must refer to the lease."""

    def __init__(self, held: HeldGroup, ranks: tuple[int, ...]) -> None:
        self.group: dist.ProcessGroup = held.group
        self.ranks = ranks  # global ranks
        weakref.finalize(self, group_closer.close_when_unused, held)


def connect(
    store: Store,
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta | None,
    gather: Gather,
    *,
    pairs: bool = False,
) -> Lease:
    """Return a new gloo group. Call on each of these ranks.

    `pairs` connects all pairs, for slices and broadcasts, instead of a ring.
    """
    own_store = PrefixStore(new_prefix(store, "group", ranks, gather), store)
    size = len(ranks)
    dry = dry_group()
    if dry is not None:
        return Lease(HeldGroup(DryGroup(rank, size, dry.counted, ranks)), tuple(ranks))
    held = make_gloo(own_store, rank, size, timeout or default_pg_timeout)
    # Wrap the backend like torch does, so that profilers see the collectives.
    group = dist.ProcessGroup(own_store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, held.group)
    held.group = group
    lease = Lease(held, tuple(ranks))
    # Also a barrier, because no rank may drop the group before all ranks have connected.
    if pairs:
        open_pairs(group, rank, size)
    else:
        group.allreduce([torch.zeros(1, device="cpu")]).wait()
    return lease


def open_pairs(group: Any, rank: int, size: int) -> None:
    works = []
    for turn in range(1, size):  # in equal order on all ranks
        works.append(group.recv([torch.empty(1, device="cpu")], (rank - turn) % size, TAG))
        works.append(group.send([torch.empty(1, device="cpu")], (rank + turn) % size, TAG))
    for work in works:
        work.wait()


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str = "") -> HeldGroup:
    """Return a gloo group that connects two ranks at their first message."""
    make: Any = dist.ProcessGroupGloo  # the type stubs lack the options
    options = make._Options()
    options._timeout = timeout
    with _making_devices:  # find the epolls of the new devices
        before = listening_sockets()
        options._devices = gloo_devices(host)
        after = listening_sockets()
    epolls = {after[inode] for inode in after.keys() - before.keys()}
    return HeldGroup(make(store, rank, size, options), frozenset(epolls))


def gloo_devices(host: str = "") -> list[Any]:
    make: Any = dist.ProcessGroupGloo

    def devices(lazy: bool) -> list[Any]:
        # torch reads this variable only when torch creates the devices.
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        if names:
            return [make.create_device(interface=n, lazy_init=lazy) for n in names.split(",")]
        if host:
            return [make.create_device(hostname=host, lazy_init=lazy)]
        return [make.create_default_device(lazy_init=lazy)]

    try:
        return devices(lazy=True)
    except RuntimeError:  # only TCP supports lazy connections: not libuv (macOS, Windows) or TLS
        return devices(lazy=False)


def _close_connections(epolls: Collection[int]) -> bool:
    """Shut a group's connections; return whether gloo's thread has closed all of them."""
    deadline = time.monotonic() + SHUT_WITHIN
    while connections := shut_connections(epolls):
        if time.monotonic() > deadline:
            # gloo does not close sockets that never connected (see `_end_loop`).
            return all(connection.state == TCP_CLOSE for connection in connections)
        time.sleep(FIRST_PAUSE)
    return True


def _end_loop(epolls: Collection[int], dropped: threading.Event) -> None:
    """Help gloo's thread on these epolls to end while the group is dropped.

    The thread ends when no socket has pending events. After a network cut, a socket that never
    connected may report events forever (torch 2.13).
    """
    seen: set[WatchedSocket] = set()
    while not dropped.wait(STUCK):
        now = {each for each in watched_sockets(epolls) if each.state == TCP_CLOSE}
        forget_sockets(seen & now)  # excludes sockets that are about to connect
        seen = now


def _keep_for_ever(group: object) -> None:
    """Leak a group until the end of the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class GroupCloser:
    """Closes unused groups, each in a separate thread.

    A thread that returns from C++ during interpreter shutdown aborts the process. So no thread
    drops a group during shutdown, and shutdown waits up to a second for registered threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._closed = False

    def close_when_unused(self, held: HeldGroup) -> None:
        if held.process == os.getpid() and not self._closed:
            thread = threading.Thread(target=self._drop, args=(held,), name="manyhands end")
            thread.daemon = True
            try:
                thread.start()
                return
            except RuntimeError:  # Python 3.12+ starts no threads during shutdown
                pass
        # A forked child, which lacks the group's threads, would wait forever. During interpreter
        # shutdown, waiting is unsafe.
        _keep_for_ever(held.group)

    def _drop(self, held: HeldGroup) -> None:
        pause = FIRST_PAUSE
        while sys.getrefcount(held.group) > 2 or not self._enter():  # 2: the field and the call
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        # gloo does not remove closed sockets from the epoll. If a forked process, such as a
        # DataLoader worker, has copies of the sockets, the epoll still reports events and gloo
        # aborts this process (torch 2.13). So shut the connections first.
        if not _close_connections(held.epolls):
            _keep_for_ever(held.group)
            return
        # Duplicates, because descriptors are reused after gloo closes the epolls.
        epolls = [os.dup(epoll) for epoll in held.epolls]
        dropped = threading.Event()
        with suppress(RuntimeError):  # interpreter shutdown, as above
            threading.Thread(target=_end_loop, args=(epolls, dropped), daemon=True).start()
        held.group = None
        dropped.set()
        for epoll in epolls:
            os.close(epoll)

    def _enter(self) -> bool:
        """Register this thread; return False during interpreter shutdown."""
        with self._lock:
            if not self._closed:
                self._under_way.add(threading.current_thread())
            return not self._closed

    def await_at_end(self, thread: threading.Thread) -> None:
        """Let `close` wait for this thread. Call before starting the thread."""
        self._under_way.add(thread)

    def close(self) -> None:
        """Stop dropping groups, and wait for registered threads, at exit."""
        with self._lock:
            self._closed = True
        until = time.monotonic() + 1.0  # slower threads wait for messages of lost ranks
        for thread in list(self._under_way):
            if thread.ident is not None:  # was started
                thread.join(max(0.0, until - time.monotonic()))


# -- sockets of torch and gloo --------------------------------------------------------------------


def internet_sockets() -> Iterator[socket.socket]:
    """Yield the internet sockets of this process as duplicates. The caller closes each."""
    for name in os.listdir("/dev/fd"):
        found = internet_socket(int(name))
        if found is not None:
            yield found


def internet_socket(descriptor: int) -> socket.socket | None:
    """Return a duplicate of the internet socket with this descriptor, or None."""
    try:
        # Do not duplicate files: closing a descriptor drops the locks (`lockf`) of this process.
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        second = os.dup(descriptor)
    except OSError:  # closed concurrently
        return None
    blocking = os.get_blocking(second)
    try:
        found = socket.socket(fileno=second)
    except OSError:  # no longer a socket
        os.close(second)
        return None
    # With a default timeout, socket() sets O_NONBLOCK, also for the owner. Restore the flag only
    # then, because the owner may change the flag concurrently.
    if socket.getdefaulttimeout() is not None:
        os.set_blocking(second, blocking)
    if found.family in (socket.AF_INET, socket.AF_INET6):
        return found
    found.close()
    return None


@dataclass(frozen=True)
class WatchedSocket:
    """A TCP socket on the list of an epoll."""

    epoll: int  # a descriptor
    descriptor: int
    inode: str  # of the socket
    state: int  # of the connection, such as TCP_LISTEN


def watched_sockets(epolls: Iterable[int]) -> set[WatchedSocket]:
    found = set()
    for epoll in epolls:
        text = ""
        with suppress(OSError):  # closed concurrently
            text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
        for number, inode in re.findall(r"tfd: *(\d+) .* ino:(\w+)", text):
            descriptor = int(number)
            end = _socket_with(inode, descriptor)
            if end is None:
                continue
            with closing(end):
                state = state_of(end)
            if state is not None:
                found.add(WatchedSocket(epoll, descriptor, inode, state))
    return found


def _socket_with(inode: str, descriptor: int) -> socket.socket | None:
    """Return a duplicate of the socket with this descriptor and inode, or None.

    gloo may close the socket at any time, so that a new socket may reuse the descriptor. In a
    forked process, descriptors on the list of an epoll may refer to different sockets.
    """
    end = internet_socket(descriptor)
    if end is not None and os.fstat(end.fileno()).st_ino != int(inode, 16):
        end.close()
        return None
    return end


def listening_sockets() -> dict[str, int]:
    found = {}
    for watched in watched_sockets(_epolls()):
        if watched.state == TCP_LISTEN:
            found[watched.inode] = watched.epoll
    return found


def shut_connections(epolls: Iterable[int]) -> set[WatchedSocket]:
    """Shut down the connections of these epolls, so that pending messages fail at both ends.

    Return the connections that gloo has not closed.
    """
    connections = {each for each in watched_sockets(epolls) if each.state != TCP_LISTEN}
    for watched in connections:
        end = _socket_with(watched.inode, watched.descriptor)
        if end is not None:
            with closing(end), suppress(OSError):  # closed concurrently, or never connected
                # Not close(): gloo owns the descriptor.
                end.shutdown(socket.SHUT_RDWR)
    return connections


def forget_sockets(sockets: Iterable[WatchedSocket]) -> None:
    for watched in sockets:
        with suppress(OSError), select.epoll.fromfd(os.dup(watched.epoll)) as epoll:
            epoll.unregister(watched.descriptor)


def _epolls() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else []:
        with suppress(OSError):  # closed concurrently
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.append(int(name))
    return found


def state_of(end: socket.socket) -> int | None:
    try:
        return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return None


group_closer = GroupCloser()
weakref.finalize(group_closer, int)  # registers weakref's exit function to run after ours
atexit.register(group_closer.close)
