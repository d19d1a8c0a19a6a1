"""The roster of a crew: an immutable value that names the members and every decision.

All workers share one roster, stored as JSON text. A *round* is an exchange between the members of a
generation: a sync round, which moves the anchor, or a state transfer to joiners.

    generation           number of the current generation: the members that share a process group
    rounds               completed rounds of this generation: index of the current round
    ended                the generation runs no more rounds; members and waiting processes form the
                         next generation
    ended_kept           whether the last round was kept or undone
    members              incarnations: "3.2" is process number 3, started for the second time
    waiting              processes that ask to join the next generation
    left, dead           members that finished; members known to have died
    done                 number of processes that have finished since the run started
    missed               members that a later generation excluded (`MissedMember`)
    synced               a sync round was kept, so a loss costs work
    all_lost             all members that took part in a sync round are lost, with their state
    revision             number of changes; a replayed older text has a lower revision
    incarnations         number of starts of each process
    worker_incarnations  number of starts of each worker, for workers with multiple processes
    facts                checksums of the facts that all workers share, per inner rank
    failed               members that ended with an error before the first sync round: the run ends
    refused              numbers of processes that were refused because their facts differ
    closing              members that have finished their steps (`ClosingMember`): they run a last
                         round if all other members finished after equal steps, else they leave
    silent               in a large crew: silent processes with their last heartbeat counts
    launchers            launchers that still need the store
    run                  name of the run, drawn by the first process
    processes            processes per worker. Inner rank p of worker n is process number
                         n * processes + p. A worker joins with all processes, or not at all

Every change replaces the text by compare-and-set. Of two concurrent changes, the first wins
and the second is computed again, so every question has a single answer.

This module works on plain values: no store, clock or process group.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple

WATCHED = 64  # number of other processes whose heartbeats a process reads


class Version(NamedTuple):
    """Training progress of a worker. The worker with the highest version sends state to joiners.

    If no worker has state, the number of steps decides, so that new joiners set no worker back. A
    worker at the end of a warm-up ranks above workers before the last warm-up step, and below
    workers after the round. The steps of a newcomer advance no other worker.
    """

    rounds: int = -1  # sync rounds included in the state; negative: no state
    established: bool = False  # has completed a round since joining
    steps: int = 0
    settled: bool = True  # False: the round that ends the warm-up is pending

    @property
    def has_state(self) -> bool:
        return self.rounds >= 0


NO_VERSION = Version()


class Member(NamedTuple):
    id: str
    version: Version
    worker_incarnation: int = 0  # equal in all processes of a worker that started together

    @property
    def number(self) -> int:
        return number_of(self.id)


class MissedMember(NamedTuple):
    """A member of an earlier generation that the next generation excluded.

    A suspended process reads the decision about the last round here after waking up.
    """

    id: str
    generation: int
    rounds: int  # completed by that generation
    ended_kept: bool


class ClosingMember(NamedTuple):
    """A member after the last step, with the index of the possible last round."""

    id: str
    round_index: int
    steps: int


def number_of(id: str) -> int:
    return int(id.partition(".")[0])


_id = attrgetter("id")
_number = attrgetter("number")


@dataclass(frozen=True)
class Roster:
    """The shared roster. Methods that change the roster return a new value."""

    generation: int = 0
    rounds: int = 0
    ended: bool = True
    ended_kept: bool = False
    members: tuple[Member, ...] = ()
    waiting: tuple[Member, ...] = ()
    left: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    missed: tuple[MissedMember, ...] = ()
    synced: bool = False
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
        # JSON has only lists. Tuples make the value immutable and equal to the original.
        fields = {name: _to_tuples(value) for name, value in dict(json.loads(text)).items()}
        for name in ("members", "waiting"):
            fields[name] = tuple(Member(id, Version(*v), *rest) for id, v, *rest in fields[name])
        fields["missed"] = tuple(starmap(MissedMember, fields["missed"]))
        fields["closing"] = tuple(starmap(ClosingMember, fields["closing"]))
        return cls(**fields)

    # -- questions -----------------------------------------------------------------------------

    @property
    def gone(self) -> frozenset[str]:
        return frozenset((*self.left, *self.dead))

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(map(_id, self.members))

    @property
    def waiting_ids(self) -> frozenset[str]:
        return frozenset(map(_id, self.waiting))

    @property
    def everyone(self) -> tuple[str, ...]:
        return (*self.ids, *self.waiting_ids, *map(_id, self.missed))

    @property
    def finished(self) -> bool:
        return bool(self.left) and self.gone >= set(self.ids)

    def worker_of(self, id: str) -> int:
        return number_of(id) // self.processes

    def is_replaced(self, id: str) -> bool:
        number, _, incarnation = id.partition(".")
        return dict(self.incarnations).get(int(number), 0) > int(incarnation)

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(self.worker_of, self.ids)))

    @property
    def _versions(self) -> list[Version]:
        versions: dict[int, Version] = {}
        for member in self.members:
            worker = self.worker_of(member.id)
            # The least advanced process determines the version of a worker.
            versions[worker] = min(member.version, versions.get(worker, member.version))
        return list(versions.values())

    @property
    def source(self) -> int:
        """Rank that sends state to joiners: the lowest rank with the highest version."""
        return self._versions.index(max(self._versions))

    @property
    def joiners(self) -> tuple[int, ...]:
        """Ranks that need the state. If no rank has state: all ranks except the source."""
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
        """Return whether a settled round was the last round of the generation."""
        # All processes of a worker must get equal answers, so an undone later round must not affect
        # the answer. A worker with a single process may regroup early.
        last: Roster | MissedMember = self
        if self.generation != generation:
            missed = self._find_missed(generation, id)
            if self.processes == 1 or missed is None:
                return True
            last = missed
        return last.rounds <= round_index or (last.ended_kept and last.rounds == round_index + 1)

    def settled(self, generation: int, round_index: int, id: str) -> bool | None:
        if self.generation == generation:
            if self.rounds > round_index:
                return True
            return False if self.ended else None
        missed = self._find_missed(generation, id)
        if missed is not None:
            return missed.rounds > round_index
        raise RuntimeError(
            f"worker {self.worker_of(id)} was stopped for some time, and a second worker with this "
            "number has joined since. Give each worker a unique number (MANYHANDS_WORKER)."
        )

    def _find_missed(self, generation: int, id: str) -> MissedMember | None:
        for missed in self.missed:
            if (missed.id, missed.generation) == (id, generation):
                return missed
        return None

    # -- heartbeats ----------------------------------------------------------------------------

    @property
    def here(self) -> frozenset[str]:
        return self.waiting_ids.union(self.ids) - self.gone

    def watched_by(self, own: str) -> tuple[str, ...]:
        """Return the members and waiting processes that a process watches.

        Each process watches the next processes on a ring in random order: if a host or half of the
        crew is lost, each lost process has living watchers. A process also watches silent
        successors, to notice their return, and processes with an equal number.
        """
        ring = sorted({*self.here, own}, key=lambda id: sha256(id.encode()).digest())
        after = ring.index(own) + 1
        successors = ring[after:] + ring[: after - 1]
        silent = dict(self.silent)
        awake = [id for id in successors if id not in silent]
        number = own.partition(".")[0]  # a launcher's id has no process number
        same = [id for id in successors if id.partition(".")[0] == number]
        return tuple(dict.fromkeys((*successors[:WATCHED], *awake[:WATCHED], *same)))

    def report(self, counts: Mapping[str, int], silent: Set[str]) -> Roster:
        """Record silent processes. Remove entries of processes with an advanced heartbeat."""
        here = self.here
        if len(here) <= WATCHED + 1:
            return self  # every process watches all heartbeats
        found = dict(self.silent)
        for id, count in counts.items():
            if id in silent:
                found[id] = count
            elif count > found.get(id, count):  # the process is alive
                del found[id]
        return replace(self, silent=tuple(sorted((i, n) for i, n in found.items() if i in here)))

    # -- a round -------------------------------------------------------------------------------

    def keep(self, generation: int, round_index: int, sync_round: bool = True) -> Roster:
        if self._is_decided(generation, round_index):
            return self
        # The generation ends if processes wait to join or members are gone, because the process
        # group then has the wrong size.
        last = bool(self.present(set()) or self.gone)
        synced = self.synced or sync_round
        return replace(self, rounds=round_index + 1, ended=last, ended_kept=last, synced=synced)

    def undo(self, generation: int, round_index: int) -> Roster:
        if self._is_decided(generation, round_index):
            return self
        # A failed exchange makes the connections unusable, so the generation ends.
        return replace(self, ended=True)

    def _is_decided(self, generation: int, round_index: int) -> bool:
        return self.generation != generation or self.ended or self.rounds > round_index

    def close(self, id: str, generation: int, round_index: int, steps: int) -> Roster:
        if self.generation != generation or self.ended or id not in self.ids:
            return self
        closing = ClosingMember(id, round_index, steps)
        return replace(self, closing=(*_others(self.closing, {id}), closing))

    def closing_at(self, round_index: int) -> dict[str, int]:
        return {m.id: m.steps for m in self.closing if m.round_index == round_index}

    # -- joining and leaving -------------------------------------------------------------------

    def count_incarnation(self, number: int) -> Roster:
        return replace(self, incarnations=_count(self.incarnations, number))

    def count_worker_incarnation(self, worker: int) -> Roster:
        return replace(self, worker_incarnations=_count(self.worker_incarnations, worker))

    def set_facts(self, inner_rank: int, digest: str) -> Roster:
        if inner_rank in dict(self.facts):
            return self
        return replace(self, facts=(*self.facts, (inner_rank, digest)))

    def refuse(self, number: int) -> Roster:
        return replace(self, refused=tuple(sorted({*self.refused, number})))

    def ask_to_join(self, *asking: Member) -> Roster:
        """Ask to join the next generation. A request of a member ends the current generation."""
        ids = set(map(_id, asking))
        numbers = set(map(_number, asking))
        return replace(
            self,
            ended=self.ended or not ids.isdisjoint(self.ids),
            waiting=(*_others(self.waiting, ids), *asking),
            # The process has returned under this id or a newer id, so drop old entries.
            missed=tuple(m for m in self.missed if number_of(m.id) not in numbers),
            silent=tuple(entry for entry in self.silent if entry[0] not in ids),
            refused=tuple(number for number in self.refused if number not in numbers),
        )

    def without(self, *ids: str, left: bool = False) -> Roster:
        gone = tuple(id for id in self.ids if id in ids and id not in self.gone)
        waiting = _others(self.waiting, ids)
        rest = replace(self, waiting=waiting, missed=_others(self.missed, ids))
        if left:
            return replace(rest, left=(*self.left, *gone), done=self.done + len(gone))
        return replace(rest, dead=(*self.dead, *gone))

    def fail(self, id: str) -> Roster:
        """Remove a process that failed. Before the first sync round this ends the run."""
        rest = self.without(id)
        if id in self.ids and not self.synced:
            return replace(rest, failed=(*self.failed, id))
        return rest

    def without_number(self, number: int, left: bool = False) -> Roster:
        ids = (id for id in self.everyone if number_of(id) == number)
        return self.without(*ids, left=left)

    def with_launcher(self, launcher: str) -> Roster:
        return replace(self, launchers=(*self.launchers, launcher))

    def without_launcher(self, launcher: str) -> Roster:
        return replace(self, launchers=tuple(id for id in self.launchers if id != launcher))

    # -- the next generation -------------------------------------------------------------------

    def present(self, silent: Set[str]) -> list[Member]:
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

    def absent(self, silent: Set[str]) -> tuple[str, ...]:
        lost = {self.worker_of(id) for id in self.ids if id in self.gone or id in silent}
        here = self.waiting_ids
        return tuple(id for id in self.ids if id not in here and self.worker_of(id) not in lost)

    def has_quorum(self, silent: Set[str], quorum: int) -> bool:
        """Return whether enough workers wait. Finished workers count as well."""
        return len(self.present(silent)) + self.done >= quorum * self.processes

    def complete(
        self, silent: Set[str], expected: int, late: bool = False, quorum: int = 1
    ) -> bool:
        """Return whether the next generation can start.

        A generation needs a `quorum` of workers and waits for all living members. If there are
        none, it waits for `expected` workers, unless `late` is set.
        """
        here = self.present(silent)
        if not here or len(set(map(_number, here))) < len(here):
            return False  # of two processes with an equal number, the newer raises an error
        if self.absent(silent) or not self.has_quorum(silent, quorum):
            return False
        start = set(self.ids).isdisjoint(map(_id, here))
        return not start or late or len(here) >= expected * self.processes

    def begin_next(
        self, after: int, silent: Set[str], expected: int, late: bool, quorum: int
    ) -> Roster:
        # A concurrent change may have started the generation or removed a waiting process.
        if self.generation == after and self.complete(silent, expected, late, quorum):
            return self.next(silent)
        return self

    def next(self, silent: Set[str]) -> Roster:
        members = tuple(self.present(silent))
        ids = set(map(_id, members))
        # Members of the last generation and processes with a checkpoint have state.
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
            all_lost=self.synced and not survivors,
            closing=(),
            silent=(),
        )


def _others(entries: Iterable[Any], ids: Collection[str]) -> tuple[Any, ...]:
    return tuple(entry for entry in entries if entry.id not in ids)


def _count(counts: tuple[tuple[int, int], ...], number: int) -> tuple[tuple[int, int], ...]:
    known = dict(counts)
    known[number] = known.get(number, 0) + 1
    return tuple(sorted(known.items()))


def _to_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_to_tuples, value))
    return value
