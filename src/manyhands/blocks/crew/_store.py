"""Access to a crew's store: calls that cannot hang, signed values, heartbeats and the roster.

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

A stranger may overwrite, delete or restore the roster. Processes that detect this write the last
known roster again, unless the heartbeat of a living process contains a newer revision. A decision
that was read only by dead processes is lost, and the members decide again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import queue
import random
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from manyhands._arguments import shown
from manyhands._ranks.groups import internet_sockets
from manyhands._ranks.message_box import HeartbeatMonitor, MessageBox
from manyhands.blocks.crew._roster import WATCHED, Member, Roster
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
ROSTER = PREFIX + "roster"
REVISION = PREFIX + "revision"
REREAD = 0.0003  # seconds between two reads of a changed roster, per process in the roster
ASK_SPREAD = 0.005  # seconds per absent member over which requests to join are spread
ASK_PAUSE = 0.0001  # seconds per member between two looks for requests of other members
REPAIR_DELAY = 2.5  # seconds: every living process writes two or more heartbeats
REPAIR_TIMEOUT = STORE_TIMEOUT  # seconds within which an invalid roster must be repaired

_dice = random.SystemRandom()  # independent of the script's seed and different after a fork
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


# -- making gloo groups --------------------------------------------------------------------------


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


# -- heartbeats and the roster ---------------------------------------------------------------------


class SharedRoster:
    def __init__(self, client: StoreClient, monitor: HeartbeatMonitor, processes: int = 1) -> None:
        self.client = client
        self.monitor = monitor
        self.id = ""  # of this process, after the first heartbeat
        self.watched: Callable[[Roster], Iterable[str]] | None = None  # set by a launcher
        self._lock = threading.RLock()  # a thread watches while this process trains
        self.roster = Roster(processes=processes, run=secrets.token_hex(8))
        self._text = self._sign(self.roster)  # signed, as stored
        self._revision: bytes | None = None  # last hint
        self._looked = 0.0  # time of the last `may_look`
        self._observed = -float("inf")  # time of the last look at the heartbeats
        self._accepted = -float("inf")  # time of the last look at the roster
        self._known_revisions: dict[str, int] = {}  # newest revision known to each process
        # Expecting "" writes the empty roster only if none is stored, and returns the stored text.
        self._accept(client.call("compare_set", ROSTER, "", self._text))
        if processes != self.roster.processes:
            raise ValueError(
                f"the workers of this run have {self.roster.processes} process(es) each, and this "
                f"one has {processes}. Start all workers alike (`manyhands run --processes`), and "
                "pass inner_group to the crew."
            )

    # -- the roster ----------------------------------------------------------------------------

    def refresh(self) -> Roster:
        with self._lock:
            revision = self.client.fetch(REVISION)
            now = time.monotonic()
            # The unsigned hint may be wrong, so read the roster regularly. The interval grows with
            # the roster, to bound the bytes per second.
            size = len(self.roster.everyone)
            pause = max(1, size / WATCHED) * self.monitor.interval
            if revision != self._revision:
                pause = REREAD * size
            if now - self._accepted >= pause:
                self._revision = revision
                self._accepted = now
                self._accept(self.client.fetch(ROSTER))
            if now - self._observed >= self.monitor.interval:
                self.observe_heartbeats()
            return self.roster

    def may_look(self) -> bool:
        """Return whether a newcomer may look again, which is limited to once per interval."""
        now = time.monotonic()
        if now - self._looked < self.monitor.interval:
            return False
        self._looked = now
        return True

    def change(self, update: Callable[[Roster], Roster]) -> Roster:
        """Apply an update; retry if a concurrent change was first. Return the roster."""
        pause = 0.001
        with self._lock:
            while (wanted := update(self.roster)) != self.roster:
                wanted = replace(wanted, revision=self.roster.revision + 1)
                text = self._sign(wanted)
                found = self.client.call("compare_set", ROSTER, self._text, text)
                if found == text.encode():
                    self._remember(wanted, text)
                    self.client.call("set", REVISION, str(wanted.revision))
                    break
                # If the key is missing, compare_set returns the expected value and writes nothing.
                missing = found == self._text.encode()
                self._accept(None if missing else found)
                # Back off in proportion to the number of processes.
                pause = min(2 * pause, 0.001 * len(self.roster.everyone))
                time.sleep(_dice.uniform(0.0, pause))
            return self.roster

    def ask_to_join(self, member: Member) -> None:
        """Ask to join the next generation. Members ask on behalf of each other.

        Each member writes a request to a list. After a random time, a member asks for all members
        on the list. With 16 members this takes 0.02 s instead of 0.14 s for separate changes.
        """
        before = self.roster
        if member.id not in before.ids:
            self.change(lambda roster: roster.ask_to_join(member))
            return
        key = f"{PREFIX}asks/{before.generation}"
        self.client.append(key, Roster(waiting=(member,)).text)
        began = time.monotonic()
        spread = _dice.uniform(0.0, ASK_SPREAD)
        while (now := self.refresh()).generation == before.generation and member not in now.waiting:
            absent = {*now.ids} - now.gone - now.waiting_ids
            if time.monotonic() - began > spread * len(absent):
                self._ask_for_all(key, member)
            time.sleep(ASK_PAUSE * len(before.ids))

    def _ask_for_all(self, key: str, member: Member) -> None:
        listed = dict[str, Member]()
        for line in (self.client.fetch(key) or b"").splitlines():
            text = self.client.text_of(key, line)
            if text:
                listed |= {m.id: m for m in Roster.of(text).waiting}
        generation = self.roster.generation

        def ask(roster: Roster) -> Roster:
            if roster.generation != generation or member in roster.waiting:
                return roster
            # A member may have asked separately after writing to the list.
            here = roster.gone | roster.waiting_ids | {member.id}
            return roster.ask_to_join(member, *(m for m in listed.values() if m.id not in here))

        self.change(ask)

    def _sign(self, roster: Roster) -> str:
        return self.client.signer.sign(ROSTER, roster.text)

    def _remember(self, roster: Roster, text: str) -> None:
        self.roster = roster
        self._text = text
        self.client.known_revision = roster.revision

    def _accept(self, found: bytes | None) -> None:
        until = time.monotonic() + REPAIR_TIMEOUT
        roster, wrong = self._parse(found)
        while roster is None:
            self.client.signer.ignore(ROSTER, wrong)
            self._repair()
            found = self.client.fetch(ROSTER)
            roster, wrong = self._parse(found)
            if roster is None and time.monotonic() > until:
                if self.roster.revision:
                    raise StoreLost(self.client.store, f"its roster stays wrong: {wrong}")
                raise ValueError(
                    f"the roster in the store at {self.client.store} cannot be used: {wrong}. Give "
                    f"all workers and hosts of a run the same {SECRET_VARIABLE}, and each run a "
                    "separate store."
                )
        assert found is not None
        self._remember(roster, found.decode())

    def _parse(self, found: bytes | None) -> tuple[Roster | None, str]:
        if found is None:
            return None, "it was deleted"
        if found == self._text.encode():
            return self.roster, ""
        text = self.client.signer.verify(ROSTER, found)
        if text is None:
            return None, UNSIGNED
        try:
            roster = Roster.of(text)
        except (ValueError, TypeError, KeyError) as error:
            return None, f"it is not well-formed ({error})"
        if roster.revision < self.roster.revision:
            return None, "it is older than a roster that was read before"
        return roster, ""

    def _repair(self) -> None:
        """Write the last known roster, unless a living process knows a newer revision."""
        if not self.roster.revision:
            # No valid roster has been read, so the secret of this process may be wrong.
            time.sleep(0.1)
            return
        names = (*self.roster.everyone, *self.roster.launchers)
        before = self._read_heartbeats(names)
        until = time.monotonic() + REPAIR_DELAY
        while (found := self.client.fetch(ROSTER)) is None or self._parse(found)[0] is None:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            now = self._read_heartbeats(names)
            for id in names:
                if now[id] > before[id] and self._known_revisions[id] > self.roster.revision:
                    return  # the living process with the newer revision repairs the roster
            # Of multiple processes that repair the roster, only the first writes.
            self.client.call("compare_set", ROSTER, found or "", self._text)
            self.client.call("set", REVISION, f"{self.roster.revision} again")
            return

    # -- heartbeats ----------------------------------------------------------------------------

    def observe_heartbeats(self) -> None:
        """Read the heartbeats of watched processes. In a large crew, report silent processes."""
        watched = self.watched or (lambda roster: roster.watched_by(self.id))
        with self._lock:
            self._observed = time.monotonic()
            counts = self._read_heartbeats(watched(self.roster))
            self.monitor.observe(counts, time.monotonic())
            if self.watched is None:  # launchers have a longer stall time and report nothing
                self.change(lambda roster: roster.report(counts, self.monitor.silent))

    @property
    def silent(self) -> frozenset[str]:
        """Other processes that send no heartbeat, as observed here or reported by watchers."""
        return self.monitor.silent.union(id for id, _ in self.roster.silent) - {self.id}

    def _read_heartbeats(self, ids: Iterable[str]) -> dict[str, int]:
        """Return the heartbeat counter of each process; 0 if no valid heartbeat is stored."""
        names = list(ids)
        counts = dict.fromkeys(names, 0)
        keys = [f"{PREFIX}heartbeat/{id}" for id in names]
        for id, text in zip(names, self.client.read_all(keys), strict=True):
            if text:
                count, revision = map(int, text.split())
                counts[id] = count
                self._known_revisions[id] = revision
        self._known_revisions = {id: self._known_revisions.get(id, 0) for id in names}
        return counts

    def report_end(self, number: int, left: bool = False) -> None:
        self.refresh()
        self.change(lambda roster: roster.without_number(number, left))

    # -- arriving at rounds --------------------------------------------------------------------

    def arrive(self, generation: int, round_index: int, id: str) -> None:
        # Members arrive simultaneously. A separate key per member avoids contention on the roster.
        self.client.put(f"{PREFIX}arrived/{generation}/{id}", str(round_index))

    def not_arrived(self, generation: int, round_index: int, ids: Sequence[str]) -> tuple[str, ...]:
        keys = [f"{PREFIX}arrived/{generation}/{id}" for id in ids]
        latest = zip(ids, self.client.read_all(keys), strict=True)
        return tuple(id for id, text in latest if not text or int(text) < round_index)

    def sweep(self, generation: int) -> None:
        # Members still read the arrivals of this generation.
        for key in self.client.call("list_keys"):
            kind, _, rest = key.removeprefix(PREFIX).partition("/")
            number = rest.partition("/")[0]
            if not number.isdecimal():  # written by a stranger
                continue
            if (kind == "group" and int(number) <= generation) or (
                kind in ("arrived", "asks") and int(number) < generation
            ):
                self.client.call("delete_key", key)
