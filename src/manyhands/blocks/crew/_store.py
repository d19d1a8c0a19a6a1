"""The store of a crew: calls that cannot hang, a heartbeat, and signed values.

A call to a store whose host is frozen or cut off does not return, and cannot be cancelled. So a
thread with its own connection makes the calls. The caller waits until the store has been silent for
`STORE_TIMEOUT` seconds, counted from the start of the unanswered call. Between the calls the thread
writes this worker's heartbeat, whatever the rest of the process does.

    client = StoreClient("10.0.0.1:29400", interval=1.0, signer=signer)
    client.put("name", "value")                # signed
    client.fetch("name")                       # the raw value, or None; never waits for a write
    client.start_heartbeat("heartbeat/3.1")    # from now on, every `interval` seconds
    client.close()

Only a process that knows the run's secret can have written a signed value:

    value = HMAC(secret, key | text) | text    HMAC-SHA256, in hexadecimal

The key is part of what is signed, so a value written for one key is worthless under another. The
signature does not say that a value is the newest of its key. Counters in the text do (of changes,
heartbeats and rounds), and the reader checks them. A value without a valid signature is ignored,
counted and logged.

Two limits on what is used of torch's store. Nothing calls `add`: if a stranger has stored something
that is not a number, `add` fails and breaks the connection. Nothing waits for a key: a stranger may
delete it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from manyhands.errors import StoreLost

SECRET_VARIABLE = "MANYHANDS_SECRET"
SHORTEST_SECRET = 16  # characters
UNSIGNED = "it is not signed with the secret of this run"
SIGNATURE_LENGTH = hashlib.sha256().digest_size * 2  # hexadecimal digits
STORE_TIMEOUT = 30.0  # seconds in which the store must answer, and in which it must be reachable
MISSING = secrets.token_hex(8)  # equals no stored value

Call = tuple[Future[Any], str, tuple[object, ...]]  # its result, the store's method, arguments

log = logging.getLogger("manyhands")


class Signer:
    """Signs and verifies the values of one run."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.ignored = 0  # values that no member can have written

    @classmethod
    def from_environment(cls, secret: str | None = None) -> Signer:
        """Make a signer with this secret, or with the environment's."""
        secret = secret or os.environ.get(SECRET_VARIABLE, "")
        if not secret:
            raise ValueError(
                "a crew's workers sign what they write to the store, and got no secret to sign it "
                f"with. Set {SECRET_VARIABLE} to the same text for all workers of the run, such as "
                '`python -c "import secrets; print(secrets.token_hex())"` prints (`manyhands run` '
                "makes one for the workers of one host)."
            )
        if len(secret) < SHORTEST_SECRET:
            raise ValueError(
                f"the secret of a run ({SECRET_VARIABLE}) must have at least {SHORTEST_SECRET} "
                f"characters, got {len(secret)}. Shorter secrets can be found by trying all."
            )
        return cls(secret)

    def sign(self, key: str, text: str) -> str:
        """Return the value to store under this key."""
        return self._signature(key, text.encode()) + text

    def verify(self, key: str, value: bytes) -> str | None:
        """Return the text of a stored value; None if no member wrote it under this key."""
        signature, text = value[:SIGNATURE_LENGTH], value[SIGNATURE_LENGTH:]
        # compare_digest takes equally long for every wrong signature: timing tells nothing.
        valid = hmac.compare_digest(signature, self._signature(key, text).encode())
        return text.decode() if valid else None

    def verify_or_ignore(self, key: str, value: bytes) -> str | None:
        """Return the text as `verify` does; count and log a value that no member wrote."""
        text = self.verify(key, value)
        if text is None:
            self.ignore(key, UNSIGNED)
        return text

    def ignore(self, key: str, why: str) -> None:
        """Count an ignored value, and log it: only the 1st, 2nd, 4th, 8th, ... of many."""
        self.ignored += 1
        if self.ignored & (self.ignored - 1) == 0:  # a power of 2
            log.warning(
                "a value in the store is ignored (%d so far): %r, because %s. A stranger writes to "
                "the store, or a worker has another secret.",
                self.ignored,
                key,
                why,
            )

    def _signature(self, key: str, text: bytes) -> str:
        # With the key's length in front, no other pair of key and text gives the same message.
        message = f"{len(key)}|{key}|".encode() + text
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


class StoreClient:
    """Calls to the store, one after the other. None of them can hang its caller."""

    def __init__(self, store: str, interval: float, signer: Signer) -> None:
        self.store = store
        self.signer = signer
        self.known_revision = 0  # of the roster; each heartbeat carries it
        self._interval = interval
        self._heartbeat_key: str | None = None
        self._heartbeats = 0
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()  # None ends the thread
        self._error: Exception | None = None
        # The start of the unanswered call, None between calls. The thread writes it, callers read
        # it: one reference, so no lock is needed. Connecting is the first thing to wait for.
        self._waiting_since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="manyhands store", daemon=True)
        self._thread.start()

    def call(self, name: str, *args: object) -> Any:
        """Call the store's method of this name, and return its result."""
        if self._error is not None:
            raise StoreLost(self.store, self._error)
        result: Future[Any] = Future()
        self._calls.put((result, name, args))
        while self._error is None:
            try:
                return result.result(self._seconds_left())
            except FutureTimeout as error:
                if result.done():  # the store's own method has timed out, and this is its error
                    self._error = error
                elif self._seconds_left() <= 0.0:
                    self._error = TimeoutError(f"no answer for {STORE_TIMEOUT:g} s")
            except (dist.DistError, OSError) as error:
                self._error = error
        raise StoreLost(self.store, self._error) from self._error

    def _seconds_left(self) -> float:
        """Return how long the store may still take for the call that it has not answered."""
        since = self._waiting_since
        return (
            STORE_TIMEOUT if since is None else max(0.0, since + STORE_TIMEOUT - time.monotonic())
        )

    def put(self, key: str, text: str) -> None:
        """Store a text, signed."""
        self.call("set", key, self.signer.sign(key, text))

    def fetch(self, key: str) -> bytes | None:
        """Return the stored value, without a look at its signature; None if there is none."""
        # `get` would wait for a missing key. compare_set answers at once: it never matches
        # MISSING, writes nothing, and returns the stored value, or MISSING if there is none.
        value: bytes = self.call("compare_set", key, MISSING, MISSING)
        return None if value == MISSING.encode() else value

    def fetch_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the stored values of several keys, as `fetch` does."""
        if keys and self.call("check", list(keys)):
            return list(self.call("multi_get", list(keys)))  # one round trip for all
        return [self.fetch(key) for key in keys]

    def verify_or_ignore(self, key: str, value: bytes | None) -> str | None:
        """Return the text of a fetched value, if a member wrote it under this key."""
        return None if value is None else self.signer.verify_or_ignore(key, value)

    @staticmethod
    def supports(name: str) -> bool:
        """Return whether this version of torch has a store method of this name."""
        return hasattr(TCPStore, name)

    def start_heartbeat(self, key: str) -> None:
        """Increase the signed counter under this key from now on."""
        self._heartbeats, self._heartbeat_key = 0, key
        self.put(key, self._next_heartbeat())

    def _next_heartbeat(self) -> str:
        self._heartbeats += 1
        return f"{self._heartbeats} {self.known_revision}"

    def close(self) -> None:
        """End the thread, and with it the heartbeat."""
        self._calls.put(None)
        self._thread.join(1.0)  # a thread that hangs in a call is left behind: it is a daemon

    def _run(self) -> None:
        try:
            client = connect_to_store(self.store)
        except Exception as error:
            self._fail(error)
            return
        due = time.monotonic()
        while True:
            self._waiting_since = None
            wait = due - time.monotonic()
            if wait <= 0:  # the heartbeat comes first, so that many calls do not delay it
                due = (now := time.monotonic()) + self._interval
                try:
                    if (key := self._heartbeat_key) is not None:
                        self._waiting_since = now
                        client.set(key, self.signer.sign(key, self._next_heartbeat()))
                except Exception as error:
                    self._fail(error)
                    return
                continue
            try:
                call = self._calls.get(timeout=wait)
            except queue.Empty:
                continue
            if call is None:
                return
            self._waiting_since = time.monotonic()
            result, name, args = call
            try:
                result.set_result(getattr(client, name)(*args))
            except Exception as error:
                result.set_exception(error)

    def _fail(self, error: Exception) -> None:
        """Let every call fail with this error, also calls that are put into the queue just now."""
        self._error = error
        while True:
            try:
                call = self._calls.get(timeout=STORE_TIMEOUT)
            except queue.Empty:
                return
            if call is None:
                return
            call[0].set_exception(error)


def parse_address(store: str) -> tuple[str, int]:
    """Return the host and port of "host:port"."""
    host, colon, port = store.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(f'store is "host:port", such as "10.0.0.1:29400", got {store!r}.')
    return host.strip("[]"), int(port)  # brackets as in "[::1]:29400"


def connect_to_store(store: str) -> TCPStore:
    """Connect to a store, which may still be starting."""
    host, port = parse_address(store)
    timeout = timedelta(seconds=STORE_TIMEOUT)
    try:
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise OSError(f"no process answers there ({error})") from error


def serve_store(host: str, port: int = 0) -> tuple[TCPStore, str]:
    """Host a store at this address only, and return it with its "host:port". Port 0: a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By itself TCPStore would listen on all interfaces. So it gets a socket that already listens.
    listening = socket.create_server((host, port), family=family, backlog=1024)
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store owns and closes it from here on
    )
    return store, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
