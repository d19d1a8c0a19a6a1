"""The connections of one generation: a gloo group that can be given up.

gloo has no way to end a message that waits for somebody who was stopped: `abort` returns at once
and changes nothing (torch 2.13), and whoever waits does so until the timeout. So we know which of
the process's sockets are the group's, and shut them: every message that waits fails at once, here
and at the other end.

All but a few: gloo forgets a message that it was about to send in the thread that finds the
connection broken, and whoever waits for that one does so until the timeout, in a thread of the
group. The end of the group waits for the thread. So a group ends in a thread of its own.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from manyhands._core.groups import group_closer
from manyhands.blocks.crew._store import UNSIGNED, Signer, address, connect

CONNECTING = 30.0  # seconds: if it takes longer, one that is alive has not come


class StoreConnection:
    """The connection to the store through which groups are made, kept from one to the next.

    A new one is dear where names are slow to look up: torch asks for the name of whoever connects,
    at both ends, and the store answers nobody meanwhile.
    """

    def __init__(self, store: str, signer: Signer) -> None:
        self.store = store
        self.signer = signer
        self._client: Any = None

    def take(self) -> Any:
        """The connection; it may be in use for long, so there is none until it is put back."""
        client, self._client = self._client, None
        return connect(self.store) if client is None else client

    def put_back(self, client: Any) -> None:
        self._client = client


class SignedStore(Store):
    """A store in which gloo's members find each other's addresses, and no stranger's."""

    def __init__(self, client: Any, prefix: str, signer: Signer, timeout: float) -> None:
        super().__init__()
        self._client, self._prefix, self._signer = client, prefix + "/", signer
        self._timeout = timedelta(seconds=timeout)

    def set(self, key: str, value: bytes | str) -> None:
        text = value if isinstance(value, str) else value.hex()
        key = self._prefix + key
        self._client.set(key, self._signer.sign(key, text))

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self.text(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.text(key, timeout)

    def text(self, key: str, timeout: timedelta | None = None) -> str:
        """What a member has written under this key, once one has."""
        key, timeout = self._prefix + key, timeout or self._timeout
        until, wrong = time.monotonic() + timeout.total_seconds(), b""
        while True:
            self._client.wait([key], timeout)
            value = self._client.get(key)
            text = self._signer.opened(key, value)
            if text is not None:
                return text
            if value != wrong:
                wrong = value
                self._signer.ignore(key, UNSIGNED)
            if time.monotonic() > until:
                raise RuntimeError(f"no member has written {key} for {timeout.total_seconds():g} s")
            time.sleep(0.05)


Ends = tuple[Any, Any]  # of a socket: its own address and the other one


class Links:
    """A group in the making, on a thread of its own, because it waits for all the others."""

    def __init__(
        self, door: StoreConnection, place: str, rank: int, size: int, timeout: float
    ) -> None:
        self.group: Any = None
        self.error: Exception | None = None
        self._ends: set[Ends] = set()
        self._given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._connect,
            args=(door, place, rank, size, timeout),
            name="manyhands links",
            daemon=True,
        )
        self._thread.start()

    def done(self, seconds: float) -> bool:
        """Wait up to so long, and say whether there is a group or an error."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """End what waits in the group, on this side and on the other."""
        self._given_up = True
        for end in _sockets():
            with closing(end):
                if _both(end) in self._ends:
                    with suppress(OSError):  # the other side has ended it since
                        end.shutdown(socket.SHUT_RDWR)

    def let_go(self) -> None:
        """Give up, and have the group end when nobody holds it any more, without a wait for that.

        Whoever dropped the last reference, be it the garbage collector, would wait otherwise.
        """
        self.give_up()
        with self._lock:
            held, self.group = [self.group], None
        if held[0] is not None:
            group_closer.close_when_unused(held, os.getpid())

    def _connect(
        self, door: StoreConnection, prefix: str, rank: int, size: int, timeout: float
    ) -> None:
        try:
            client = door.take()
            place = SignedStore(client, prefix, door.signer, min(timeout, CONNECTING))
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=min(timeout, CONNECTING))
            before, others = set(_listening()), set(_connections())
            if os.environ.get("GLOO_SOCKET_IFNAME"):
                options._devices = [gloo.create_default_device()]
            else:
                options._devices = [gloo.create_device(hostname=own_address(door.store))]
            doors = [port for port in _listening() if port not in before]  # another's too, perhaps
            place.set(f"door/{rank}", " ".join(map(str, doors)))
            group = gloo(place, rank, size, options)
            group._set_default_timeout(timedelta(seconds=timeout))
            told = " ".join(place.text(f"door/{other}") for other in range(size))
            ports = set(map(int, told.split()))
            links = (ends for ends in _connections() if ends not in others)
            self._ends = {ends for ends in links if not ports.isdisjoint((ends[0][1], ends[1][1]))}
            door.put_back(client)
            self.group = group
            del group
            if self._given_up:
                self.let_go()
        except Exception as error:
            self.error = error


def own_address(store: str) -> str:
    """The address of this host that the store's is reached from."""
    host, port = address(store)
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


def _sockets() -> Iterator[socket.socket]:
    """The process's internet sockets, each under a second descriptor: close it."""
    for name in os.listdir("/dev/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # gone by now
            continue
        try:
            found = socket.socket(fileno=descriptor)
        except OSError:  # a file
            os.close(descriptor)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6):
            yield found
        else:
            found.close()


def _both(end: socket.socket) -> Ends | None:
    try:
        return end.getsockname()[:2], end.getpeername()[:2]
    except OSError:  # not connected
        return None


def _listening() -> list[int]:
    """The ports at which this process listens."""
    ports = []
    for end in _sockets():
        with closing(end):
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.append(int(end.getsockname()[1]))
    return ports


def _connections() -> Iterator[Ends]:
    """The two ends of each connection of this process."""
    for end in _sockets():
        with closing(end):
            if (ends := _both(end)) is not None:
                yield ends
