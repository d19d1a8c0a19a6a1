"""Access a crew's store by calls that cannot hang, sign values, and write this process's heartbeat.

A call to a store on a frozen or unreachable host does not return and cannot be canceled. A thread
with a separate connection therefore makes the calls, and the caller waits until the store has been
silent for `STORE_TIMEOUT` seconds. Between calls, the thread writes this worker's heartbeat,
independent of the rest of the process.

    client = StoreClient("10.0.0.1:29400", interval=1.0, signer=signer)
    client.put("name", "value")                # signed
    client.fetch("name")                       # the raw value, or None; never waits for a write
    client.start_heartbeat("heartbeat/3.1")    # write every `interval` seconds
    client.close()

Only a process with the run's secret can produce a signed value:

    value = HMAC(secret, key | text) | text    HMAC-SHA256, in hexadecimal

The signature covers the key, so a value copied to a different key is invalid. To detect older
values, readers check counters in the text (of changes, heartbeats and rounds).

Two methods of torch's store are not used: `add` breaks the connection if a stranger has stored a
text that is not a number, and `wait` hangs if a stranger deletes the key.

All keys start with "manyhands/":

    roster            the roster (_roster.py)
    revision          the roster's revision: cheap to read while watching for changes; not signed
    heartbeat/ID      a counter that a living process increases, with the last known revision
    asks/G            requests of members of generation G to join the next generation, one per line
    arrived/G/ID      the latest round of generation G at which this member has arrived
    facts/P           the facts that inner rank P of all workers shares (_enrollment.py)
    expected          number of workers for the first round
    group/G/P/...     addresses of the gloo group of inner rank P in generation G
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import queue
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from manyhands._arguments import shown
from manyhands._ranks.groups import internet_sockets
from manyhands._ranks.message_box import MessageBox
from manyhands.errors import StoreLost

SECRET_VARIABLE = "MANYHANDS_SECRET"
SHORTEST_SECRET = 16  # characters
UNSIGNED = "it is not signed with the secret of this run"
SIGNATURE_LENGTH = hashlib.sha256().digest_size * 2  # hexadecimal digits
STORE_TIMEOUT = 30.0  # seconds within which the store must answer
LOOK = 0.5  # seconds between two checks whether the connection of a waiting call has ended
MISSING = secrets.token_hex(8)  # differs from all stored values
LOOPBACK = re.compile(r"localhost|127\..*|::1")
TCP_RTO_MAX_MS = 44  # of Linux 6.15, missing in Python's socket module
FIRST_PAUSE = 0.002  # seconds between two looks at the store: initial value,
LONGEST_PAUSE = 0.03  # and maximum for up to CROWD members
CROWD = 256

PREFIX = "manyhands/"

Call = tuple[Future[Any], str, tuple[object, ...]]  # result, name of the method, arguments

log = logging.getLogger("manyhands")


class Signer:
    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.ignored = 0  # number of invalid values

    @classmethod
    def from_environment(cls, secret: str | None = None) -> Signer:
        secret = secret or os.environ.get(SECRET_VARIABLE, "")
        if not secret:
            raise ValueError(
                "the workers of a crew sign their values in the store and need a secret, got none. "
                f"Set {SECRET_VARIABLE} to the same text for all workers of the run, such as the "
                'output of `python -c "import secrets; print(secrets.token_hex())"` (`manyhands '
                "run` creates a secret for the workers of a single host)."
            )
        if len(secret) < SHORTEST_SECRET:
            raise ValueError(
                f"the secret of a run ({SECRET_VARIABLE}) must have at least {SHORTEST_SECRET} "
                f"characters, got {len(secret)}. Shorter secrets can be guessed."
            )
        return cls(secret)

    def sign(self, key: str, text: str) -> str:
        return self.signature(key, text.encode()) + text

    def verify(self, key: str, value: bytes) -> str | None:
        """Return the text of a stored value; None if the signature is invalid for this key."""
        signature = value[:SIGNATURE_LENGTH]
        text = value[SIGNATURE_LENGTH:]
        # compare_digest needs equal time for all wrong signatures, so timing reveals no digits.
        if hmac.compare_digest(signature, self.signature(key, text).encode()):
            return text.decode()
        return None

    def verify_or_ignore(self, key: str, value: bytes) -> str | None:
        text = self.verify(key, value)
        if text is None:
            self.ignore(key, UNSIGNED)
        return text

    def ignore(self, key: str, why: str) -> None:
        """Count an ignored value. Log the 1st, 2nd, 4th, 8th, ... ignored value."""
        self.ignored += 1
        if self.ignored & (self.ignored - 1) == 0:  # a power of 2
            log.warning(
                "ignoring a value in the store (%d so far): %r, because %s. A stranger writes to "
                "the store, or a worker uses a different secret.",
                self.ignored,
                key,
                why,
            )

    def signature(self, key: str, text: bytes) -> str:
        """Return the signature of a text under this key, without the text."""
        message = f"{len(key)}|{key}|".encode() + text
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


class StoreClient(MessageBox):
    """The crew's message box: all messages are signed, and no call can hang the caller."""

    def __init__(self, store: str, interval: float, signer: Signer) -> None:
        super().__init__(store)
        self.signer = signer
        self.known_revision = 0  # of the roster, part of each heartbeat
        self._interval = interval
        self._heartbeat_key: str | None = None
        self._heartbeats = 0
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()  # None ends the thread
        self._error: Exception | None = None
        # Start of the unanswered call (initially the connection); None between calls. Assigning a
        # reference needs no lock.
        self._waiting_since: float | None = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="manyhands store", daemon=True)
        self._thread.start()

    def call(self, name: str, *args: object) -> Any:
        result: Future[Any] = Future()
        self._calls.put((result, name, args))
        while self._error is None:
            began = self._waiting_since
            passed = 0.0 if began is None else time.monotonic() - began
            try:
                return result.result(max(0.0, min(LOOK, STORE_TIMEOUT - passed)))
            except FutureTimeout:
                if passed >= STORE_TIMEOUT and not result.done():
                    self._error = TimeoutError(f"no answer for {STORE_TIMEOUT:g} s")
            except (dist.DistError, OSError) as error:
                self._error = error
        raise StoreLost(self.store, self._error) from self._error

    def put(self, key: str, text: str) -> None:
        self.call("set", key, self.signer.sign(key, text))

    def append(self, key: str, text: str) -> None:
        self.call("append", key, self.signer.sign(key, text) + "\n")

    def fetch(self, key: str) -> bytes | None:
        """Return the stored value without verifying the signature; None if there is none."""
        # `get` would wait for a missing key. MISSING never matches a stored value, so compare_set
        # writes nothing and returns the stored value or MISSING.
        value: bytes = self.call("compare_set", key, MISSING, MISSING)
        if value == MISSING.encode():
            return None
        return value

    def text_of(self, key: str, value: bytes | None) -> str:
        return "" if value is None else self.signer.verify_or_ignore(key, value) or ""

    def read_all(self, keys: Sequence[str]) -> list[str]:
        if keys and self.call("check", list(keys)):  # all exist: a single round trip
            return list(map(self.text_of, keys, self.call("multi_get", list(keys))))
        return list(map(self.read, keys))

    def start_heartbeat(self, key: str) -> None:
        self._heartbeats = 0
        self._heartbeat_key = key
        self.put(key, self._next_heartbeat())

    def _next_heartbeat(self) -> str:
        self._heartbeats += 1
        return f"{self._heartbeats} {self.known_revision}"

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(1.0)  # a hanging call ends with the process, as the thread is a daemon

    def _run(self) -> None:
        try:
            client = connect_to_store(self.store)
            due = time.monotonic()
            while True:
                self._waiting_since = None
                pause = due - time.monotonic()
                if pause <= 0:  # heartbeats have priority over calls
                    self._waiting_since = time.monotonic()
                    due = self._waiting_since + self._interval
                    key = self._heartbeat_key
                    if key is not None:
                        client.set(key, self.signer.sign(key, self._next_heartbeat()))
                    continue
                try:
                    call = self._calls.get(timeout=pause)
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
        except Exception as error:
            self._error = error  # raised by every call


def parse_address(store: str) -> tuple[str, int]:
    host, colon, port = str(store).rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(f'store is "host:port", such as "10.0.0.1:29400", got {shown(store)}.')
    return host.strip("[]"), int(port)  # IPv6: "[::1]:29400"


def own_address(store: str) -> str:
    host, port = parse_address(store)
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # a datagram socket only selects a route and sends no packet
        return str(probe.getsockname()[0])


def next_pause(pause: float, members: int) -> float:
    """Return the pause before the next look at the store. Large crews look less often."""
    return min(1.5 * pause, LONGEST_PAUSE * max(1.0, members / CROWD))


def connect_to_store(store: str) -> TCPStore:
    host, port = parse_address(store)
    timeout = timedelta(seconds=STORE_TIMEOUT)
    try:
        client = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise OSError(f"no process answers there ({error})") from error
    if sys.platform == "linux" and not LOOPBACK.fullmatch(host):
        # torch has no option for this connection, so find the sockets connected to the port.
        for end in internet_sockets():
            with closing(end), suppress(OSError):  # not connected
                if end.getpeername()[1] == port:
                    survive_cuts(end)
    return client


def survive_cuts(end: socket.socket) -> None:
    """Let a connection survive network cuts and continue soon after a cut.

    TCP doubles the pause before each retry, so limit the pause to a second. TCP gives up after 15
    retries, which then take 15 s, so extend the timeout to twice the patience of `StoreClient`.
    """
    if sys.platform == "linux":
        options = {socket.TCP_USER_TIMEOUT: round(2000 * STORE_TIMEOUT), TCP_RTO_MAX_MS: 1000}
        for option, milliseconds in options.items():
            with suppress(OSError):  # an older Linux, or a datagram socket of a different thread
                end.setsockopt(socket.IPPROTO_TCP, option, milliseconds)


def serve_store(host: str, port: int = 0) -> tuple[TCPStore, str]:
    """Serve a store on this address only; return the store and "host:port".

    Port 0 selects a free port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCPStore would listen on all interfaces, unless given a listening socket.
    listening = socket.create_server((host, port), family=family, backlog=1024)
    survive_cuts(listening)  # accepted connections inherit the options
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # now owned and closed by the store
    )
    return store, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
