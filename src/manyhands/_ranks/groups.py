"""Make process groups that only we use, and end them with their last user.

Some of our collectives must never be taken for anybody else's: the small vector that a scaling
rule sends at the end of a backward pass, the buckets of a `ShardedDataParallel`, a block's mean
that travels while training goes on. Each of these objects has a separate gloo group, which costs
a few descriptors and three threads.

    connect   all ranks agree on a serial number, and connect to those whom they will send messages
    Lease     kept by each user of the group; the group ends with the last reference to the lease
    end       in a thread, because the end of a gloo group waits for its messages under way (a
              crew's groups end the same way)

gloo by itself connects all ranks to all, with N requests of each for N addresses of N bytes. Ours
connect two ranks when they first exchange a message, and open at once the connections that will be
used, the ring of an all-gather or an all-reduce, or all pairs: a rank that dies later must not keep
the others in a connection that never comes.

Two objects share no group. Ranks may issue the collectives of two rules in different orders (the
hooks of two optimizers on one model fire in the order in which they were made), and what a rank
that misses a pass sends next would be taken for another part's. Stop votes of one process group
share one; so do an `OSS` in shared memory and its module, whose collectives have one order.

These groups are not made with `torch.distributed.new_group`, because torch names a group by its
ranks and by the *number* of groups that the process has. Ranks whose garbage collectors drop a
group at different moments would wait for each other under different names, or find the addresses of
a group that has ended. torch keeps no record of our groups, so `destroy_process_group()` leaves
them alone.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout

from manyhands._ranks import presence
from manyhands._ranks.dry_run import DryGroup, dry_group
from manyhands._ranks.message_box import MessageBox
from manyhands._ranks.sockets import (
    TCP_CLOSE,
    WatchedSocket,
    forget_sockets,
    listening_sockets,
    shut_connections,
    watched_sockets,
)
from manyhands._warn import warn

Gather: TypeAlias = Callable[[list[float]], list[list[float]]]  # numbers, over some ranks
FIRST_PAUSE = 0.001  # seconds between two checks for users of a group, at first
LONGEST_PAUSE = 1.0  # and later
STUCK = 0.3  # seconds between two looks for sockets that keep a group from ending
SHUT_WITHIN = 1.0  # seconds in which gloo closes connections that have been shut

CALL = "Call it on every worker."
TAG = 7060  # of the messages that open connections

_making_devices = threading.Lock()

# The newest prefixes that this rank has used, by name. Weak: a store is a server's port.
_serials: weakref.WeakKeyDictionary[Store, Counter[str]] = weakref.WeakKeyDictionary()


def name_of_ranks(ranks: Sequence[int]) -> str:
    """Return a name for these ranks that is short, however many they are: it goes into keys."""
    return hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]


def new_prefix(store: Store, kind: str, ranks: Sequence[int], gather: Gather) -> str:
    """Return a prefix for keys that these ranks have not used: the same on each of them."""
    serials = _serials.setdefault(store, Counter())
    name = f"manyhands/{kind}/{name_of_ranks(ranks)}"
    newest = gather([float(serials[name])])  # may differ where a rank once failed
    serial = int(max(number for (number,) in newest)) + 1
    serials[name] = serial
    return f"{name}/{serial}"


@dataclass
class HeldGroup:
    """A group of our own, on its way from its maker to `GroupCloser`, which drops it."""

    group: Any  # None once it has been dropped
    epolls: frozenset[int] = frozenset()  # on which the threads of gloo wait for its sockets
    process: int = field(default_factory=os.getpid)


class Lease:
    """Keeps a group of our own alive. An object that keeps `group` keeps the lease as well."""

    def __init__(self, held: HeldGroup, ranks: tuple[int, ...]) -> None:
        self.group: dist.ProcessGroup = held.group
        self.ranks = ranks  # among all processes
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
    """Return a new gloo group of these ranks. Call it on each of them."""
    # `pairs`: they will exchange slices, or broadcast; else they pass messages on in a ring.
    own_store = PrefixStore(new_prefix(store, "group", ranks, gather), store)
    size = len(ranks)
    dry = dry_group()
    if dry is not None:
        return Lease(HeldGroup(DryGroup(rank, size, dry.counted)), tuple(ranks))
    held = make_gloo(own_store, rank, size, timeout or default_pg_timeout)
    # In the object that torch has around every backend, so that profilers see its collectives.
    group = dist.ProcessGroup(own_store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, held.group)
    held.group = group
    lease = Lease(held, tuple(ranks))
    # A barrier, too: a rank that drops the group before all have connected would break it.
    if pairs:
        open_pairs(group, rank, size)
    else:
        group.allreduce([torch.zeros(1, device="cpu")]).wait()
    return lease


def open_pairs(group: Any, rank: int, size: int) -> None:
    """Let all ranks exchange a message with each other, which connects them."""
    works = []
    for turn in range(1, size):  # on all ranks in the same order
        works.append(group.recv([torch.empty(1, device="cpu")], (rank - turn) % size, TAG))
        works.append(group.send([torch.empty(1, device="cpu")], (rank + turn) % size, TAG))
    for work in works:
        work.wait()


def make_gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str = "") -> HeldGroup:
    """Return a gloo group that connects two ranks when they first exchange a message."""
    make: Any = dist.ProcessGroupGloo  # torch's types leave its options out
    options = make._Options()
    options._timeout = timeout
    with _making_devices:  # torch does not say which epolls belong to a device
        before = listening_sockets()
        options._devices = gloo_devices(host)
        after = listening_sockets()
    epolls = {after[inode] for inode in after.keys() - before.keys()}
    return HeldGroup(make(store, rank, size, options), frozenset(epolls))


def gloo_devices(host: str = "") -> list[Any]:
    """Return the network interfaces of a group; raise RuntimeError if there are none."""
    make: Any = dist.ProcessGroupGloo

    def devices(lazy: bool) -> list[Any]:
        # As torch does, which reads this variable only where it makes the devices itself.
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        if names:
            return [make.create_device(interface=n, lazy_init=lazy) for n in names.split(",")]
        if host:
            return [make.create_device(hostname=host, lazy_init=lazy)]
        return [make.create_default_device(lazy_init=lazy)]

    try:
        return devices(lazy=True)
    except RuntimeError:  # only TCP can: not libuv (macOS, Windows), and not TLS
        return devices(lazy=False)


class RollCall:
    """Waits until all ranks make the same call, outside of any collective.

    For calls that lead to a collective, and that a script of other people's may make on one rank
    alone: that rank then gets an error, and does not wait for a collective that never comes.
    """

    # Seconds. Other ranks may be writing files meanwhile.
    warn_after = 30.0
    give_up_after = 600.0
    look_after = 10.0  # until the first check whether the missing ranks can still come

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        prefix: str = "manyhands/call",
        ranks: Sequence[int] = (),
    ) -> None:
        self.box = MessageBox(store, prefix)
        self._rank = rank
        self._size = size
        self._ranks = ranks  # among all processes, if they are known

    def wait(self, call: str, in_vain: Callable[[], str] = str) -> None:
        """Wait until all ranks are here; warn if that takes long, and raise if they do not come."""
        # `in_vain` may know earlier that they will not, and returns the error's message then.
        began = time.monotonic()
        warned = False
        pause = FIRST_PAUSE
        count = self.box.count("", 1)
        everyone = -(-count // self._size) * self._size  # the count once all ranks have called
        first = count == everyone - self._size + 1
        if count < everyone:
            self.box.put(f"/{self._rank}", str(everyone))
        if first and self._size > 1:
            self._note_problem("")
        others = presence.Presence(self.box.store)
        while count < everyone:
            waited = time.monotonic() - began
            problem = ""
            if waited > self.look_after:
                problem = in_vain()
                if not problem and others.may_look():
                    problem = self._look_for_missing(others, call, everyone, first)
            late = waited > self.give_up_after
            if not problem and (late or (waited > self.warn_after and not warned)):
                missing = self._missing(everyone) if first else []  # all would ask too often
                who = f"rank(s) {missing[:8]}"
                if not missing:
                    who = f"{everyone - count} of {self._size} ranks"
                if late:
                    problem = f"{who} have not called {call} within {waited:.3g} s. {CALL}"
                else:
                    warned = True
                    warn(f"{call} waits: {who} have not called it. {CALL}")
            if problem and self._leave(everyone):
                raise RuntimeError(problem)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if waited < self.look_after:
                pause = min(pause, 0.05)
            count = self.box.count("", 0)

    def _look_for_missing(
        self, others: presence.Presence, call: str, everyone: int, first: bool
    ) -> str:
        """Return an error's message if the missing ranks will not come, else ""."""
        if not self._ranks:
            return ""
        if first:
            reason = others.why_absent([self._ranks[rank] for rank in self._missing(everyone)])
            self._note_problem(reason)
        else:  # the first to come looks for all
            number, reason = json.loads(self.box.read("/first"))
            reason = reason or others.why_absent([self._ranks[number]])
        return reason and f"rank {self._rank} has called {call}, and {reason}. {CALL}"

    def _note_problem(self, reason: str) -> None:
        """Write, on the first rank to come, that it is the first, and its `reason`."""
        self.box.put("/first", json.dumps([self._rank, reason]))

    def _missing(self, everyone: int) -> list[int]:
        return [n for n in range(self._size) if self.box.read(f"/{n}") != str(everyone)]

    def _leave(self, everyone: int) -> bool:
        """Return whether this rank could take back that it was here, before all were."""
        if self.box.count("", -1) < everyone - 1:
            return True
        self.box.count("", 1)  # the last one has come in this moment
        return False


def _close_connections(epolls: Collection[int]) -> bool:
    """Shut a group's connections; return whether gloo's thread has closed all of them."""
    deadline = time.monotonic() + SHUT_WITHIN
    while connections := shut_connections(epolls):
        if time.monotonic() > deadline:
            # One that never connected has no owner that could close it (see `_end_loop`).
            return all(connection.state == TCP_CLOSE for connection in connections)
        time.sleep(FIRST_PAUSE)
    return True


def _end_loop(epolls: Collection[int], dropped: threading.Event) -> None:
    """Let gloo's thread end that waits on these epolls, while the group it belongs to is dropped.

    It ends as soon as no socket has anything to say. After a cut one may be left that was never
    connected, which always has (torch 2.13). Then the thread is busy, and never ends.
    """
    seen: set[WatchedSocket] = set()
    while not dropped.wait(STUCK):
        now = {each for each in watched_sockets(epolls) if each.state == TCP_CLOSE}
        forget_sockets(seen & now)  # not those that are about to be connected
        seen = now


def _keep_for_ever(group: object) -> None:
    """Leave a group to the end of the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class GroupCloser:
    """Closes groups that have no users any more, each in a separate thread.

    A thread that returns from C++ while Python ends aborts the process. So no thread drops a group
    then, and a thread that drops one, connects one or waits in one is awaited, for a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._closed = False

    def close_when_unused(self, held: HeldGroup) -> None:
        """Drop this group once it has no other user; return at once."""
        if held.process == os.getpid() and not self._closed:
            thread = threading.Thread(target=self._drop, args=(held,), name="manyhands end")
            thread.daemon = True
            try:
                thread.start()
                return
            except RuntimeError:  # Python is ending, and (from 3.12 on) starts no more threads
                pass
        # The group's threads belong to the process that made it, and the system ends them with it.
        # A forked child would wait for them for ever, and at Python's end it is too late to wait.
        _keep_for_ever(held.group)

    def _drop(self, held: HeldGroup) -> None:
        """Wait, in a thread, until the group has no other user, and let it end."""
        pause = FIRST_PAUSE
        while sys.getrefcount(held.group) > 2 or not self._enter():  # the field, and the call
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        # While gloo ends a group, it closes sockets without taking them off its epoll. Where a
        # forked process has copies of them, such as a DataLoader's worker, the epoll still reports
        # them, and gloo aborts this process (torch 2.13). So the connections are closed first.
        # A message that no rank waits for any longer fails then.
        if not _close_connections(held.epolls):
            _keep_for_ever(held.group)
            return
        # Under numbers that no other epoll gets when gloo closes these.
        epolls = [os.dup(epoll) for epoll in held.epolls]
        dropped = threading.Event()
        with suppress(RuntimeError):  # Python is ending, as above
            threading.Thread(target=_end_loop, args=(epolls, dropped), daemon=True).start()
        held.group = None
        dropped.set()
        for epoll in epolls:
            os.close(epoll)

    def _enter(self) -> bool:
        """Return whether there is still time to drop a group, and note that this thread does so."""
        with self._lock:
            if not self._closed:
                self._under_way.add(threading.current_thread())
            return not self._closed

    def await_at_end(self, thread: threading.Thread) -> None:
        """Wait for this thread in `close`: it will use a group. Call this before it starts."""
        self._under_way.add(thread)

    def close(self) -> None:
        """As Python ends (`atexit`): drop no more groups, and wait for the threads under way."""
        with self._lock:
            self._closed = True
        until = time.monotonic() + 1.0  # a slower one waits for a message that does not come
        for thread in list(self._under_way):
            if thread.ident is not None:  # it could be started
                thread.join(max(0.0, until - time.monotonic()))


group_closer = GroupCloser()
weakref.finalize(group_closer, int)  # registers weakref's exit function, which is to run after ours
atexit.register(group_closer.close)
