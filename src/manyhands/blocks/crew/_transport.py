"""Connect the members of a generation in a gloo group that can be aborted.

gloo has no way to end a message that waits for a stopped process: `abort` returns at once and
changes nothing (torch 2.13), so the message waits until the timeout. Therefore we shut down the
connections on which the group's threads wait (on Linux). Every waiting message then fails at once,
at both ends.

There is one rare exception. If gloo is about to send a message and the sending thread itself finds
the connection broken, gloo forgets the message. A thread that waits for it waits until the
timeout, in a thread of the group, and the group's destructor waits for that thread. So a group is
destroyed in a separate thread.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from manyhands._ranks.groups import (
    HeldGroup,
    gloo_devices,
    group_closer,
    make_gloo,
    open_pairs,
)
from manyhands._ranks.sockets import shut_connections
from manyhands.blocks.crew._store import UNSIGNED, Signer, connect_to_store, parse_address

log = logging.getLogger("manyhands")

# Seconds between two checks of something that is waited for: at first, and in a long wait.
FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.03
CROWD = 256  # members that may each look so often; more of them look more rarely
CONNECT_TIMEOUT = 30.0  # seconds: if it takes longer, a living member has not come


def next_pause(pause: float, members: int) -> float:
    """Return how long to wait before the next look at the store, after this pause."""
    return min(1.5 * pause, LONGEST_PAUSE * max(1.0, members / CROWD))


class StoreConnection:
    """The connection to the store through which groups are made, kept between two groups.

    A new connection is expensive where name look-ups are slow: torch looks up the other side's name
    at both ends, and the store answers no other call meanwhile.
    """

    def __init__(self, store: str, signer: Signer) -> None:
        self.store = store
        self.signer = signer
        self._client: TCPStore | None = None
        self._failures = 0  # of groups, since one has connected

    def acquire(self) -> TCPStore:
        """Return the connection; a new one if the last user has not put it back."""
        # A group that never connects keeps its client: a client cannot be shared while it waits.
        client = self._client
        self._client = None
        return connect_to_store(self.store) if client is None else client

    def put_back(self, client: TCPStore) -> None:
        self._client = client

    def forget(self) -> None:
        """Drop the connection: the store has been lost."""
        self._client = None

    def count_failure(self, connected: bool, error: Exception | None, number: int) -> None:
        """Log that worker `number` cannot connect: only the 2nd, 4th, 8th, ... time in a row."""
        # Once is no news, as a member may have died meanwhile.
        self._failures = 0 if connected else self._failures + 1
        tell = self._failures > 1 and self._failures & (self._failures - 1) == 0
        if tell and error is not None:
            log.warning(
                "worker %d cannot connect to the others, and tries again: %s", number, error
            )


class SignedStore(Store):
    """A torch store through which members find each other's addresses, and no stranger's."""

    def __init__(self, client: TCPStore, prefix: str, signer: Signer, timeout: float) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix + "/"
        self._signer = signer
        self._timeout = timedelta(seconds=timeout)
        self._written: dict[str, str] = {}  # by this member, and by key
        self._known: dict[str, str] = {}  # texts of members, by key

    # gloo calls these three from C++, with addresses in bytes.

    def set(self, key: str, value: bytes | str) -> None:
        text = value if isinstance(value, str) else value.hex()
        self._written[key] = text
        key = self._prefix + key
        self._client.set(key, self._signer.sign(key, text))

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self.text(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.text(key, timeout)

    def text(self, key: str, timeout: timedelta | None = None) -> str:
        """Return the text of a member under this key; wait until one has written it."""
        if key in self._known:
            return self._known[key]
        key = self._prefix + key
        timeout = timeout or self._timeout
        until = time.monotonic() + timeout.total_seconds()
        wrong = b""
        while True:
            self._client.wait([key], timeout)
            value = self._client.get(key)
            text = self._signer.verify(key, value)
            if text is not None:
                return text
            if value != wrong:  # count each forged value once, not at every look
                wrong = value
                self._signer.ignore(key, UNSIGNED)
            if time.monotonic() > until:
                raise RuntimeError(f"no member has written {key} for {timeout.total_seconds():g} s")
            time.sleep(0.05)

    def exchange(self, rank: int, size: int) -> None:
        """Read all members' addresses at once, for gloo."""
        self.set(f"member/{rank}", json.dumps(self._written))
        keys = [f"{self._prefix}member/{other}" for other in range(size)]
        self._client.wait(keys, self._timeout)
        texts = map(self._signer.verify, keys, self._client.multi_get(keys))
        for other, text in enumerate(texts):
            self._known |= json.loads(text or self.text(f"member/{other}"))


class GlooTransport:
    """A gloo group, connected on a separate thread because it waits for all other members."""

    def __init__(
        self, connection: StoreConnection, prefix: str, rank: int, size: int, timeout: float
    ) -> None:
        self.group: dist.ProcessGroup | None = None  # once all members have connected
        self._held: HeldGroup | None = None  # the group from the moment it is made
        self.error: Exception | None = None
        self._aborted = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._connect,
            args=(connection, prefix, rank, size, timeout),
            name="manyhands transport",
            daemon=True,
        )
        group_closer.await_at_end(self._thread)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to this long; return whether there is a group or an error."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def abort(self) -> None:
        """Make every message that waits in the group fail, here and at the other end."""
        self._aborted = True
        with self._lock:  # the group is not dropped meanwhile
            if self._held is not None:
                shut_connections(self._held.epolls)

    def release(self) -> None:
        """Abort, and let the group be destroyed without a wait."""
        # Otherwise the thread that drops the last reference, even by garbage collection, waits for
        # the group's threads.
        self.abort()
        with self._lock:  # the connecting thread may release too, if the group came too late
            held = self._held
            self._held = None
            self.group = None
        if held is not None:
            group_closer.close_when_unused(held)

    def _connect(
        self, connection: StoreConnection, prefix: str, rank: int, size: int, timeout: float
    ) -> None:
        """Connect the generation's members by gloo, in a thread, because that may hang."""
        try:
            client = connection.acquire()
            seconds = min(timeout, CONNECT_TIMEOUT)
            store = SignedStore(client, prefix, connection.signer, seconds)
            limit = timedelta(seconds=seconds)
            held = make_gloo(store, rank, size, limit, own_address(connection.store))
            self._held = held
            store.exchange(rank, size)
            open_pairs(held.group, rank, size)  # returns when all members have connected
            held.group._set_default_timeout(timedelta(seconds=timeout))
            connection.put_back(client)
            self.group = held.group
            if self._aborted:  # before the group existed, so abort() could not reach its sockets
                self.release()
        except Exception as error:
            self.error = error


def check_interface() -> None:
    """Raise if gloo cannot use the interface that the user names: no group would ever connect."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        try:
            gloo_devices()
        except RuntimeError as error:
            here = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                "GLOO_SOCKET_IFNAME must name a network interface of this host that has an "
                f"address, got {names!r}. The host has {here}."
            ) from error


def own_address(store: str) -> str:
    """Return the address of this host's interface from which the store is reached."""
    host, port = parse_address(store)
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # a datagram socket only picks a route: nothing is sent
        return str(probe.getsockname()[0])
