"""Who meets: the one text in the store that all workers share, and the ways it may change.

    generation    the members that have a process group together; the next one has another number
    member        a worker's life among them: number 3 that came for the second time is "3.2"
    meeting       how many meetings the generation has kept; the one at hand has this index
    over          the generation meets no more: its members and the waiting form the next
    closed        it ended with a meeting that was kept (and not with one that was undone)
    waiting       who has asked to be in the next generation
    left, dead    members that are done, and those that somebody has seen die
    missed        members that the others went on without, how many meetings were kept by then, and
                  closed: such a worker may wake up, and must still learn what became of its last
    begun         a sync round was kept (bringing joiners the state is a meeting, but not one)
    anew          and all who had a part in them are lost, with all that they held
    change        how many changes led here: an older text, put back by a stranger, has fewer
    lives         how often each process has come, by its number
    teams         how often each worker has come, by its number, if it is several processes
    terms         what all workers must have alike, as a checksum for each part of a worker
    failed        members that have ended with an error before the first sync round: all end
    refused       numbers of processes that came with other terms, and are not let in
    closing       members that are done, at which meeting and after how many steps: they hold it if
                  all others are done after as many, and leave without it otherwise
    hosts         launchers that need the store, beside the workers
    run           the name of the run, drawn by the first to come
    parts         processes of a worker. With more than one, a member is a process: part p of
                  worker n has the number n * parts + p, and a worker takes part with all of its
                  processes (which know each other by their `team`) or not at all

Every change is made to the whole text at once, from the text that was read (compare and set): of
two changes to the same text the first wins, and the other is thought over again. So all questions
(is the meeting kept? who is in the next generation?) have one answer.

Everything here is plain values: no store, no clock, no process group.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Set
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Member:
    """A process in one of its lives, and how many meetings' results it holds (-1: nothing)."""

    id: str
    version: int
    team: int = 0  # counts up: the same in all processes of a worker that were started together

    @property
    def number(self) -> int:
        return number_of(self.id)


def number_of(id: str) -> int:
    """The process's own number, which it keeps when it comes again."""
    return int(id.partition(".")[0])


@dataclass(frozen=True)
class Roster:
    """The shared text as a value; each change gives a new one."""

    generation: int = 0
    meeting: int = 0
    over: bool = True
    closed: bool = False
    members: tuple[Member, ...] = ()
    waiting: tuple[Member, ...] = ()
    left: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    missed: tuple[tuple[str, int, int, bool], ...] = ()  # id, generation, meetings kept, closed
    begun: bool = False
    anew: bool = False
    parts: int = 1
    run: str = ""
    change: int = 0
    lives: tuple[tuple[int, int], ...] = ()
    teams: tuple[tuple[int, int], ...] = ()
    terms: tuple[tuple[int, str], ...] = ()
    failed: tuple[str, ...] = ()
    refused: tuple[int, ...] = ()
    closing: tuple[tuple[str, int, int], ...] = ()  # id, meeting, steps
    hosts: tuple[str, ...] = ()

    # -- as text -------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Roster:
        told = json.loads(text)
        for name in ("members", "waiting"):
            told[name] = tuple(Member(**member) for member in told[name])
        for name in ("left", "dead", "failed", "refused", "hosts"):
            told[name] = tuple(told[name])
        for name in ("missed", "lives", "teams", "terms", "closing"):
            told[name] = tuple(tuple(entry) for entry in told[name])
        return cls(**told)

    # -- what it says --------------------------------------------------------------------------

    @property
    def gone(self) -> frozenset[str]:
        """Members that will not meet again, and are known not to."""
        return frozenset((*self.left, *self.dead))

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    @property
    def everyone(self) -> tuple[str, ...]:
        """All that are named, as members, waiting or missed."""
        return (*self.ids, *(m.id for m in self.waiting), *(m[0] for m in self.missed))

    @property
    def finished(self) -> bool:
        """Whether the last members are gone, and some of them because they were done."""
        return bool(self.left) and self.gone >= set(self.ids)

    def worker_of(self, id: str) -> int:
        """The number of the worker whose process it is."""
        return number_of(id) // self.parts

    @property
    def workers(self) -> tuple[int, ...]:
        """The numbers of the members' workers, in rank order."""
        return tuple(dict.fromkeys(self.worker_of(id) for id in self.ids))

    @property
    def _versions(self) -> list[int]:
        """Of each worker, in rank order."""
        versions = [member.version for member in self.members]
        return [min(versions[i : i + self.parts]) for i in range(0, len(versions), self.parts)]

    @property
    def source(self) -> int:
        """The rank that brings the state: the lowest of those that hold the most."""
        return self._versions.index(max(self._versions))

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The ranks that need the state. Where nobody holds anything: all but the source."""
        best, source = max(self._versions), self.source
        return tuple(
            rank
            for rank, version in enumerate(self._versions)
            if version < best or (best < 0 and rank != source)
        )

    def ends_with(self, generation: int, meeting: int, id: str) -> bool:
        """Whether that meeting, which is settled, was its generation's last: the same for all.

        (That a later one was undone meanwhile its members learn when they come to it. Only a
        worker of one process may as well be told at once.)
        """
        kept, closed = self.meeting, self.closed
        if self.generation != generation:
            if self.parts == 1:
                return True
            mine = (m[2:] for m in self.missed if m[:2] == (id, generation))
            kept, closed = next(mine, (meeting, False))
        return kept <= meeting or (closed and kept == meeting + 1)

    def settled(self, generation: int, meeting: int, id: str) -> bool | None:
        """Whether the members kept a meeting; None as long as that is open."""
        if self.generation == generation:
            return True if self.meeting > meeting else False if self.over else None
        for missed, its_generation, kept, _ in self.missed:
            if (missed, its_generation) == (id, generation):
                return kept > meeting
        raise RuntimeError(
            f"worker {self.worker_of(id)} was stopped for some time, and another one with its "
            "number has come meanwhile. Give each worker a number (MANYHANDS_WORKER) of its own."
        )

    # -- a meeting -----------------------------------------------------------------------------

    def keep(self, generation: int, meeting: int, sync_round: bool = True) -> Roster:
        """All have arrived. With somebody to take in or to leave behind, it is the last one."""
        if self.generation != generation or self.over or self.meeting > meeting:
            return self
        last = bool(self.present(set()) or self.gone)
        begun = self.begun or sync_round
        return replace(self, meeting=meeting + 1, over=last, closed=last, begun=begun)

    def undo(self, generation: int, meeting: int) -> Roster:
        """Somebody did not arrive. The generation ends, because its connections are of no use."""
        if self.generation != generation or self.over or self.meeting > meeting:
            return self
        return replace(self, over=True)

    def close(self, id: str, generation: int, meeting: int, steps: int) -> Roster:
        """This member is done, after so many steps."""
        others = tuple(entry for entry in self.closing if entry[0] != id)
        if self.generation != generation or self.over or id not in self.ids:
            return self
        return replace(self, closing=(*others, (id, meeting, steps)))

    def closing_at(self, meeting: int) -> dict[str, int]:
        """The members that hold this meeting as their last or not at all, and their steps."""
        return {id: steps for id, at, steps in self.closing if at == meeting}

    # -- coming and going ----------------------------------------------------------------------

    def born(self, number: int) -> Roster:
        """The process of this number begins a life."""
        lives = dict(self.lives)
        lives[number] = lives.get(number, 0) + 1
        return replace(self, lives=tuple(sorted(lives.items())))

    def gathers(self, worker: int) -> Roster:
        """The processes of this worker begin a life together."""
        teams = dict(self.teams)
        teams[worker] = teams.get(worker, 0) + 1
        return replace(self, teams=tuple(sorted(teams.items())))

    def agree(self, part: int, terms: str) -> Roster:
        """The first to come says what all must have alike."""
        if part in dict(self.terms):
            return self
        return replace(self, terms=(*self.terms, (part, terms)))

    def refuse(self, number: int) -> Roster:
        """The process of this number may not come in as it is."""
        return replace(self, refused=tuple(sorted({*self.refused, number})))

    def knock(self, id: str, version: int, team: int = 0) -> Roster:
        """Ask to be in the next generation; a member of the present one ends it thereby."""
        others = tuple(member for member in self.waiting if member.id != id)
        return replace(
            self,
            over=self.over or id in self.ids,
            waiting=(*others, Member(id, version, team)),
            missed=tuple(m for m in self.missed if number_of(m[0]) != number_of(id)),
            refused=tuple(number for number in self.refused if number != number_of(id)),
        )

    def without(self, *ids: str, left: bool = False) -> Roster:
        """These have left, or else are dead."""
        gone = tuple(id for id in self.ids if id in ids and id not in self.gone)
        return replace(
            self,
            waiting=tuple(member for member in self.waiting if member.id not in ids),
            left=(*self.left, *gone) if left else self.left,
            dead=self.dead if left else (*self.dead, *gone),
            missed=tuple(m for m in self.missed if m[0] not in ids),
        )

    def fail(self, id: str) -> Roster:
        """This one ends by an error of its own; before the first sync round all end with it."""
        early = id in self.ids and not self.begun
        failed = (*self.failed, id) if early else self.failed
        return replace(self.without(id), failed=failed)

    def without_number(self, number: int, left: bool = False) -> Roster:
        """As `without`, for the process of this number, under whatever id it was here."""
        ids = (id for id in self.everyone if number_of(id) == number)
        return self.without(*ids, left=left)

    def with_host(self, host: str) -> Roster:
        """This launcher needs the store."""
        return replace(self, hosts=(*self.hosts, host))

    def without_host(self, host: str) -> Roster:
        """This launcher has ended."""
        return replace(self, hosts=tuple(other for other in self.hosts if other != host))

    # -- the next generation -------------------------------------------------------------------

    def present(self, silent: Set[str]) -> list[Member]:
        """Who waits and is not known to be lost, by number, if its worker is there as a whole."""
        found = [member for member in self.waiting if member.id not in silent]
        if self.parts > 1:
            here = Counter((self.worker_of(member.id), member.team) for member in found)
            found = [m for m in found if here[self.worker_of(m.id), m.team] == self.parts]
        return sorted(found, key=lambda member: member.number)

    def absent(self, silent: Set[str]) -> tuple[str, ...]:
        """The members that have not come, though nobody takes their worker for lost."""
        lost = {self.worker_of(id) for id in self.ids if id in self.gone or id in silent}
        here = {member.id for member in self.waiting}
        return tuple(id for id in self.ids if id not in here and self.worker_of(id) not in lost)

    def complete(self, silent: Set[str], expected: int, late: bool = False) -> bool:
        """Whether the next generation can begin.

        It waits for all living members. Where none is left, this is a start: it waits until as
        many workers as `expected` have come, or until it is `late`.
        """
        here = self.present(silent)
        if not here or len({member.number for member in here}) < len(here):
            return False  # of two with the same number one will give up
        if self.absent(silent):
            return False
        start = not any(member.id in self.ids for member in here)
        return not start or late or len(here) >= expected * self.parts

    def next(self, silent: Set[str]) -> Roster:
        """The next generation, in the order of the workers' numbers."""
        members = tuple(self.present(silent))
        ids = {member.id for member in members}
        survivors = any(member.id in self.ids or member.version >= 0 for member in members)
        asleep = [(id, self.generation, self.meeting, self.closed) for id in self.ids]
        return replace(
            self,
            generation=self.generation + 1,
            meeting=0,
            over=False,
            closed=False,
            members=members,
            waiting=tuple(m for m in self.waiting if m.id not in ids and m.id not in silent),
            missed=(*self.missed, *(m for m in asleep if m[0] not in ids | self.gone)),
            left=(),
            dead=(),
            failed=(),
            anew=self.begun and not survivors,
            closing=(),
        )
