"""Agree on every round with workers that join, leave, stall and die.

A *round* is one exchange between the members of a *generation*, which share a process group. It is
kept if every member reports that everything has arrived, and undone otherwise, with one decision
for all. The next generation begins after an undone round, and when a process waits to join or a
member has left.

    crew = Crew()
    crew.join(version, facts)               version: how far this worker is (`Version`)
    while training:
        if crew.joiners:                    they need the state, which `source` sends over `group`
            transfer_state(crew.group, crew.source, crew.joiners); crew.settle(True)
        take_steps()
        start_exchange(crew.group)
        try:
            crew.wait(finished)             raises WorkerLost if waiting cannot succeed
        except WorkerLost:
            crew.abort()
        if crew.settle(arrived):            the same answer for all members
            version = Version(version.rounds + 1)
        if crew.regroup_due:
            crew.regroup(version)
    if crew.close(steps):                   all others finished after equally many steps
        exchange_a_last_time()
    crew.leave()

_roster.py has the decisions that members share. _enrollment.py compares the options of workers, and
lets a process into a generation. The state itself belongs to the caller.

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
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import torch.distributed as dist

from manyhands._arguments import number_in, real, whole
from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.stop_notice import stop_notice
from manyhands._warn import warn
from manyhands.blocks.crew._enrollment import (
    NO_FACTS,
    Enrollment,
    MemberFacts,
    Siblings,
    check_not_failed,
)
from manyhands.blocks.crew._roster import NO_VERSION, WATCHED, Roster, Version
from manyhands.blocks.crew._store import (
    PREFIX,
    SharedRoster,
    Signer,
    StoreClient,
    parse_address,
)
from manyhands.blocks.crew._transport import (
    FIRST_PAUSE,
    GlooTransport,
    StoreConnection,
    check_interface,
    next_pause,
)
from manyhands.errors import StoreLost, WorkerLost

PATIENCE = 600.0  # seconds, unless others are given
AUTO = "auto"
PATIENCE_NEEDS = f'It is at least as long as stall, or "{AUTO}".'
REPEAT_ARRIVAL = 1.0  # seconds until a worker reports its arrival again
SHORTEST = 1.0  # seconds; on a busy host living members may be late by less than that
KNOWN = 3  # waits that are needed to know the usual one
REGROUP = 1.0  # seconds that a regrouping is assumed to take until one was timed
JOINED_ALREADY = (
    "this worker has joined the crew already. Wrap several optimizers, such as Muon and AdamW, in "
    "one list: mh.DiLoCo([muon, adamw], crew=crew). To change the members, call regroup()."
)

Number = TypeVar("Number", int, float)


class Crew:
    """The workers of a run, and this worker's place among them.

    `store` is "host:port" of a torch TCPStore. `number` identifies this worker; a restarted worker
    keeps its number. `expected` is the number of workers at the start. A worker without a heartbeat
    for `stall` seconds is considered lost; a live one is waited for, up to `patience` seconds. With
    `patience="auto"` the others wait as long as that costs less than going on without it, judged by
    the time that earlier rounds took.
    No round is held by fewer than `quorum` workers: if fewer are left, they wait for others to
    come. Workers that have finished count as well. With a quorum above 1, a worker that is cut off
    from the store waits until it can reach the store again, and joins again.
    A worker may consist of several processes that train one model together, as under DDP or FSDP:
    `inner_group` is their process group, and all of them have the same number.
    All workers sign what they write to the store with `secret`, the same text on every worker, and
    ignore everything in the store that is not signed with it.
    Arguments that are left out come from the environment that `manyhands run` sets:
    MANYHANDS_STORE, MANYHANDS_SECRET, MANYHANDS_WORKER, MANYHANDS_WORKERS, MANYHANDS_STALL,
    MANYHANDS_PATIENCE and MANYHANDS_QUORUM.

    Without a store it is a crew of one worker: there are no threads, and every round is kept.

    >>> import torch, manyhands as mh
    >>> param = torch.nn.Parameter(torch.zeros(1))
    >>> crew = mh.Crew()  # in a script that `manyhands run` may start
    >>> optimizer = mh.DiLoCo(torch.optim.SGD([param], lr=0.1), every=50, crew=crew)
    >>> crew.number, crew.size
    (0, 1)
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        number: int | None = None,
        expected: int | None = None,
        stall: float | None = None,
        patience: float | str | None = None,
        quorum: int | None = None,
        inner_group: dist.ProcessGroup | None = None,
        secret: str | None = None,
    ) -> None:
        self.inner = RankGroup() if inner_group is None else RankGroup.of(inner_group)
        self.store = store or os.environ.get("MANYHANDS_STORE") or None
        if self.store:
            parse_address(self.store)  # raises if it is malformed
            stop_notice.in_crew = True
        if self.store and number is None and not os.environ.get("MANYHANDS_WORKER"):
            raise ValueError(
                "a worker of a crew needs a number that no other worker has, and got none. Set "
                "MANYHANDS_WORKER (`manyhands run` does), or give number=."
            )
        self.number = whole("number", _or_environment(number, "MANYHANDS_WORKER", int, 0))
        self.expected = whole("expected", _or_environment(expected, "MANYHANDS_WORKERS", int, 1), 1)
        self.stall = real("stall", _or_environment(stall, "MANYHANDS_STALL", float, 5.0), least=0.1)
        given: object = patience
        self._grace: GraceWindow | None = None
        if (os.environ.get("MANYHANDS_PATIENCE") if patience is None else patience) == AUTO:
            self._grace = GraceWindow()
            given = max(PATIENCE, self.stall)
        elif not isinstance(patience, str):
            given = _or_environment(patience, "MANYHANDS_PATIENCE", float, PATIENCE)
        self.patience = real("patience", given, least=self.stall, why=PATIENCE_NEEDS)
        self.quorum = whole("quorum", _or_environment(quorum, "MANYHANDS_QUORUM", int, 1), 1)
        if self.quorum > 1 and self.inner.size > 1:
            raise ValueError(
                "a quorum is for workers of one process: the processes of an inner_group cannot "
                "wait for the store and join again, each by itself. Leave quorum out."
            )
        self.regroup_due = False
        self._membership = Membership()
        self._round = 0  # index of the current round of this generation
        self._enrollment: Enrollment | None = None  # None before join() and after leaving
        self._transport: GlooTransport | None = None
        self._connection: StoreConnection | None = None  # None without a store
        if self.store is not None:
            self._connection = StoreConnection(self.store, Signer.from_environment(secret))

    @property
    def generation(self) -> int:
        return self._membership.generation

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the workers, in rank order."""
        return self._membership.members

    @property
    def rank(self) -> int:
        return self._membership.rank

    @property
    def source(self) -> int:
        """The rank that sends joiners the state."""
        return self._membership.source

    @property
    def joiners(self) -> tuple[int, ...]:
        """The ranks that need the state."""
        return self._membership.joiners

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The members' gloo group (a ProcessGroupGloo); None for a worker that is alone."""
        return None if self._transport is None else self._transport.group

    @property
    def run(self) -> str | None:
        """The name of the run, which its first worker has drawn; None before this worker joins."""
        return None if self._enrollment is None else self._enrollment.shared.roster.run

    @property
    def ignored(self) -> int:
        """Values in the store that this worker ignored, because no member can have written them."""
        return 0 if self._connection is None else self._connection.signer.ignored

    # -- joining and leaving -------------------------------------------------------------------

    def join(self, version: Version = NO_VERSION, facts: MemberFacts = NO_FACTS) -> None:
        """Join the crew: return when this worker is in a generation.

        `version` says how far it is, as from a checkpoint.
        All workers must have equal `facts`. If they differ, an error names the differences, before
        the other workers have noticed this one.
        """
        if self.members or self._enrollment is not None:
            raise RuntimeError(JOINED_ALREADY)
        if self._connection is None:
            self._begin_alone()
            return
        check_interface()
        try:
            self._enroll(self._connection, facts)
            # A script that ends without leave() is lost. The others need not wait for its silence.
            atexit.register(self._depart)
            self._enter(version)
        except BaseException:
            self._depart()
            raise
        if self._grace is not None:
            self._grace.begin_block()

    def _enroll(self, connection: StoreConnection, facts: MemberFacts) -> None:
        """Connect to the store, and check that this worker fits the others."""
        store = connection.store
        monitor = HeartbeatMonitor(self.stall)
        client = StoreClient(store, monitor.interval, connection.signer)
        try:
            shared = SharedRoster(client, monitor, self.inner.size)
            former = frozenset() if self._enrollment is None else self._enrollment.own_ids
            siblings = Siblings(self.number, self.inner)
            self._enrollment = Enrollment(
                shared, siblings, self.expected, self.patience, self.quorum, former
            )
            siblings.agree_on_incarnation(shared)
            self._enrollment.check_facts(facts)
        except (StoreLost, OSError) as error:
            client.close()
            if self._enrollment is not None:
                self._enrollment.close()
            if isinstance(error, StoreLost):
                raise
            raise StoreLost(store, error) from error  # there is no route to it

    def regroup(self, version: Version) -> None:
        """Form the next generation with all living members and all waiting processes."""
        if self._connection is None:
            self._begin_alone()
            return
        began = time.monotonic()
        while True:
            if self._joined().cut_off:
                self._return_to_store(self._connection)
            try:
                self._enter(version)
                break
            except StoreLost:
                self._note_cut()
        if self._grace is not None:
            self._grace.add_regroup(time.monotonic() - began)
            self._grace.begin_block()

    def _note_cut(self) -> None:
        """Let this worker join again, with a quorum; else raise the error that is handled."""
        if self.quorum == 1:
            raise
        self._joined().cut_off = True
        self.regroup_due = True

    def _return_to_store(self, connection: StoreConnection) -> None:
        """Wait until the store answers again; this worker then comes as a new process."""
        former = self._joined()
        self._disconnect()
        former.close()
        until = time.monotonic() + self.patience
        while True:
            try:
                connection.forget()
                self._enroll(connection, former.facts)
                break
            except StoreLost:
                if time.monotonic() > until:
                    raise
                time.sleep(1.0)  # without a route there is an answer at once
        # No generation has our new id, and a store that was started again counts from 1.
        self._membership = Membership()

    def leave(self) -> None:
        """Leave because this worker is done. The others go on without waiting for it.

        When the last members have left, the run is finished. A worker that comes later gets
        CrewFinished.
        """
        self._depart(left=True)

    def drop_out(self) -> None:
        """Leave as if dead, so that the others do not wait for this worker."""
        self._depart()

    def abort(self) -> None:
        """Make every message that waits in the group fail, here and on the other members.

        The group is unusable afterwards. Threads that wait in it end within milliseconds, with
        rare exceptions (_transport.py): do not wait for them.
        """
        if self._transport is not None:
            self._transport.abort()

    def _depart(self, left: bool = False) -> None:
        """Tell the members that this worker is gone: it has left, or it ends (`atexit`)."""
        enrollment = self._enrollment
        self._enrollment = None
        self._membership = replace(self._membership, members=())  # the rank decides who saves
        atexit.unregister(self._depart)
        if enrollment is None or enrollment.process != os.getpid():
            return
        id = enrollment.id
        shared = enrollment.shared
        try:
            if left:
                shared.change(lambda roster: roster.without(id, left=True))
            else:
                shared.change(lambda roster: roster.fail(id))
        except StoreLost:
            pass  # the others cannot reach the store either
        finally:
            enrollment.close()
            self._disconnect()

    # -- a round -------------------------------------------------------------------------------

    def wait(self, done: Callable[[float], bool]) -> None:
        """Call `done(seconds)`, which waits up to that long, until it returns True.

        Raise WorkerLost as soon as the round cannot be kept any more.
        """
        began = time.monotonic()
        pause = FIRST_PAUSE
        if self._grace is not None:
            self._grace.arrive()
        while not done(pause):
            if self._enrollment is None:
                continue
            roster = self._enrollment.shared.refresh()
            if roster.settled(self.generation, self._round, self._enrollment.id) is not None:
                raise WorkerLost("another worker has given up this round.", self._lost(roster))
            hindrance = self._find_hindrance(roster, began)
            if hindrance is not None:
                raise WorkerLost(*hindrance)
            pause = next_pause(pause, self.size)

    def is_awaited(self, steps: int) -> bool:
        """Return whether the others regroup, at fewer steps than this newcomer has taken.

        They hold a round that it does not know of. Then `regroup_due` is set.
        """
        if self._enrollment is None or not self._enrollment.shared.may_look():
            return False
        try:
            roster = self._enrollment.shared.refresh()
        except StoreLost:
            return False  # the next round finds it lost, too
        awaited = roster.generation != self.generation
        for member in roster.waiting:
            if member.id in roster.ids and member.version.steps < steps:
                awaited = True
        self.regroup_due = self.regroup_due or awaited
        return awaited

    def begin_blocks(self) -> None:
        """Forget how long rounds took: those of a warm-up come after each step."""
        if self._grace is not None:
            self._grace.forget_rounds()

    def close(self, steps: int) -> bool:
        """Announce that this worker is done; return whether to hold a last round before it leaves.

        True once all others have finished after equally many steps. False if they go on, or have
        taken more steps: they hold their next round without this worker, as if it had died. With a
        quorum, also False if this worker cannot reach the store: then `regroup_due` is set.
        """
        if self._enrollment is None or self.size == 1 == self.inner.size:
            return True
        try:
            return self._close(self._enrollment, steps)
        except StoreLost:
            self._note_cut()
            return False

    def _close(self, enrollment: Enrollment, steps: int) -> bool:
        """Announce the end, and wait up to `patience` seconds for announcements of the others."""
        generation = self.generation
        round_index = self._round
        shared = enrollment.shared
        own = enrollment.id
        roster = shared.change(lambda roster: roster.close(own, generation, round_index, steps))
        began = time.monotonic()
        pause = FIRST_PAUSE
        while True:
            closing = roster.closing_at(round_index)
            for id in roster.gone:
                closing.pop(id, None)
            if roster.generation != generation or own not in closing:
                return False
            all_known = {*closing, *roster.gone, *shared.silent} >= {*roster.ids}
            # One that saw before us who is lost has ended the generation, and asks for the next
            # one, to hold the last round there. If one that trains on has ended it, we leave.
            regrouping = roster.waiting_ids.intersection(roster.ids)
            if (all_known or regrouping & closing.keys()) and {*closing.values()} == {steps}:
                return True
            others_took_more = max(closing.values()) > steps
            if others_took_more or regrouping or time.monotonic() - began > self.patience:
                return False
            time.sleep(pause)
            pause = next_pause(pause, self.size)
            roster = shared.refresh()

    def settle(self, arrived: bool, sync_round: bool = True) -> bool:
        """Return whether this round is kept: whether every member `arrived`. One answer for all.

        `sync_round` is False for a state transfer: before the first sync round there is nothing to
        lose, and an error ends the run.
        """
        if self.store is None:
            self.regroup_due = not arrived
            return arrived
        try:
            kept = self._settle(arrived, sync_round)
        except StoreLost:
            # The others may have kept it. They are further then, and send this worker their state.
            self._note_cut()
            return False
        if self._grace is not None:
            if kept and sync_round:
                self._grace.keep_round()
            self._grace.begin_block()
        return kept

    def _settle(self, arrived: bool, sync_round: bool) -> bool:
        """Report if the round has arrived here, and wait until the roster says: kept, or undone."""
        enrollment = self._joined()
        generation = self.generation
        round_index = self._round
        shared = enrollment.shared
        began = time.monotonic()
        pause = FIRST_PAUSE
        reported = -float("inf")
        roster = shared.roster
        missing = roster.ids  # members whose report has not been seen
        while (kept := roster.settled(generation, round_index, enrollment.id)) is None:
            check_not_failed(roster, generation, self.number)
            look = arrived and time.monotonic() - reported > REPEAT_ARRIVAL
            if look:
                # Report again now and then: a stranger may have erased the first report.
                reported = time.monotonic()
                shared.arrive(generation, round_index, enrollment.id)
            # The last member to arrive sees all reports, and keeps the round for all. In a large
            # crew that would be N readings of N reports: there the first member looks, repeatedly.
            if len(roster.ids) > WATCHED:
                look = arrived and enrollment.id == roster.ids[0]
            if look and not (missing := shared.not_arrived(generation, round_index, missing)):
                roster = shared.change(lambda r: r.keep(generation, round_index, sync_round))
                continue
            if not arrived or self._find_hindrance(roster, began):
                # If others have kept the round meanwhile, this changes nothing: the loop then
                # finds the round kept.
                roster = shared.change(lambda roster: roster.undo(generation, round_index))
                continue
            time.sleep(pause)
            pause = next_pause(pause, self.size)
            roster = shared.refresh()
        self._round += 1
        self.regroup_due = roster.ends_with(generation, round_index, enrollment.id)
        # All members have connected by now, so the addresses are not needed any more.
        if kept and round_index == 0 and self.rank == self.inner.rank == 0:
            shared.sweep(generation)
        return kept

    def _find_hindrance(self, roster: Roster, began: float) -> tuple[str, tuple[int, ...]] | None:
        """Return why a round that is waited for cannot be kept, and the numbers of those lost."""
        closing = roster.closing_at(self._round)
        if closing and roster.generation == self.generation and self._joined().id not in closing:
            numbers = tuple(sorted(set(map(roster.worker_of, closing))))
            which = ", ".join(map(str, numbers))
            return f"worker {which} is done, and leaves before this round.", numbers
        lost = self._lost(roster)
        if lost:
            which = ", ".join(map(str, lost))
            return f"worker {which} is lost: it left, died or stalled.", lost
        if time.monotonic() - began > self._longest_wait:
            return f"a worker is so slow that {self._longest_wait:.3g} s were not enough.", ()
        return None

    @property
    def _longest_wait(self) -> float:
        """Seconds for which a living member is waited for."""
        if self._grace is None:
            return self.patience
        return min(self.patience, self._grace.seconds(self.size))

    def _lost(self, roster: Roster) -> tuple[int, ...]:
        """Return the numbers of the lost members, as far as this worker knows."""
        if roster.generation != self.generation:
            return (self.number,)  # the others went on without this worker
        lost = (self._joined().shared.silent | roster.gone) & set(roster.ids)
        return tuple(sorted(set(map(roster.worker_of, lost))))

    def _joined(self) -> Enrollment:
        if self._enrollment is None:
            raise RuntimeError("this worker is not in the crew. Call join() first.")
        return self._enrollment

    # -- from one generation to the next -------------------------------------------------------

    def _begin_alone(self) -> None:
        """Begin a generation of this worker alone: a crew without a store."""
        self._membership = Membership(self.generation + 1, (self.number,))
        self.regroup_due = False

    def _enter(self, version: Version) -> None:
        """Ask for the next generation until this worker is in one whose members are connected."""
        enrollment = self._joined()
        longest_wait = self._longest_wait
        shared = enrollment.shared
        if enrollment.id not in shared.refresh().ids:
            enrollment.begin_incarnation()
        while True:
            # The old group has other members. It ends in the background, without a wait.
            self._disconnect()
            roster = enrollment.wait_for_generation(version, self.generation, longest_wait)
            self._membership = Membership.of(roster, self.number)
            self._round = 0
            self.regroup_due = False
            if roster.all_lost:
                warn(
                    "all workers of this run were lost at once, and with them all that they had "
                    "agreed on. Training begins again with what this script starts from: let it "
                    "load the last checkpoint, if there is one.",
                    RuntimeWarning,
                )
            if not self._connect():
                shared.change(lambda roster: roster.undo(self.generation, 0))
            # Each inner rank has a separate group, and one of these may have failed. So a
            # round decides, for all processes of all workers, whether everything is connected.
            elif self.inner.size == 1 or self.settle(True, sync_round=False):
                return

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.release()
            self._transport = None

    def _connect(self) -> bool:
        """Connect the members; return False if that failed, or if a member was lost meanwhile."""
        if self.size == 1 or self._connection is None:
            return True
        prefix = f"{PREFIX}group/{self.generation}/{self.inner.rank}"
        transport = GlooTransport(self._connection, prefix, self.rank, self.size, self.patience)
        self._transport = transport
        try:
            # Not a plain join of the transport's thread: a member may die before it connects.
            self.wait(transport.wait)
        except WorkerLost:
            connected = False
        else:
            connected = transport.group is not None
        if not connected:
            self._disconnect()
        self._connection.count_failure(connected, transport.error, self.number)
        return connected


@dataclass(frozen=True)
class Membership:
    """A generation, and the rank of this worker in it."""

    generation: int = 0
    members: tuple[int, ...] = ()
    rank: int = 0
    source: int = 0
    joiners: tuple[int, ...] = ()

    @classmethod
    def of(cls, roster: Roster, number: int) -> Membership:
        members = roster.workers
        rank = members.index(number)
        return cls(roster.generation, members, rank, roster.source, roster.joiners)


def _or_environment(
    value: Number | None, variable: str, parse: Callable[[str], Number], default: Number
) -> Number:
    """Return the argument; if it is None, the environment's value; without one, the default."""
    return number_in(os.environ, variable, parse, default) if value is None else value


class GraceWindow:
    """The times that one member has seen, and how long it waits because of them."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=32)  # from its arrival until a round was kept
        self._blocks: deque[float] = deque(maxlen=8)  # from a kept round until its next arrival
        self._regroups: deque[float] = deque(maxlen=8)
        self._began = 0.0  # the present block
        self._arrived = 0.0  # at the present round

    def begin_block(self) -> None:
        self._began = time.monotonic()

    def arrive(self) -> None:
        self._arrived = time.monotonic()

    def keep_round(self) -> None:
        """Add the times of the present round."""
        self.add_round(self._arrived - self._began, time.monotonic() - self._arrived)

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
        regroup = median(self._regroups or [REGROUP])
        worth = (median(self._blocks) + 2 * members * regroup) / (members - 1)
        return max(usual, worth, SHORTEST)
