"""The roster in the store, read and changed, and what is heard of those who stand on it.

    crew        the roster (_roster.py)
    news        a counter of its changes: cheap to read, so that watching costs little
    beat/ID     a counter that the living count up
    life/N      how often process N has come
    team/N      how often worker N has come, if it is several processes
    done/G/M    how many have arrived at meeting M of generation G
    gen/G/P/... where the members of a generation (part P of each) find each other's connections

All keys stand under "manyhands/". What a generation needed is swept when the next one has met.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from manyhands.blocks._line import Line
from manyhands.blocks._pulse import Pulse
from manyhands.blocks._roster import Roster

PLACE = "manyhands/"


class Board:
    """One process's view of the roster."""

    def __init__(self, line: Line, pulse: Pulse, parts: int = 1) -> None:
        self.line = line
        self.pulse = pulse
        self._news = -1
        self._looked = -float("inf")
        first = Roster(parts=parts).text
        self._read(line.call("compare_set", PLACE + "crew", "", first))
        if parts != self.roster.parts:
            raise ValueError(
                f"the workers of this run have {self.roster.parts} process(es) each, and this one "
                f"has {parts}. Start all of them alike (`manyhands run --processes`), and give the "
                "crew its inner_group."
            )

    def _read(self, text: bytes) -> None:
        self._text = text.decode()
        self.roster = Roster.of(self._text)

    def look(self) -> Roster:
        """The roster as it is now; now and then also who beats."""
        news, now = self.line.call("add", PLACE + "news", 0), time.monotonic()
        listen = now - self._looked >= self.pulse.interval
        if news != self._news or listen:
            self._news = news
            self._read(self.line.call("get", PLACE + "crew"))
        if listen:
            self._looked = now
            self.listen()
        return self.roster

    def listen(self) -> None:
        roster = self.roster
        ids = [id for id in dict.fromkeys(roster.everyone) if id not in roster.gone]
        keys = [f"{PLACE}beat/{id}" for id in ids]
        values = self.line.call("multi_get", keys) if keys else []
        self.pulse.look(dict(zip(ids, values, strict=True)), time.monotonic())

    def change(self, how: Callable[[Roster], Roster]) -> Roster:
        """Apply a change, again if somebody else was faster; gives the roster after it."""
        while (wanted := how(self.roster)) != self.roster:
            new = wanted.text
            self._read(self.line.call("compare_set", PLACE + "crew", self._text, new))
            if self._text == new:
                self.line.call("add", PLACE + "news", 1)
                break
        return self.roster

    def report(self, number: int, left: bool = False) -> None:
        """The process of this number is dead, or done: its launcher has seen it end."""
        self.look()
        self.change(lambda roster: roster.without_number(number, left))

    def sweep(self, generation: int, meeting: int) -> None:
        """Delete what was needed for connecting, and to count at earlier meetings."""
        for key in self.line.call("list_keys") if self.line.can("list_keys") else ():
            kind, _, rest = key.removeprefix(PLACE).partition("/")
            parts = rest.split("/")
            if kind == "gen" and int(parts[0]) <= generation:
                self.line.call("delete_key", key)
            if kind == "done" and (int(parts[0]), int(parts[1])) < (generation, meeting):
                self.line.call("delete_key", key)
