"""The roster in the store, read and changed, and what is heard of those who stand on it.

    crew        the roster (_roster.py)
    news        which change of it was the last: cheap to read, so that watching costs little
    beat/ID     a counter that the living count up, and the newest change that they know
    done/G/ID   the last meeting of generation G at which this member has arrived
    terms/P     what part P of all workers must have alike (_terms.py)
    expected    for how many workers the first meeting waits
    gen/G/P/... where the members of a generation (part P of each) find each other's connections

All keys stand under "manyhands/". What a generation needed is swept when the next one has met.

All values but the news, which are a hint, are signed (_store.py). Where a stranger has overwritten
or deleted the roster, or put back an older one, whoever notices writes down again what it knows, if
nobody alive knows more. Each beat says up to which change its sender knows the roster.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from manyhands.blocks.crew._heartbeat import HeartbeatMonitor
from manyhands.blocks.crew._roster import Roster
from manyhands.blocks.crew._store import LIMIT, UNSIGNED, VARIABLE, StoreClient
from manyhands.errors import StoreLost

PLACE = "manyhands/"
CREW, NEWS = PLACE + "crew", PLACE + "news"
HEALING = 2.5  # seconds in which all that are alive beat at least twice


class SharedRoster:
    """One process's view of the roster."""

    def __init__(self, line: StoreClient, pulse: HeartbeatMonitor, parts: int = 1) -> None:
        self.line = line
        self.pulse = pulse
        self.roster = Roster(parts=parts, run=secrets.token_hex(8))
        self._text = self._signed(self.roster)  # as it stands in the store
        self._news: bytes | None = None
        self._looked = -float("inf")
        self._seen: dict[str, int] = {}  # the newest change that each knows
        self._take(line.call("compare_set", CREW, "", self._text))
        if parts != self.roster.parts:
            raise ValueError(
                f"the workers of this run have {self.roster.parts} process(es) each, and this one "
                f"has {parts}. Start all of them alike (`manyhands run --processes`), and give the "
                "crew its inner_group."
            )

    # -- the roster ----------------------------------------------------------------------------

    def look(self) -> Roster:
        """The roster as it is now; now and then also who beats."""
        news, now = self.line.fetch(NEWS), time.monotonic()
        listen = now - self._looked >= self.pulse.interval
        if news != self._news or listen:
            self._news = news
            self._take(self.line.fetch(CREW))
        if listen:
            self._looked = now
            self.listen()
        return self.roster

    def change(self, how: Callable[[Roster], Roster]) -> Roster:
        """Apply a change, again if somebody else was faster; gives the roster after it."""
        while (wanted := how(self.roster)) != self.roster:
            wanted = replace(wanted, change=self.roster.change + 1)
            text = self._signed(wanted)
            found = self.line.call("compare_set", CREW, self._text, text)
            if found == text.encode():
                self._know(wanted, text)
                self.line.call("set", NEWS, str(wanted.change))
                break
            missing = found == self._text.encode()  # what is expected comes back, as torch has it
            self._take(None if missing else found)
        return self.roster

    def _signed(self, roster: Roster) -> str:
        return self.line.signer.sign(CREW, roster.text)

    def _know(self, roster: Roster, text: str) -> None:
        self.roster, self._text = roster, text
        self.line.seen = roster.change

    def _take(self, found: bytes | None) -> None:
        """Take in what the store holds; heal it first if no member was the last to write it."""
        until = time.monotonic() + LIMIT
        roster, wrong = self._read(found)
        while roster is None:
            self.line.signer.ignore(CREW, wrong)
            self._heal()
            found = self.line.fetch(CREW)
            roster, wrong = self._read(found)
            if roster is None and time.monotonic() > until:
                if self.roster.change:
                    raise StoreLost(self.line.store, f"its roster stays wrong: {wrong}")
                raise ValueError(
                    f"the roster in the store at {self.line.store} is of no use: {wrong}. Give all "
                    f"workers and hosts of a run the same {VARIABLE}, and each run its own store."
                )
        assert found is not None
        self._know(roster, found.decode())

    def _read(self, found: bytes | None) -> tuple[Roster | None, str]:
        """What the store holds, if it is at least as new as what we know; what is wrong, if not."""
        if found is None:
            return None, "it was deleted"
        if found == self._text.encode():
            return self.roster, ""
        text = self.line.signer.opened(CREW, found)
        if text is None:
            return None, UNSIGNED
        try:
            roster = Roster.of(text)
        except (ValueError, TypeError, KeyError) as error:
            return None, f"it is not well-formed ({error})"
        if roster.change < self.roster.change:
            return None, "it is older than what was there before"
        return roster, ""

    def _heal(self) -> None:
        """Put back the roster that we know, unless somebody who is alive knows a newer one."""
        if not self.roster.change:  # we know none: it may be we who have a wrong secret
            time.sleep(0.1)
            return
        names = (*self.roster.everyone, *self.roster.hosts)
        before = self._beats(names)
        until = time.monotonic() + HEALING
        while (found := self.line.fetch(CREW)) is None or self._read(found)[0] is None:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            now = self._beats(names)
            if any(now[id] > before[id] and self._seen[id] > self.roster.change for id in names):
                return  # that one does it, when it comes to look
            self.line.call("compare_set", CREW, found or "", self._text)
            self.line.call("set", NEWS, f"{self.roster.change} again")
            return

    # -- who beats -----------------------------------------------------------------------------

    def listen(self) -> None:
        """Hear who is alive, of all that the roster names."""
        roster = self.roster
        ids = [id for id in dict.fromkeys((*roster.everyone, *roster.hosts))]
        beats = self._beats(id for id in ids if id not in roster.gone)
        self.pulse.look(beats, time.monotonic())

    def _beats(self, ids: Iterable[str]) -> dict[str, int]:
        """How often each has beaten; 0 where that is not known."""
        names = list(ids)
        counts = dict.fromkeys(names, 0)
        keys = [f"{PLACE}beat/{id}" for id in names]
        for id, key, value in zip(names, keys, self.line.fetch_all(keys), strict=True):
            text = self.line.verified(key, value)
            if text is not None:
                count, seen = map(int, text.split())
                counts[id], self._seen[id] = count, seen
        self._seen = {id: self._seen.get(id, 0) for id in names}
        return counts

    def report(self, number: int, left: bool = False) -> None:
        """The process of this number is dead, or done: its launcher has seen it end."""
        self.look()
        self.change(lambda roster: roster.without_number(number, left))

    # -- arriving at meetings ------------------------------------------------------------------

    def arrive(self, generation: int, meeting: int, id: str) -> None:
        """Say that this member has all that the meeting brings it."""
        self.line.put(f"{PLACE}done/{generation}/{id}", str(meeting))

    def have_arrived(self, generation: int, meeting: int, ids: Sequence[str]) -> bool:
        """Whether all of these have said so."""
        keys = [f"{PLACE}done/{generation}/{id}" for id in ids]
        texts = map(self.line.verified, keys, self.line.fetch_all(keys))
        return all(text is not None and int(text) >= meeting for text in texts)

    def sweep(self, generation: int) -> None:
        """Delete what was needed for connecting, and to arrive in earlier generations."""
        for key in self.line.call("list_keys") if self.line.can("list_keys") else ():
            kind, _, rest = key.removeprefix(PLACE).partition("/")
            number = rest.partition("/")[0]
            if not number.isdecimal():
                continue
            if (kind == "gen" and int(number) <= generation) or (
                kind == "done" and int(number) < generation
            ):
                self.line.call("delete_key", key)
