"""Use the store of a crew: calls that cannot hang, signed values, heartbeats, and the roster.

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

Two methods of torch's store are not used here. `add` fails and breaks the connection if a stranger
has stored a text that is not a number. `wait` would hang if a stranger deletes the key.

All keys begin with "manyhands/":

    roster            the roster (_roster.py)
    revision          the roster's revision: cheap to read, so that watching costs little
    heartbeat/ID      a counter that a living process increases, and the revision that it knows
    asks/G            a line of each member of generation G that asks to be in the next one
    arrived/G/ID      the latest round of generation G at which this member has arrived
    facts/P           the facts that inner rank P of all workers shares (_enrollment.py)
    door/ID           where others see whether they reach a process (_enrollment.py); with a quorum
    environment/N     the variables that the script of process number N has changed (_kept.py)
    expected          the number of workers that the first round waits for
    group/G/P/...     where inner rank P of each member of generation G publishes its addresses

Keys of a generation are deleted when a later generation has kept its first round.

All values but the revision, which is only a hint, are signed (_store.py). A stranger may overwrite
or delete the roster, or put back an older one. A process that notices this writes the roster
that it knows again, unless a living process knows a newer one: each heartbeat carries the revision
that its sender knows. A decision that only a dead process has read is lost with it: the others
decide again.

`HeartbeatMonitor` (_ranks/message_box.py) decides which processes have no heartbeat any more.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import queue
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from manyhands._arguments import shown
from manyhands._ranks.message_box import HeartbeatMonitor, MessageBox
from manyhands._ranks.sockets import survive_cuts, survive_cuts_to
from manyhands.blocks.crew._roster import WATCHED, Member, Roster
from manyhands.errors import StoreLost

SECRET_VARIABLE = "MANYHANDS_SECRET"
SHORTEST_SECRET = 16  # characters
UNSIGNED = "it is not signed with the secret of this run"
SIGNATURE_LENGTH = hashlib.sha256().digest_size * 2  # hexadecimal digits
STORE_TIMEOUT = 30.0  # seconds in which the store must answer, and in which it must be reachable
LOOK = 0.5  # seconds between two looks of a waiting call whether the connection has ended
MISSING = secrets.token_hex(8)  # equals no stored value
LOOPBACK = re.compile(r"localhost|127\..*|::1")

PREFIX = "manyhands/"
ROSTER = PREFIX + "roster"
REVISION = PREFIX + "revision"
REREAD = 0.0003  # seconds between two readings of a changed roster, for each process in it
ASK_SPREAD = 0.005  # seconds for each member that has not asked, over which they ask
ASK_PAUSE = 0.0001  # seconds for each member, until one looks again whether another has asked
REPAIR_DELAY = 2.5  # seconds in which every living process has at least two heartbeats
REPAIR_TIMEOUT = STORE_TIMEOUT  # seconds in which a wrong roster must be repaired

_dice = random.SystemRandom()  # not the script's random numbers, and not the same after a fork
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
        return self.signature(key, text.encode()) + text

    def verify(self, key: str, value: bytes) -> str | None:
        """Return the text of a stored value; None if no member wrote it under this key."""
        signature = value[:SIGNATURE_LENGTH]
        text = value[SIGNATURE_LENGTH:]
        # compare_digest takes equally long for every wrong signature: timing tells nothing.
        if hmac.compare_digest(signature, self.signature(key, text).encode()):
            return text.decode()
        return None

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

    def signature(self, key: str, text: bytes) -> str:
        """Return the signature of a text under this key, without the text."""
        # With the key's length in front, no other pair of key and text gives the same message.
        message = f"{len(key)}|{key}|".encode() + text
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


class StoreClient(MessageBox):
    """The crew's message box: all messages are signed, and no call can hang its caller."""

    def __init__(self, store: str, interval: float, signer: Signer) -> None:
        super().__init__(store)
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
        """Store a text, signed."""
        self.call("set", key, self.signer.sign(key, text))

    def append(self, key: str, text: str) -> None:
        """Add a line to a stored text; each line is signed by itself."""
        self.call("append", key, self.signer.sign(key, text) + "\n")

    def fetch(self, key: str) -> bytes | None:
        """Return the stored value, without a look at its signature; None if there is none."""
        # `get` would wait for a missing key. compare_set answers at once: it never matches
        # MISSING, writes nothing, and returns the stored value, or MISSING if there is none.
        value: bytes = self.call("compare_set", key, MISSING, MISSING)
        if value == MISSING.encode():
            return None
        return value

    def text_of(self, key: str, value: bytes | None) -> str:
        """Return the text of a stored value, if a member wrote it under this key; else ""."""
        return "" if value is None else self.signer.verify_or_ignore(key, value) or ""

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return the texts of several keys, as `read` does."""
        if keys and self.call("check", list(keys)):  # one round trip for all
            return list(map(self.text_of, keys, self.call("multi_get", list(keys))))
        return list(map(self.read, keys))

    def start_heartbeat(self, key: str) -> None:
        """Increase the signed counter under this key from now on."""
        self._heartbeats = 0
        self._heartbeat_key = key
        self.put(key, self._next_heartbeat())

    def _next_heartbeat(self) -> str:
        self._heartbeats += 1
        return f"{self._heartbeats} {self.known_revision}"

    def close(self) -> None:
        """End the thread, and with it the heartbeat."""
        self._calls.put(None)
        self._thread.join(1.0)  # a thread that hangs in a call is left behind: it is a daemon

    def _run(self) -> None:
        """Make the calls of all threads, one by one, and the heartbeats between them."""
        try:
            client = connect_to_store(self.store)
            due = time.monotonic()
            while True:
                self._waiting_since = None
                pause = due - time.monotonic()
                if pause <= 0:  # the heartbeat comes first, so that many calls do not delay it
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
            self._error = error  # of every call


def parse_address(store: str) -> tuple[str, int]:
    """Return the host and port of "host:port"."""
    host, colon, port = str(store).rpartition(":")
    if not (host and colon and port.isdigit()):
        raise ValueError(f'store is "host:port", such as "10.0.0.1:29400", got {shown(store)}.')
    return host.strip("[]"), int(port)  # brackets as in "[::1]:29400"


def connect_to_store(store: str) -> TCPStore:
    """Connect to a store, which may still be starting."""
    host, port = parse_address(store)
    timeout = timedelta(seconds=STORE_TIMEOUT)
    try:
        client = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise OSError(f"no process answers there ({error})") from error
    if not LOOPBACK.fullmatch(host):  # which no cut interrupts
        survive_cuts_to(port, 2 * STORE_TIMEOUT)  # the caller gives up first
    return client


def serve_store(host: str, port: int = 0) -> tuple[TCPStore, str]:
    """Host a store at this address only, and return it with its "host:port". Port 0: a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By itself TCPStore would listen on all interfaces. So it gets a socket that already listens.
    listening = socket.create_server((host, port), family=family, backlog=1024)
    survive_cuts(listening, 2 * STORE_TIMEOUT)  # and all connections that it accepts
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


# -- heartbeats and the roster ---------------------------------------------------------------------


class SharedRoster:
    """One process's view of the shared roster."""

    def __init__(self, client: StoreClient, monitor: HeartbeatMonitor, processes: int = 1) -> None:
        self.client = client
        self.monitor = monitor
        self.id = ""  # of this process, once it has a heartbeat
        self.watched: Callable[[Roster], Iterable[str]] | None = None  # for a launcher
        self._lock = threading.RLock()  # a thread watches while this process trains
        self.roster = Roster(processes=processes, run=secrets.token_hex(8))
        self._text = self._sign(self.roster)  # as it stands in the store
        self._revision: bytes | None = None  # the hint that was read last
        self._looked = 0.0  # when a newcomer last looked whether the others await it
        self._observed = -float("inf")  # when the heartbeats were read last
        self._accepted = -float("inf")  # when the roster was read last
        self._known_revisions: dict[str, int] = {}  # the newest one that each process knows
        # Expecting "" writes the empty roster only if there is none, and returns the stored one.
        self._accept(client.call("compare_set", ROSTER, "", self._text))
        if processes != self.roster.processes:
            raise ValueError(
                f"the workers of this run have {self.roster.processes} process(es) each, and this "
                f"one has {processes}. Start all of them alike (`manyhands run --processes`), and "
                "give the crew its inner_group."
            )

    # -- the roster ----------------------------------------------------------------------------

    def refresh(self) -> Roster:
        """Return the roster as it is now. Read the heartbeats too, if they are due."""
        with self._lock:
            revision = self.client.fetch(REVISION)
            now = time.monotonic()
            # The hint is not signed and may be missing or wrong: read the roster now and then
            # anyway. A long one is read more rarely, so that equally many bytes a second are read.
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
        """Return whether it is time for a newcomer to look again."""
        now = time.monotonic()
        if now - self._looked < self.monitor.interval:
            return False
        self._looked = now
        return True

    def change(self, update: Callable[[Roster], Roster]) -> Roster:
        """Apply an update, again if another process changed the roster first; return the roster."""
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
                # For a missing key, compare_set returns the expected value and writes nothing.
                missing = found == self._text.encode()
                self._accept(None if missing else found)
                # Many change it at once: give the others time.
                pause = min(2 * pause, 0.001 * len(self.roster.everyone))
                time.sleep(_dice.uniform(0.0, pause))
            return self.roster

    def ask_to_join(self, member: Member) -> None:
        """Ask to be in the next generation. Members ask for each other.

        Each writes down that it asks, and if none of the others has asked for it after a random
        time, it asks for all that have written this down. If each of 16 members changed the roster
        itself, all at once, that would take 0.14 s, and 0.02 s like this.
        """
        before = self.roster
        others = dict[str, Member]()

        def ask(roster: Roster) -> Roster:
            if roster.generation != before.generation or member in roster.waiting:
                return roster  # it has begun without them, or another one was faster
            # A member that has asked for itself may have done so after it wrote its line.
            here = roster.gone | roster.waiting_ids | {member.id}
            return roster.ask_to_join(member, *(m for m in others.values() if m.id not in here))

        if member.id not in before.ids:
            self.change(lambda roster: roster.ask_to_join(member))
            return
        key = f"{PREFIX}asks/{before.generation}"
        self.client.append(key, Roster(waiting=(member,)).text)
        began = time.monotonic()
        spread = _dice.uniform(0.0, ASK_SPREAD)
        while (now := self.refresh()).generation == before.generation and member not in now.waiting:
            to_come = {*now.ids} - now.gone - now.waiting_ids
            if time.monotonic() - began > spread * len(to_come):
                lines = (self.client.fetch(key) or b"").splitlines()
                texts = (self.client.text_of(key, line) for line in lines)
                others |= {m.id: m for text in texts if text for m in Roster.of(text).waiting}
                self.change(ask)
            time.sleep(ASK_PAUSE * len(before.ids))

    def _sign(self, roster: Roster) -> str:
        return self.client.signer.sign(ROSTER, roster.text)

    def _remember(self, roster: Roster, text: str) -> None:
        self.roster = roster
        self._text = text
        self.client.known_revision = roster.revision

    def _accept(self, found: bytes | None) -> None:
        """Take over the stored roster. Repair it first if a stranger has changed it."""
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
                    f"all workers and hosts of a run the same {SECRET_VARIABLE}, and each run its "
                    "own store."
                )
        assert found is not None
        self._remember(roster, found.decode())

    def _parse(self, found: bytes | None) -> tuple[Roster | None, str]:
        """Return the stored roster, or None and the reason: forged, malformed or older."""
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
            return None, "it is older than what was there before"
        return roster, ""

    def _repair(self) -> None:
        """Put back the roster that we know, unless a living process knows a newer one."""
        if not self.roster.revision:
            # We have never read a valid roster, so our own secret may be the wrong one.
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
                    return  # that process is alive, and repairs the roster when it reads it
            # Compare and set again: of several processes that repair, only the first one writes.
            self.client.call("compare_set", ROSTER, found or "", self._text)
            self.client.call("set", REVISION, f"{self.roster.revision} again")
            return

    # -- heartbeats ----------------------------------------------------------------------------

    def observe_heartbeats(self) -> None:
        """Read the heartbeats of the watched processes; of many, report those that are silent."""
        watched = self.watched or (lambda roster: roster.watched_by(self.id))
        with self._lock:
            self._observed = time.monotonic()
            counts = self._read_heartbeats(watched(self.roster))
            self.monitor.observe(counts, time.monotonic())
            if self.watched is None:  # a launcher's stall time is longer than the members'
                self.change(lambda roster: roster.report(counts, self.monitor.silent))

    @property
    def silent(self) -> frozenset[str]:
        """The other processes without a heartbeat, as we have seen or their watchers report."""
        return self.monitor.silent.union(id for id, _ in self.roster.silent) - {self.id}

    def _read_heartbeats(self, ids: Iterable[str]) -> dict[str, int]:
        """Return each process's heartbeat counter; 0 if no valid one is stored."""
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
        """Report that the process of this number is done (`left`) or dead: its launcher knows."""
        self.refresh()
        self.change(lambda roster: roster.without_number(number, left))

    # -- arriving at rounds --------------------------------------------------------------------

    def arrive(self, generation: int, round_index: int, id: str) -> None:
        """Report that this member has received everything that the round sends it."""
        # A separate key: members arrive together, and would wait in line to change the roster.
        self.client.put(f"{PREFIX}arrived/{generation}/{id}", str(round_index))

    def not_arrived(self, generation: int, round_index: int, ids: Sequence[str]) -> tuple[str, ...]:
        """Return those of these members that have not arrived at the round."""
        keys = [f"{PREFIX}arrived/{generation}/{id}" for id in ids]
        latest = zip(ids, self.client.read_all(keys), strict=True)
        return tuple(id for id, text in latest if not text or int(text) < round_index)

    def sweep(self, generation: int) -> None:
        """Delete this generation's addresses, and all keys of earlier generations."""
        # So the store stays small. This generation's arrivals stay: its members still read them.
        for key in self.client.call("list_keys"):
            kind, _, rest = key.removeprefix(PREFIX).partition("/")
            number = rest.partition("/")[0]
            if not number.isdecimal():  # a stranger's key
                continue
            if (kind == "group" and int(number) <= generation) or (
                kind in ("arrived", "asks") and int(number) < generation
            ):
                self.client.call("delete_key", key)
