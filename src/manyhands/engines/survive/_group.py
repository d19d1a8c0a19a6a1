"""Change the members of torch's default process group.

All uses of torch's experimental functions (`_reconfigure` and `_get_reconfigure_handle`, torch
2.15) are in this file.

    group = ElasticGroup(connection, backend)      a group of this rank alone
    transport = group.connect(...)                 with the members of a generation (`Transport`)
    group.abort()                                  fail all messages, here and on other members

After an abort, this rank is alone in the group, and collectives return immediately. Callers must
therefore note the failure before they abort.

torch exchanges the addresses of the members through the store of the group. Our store signs the
addresses. `abort` shuts down the connections, because a pending message would otherwise keep the
connections of the former members.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import _world

from manyhands._ranks.groups import group_closer, listening_sockets, shut_connections
from manyhands.blocks.crew._store import PREFIX, Signer, own_address
from manyhands.blocks.crew._transport import SignedStore, StoreConnection

CONNECT_TIMEOUT = 30.0  # seconds within which all members must connect
# Seconds, doubled after each failure. gloo makes five attempts to reach a dead member, even after
# an abort. It also limits `recv` to this time if `wait` has no timeout.
FIRST_ATTEMPT = 0.5
LOOK = 0.002  # seconds between two looks for the address of a member
NEEDS_TORCH = "2.15"
SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


def check_torch() -> None:
    if not hasattr(dist, "_reconfigure"):
        raise RuntimeError(
            f"survive=True needs torch {NEEDS_TORCH} or later, which can change the members of a "
            f"process group, got torch {torch.__version__}. Update torch, or train in blocks with "
            "a crew (mh.DiLoCo)."
        )


class ElasticGroup:
    def __init__(self, connection: StoreConnection, backend: str) -> None:
        self._store = GroupStore(connection.acquire(), connection.signer)
        interface = interface_of(own_address(connection.store))
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        before = listening_sockets()
        make: Any = dist.init_process_group  # torch 2.13 lacks `enable_reconfigure`
        make(backend, store=self._store, rank=0, world_size=1, enable_reconfigure=True)
        after = listening_sockets()
        # The epolls on which gloo's threads wait for the sockets of the group.
        self._epolls = {after[inode] for inode in after.keys() - before.keys()}
        self.attempt = FIRST_ATTEMPT  # seconds
        self.change([self.handle], secrets.randbits(48))

    @property
    def handle(self) -> str:
        reconfiguration: Any = dist
        handle: str = reconfiguration._get_reconfigure_handle()
        return handle

    def change(self, handles: Sequence[str], number: int) -> None:
        """Let the group have these members, in rank order. The number must be new."""
        reconfiguration: Any = dist
        limit = timedelta(seconds=self.attempt)
        if len(handles) == 1:
            self._store.local = {}  # the store may be lost or unreachable
        try:
            reconfiguration._reconfigure(number, list(handles), timeout=limit).wait()
        finally:
            self._store.local = None
        # torch reads the members of the default group here.
        world: Any = dist.group.WORLD
        _world.pg_group_ranks[world] = {rank: rank for rank in range(len(handles))}

    def abort(self) -> None:
        if not dist.is_initialized():  # the script has destroyed the group
            return
        shut_connections(self._epolls)
        self.change([self.handle], secrets.randbits(48))

    def connect(
        self, connection: StoreConnection, prefix: str, rank: int, size: int, timeout: float
    ) -> GroupTransport:
        """Start to connect the members of a generation. Its interface is `GlooTransport`'s."""
        return GroupTransport(self, connection, self._store, prefix, rank, size)


def destroy() -> None:
    """Destroy the group, at the end of the process."""
    if not dist.is_initialized():
        return
    # A thread, because this waits for messages that gloo has forgotten (`_messages.py`).
    thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
    thread.start()
    thread.join(1.0)


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # the interface has no IPv4 address
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return ""  # IPv6, or a second address


class GroupTransport:
    """Connects the members in a separate thread, because connecting waits for all members."""

    def __init__(
        self,
        elastic: ElasticGroup,
        connection: StoreConnection,
        store: GroupStore,
        prefix: str,
        rank: int,
        size: int,
    ) -> None:
        self.group: dist.ProcessGroup | None = None  # set after all members have connected
        self.error: Exception | None = None
        self._elastic = elastic
        self._connection = connection
        self._store = store
        self._lock = threading.Lock()
        self._released = False
        store.canceled.clear()
        self._thread = threading.Thread(
            target=self._connect, args=(prefix, rank, size), name="manyhands survive", daemon=True
        )
        group_closer.await_at_end(self._thread)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def abort(self) -> None:
        with self._lock:  # the training thread and the watching thread may abort concurrently
            if self._released:
                shut_connections(self._elastic._epolls)  # a message may have started since
                return
            self._released = True
            self._store.canceled.set()
            while self._thread.is_alive():
                shut_connections(self._elastic._epolls)
                self._thread.join(LOOK)
            self._store.canceled.clear()
            self.group = None
            self._elastic.abort()

    def release(self) -> None:
        self.abort()

    def _connect(self, prefix: str, rank: int, size: int) -> None:
        try:
            if self._store.disconnected:
                self._store.reconnect(self._connection.acquire())
            names = [f"{prefix}/{other}" for other in range(size)]
            self._store.publish(names[rank], self._elastic.handle)
            handles = [self._store.published(name) for name in names]
            # Above the random numbers of ranks that are alone.
            generation = int(prefix.split("/")[2])
            self._elastic.change(handles, generation + (1 << 52))
            self.group = dist.group.WORLD
            self._elastic.attempt = FIRST_ATTEMPT
        except Exception as error:
            if not self._store.canceled.is_set():
                self._elastic.attempt = min(2 * self._elastic.attempt, CONNECT_TIMEOUT)
            self._store.disconnected = isinstance(error, dist.DistError)
            self.error = error


class GroupStore(SignedStore):
    """The store of the default group. Waiting calls end when `canceled` is set."""

    def __init__(self, client: TCPStore, signer: Signer, prefix: str = PREFIX + "torch") -> None:
        super().__init__(client, prefix, signer, CONNECT_TIMEOUT)
        self.canceled = threading.Event()
        self.disconnected = False  # the connection failed; a store may answer a new connection
        self.local: dict[str, str] | None = None  # replaces the store, for a rank alone
        self._clones: list[GroupStore] = []  # torch keeps only the C++ part

    def reconnect(self, client: TCPStore) -> None:
        self._client = client
        self.disconnected = False

    def set(self, key: str, value: bytes | str) -> None:
        if self.local is None:
            super().set(key, value)
        else:
            self.local[key] = value if isinstance(value, str) else value.hex()

    def text(self, key: str, timeout: timedelta | None = None) -> str:
        if self.local is not None:
            return self.local[key]
        key = self._prefix + key
        # Not `timeout`, the time of an attempt.
        until = time.monotonic() + self._timeout.total_seconds()
        while not self.canceled.is_set():
            if self._client.check([key]):
                text = self._signer.verify(key, self._client.get(key))
                if text is not None:
                    return text
            if time.monotonic() > until:
                break
            time.sleep(LOOK)
        raise RuntimeError(f"no member has written {key}")

    def publish(self, key: str, text: str) -> None:
        self.set(key, text.encode())

    def published(self, key: str) -> str:
        return self.get(key).decode()

    # torch calls these methods from C++.

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write a value if there is none. torch claims the number of a reconfiguration."""
        if self.local is not None:
            return desired.encode() if isinstance(desired, str) else desired
        key = self._prefix + key
        value = desired if isinstance(desired, str) else desired.hex()
        signed = self._signer.sign(key, value)
        found = self._client.compare_set(key, "", signed)
        return bytes.fromhex(self._signer.verify(key, found) or "")

    def clone(self) -> GroupStore:
        client: Any = self._client  # the type stubs lack `clone`
        made = GroupStore(client.clone(), self._signer, self._prefix.rstrip("/"))
        made.canceled = self.canceled
        self._clones = [*self._clones[-4:], made]
        return made
