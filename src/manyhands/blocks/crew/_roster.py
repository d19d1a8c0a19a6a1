"""Keep the roster of a crew: its members, as one immutable value, and every change of it.

All workers share one roster, as one text in the store. A *round* is one exchange between the
members of a generation: a sync round, which moves the anchor, or a state transfer to joiners.

    generation           number of the present generation: the members that share a process group
    rounds               rounds that this generation has kept: the index of its current round
    ended                the generation holds no more rounds; its members and the waiting processes
                         form the next one
    ended_kept           its last round was kept (False: it was undone)
    members              one incarnation each: "3.2" is process number 3, started a second time
    waiting              processes that have asked to be in the next generation, each with those
                         that it cannot reach: only processes that all reach each other are members
    left, dead           members that finished, and members that are known to have died
    done                 number of processes that have finished since the run began
    missed               members that the others went on without, see `MissedMember`
    begun                a sync round was kept, so there is work to lose (a state transfer alone
                         does not count)
    all_lost             and every member that had taken part in one is lost, with all its state
    revision             number of changes that led to this roster: an older text that a stranger
                         puts back has a lower one
    incarnations         how often each process has been started, by its number
    worker_incarnations  how often each worker has been started, if a worker has several processes
    facts                checksums of the facts that all workers share, one for each inner rank
    failed               members that ended with an error before the first sync round: the run ends
    refused              numbers of processes that came with other facts, and may not join
    closing              members that have finished their steps, see `ClosingMember`: they hold the
                         round if all others finished after equally many steps; otherwise they
                         leave without it
    silent               in a large crew: processes whose heartbeat stands still, and at which
                         count, as those that watch it have reported
    launchers            launchers that still need the store
    run                  name of the run, drawn by the first process
    processes            processes of each worker. Inner rank p of worker n is process number
                         n * processes + p. A worker takes part with all processes of one
                         incarnation, or not at all

Every change replaces the whole text, and only if the text is still the one that was read (compare
and set). Of two concurrent changes the first wins, and the second is computed again. So each
question (is the round kept? who is in the next generation?) has exactly one answer.

Everything here is plain values: no store, no clock, no process group.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple

WATCHED = 64  # processes whose heartbeats each one reads; those of a smaller crew read all


class Version(NamedTuple):
    """How far a worker is: the one with the highest version sends joiners its state.

    If no worker has a state, the steps decide, so that a joiner, which has taken none, sets no
    other worker back. A worker that ends a warm-up is further than one before its last step, and
    not as far as one that has held the round. A newcomer's steps set nobody forward: the others may
    hold a round at the step that let it in.
    """

    rounds: int = -1  # sync rounds that its state is the result of; negative: it has no state
    established: bool = False  # it has held a round since it was let in
    steps: int = 0
    settled: bool = True  # False: the round that ends a warm-up is still to be held

    @property
    def has_state(self) -> bool:
        return self.rounds >= 0


NO_VERSION = Version()


class Member(NamedTuple):
    """One incarnation of a process."""

    id: str
    version: Version
    worker_incarnation: int = 0  # equal in all processes of a worker that were started together
    cut_from: tuple[str, ...] = ()  # processes that it cannot reach

    @classmethod
    def of(
        cls, id: str, version: Iterable[Any], worker_incarnation: int, cut_from: Iterable[str]
    ) -> Member:
        return cls(id, Version(*version), worker_incarnation, tuple(cut_from))

    @property
    def number(self) -> int:
        return number_of(self.id)


class MissedMember(NamedTuple):
    """A member that the others went on without.

    It may be stopped and wake up later. It must then still learn whether its last round was kept.
    """

    id: str
    generation: int
    rounds: int  # that its generation had kept when the others went on
    ended_kept: bool


class ClosingMember(NamedTuple):
    """A member that has finished its steps, and the round that it would hold as its last."""

    id: str
    round_index: int
    steps: int


def number_of(id: str) -> int:
    """Return the process number in an id. A restarted process keeps its number."""
    return int(id.partition(".")[0])


_id = attrgetter("id")
_number = attrgetter("number")


@dataclass(frozen=True)
class Roster:
    """The shared roster. Each method that changes something returns a new roster."""

    generation: int = 0
    rounds: int = 0
    ended: bool = True
    ended_kept: bool = False
    members: tuple[Member, ...] = ()
    waiting: tuple[Member, ...] = ()
    left: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    missed: tuple[MissedMember, ...] = ()
    begun: bool = False
    all_lost: bool = False
    processes: int = 1
    run: str = ""
    revision: int = 0
    incarnations: tuple[tuple[int, int], ...] = ()
    worker_incarnations: tuple[tuple[int, int], ...] = ()
    facts: tuple[tuple[int, str], ...] = ()
    failed: tuple[str, ...] = ()
    refused: tuple[int, ...] = ()
    closing: tuple[ClosingMember, ...] = ()
    silent: tuple[tuple[str, int], ...] = ()
    launchers: tuple[str, ...] = ()
    done: int = 0

    # -- as text -------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return json.dumps(self.__dict__, separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Roster:
        """Parse a roster's text. Malformed text raises ValueError, TypeError or KeyError."""
        fields = json.loads(text)
        # JSON has only lists. Tuples make the value immutable, and equal to the one it came from.
        for name in ("members", "waiting"):
            fields[name] = tuple(starmap(Member.of, fields[name]))
        for name in ("left", "dead", "failed", "refused", "launchers"):
            fields[name] = tuple(fields[name])
        for name in ("incarnations", "worker_incarnations", "facts", "silent"):
            fields[name] = tuple(map(tuple, fields[name]))
        fields["missed"] = tuple(starmap(MissedMember, fields["missed"]))
        fields["closing"] = tuple(starmap(ClosingMember, fields["closing"]))
        return cls(**fields)

    # -- questions -----------------------------------------------------------------------------

    @property
    def gone(self) -> frozenset[str]:
        """The members that are known to be done or dead: they hold no further round."""
        return frozenset((*self.left, *self.dead))

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(map(_id, self.members))

    @property
    def waiting_ids(self) -> frozenset[str]:
        return frozenset(map(_id, self.waiting))

    @property
    def everyone(self) -> tuple[str, ...]:
        """The ids of all processes in the roster: members, waiting and missed ones."""
        return (*self.ids, *self.waiting_ids, *map(_id, self.missed))

    @property
    def finished(self) -> bool:
        """Whether the last members are gone, and at least one of them had finished."""
        return bool(self.left) and self.gone >= set(self.ids)

    def worker_of(self, id: str) -> int:
        """Return the number of the worker that a process belongs to."""
        return number_of(id) // self.processes

    def is_replaced(self, id: str) -> bool:
        """Return whether a process of the same number, or the same process, has a newer id."""
        number, _, incarnation = id.partition(".")
        return dict(self.incarnations).get(int(number), 0) > int(incarnation)

    @property
    def workers(self) -> tuple[int, ...]:
        """The numbers of the members' workers, in rank order."""
        return tuple(dict.fromkeys(map(self.worker_of, self.ids)))

    @property
    def _versions(self) -> list[Version]:
        """The version that each worker holds, in rank order."""
        versions: dict[int, Version] = {}
        for member in self.members:
            worker = self.worker_of(member.id)
            # A worker holds only what all of its processes hold.
            versions[worker] = min(member.version, versions.get(worker, member.version))
        return list(versions.values())

    @property
    def source(self) -> int:
        """The rank that sends joiners the state: the lowest rank with the highest version."""
        return self._versions.index(max(self._versions))

    @property
    def joiners(self) -> tuple[int, ...]:
        """The ranks that need the state. If no rank holds any state: all but the source."""
        versions = self._versions
        source = self.source
        best = versions[source]._replace(established=True)
        joiners = []
        for rank, version in enumerate(versions):
            same = version._replace(established=True) == best
            if not same or not (best.has_state or rank == source):
                joiners.append(rank)
        return tuple(joiners)

    def ends_with(self, generation: int, round_index: int, id: str) -> bool:
        """Return whether a settled round was its generation's last, with one answer for all."""
        # A later round may have been undone meanwhile. Members with several processes learn that
        # only when they come to that round, so that all processes of a worker get the same answer.
        # A worker of one process may learn it at once.
        last: Roster | MissedMember = self
        if self.generation != generation:
            missed = self._find_missed(generation, id)
            if self.processes == 1 or missed is None:
                return True
            last = missed
        return last.rounds <= round_index or (last.ended_kept and last.rounds == round_index + 1)

    def settled(self, generation: int, round_index: int, id: str) -> bool | None:
        """Return whether the members kept a round; None while that is open."""
        if self.generation == generation:
            if self.rounds > round_index:
                return True
            return False if self.ended else None
        missed = self._find_missed(generation, id)
        if missed is not None:
            return missed.rounds > round_index
        raise RuntimeError(
            f"worker {self.worker_of(id)} was stopped for some time, and another worker with its "
            "number has joined meanwhile. Give each worker a number (MANYHANDS_WORKER) of its own."
        )

    def _find_missed(self, generation: int, id: str) -> MissedMember | None:
        for missed in self.missed:
            if (missed.id, missed.generation) == (id, generation):
                return missed
        return None

    # -- heartbeats ----------------------------------------------------------------------------

    @property
    def here(self) -> frozenset[str]:
        """The members and the waiting processes, but those that are gone."""
        return self.waiting_ids.union(self.ids) - self.gone

    def watched_by(self, own: str) -> tuple[str, ...]:
        """Return the members and waiting processes whose heartbeats a process reads.

        They follow it on a ring, whose order has nothing to do with hosts: if a host or half of the
        crew is lost, each lost process still has watchers. Those that are reported to be silent are
        read as well, so that their return is noticed, and so is a process with the same number.
        """
        ring = sorted({*self.here, own}, key=lambda id: sha256(id.encode()).digest())
        others = ring[ring.index(own) + 1 :] + ring[: ring.index(own)]
        silent = dict(self.silent)
        awake = [id for id in others if id not in silent]
        number = own.partition(".")[0]
        same = [id for id in others if id.partition(".")[0] == number]
        return tuple(dict.fromkeys((*others[:WATCHED], *awake[:WATCHED], *same)))

    def report(self, counts: Mapping[str, int], silent: Set[str]) -> Roster:
        """Take in which of the heartbeats that a process has read stand still."""
        here = self.here
        if len(here) <= WATCHED + 1:
            return self  # each process watches all others
        found = dict(self.silent)
        for id, count in counts.items():
            if id in silent:
                found[id] = count
            elif count > found.get(id, count):  # beyond its reported count: a sign of life
                del found[id]
        return replace(self, silent=tuple(sorted((i, n) for i, n in found.items() if i in here)))

    # -- a round -------------------------------------------------------------------------------

    def keep(self, generation: int, round_index: int, sync_round: bool = True) -> Roster:
        """Keep a round: all members have arrived."""
        # The generation ends with this round if there are processes to let in or members that are
        # gone: its process group then has the wrong size.
        if self.generation != generation or self.ended or self.rounds > round_index:
            return self  # another member has decided first
        last = bool(self.admissible or self.gone)
        begun = self.begun or sync_round
        return replace(self, rounds=round_index + 1, ended=last, ended_kept=last, begun=begun)

    def undo(self, generation: int, round_index: int) -> Roster:
        """Undo a round in which a member did not arrive."""
        # The generation ends, because a broken exchange leaves its connections unusable.
        if self.generation != generation or self.ended or self.rounds > round_index:
            return self  # another member has decided first
        return replace(self, ended=True)

    def close(self, id: str, generation: int, round_index: int, steps: int) -> Roster:
        """Record that a member has finished, after this number of steps."""
        if self.generation != generation or self.ended or id not in self.ids:
            return self
        closing = ClosingMember(id, round_index, steps)
        return replace(self, closing=(*_others(self.closing, {id}), closing))

    def closing_at(self, round_index: int) -> dict[str, int]:
        """Return the steps of each member that is closing at this round, by id."""
        return {m.id: m.steps for m in self.closing if m.round_index == round_index}

    # -- joining and leaving -------------------------------------------------------------------

    def count_incarnation(self, number: int) -> Roster:
        """Count one more start of the process with this number."""
        return replace(self, incarnations=_count(self.incarnations, number))

    def count_worker_incarnation(self, worker: int) -> Roster:
        """Count one more start of this worker with all its processes."""
        return replace(self, worker_incarnations=_count(self.worker_incarnations, worker))

    def set_facts(self, inner_rank: int, digest: str) -> Roster:
        """Set the run's facts for an inner rank, unless an earlier process has set them."""
        if inner_rank in dict(self.facts):
            return self
        return replace(self, facts=(*self.facts, (inner_rank, digest)))

    def refuse(self, number: int) -> Roster:
        """Record that the process of this number may not join: its facts differ."""
        return replace(self, refused=tuple(sorted({*self.refused, number})))

    def ask_to_join(self, *asking: Member) -> Roster:
        """Ask to be in the next generation. A member that asks ends the present generation."""
        ids = set(map(_id, asking))
        numbers = set(map(_number, asking))
        return replace(
            self,
            ended=self.ended or not ids.isdisjoint(self.ids),
            waiting=(*_others(self.waiting, ids), *asking),
            # The process is back, under this id or a newer one: old entries have no use any more.
            missed=tuple(m for m in self.missed if number_of(m.id) not in numbers),
            silent=tuple(entry for entry in self.silent if entry[0] not in ids),
            refused=tuple(number for number in self.refused if number not in numbers),
        )

    def without(self, *ids: str, left: bool = False) -> Roster:
        """Remove processes that have finished (`left`) or died."""
        gone = tuple(id for id in self.ids if id in ids and id not in self.gone)
        waiting = _others(self.waiting, ids)
        rest = replace(self, waiting=waiting, missed=_others(self.missed, ids))
        if left:
            return replace(rest, left=(*self.left, *gone), done=self.done + len(gone))
        return replace(rest, dead=(*self.dead, *gone))

    def fail(self, id: str) -> Roster:
        """Remove a process that ended with an error; before the first sync round the run ends."""
        rest = self.without(id)
        if id in self.ids and not self.begun:
            return replace(rest, failed=(*self.failed, id))
        return rest

    def without_number(self, number: int, left: bool = False) -> Roster:
        """Remove the process with this number, whatever its incarnation."""
        ids = (id for id in self.everyone if number_of(id) == number)
        return self.without(*ids, left=left)

    def with_launcher(self, launcher: str) -> Roster:
        """Add a launcher that needs the store."""
        return replace(self, launchers=(*self.launchers, launcher))

    def without_launcher(self, launcher: str) -> Roster:
        """Remove a launcher that has ended."""
        return replace(self, launchers=tuple(one for one in self.launchers if one != launcher))

    # -- the next generation -------------------------------------------------------------------

    def present(self, silent: Set[str]) -> list[Member]:
        """Return the waiting processes of workers that are complete and alive, by number."""
        workers: dict[tuple[int, int], list[Member]] = {}
        for member in self.waiting:
            if member.id not in silent:
                worker = (self.worker_of(member.id), member.worker_incarnation)
                workers.setdefault(worker, []).append(member)
        found: list[Member] = []
        for members in workers.values():
            if self.processes == 1 or len(members) == self.processes:
                found += members
        return sorted(found, key=_number)

    @property
    def admissible(self) -> list[Member]:
        """The waiting processes that can reach all members of the present generation."""
        members = set(self.ids)
        return [m for m in self.present(set()) if members.isdisjoint(m.cut_from)]

    def together(self, silent: Set[str]) -> list[Member]:
        """Return the largest set of present processes that all reach each other, by number."""
        # Of several such sets, the one with the highest version, and then with the lowest number.
        found = self.present(silent)
        apart = {frozenset((m.id, other)) for m in found for other in m.cut_from}
        if not apart:
            return found
        sets = []
        for first in found:
            chosen = [first]
            for member in found:
                lines = (frozenset((member.id, one.id)) for one in chosen)
                if member is not first and apart.isdisjoint(lines):
                    chosen.append(member)
            sets.append(chosen)
        best = max(sets, key=lambda chosen: (len(chosen), max(m.version for m in chosen)))
        return sorted(best, key=_number)

    def absent(self, silent: Set[str]) -> tuple[str, ...]:
        """Return the members that do not wait yet, though their worker is not known to be lost."""
        lost = {self.worker_of(id) for id in self.ids if id in self.gone or id in silent}
        here = self.waiting_ids
        return tuple(id for id in self.ids if id not in here and self.worker_of(id) not in lost)

    def has_quorum(self, silent: Set[str], quorum: int) -> bool:
        """Return whether enough workers wait. Those that have finished count as well."""
        return len(self.together(silent)) + self.done >= quorum * self.processes

    def complete(
        self, silent: Set[str], expected: int, late: bool = False, quorum: int = 1
    ) -> bool:
        """Return whether the next generation can begin."""
        # It needs a `quorum` of workers, and waits for all living members. Without a living member
        # this is a start: it waits until `expected` workers are present, or until it is `late`.
        here = self.present(silent)
        if not here or len(set(map(_number, here))) < len(here):
            return False  # of two processes with one number, one will give up
        if self.absent(silent) or not self.has_quorum(silent, quorum):
            return False
        start = set(self.ids).isdisjoint(map(_id, here))
        return not start or late or len(here) >= expected * self.processes

    def begin_next(
        self, after: int, silent: Set[str], expected: int, late: bool, quorum: int
    ) -> Roster:
        """Begin the generation that follows `after`, if it is still complete."""
        # Another process may have begun it meanwhile, or a waiting one may have died.
        if self.generation == after and self.complete(silent, expected, late, quorum):
            return self.next(silent)
        return self

    def next(self, silent: Set[str]) -> Roster:
        """Begin the next generation, with ranks in the order of the workers' numbers."""
        members = tuple(self.together(silent))
        ids = set(map(_id, members))
        # A member of the last generation, or a process with a checkpoint, still holds the state.
        survivors = any(member.id in self.ids or member.version.has_state for member in members)
        missed = list(self.missed)
        for id in self.ids:
            if id not in ids and id not in self.gone:
                missed.append(MissedMember(id, self.generation, self.rounds, self.ended_kept))
        return replace(
            self,
            generation=self.generation + 1,
            rounds=0,
            ended=False,
            ended_kept=False,
            members=members,
            waiting=_others(self.waiting, ids | silent),
            missed=tuple(missed),
            left=(),
            dead=(),
            failed=(),
            all_lost=self.begun and not survivors,
            closing=(),
            silent=(),
        )


def _others(entries: Iterable[Any], ids: Collection[str]) -> tuple[Any, ...]:
    """Return the entries that have none of these ids."""
    return tuple(entry for entry in entries if entry.id not in ids)


def _count(counts: tuple[tuple[int, int], ...], number: int) -> tuple[tuple[int, int], ...]:
    """Increase the count of a number."""
    known = dict(counts)
    known[number] = known.get(number, 0) + 1
    return tuple(sorted(known.items()))
