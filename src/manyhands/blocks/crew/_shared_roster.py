"""The roster in the store: read it, change it, repair it, and watch its members' heartbeats.

All keys begin with "manyhands/":

    roster            the roster (_roster.py)
    revision          the roster's revision: cheap to read, so that watching costs little
    heartbeat/ID      a counter that a living process increases, and the revision that it knows
    arrived/G/ID      the latest round of generation G at which this member has arrived
    terms/P           what inner rank P of all workers must have in common (_enrollment.py)
    door/ID           where others see whether they reach a process (_enrollment.py); with a quorum
    expected          how many workers the first round waits for
    group/G/P/...     where inner rank P of each member of generation G publishes its addresses

Keys of a generation are deleted when a later generation has kept its first round.

All values but the revision, which is only a hint, are signed (_store.py). A stranger may overwrite
or delete the roster, or put back an older one. A process that notices this writes the roster
that it knows again, unless a living process knows a newer one: each heartbeat carries the revision
that its sender knows.

`HeartbeatMonitor` decides which processes have no heartbeat any more. Clocks are not compared
between hosts. Each worker reads the others' counters, and measures with its own clock for how long
it has *watched* a counter stand still. The time between two observations counts for no more than an
observation should take. So workers that were all stopped together, as on a laptop that sleeps, do
not consider each other lost when they wake up.

`GraceWindow` says how long to wait for a late member, judged by the time that earlier rounds took.
Waiting has a cost: each of the other n - 1 members loses a second for every second. Going on
without the late member has one, too: it loses its block, and all members regroup twice, to go on
without it and to let it in again. Members that wait until the first cost equals the second, and
then go on, lose at most twice as much as if they had known how late the member would be.

    usual      median + 4 MAD of the last waits; MAD is the median distance from the median
    worth      (block + 2 n regroup) / (n - 1): so long waiting costs less than going on
    window     the larger of the two, and at least SHORTEST

    block      median time of this member's last blocks
    regroup    median time of its last regroupings

These are plain floats: no clock, no store.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from manyhands.blocks.crew._roster import Roster
from manyhands.blocks.crew._store import SECRET_VARIABLE, STORE_TIMEOUT, UNSIGNED, StoreClient
from manyhands.errors import StoreLost

PREFIX = "manyhands/"
ROSTER, REVISION = PREFIX + "roster", PREFIX + "revision"
REPAIR_DELAY = 2.5  # seconds in which every living process has at least two heartbeats
SHORTEST = 1.0  # seconds; on a busy host living members may be late by less than that
KNOWN = 3  # waits that are needed to say what is usual
REGROUP = 1.0  # seconds that a regrouping is assumed to take until one was timed


@dataclass
class _Counter:
    """One process's heartbeat counter, as this process has observed it."""

    count: int
    last: float  # time of the latest observation
    silence: float = 0.0  # seconds for which it was watched standing still
    advanced: bool = False


@dataclass
class HeartbeatMonitor:
    """The heartbeats of other processes. One without a heartbeat for `stall` seconds is lost."""

    stall: float
    _counters: dict[str, _Counter] = field(default_factory=dict)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats, and between two observations."""
        # Five heartbeats for each stall time: one lost or late heartbeat makes no process silent.
        return min(1.0, self.stall / 5)

    def observe(self, counts: Mapping[str, int], now: float) -> None:
        """Take in the present counter of each process; processes not named are forgotten."""
        counters = {}
        for id, count in counts.items():
            counter = self._counters.get(id) or _Counter(count, now)
            # A lower count is an old value that a stranger has put back: no sign of life.
            if count > counter.count:
                counter.count, counter.silence, counter.advanced = count, 0.0, True
            else:
                # The limit leaves out time in which this process itself was stopped.
                counter.silence += min(now - counter.last, 2 * self.interval)
            counter.last = now
            counters[id] = counter
        self._counters = counters

    @property
    def silent(self) -> frozenset[str]:
        """The processes without a heartbeat for `stall` seconds."""
        return self.silent_for(self.stall)

    def silent_for(self, seconds: float) -> frozenset[str]:
        """Return the processes without a heartbeat for this long."""
        return frozenset(id for id, one in self._counters.items() if one.silence >= seconds)

    def has_advanced(self, id: str) -> bool:
        """Return whether this counter has increased since the first observation."""
        return id in self._counters and self._counters[id].advanced

    def reset(self) -> None:
        """Forget all observations, as after a long stop of this process."""
        self._counters.clear()


class SharedRoster:
    """One process's view of the shared roster."""

    def __init__(self, client: StoreClient, monitor: HeartbeatMonitor, processes: int = 1) -> None:
        self.client = client
        self.monitor = monitor
        self.roster = Roster(processes=processes, run=secrets.token_hex(8))
        self._text = self._sign(self.roster)  # as it stands in the store
        self._revision: bytes | None = None  # the hint that was read last
        self._observed = -float("inf")  # when the heartbeats were read last
        self._known_revisions: dict[str, int] = {}  # the newest one that each process knows
        # Expecting "" writes the empty roster only if there is none yet, and returns what is there.
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
        revision, now = self.client.fetch(REVISION), time.monotonic()
        due = now - self._observed >= self.monitor.interval
        # The hint is not signed and may be missing or wrong: read the roster now and then anyway.
        if revision != self._revision or due:
            self._revision = revision
            self._accept(self.client.fetch(ROSTER))
        if due:
            self._observed = now
            self.observe_heartbeats()
        return self.roster

    def change(self, update: Callable[[Roster], Roster]) -> Roster:
        """Apply an update, again if another process changed the roster first; return the roster."""
        while (wanted := update(self.roster)) != self.roster:
            wanted = replace(wanted, revision=self.roster.revision + 1)
            text = self._sign(wanted)
            found = self.client.call("compare_set", ROSTER, self._text, text)
            if found == text.encode():
                self._remember(wanted, text)
                self.client.call("set", REVISION, str(wanted.revision))
                break
            # For a missing key, torch's compare_set returns the expected value and writes nothing.
            missing = found == self._text.encode()
            self._accept(None if missing else found)
        return self.roster

    def _sign(self, roster: Roster) -> str:
        return self.client.signer.sign(ROSTER, roster.text)

    def _remember(self, roster: Roster, text: str) -> None:
        self.roster, self._text = roster, text
        self.client.known_revision = roster.revision

    def _accept(self, found: bytes | None) -> None:
        """Take over the stored roster. Repair it first if a stranger has changed it."""
        until = time.monotonic() + STORE_TIMEOUT
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
        """Return the stored roster, or None and what is wrong: forged, malformed or older."""
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
            alive = [id for id in names if now[id] > before[id]]
            if any(self._known_revisions[id] > self.roster.revision for id in alive):
                return  # that process repairs the roster when it reads it
            # Compare and set again: of several processes that repair, only the first one writes.
            self.client.call("compare_set", ROSTER, found or "", self._text)
            self.client.call("set", REVISION, f"{self.roster.revision} again")
            return

    # -- heartbeats ----------------------------------------------------------------------------

    def observe_heartbeats(self) -> None:
        """Read the heartbeats of all processes in the roster that are not known to be gone."""
        roster = self.roster
        ids = list(dict.fromkeys((*roster.everyone, *roster.launchers)))
        counts = self._read_heartbeats(id for id in ids if id not in roster.gone)
        self.monitor.observe(counts, time.monotonic())

    def _read_heartbeats(self, ids: Iterable[str]) -> dict[str, int]:
        """Return each process's heartbeat counter; 0 if no valid one is stored."""
        names = list(ids)
        counts = dict.fromkeys(names, 0)
        keys = [f"{PREFIX}heartbeat/{id}" for id in names]
        for id, key, value in zip(names, keys, self.client.fetch_all(keys), strict=True):
            text = self.client.verify_or_ignore(key, value)
            if text is not None:
                count, revision = map(int, text.split())
                counts[id], self._known_revisions[id] = count, revision
        self._known_revisions = {id: self._known_revisions.get(id, 0) for id in names}
        return counts

    def report_end(self, number: int, left: bool = False) -> None:
        """Report that the process of this number is done (`left`) or dead: its launcher knows."""
        self.refresh()
        self.change(lambda roster: roster.without_number(number, left))

    # -- arriving at rounds --------------------------------------------------------------------

    def arrive(self, generation: int, round_index: int, id: str) -> None:
        """Report that this member has received everything that the round sends it."""
        # A key of its own: members arrive together, and would wait in line to change the roster.
        self.client.put(f"{PREFIX}arrived/{generation}/{id}", str(round_index))

    def have_arrived(self, generation: int, round_index: int, ids: Sequence[str]) -> bool:
        """Return whether all these members have arrived at the round."""
        keys = [f"{PREFIX}arrived/{generation}/{id}" for id in ids]
        texts = map(self.client.verify_or_ignore, keys, self.client.fetch_all(keys))
        return all(text is not None and int(text) >= round_index for text in texts)

    def sweep(self, generation: int) -> None:
        """Delete this generation's addresses, and all keys of earlier generations.

        So the store stays small. This generation's arrivals stay: its members still read them.
        """
        for key in self.client.call("list_keys") if self.client.supports("list_keys") else ():
            kind, _, rest = key.removeprefix(PREFIX).partition("/")
            number = rest.partition("/")[0]
            if not number.isdecimal():  # a stranger's key
                continue
            if (kind == "group" and int(number) <= generation) or (
                kind == "arrived" and int(number) < generation
            ):
                self.client.call("delete_key", key)


class GraceWindow:
    """The times that one member has seen, and how long it waits because of them."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=32)  # from its arrival until a round was kept
        self._blocks: deque[float] = deque(maxlen=8)  # from a kept round until its next arrival
        self._regroups: deque[float] = deque(maxlen=8)

    def add_round(self, block: float, waited: float) -> None:
        """Add the times of a round that was kept."""
        self._blocks.append(block)
        self._waits.append(waited)

    def add_regroup(self, seconds: float) -> None:
        self._regroups.append(seconds)

    def forget_rounds(self) -> None:
        """Forget earlier rounds, because later ones will take a different time."""
        self._waits.clear()
        self._blocks.clear()

    def seconds(self, members: int) -> float:
        """Return how long a crew of this size waits, in seconds; infinity if too little is known.

        >>> window = GraceWindow()
        >>> for waited in (0.1, 0.3, 0.2):
        ...     window.add_round(block=12.0, waited=waited)
        >>> window.seconds(5)  # (12 + 2 * 5 * 1) / 4
        5.5
        """
        if len(self._waits) < KNOWN or members < 2:
            return math.inf
        middle = median(self._waits)
        usual = middle + 4 * median(abs(wait - middle) for wait in self._waits)
        regroup = median(self._regroups) if self._regroups else REGROUP
        worth = (median(self._blocks) + 2 * members * regroup) / (members - 1)
        return max(usual, worth, SHORTEST)
