"""A line to the store: one thread with a connection of its own, which also keeps the pulse.

A call to a store whose host is frozen or cut off does not return, and cannot be ended. So the
thread makes the calls, and whoever asked waits until the store has been silent for `LIMIT` seconds,
counted from the oldest call that it has not answered. In between the thread writes this worker's
beat, whatever the rest of the process does.

    line = Line("10.0.0.1:29400", interval=1.0, signer=signer)
    line.put("name", "value")     # signed
    line.fetch("name")            # as it stands there, or None; never waits for it to be written
    line.beat("beat/3.1")         # from now on, every `interval` seconds
    line.close()

Nothing here uses the store's `add`: it fails, and takes the connection along, where a stranger has
written something else than a number. And nothing waits for a key: a stranger may delete it.
"""

from __future__ import annotations

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

from manyhands.blocks._signer import Signer

LIMIT = 30.0  # seconds that the store has for an answer, and to be there at all
MISSING = secrets.token_hex(8)  # what no value is


class StoreLost(RuntimeError):
    """The store, where the workers find each other, is not there any more."""

    def __init__(self, store: str, why: object) -> None:
        super().__init__(
            f"the store at {store} is lost: {why}. It is the one place where the workers agree on "
            "who takes part, and it cannot be replaced while they run. Start the store (`manyhands "
            "run` hosts it) and all workers again, from a checkpoint."
        )


class Line:
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
