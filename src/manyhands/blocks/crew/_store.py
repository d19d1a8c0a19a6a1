"""A line to the store: one thread with a connection of its own, which also keeps the pulse.

A call to a store whose host is frozen or cut off does not return, and cannot be ended. So the
thread makes the calls, and whoever asked waits until the store has been silent for `LIMIT` seconds,
counted from the oldest call that it has not answered. In between the thread writes this worker's
beat, whatever the rest of the process does.

    line = StoreClient("10.0.0.1:29400", interval=1.0, signer=signer)
    line.put("name", "value")     # signed
    line.fetch("name")            # as it stands there, or None; never waits for it to be written
    line.beat("beat/3.1")         # from now on, every `interval` seconds
    line.close()

Nothing here uses the store's `add`: it fails, and takes the connection along, where a stranger has
written something else than a number. And nothing waits for a key: a stranger may delete it.
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
from concurrent.futures import TimeoutError as TimedOut
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from manyhands.errors import StoreLost

VARIABLE = "MANYHANDS_SECRET"
SHORTEST = 16  # characters of a secret
UNSIGNED = "it is not signed with the secret of this run"
DIGITS = hashlib.sha256().digest_size * 2

log = logging.getLogger("manyhands")


class Signer:
    """Sign and verify the values of one run."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.ignored = 0  # values that no member can have written

    @classmethod
    def from_environment(cls, secret: str | None = None) -> Signer:
        """The signer of the secret that is given, or else of the environment's."""
        secret = secret or os.environ.get(VARIABLE, "")
        if not secret:
            raise ValueError(
                "a crew's workers sign what they write to the store, and got no secret to sign it "
                f"with. Set {VARIABLE} to the same text for all workers of the run, such as "
                '`python -c "import secrets; print(secrets.token_hex())"` prints (`manyhands run` '
                "makes one for the workers of one host)."
            )
        if len(secret) < SHORTEST:
            raise ValueError(
                f"the secret of a run ({VARIABLE}) must have at least {SHORTEST} characters, got "
                f"{len(secret)}: anybody could try all shorter ones."
            )
        return cls(secret)

    def sign(self, key: str, text: str) -> str:
        """The value to store under this key."""
        return self._code(key, text.encode()) + text

    def opened(self, key: str, value: bytes) -> str | None:
        """The text of a stored value; None if no member has written it under this key."""
        code, text = value[:DIGITS], value[DIGITS:]
        right = hmac.compare_digest(code, self._code(key, text).encode())
        return text.decode() if right else None

    def verified(self, key: str, value: bytes) -> str | None:
        """As `opened`; a value that no member has written is counted and logged."""
        text = self.opened(key, value)
        if text is None:
            self.ignore(key, UNSIGNED)
        return text

    def ignore(self, key: str, why: str) -> None:
        """Count a value that is ignored, and log it; of many only the 1st, 2nd, 4th, 8th, ..."""
        self.ignored += 1
        if self.ignored & (self.ignored - 1) == 0:
            log.warning(
                "a value in the store is ignored (%d so far): %r, because %s. A stranger writes to "
                "the store, or a worker has another secret.",
                self.ignored,
                key,
                why,
            )

    def _code(self, key: str, text: bytes) -> str:
        message = f"{len(key)}|{key}|".encode() + text
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


LIMIT = 30.0  # seconds that the store has for an answer, and to be there at all
MISSING = secrets.token_hex(8)  # what no value is


class StoreClient:
    """Calls to a store, one after the other, none of which can hang its caller."""

    def __init__(self, store: str, interval: float, signer: Signer) -> None:
        self.store = store
        self.signer = signer
        self.seen = 0  # the newest change of the roster that is known here: goes with the beat
        self._interval = interval
        self._beating: str | None = None
        self._beats = 0
        self._jobs: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None]
        self._jobs = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._asked: float | None = time.monotonic()  # since when the store owes an answer
        self._thread = threading.Thread(target=self._run, name="manyhands line", daemon=True)
        self._thread.start()

    def call(self, name: str, *args: Any) -> Any:
        """What the store's method of this name returns."""
        if self._failed is not None:
            raise StoreLost(self.store, self._failed)
        job: Future[Any] = Future()
        self._jobs.put((job, name, args))
        while self._failed is None:
            try:
                return job.result(self._left())
            except TimedOut as error:
                if job.done():
                    self._failed = error
                elif self._left() <= 0.0:
                    self._failed = TimeoutError(f"no answer for {LIMIT:g} s")
            except (dist.DistError, OSError) as error:
                self._failed = error
        raise StoreLost(self.store, self._failed) from self._failed

    def _left(self) -> float:
        """Seconds that the store still has to answer the call that it owes an answer to."""
        asked = self._asked
        return LIMIT if asked is None else max(0.0, asked + LIMIT - time.monotonic())

    def put(self, key: str, text: str) -> None:
        """Write a text, signed."""
        self.call("set", key, self.signer.sign(key, text))

    def fetch(self, key: str) -> bytes | None:
        """What the store holds, by whomever it was written; None if there is nothing."""
        value: bytes = self.call("compare_set", key, MISSING, MISSING)
        return None if value == MISSING.encode() else value

    def fetch_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """As `fetch`, for several keys."""
        if keys and self.call("check", list(keys)):
            return list(self.call("multi_get", list(keys)))
        return [self.fetch(key) for key in keys]

    def verified(self, key: str, value: bytes | None) -> str | None:
        """The text in a value, if a member has written it under this key."""
        return None if value is None else self.signer.verified(key, value)

    @staticmethod
    def can(name: str) -> bool:
        """Whether this torch's store has such a method."""
        return hasattr(TCPStore, name)

    def beat(self, key: str) -> None:
        """Count up the signed number under this key from now on."""
        self._beats, self._beating = 0, key
        self.put(key, self._next_beat())

    def _next_beat(self) -> str:
        self._beats += 1
        return f"{self._beats} {self.seen}"

    def close(self) -> None:
        """End the thread, and with it the beat."""
        self._jobs.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            client = connect(self.store)
        except Exception as error:
            self._fail(error)
            return
        due = time.monotonic()
        while True:
            self._asked = None
            wait = due - time.monotonic()
            if wait <= 0:  # first, so that many calls do not starve the beat
                due = (asked := time.monotonic()) + self._interval
                try:
                    if (key := self._beating) is not None:
                        self._asked = asked
                        client.set(key, self.signer.sign(key, self._next_beat()))
                except Exception as error:
                    self._fail(error)
                    return
                continue
            try:
                job = self._jobs.get(timeout=wait)
            except queue.Empty:
                continue
            if job is None:
                return
            self._asked = time.monotonic()
            future, name, args = job
            try:
                future.set_result(getattr(client, name)(*args))
            except Exception as error:
                future.set_exception(error)

    def _fail(self, error: Exception) -> None:
        self._failed = error
        while True:
            try:
                job = self._jobs.get(timeout=LIMIT)
            except queue.Empty:
                return
            if job is None:
                return
            job[0].set_exception(error)


def address(store: str) -> tuple[str, int]:
    """The host and port in "host:port"."""
    host, colon, port = store.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(f'store is "host:port", such as "10.0.0.1:29400", got {store!r}.')
    return host.strip("[]"), int(port)


def connect(store: str) -> Any:
    """A client of the store, which may still be starting."""
    host, port = address(store)
    limit = timedelta(seconds=LIMIT)
    try:
        return TCPStore(host, port, None, False, limit, wait_for_workers=False)
    except dist.DistError as error:
        raise OSError(f"nobody answers there ({error})") from error


def serve(host: str, port: int = 0) -> tuple[Any, str]:
    """Host a store at this address and no other; port 0 is a free one. Gives it and its name."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
