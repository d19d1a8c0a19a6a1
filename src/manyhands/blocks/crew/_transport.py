"""Connect the members of a generation by a gloo group, through the crew's store.

    connection = StoreConnection("10.0.0.1:29400", signer)
    transport = GlooTransport(connection, "group/3", rank, size, timeout)
    transport.wait(seconds)            whether the attempt to connect has ended
    transport.group                    the group, or None after a failure
    transport.abort()                  fail all pending messages, here and on other members
    transport.release()                also destroy the group, in the background

gloo cannot cancel a message to a suspended process (torch 2.13: `abort` has no effect, and the
message waits for the timeout). On Linux, we therefore shut down the connections of the group, and
every pending message fails at both ends. In rare cases gloo forgets a message on a broken
connection. The destructor of the group then waits for the timeout, so a separate thread destroys
groups.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from manyhands._ranks.groups import (
    HeldGroup,
    gloo_devices,
    group_closer,
    make_gloo,
    open_pairs,
    shut_connections,
)
from manyhands.blocks.crew._store import UNSIGNED, Signer, connect_to_store, own_address

CONNECT_TIMEOUT = 30.0  # seconds within which all members must connect

log = logging.getLogger("manyhands")


class Transport(Protocol):
    """Connects the members of a generation."""

    group: dist.ProcessGroup | None  # set after all members have connected
    error: Exception | None

    def wait(self, seconds: float) -> bool:
        """Return whether the attempt to connect has ended."""

    def abort(self) -> None:
        """Fail all pending messages, here and on other members."""

    def release(self) -> None:
        """Abort, and give up the group."""


class GlooTransport:
    """A gloo group that connects in a separate thread, because connecting waits for all members."""

    def __init__(
        self, connection: StoreConnection, prefix: str, rank: int, size: int, timeout: float
    ) -> None:
        self.group: dist.ProcessGroup | None = None  # set after all members have connected
        self._held: HeldGroup | None = None  # set when the group is created
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
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def abort(self) -> None:
        self._aborted = True
        with self._lock:  # prevents a concurrent release
            if self._held is not None:
                shut_connections(self._held.epolls)

    def release(self) -> None:
        """Abort, and destroy the group in the background."""
        # The thread that drops the last reference waits for the group's threads, so drop the
        # reference in a thread of `group_closer`.
        self.abort()
        with self._lock:  # the connecting thread may release concurrently
            held = self._held
            self._held = None
            self.group = None
        if held is not None:
            group_closer.close_when_unused(held)

    def _connect(
        self, connection: StoreConnection, prefix: str, rank: int, size: int, timeout: float
    ) -> None:
        try:
            client = connection.acquire()
            seconds = min(timeout, CONNECT_TIMEOUT)
            store = SignedStore(client, prefix, connection.signer, seconds)
            limit = timedelta(seconds=seconds)
            held = make_gloo(store, rank, size, limit, own_address(connection.store))
            self._held = held
            store.exchange(rank, size)
            open_pairs(held.group, rank, size)  # returns after all members have connected
            held.group._set_default_timeout(timedelta(seconds=timeout))
            connection.put_back(client)
            self.group = held.group
            if self._aborted:  # abort() found no sockets before the group existed
                self.release()
        except Exception as error:
            self.error = error


class StoreConnection:
    """Reusable connection to the store for creating gloo groups.

    New connections are expensive if name lookups are slow: torch looks up the peer's name at both
    ends, which blocks the store.
    """

    def __init__(self, store: str, signer: Signer) -> None:
        self.store = store
        self.signer = signer
        self._client: TCPStore | None = None
        self._failures = 0  # consecutive groups that failed to connect

    def acquire(self) -> TCPStore:
        # A client cannot be shared while a call waits, as in a group that never connects.
        client = self._client
        self._client = None
        return connect_to_store(self.store) if client is None else client

    def put_back(self, client: TCPStore) -> None:
        self._client = client

    def forget(self) -> None:
        self._client = None

    def count_failure(self, connected: bool, error: Exception | None, number: int) -> None:
        """Log the 2nd, 4th, 8th, ... consecutive failure of worker `number` to connect."""
        # A single failure is expected if a member dies.
        self._failures = 0 if connected else self._failures + 1
        tell = self._failures > 1 and self._failures & (self._failures - 1) == 0
        if tell and error is not None:
            log.warning(
                "worker %d cannot connect to the other workers and retries: %s", number, error
            )


class SignedStore(Store):
    """A torch store for gloo addresses that only members can write."""

    def __init__(self, client: TCPStore, prefix: str, signer: Signer, timeout: float) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix + "/"
        self._signer = signer
        self._timeout = timedelta(seconds=timeout)
        self._written: dict[str, str] = {}  # texts of this member, by key
        self._known: dict[str, str] = {}  # texts of all members, by key

    # gloo calls `set`, `get` and `wait` from C++, with addresses as bytes.

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
            if value != wrong:  # count each forged value a single time
                wrong = value
                self._signer.ignore(key, UNSIGNED)
            if time.monotonic() > until:
                raise RuntimeError(f"no member has written {key} for {timeout.total_seconds():g} s")
            time.sleep(0.05)

    def exchange(self, rank: int, size: int) -> None:
        self.set(f"member/{rank}", json.dumps(self._written))
        keys = [f"{self._prefix}member/{other}" for other in range(size)]
        self._client.wait(keys, self._timeout)
        texts = map(self._signer.verify, keys, self._client.multi_get(keys))
        for other, text in enumerate(texts):
            self._known |= json.loads(text or self.text(f"member/{other}"))


def check_interface() -> None:
    """Raise if gloo cannot use the network interface in GLOO_SOCKET_IFNAME."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        try:
            gloo_devices()
        except RuntimeError as error:
            here = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                "GLOO_SOCKET_IFNAME must name a network interface of this host that has an "
                f"address, got {names!r}. The host has {here}."
            ) from error
