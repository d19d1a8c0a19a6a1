"""Process groups of our own, which end with their last user.

Some of our collectives must never be taken for anybody else's: the small vector that a scaling
rule sends at the end of a backward pass, the buckets of a `ShardedDataParallel`, a block's mean
that travels while training goes on. Each of these objects has a gloo group of its own, which costs
a few descriptors and three threads.

    connect   all ranks agree on a serial number, connect, and wait until all have connected
    Lease     what users of the group hold; the group ends when nobody holds the lease any more
    end       in a thread, because the end of a gloo group waits for what is under way in it (a
              crew's groups end the same way)

Two objects never share a group: ranks may issue the collectives of two rules in different orders
(the hooks of two optimizers on one model fire in the order in which they were made).

These groups are not made with `torch.distributed.new_group`, because torch names a group by its
ranks and by the *number* of groups that the process has. Ranks whose garbage collectors drop a
group at different moments would wait for each other under different names, or find the addresses of
a group that has ended. torch keeps no record of our groups, so `destroy_process_group()` leaves
them alone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,
    default_pg_timeout,
)

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 1.0  # seconds between two looks at who still holds a group

# The newest group of these ranks that this rank has made. Weak: a store is a server's port.
_serials: weakref.WeakKeyDictionary[Store, dict[tuple[int, ...], int]] = weakref.WeakKeyDictionary()


class Ranks(Protocol):
    """What a roll call asks of a `RankGroup`, which imports this file."""

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> list[int]: ...

    @property
    def any_device(self) -> torch.device: ...

    def all_gather(self, numbers: list[float], device: torch.device) -> list[list[float]]: ...


class Lease:
    """Keeps a group of our own alive. An object that keeps `group` keeps the lease as well."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks  # among all processes
        weakref.finalize(self, group_closer.close_when_unused, [group], os.getpid())


def connect(
    ranks: Sequence[int],
    rank: int,
    timeout: timedelta | None,
    gather: Callable[[list[float]], list[list[float]]],
) -> Lease:
    """Return a new gloo group of these ranks. Call it on each of them.

    `gather` is an all_gather of numbers over the ranks.
    """
    store = _get_default_store()
    serials = _serials.setdefault(store, {})
    members = tuple(ranks)
    newest = gather([float(serials.get(members, 0))])  # may differ where a rank once failed
    serial = int(max(number for (number,) in newest)) + 1
    serials[members] = serial
    prefix = f"manyhands/{'_'.join(map(str, ranks))}/{serial}"
    place = PrefixStore(prefix, store)
    gloo = dist.ProcessGroupGloo(place, rank, len(ranks), timeout or default_pg_timeout)
    gather([0.0])  # a rank that drops the group before all have connected would break it
    # Around it what torch has around every backend, so that profilers see its collectives too.
    group = dist.ProcessGroup(place, rank, len(ranks))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return Lease(group, members)


class RollCall:
    """Waits until all ranks make the same call, outside of any collective.

    For calls that lead to a collective, and that a script of other people's may make on one rank
    alone: that rank then gets an error, and does not wait for a collective that never comes.
    """

    WARN_AFTER, GIVE_UP_AFTER = 30.0, 600.0  # seconds: a rank may be writing files meanwhile
    LOOK_AFTER = 10.0  # seconds after which the caller looks whether waiting is in vain

    def __init__(self, store: Store, size: int, prefix: str = "manyhands/roll call") -> None:
        self.store, self._size, self.prefix = store, size, prefix

    @classmethod
    def of(cls, ranks: Ranks) -> RollCall:
        """Return a roll call that is not taken for any other of these ranks: on each of them."""
        store = _get_default_store()
        serials = _serials.setdefault(store, {})
        members = (-1, *ranks.ranks)  # apart from the groups of these ranks
        newest = ranks.all_gather([float(serials.get(members, 0))], ranks.any_device)
        serials[members] = serial = int(max(number for (number,) in newest)) + 1
        prefix = f"manyhands/roll call/{'_'.join(map(str, ranks.ranks))}/{serial}"
        return cls(store, ranks.size, prefix)

    def wait(self, call: str, in_vain: Callable[[], str] = str) -> None:
        """Wait until all ranks are here; warn if that takes long, and raise if they do not come.

        `in_vain` may know earlier that they will not, and returns the error's message then.
        """
        began, warned, pause = time.monotonic(), False, FIRST_PAUSE
        count = self.store.add(self.prefix, 1)
        earlier = (count - 1) // self._size * self._size  # of calls that all ranks have made
        while (here := count - earlier) < self._size:
            waited = time.monotonic() - began
            if waited > self.LOOK_AFTER and (problem := in_vain()) and self._leave(earlier):
                raise RuntimeError(problem)
            if waited > self.GIVE_UP_AFTER and self._leave(earlier):
                raise RuntimeError(
                    f"{call} collects something from all {self._size} workers, and only {here} of "
                    f"them called it in {waited:.0f} s. Call it on every worker."
                )
            if waited > self.WARN_AFTER and not warned:
                warned = True
                warnings.warn(
                    f"{call} waits for {self._size - here} of {self._size} workers that have not "
                    "called it. Call it on every worker.",
                    stacklevel=3,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05 if waited < self.LOOK_AFTER else LONGEST_PAUSE)
            count = self.store.add(self.prefix, 0)

    def _leave(self, earlier: int) -> bool:
        """Return whether this rank could take back that it was here, before all were."""
        if self.store.add(self.prefix, -1) < earlier + self._size - 1:
            return True
        self.store.add(self.prefix, 1)  # the last one has come in this moment
        return False


class GroupCloser:
    """Closes groups that nobody uses any more, each in a thread of its own.

    A thread that returns from C++ while Python ends aborts the process. So no thread drops a group
    then, and a thread that is dropping one is waited for, for a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[threading.Thread] = set()
        self._closed = False

    def close_when_unused(self, held: list[object], process: int) -> None:
        """Drop the group in this list once nobody else has it; return at once."""
        if process == os.getpid() and not self._closed:
            thread = threading.Thread(target=self._drop, args=(held,), name="manyhands end")
            thread.daemon = True
            try:
                thread.start()
                return
            except RuntimeError:  # Python is ending, and (from 3.12 on) starts no more threads
                pass
        # The group's threads belong to the process that made it, and the system ends them with it.
        # A forked child would wait for them for ever, and at Python's end it is too late to wait.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held[0]))

    def _drop(self, held: list[object]) -> None:
        pause = FIRST_PAUSE
        while sys.getrefcount(held[0]) > 2 or not self._enter():  # the list, and the call itself
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        held.clear()
        self._under_way.discard(threading.current_thread())

    def _enter(self) -> bool:
        """Return whether there is still time to drop a group, and note that this thread does so."""
        with self._lock:
            if not self._closed:
                self._under_way.add(threading.current_thread())
            return not self._closed

    def close(self) -> None:
        """Drop no more groups: Python is ending."""
        with self._lock:
            self._closed = True
        for thread in list(self._under_way):
            thread.join(1.0)  # longer: it waits for a message that does not come


group_closer = GroupCloser()
weakref.finalize(group_closer, int)  # registers weakref's exit function, which is to run after ours
atexit.register(group_closer.close)
