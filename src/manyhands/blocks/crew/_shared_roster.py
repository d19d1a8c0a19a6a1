"""Read and change a crew's roster in the store, with heartbeats and arrivals at rounds.

A stranger may overwrite, delete or restore the roster. Processes that detect this write the last
known roster again, unless the heartbeat of a living process contains a newer revision. A decision
that was read only by dead processes is lost, and the members decide again.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew._roster import WATCHED, Member, Roster
from manyhands.blocks.crew._store import (
    PREFIX,
    SECRET_VARIABLE,
    STORE_TIMEOUT,
    UNSIGNED,
    StoreClient,
)
from manyhands.errors import StoreLost

ROSTER = PREFIX + "roster"
REVISION = PREFIX + "revision"
REREAD = 0.0003  # seconds between two reads of a changed roster, per process in the roster
ASK_SPREAD = 0.005  # seconds per absent member over which requests to join are spread
ASK_PAUSE = 0.0001  # seconds per member between two looks for requests of other members
REPAIR_DELAY = 2.5  # seconds: every living process writes two or more heartbeats
REPAIR_TIMEOUT = STORE_TIMEOUT  # seconds within which an invalid roster must be repaired

_dice = random.SystemRandom()  # independent of the script's seed and different after a fork


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
