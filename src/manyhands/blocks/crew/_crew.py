"""`Crew`: sync rounds between workers that join, leave, stall and die.

A *round* is an exchange between the members of a *generation*, which share a process group. A round
is kept if every member reports that all data has arrived, and undone otherwise; all members get the
same decision. A new generation starts after an undone round, when a process waits to join, or when
a member has left.

    crew = Crew()
    crew.join(version, facts)               version: this worker's progress (`Version`)
    while training:
        if crew.joiners:                    joiners need the state of `source`
            transfer_state(crew.group, crew.source, crew.joiners); crew.settle(True)
        take_steps()
        start_exchange(crew.group)
        try:
            crew.wait(finished)             raises WorkerLost if the round cannot succeed
        except WorkerLost:
            crew.abort()
        if crew.settle(arrived):            equal on all members
            version = Version(version.rounds + 1)
        if crew.regroup_due:
            crew.regroup(version)
    if crew.close(steps):                   all other members finished after equal steps
        exchange_a_last_time()
    crew.leave()

_roster.py contains the shared decisions. _enrollment.py admits processes to a generation. The
training state belongs to the caller.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from manyhands._arguments import number_in, real, whole
from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands._ranks.ranks import RankGroup
from manyhands._warn import warn
from manyhands.blocks.crew._enrollment import (
    NO_FACTS,
    Enrollment,
    MemberFacts,
    Siblings,
    check_not_failed,
)
from manyhands.blocks.crew._grace import GraceWindow
from manyhands.blocks.crew._roster import NO_VERSION, WATCHED, Roster, Version
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import (
    FIRST_PAUSE,
    PREFIX,
    Signer,
    StoreClient,
    next_pause,
    parse_address,
)
from manyhands.blocks.crew._transport import (
    GlooTransport,
    StoreConnection,
    Transport,
    check_interface,
)
from manyhands.errors import StoreLost, WorkerLost

PATIENCE = 600.0  # seconds, default
AUTO = "auto"
PATIENCE_NEEDS = f'It is at least as long as stall, or "{AUTO}".'
REPEAT_ARRIVAL = 1.0  # seconds until a worker reports its arrival again
JOINED_ALREADY = (
    "this worker has joined the crew already. Wrap multiple optimizers, such as Muon and AdamW, in "
    "a single list: mh.DiLoCo([muon, adamw], crew=crew). To change the members, call regroup()."
)

Number = TypeVar("Number", int, float)


class Outlook(NamedTuple):
    """Changes since the current generation began."""

    generation: int
    over: bool  # a member is lost, or the generation has ended
    waiting: bool = False  # a process waits to join
    closed_after: float = math.inf  # the fewest steps of a member that is done


class Crew:
    """The workers of a run, and this worker's membership.

    `store` is "host:port" of a torch TCPStore. `number` identifies this worker, also after a
    restart. `expected` is the number of workers at the start. A worker that sends no heartbeat for
    `stall` seconds is considered lost. Members wait up to `patience` seconds for a living worker.
    With `patience="auto"`, members wait as long as waiting costs less than proceeding, estimated
    from the durations of earlier rounds.
    A round needs at least `quorum` workers; finished workers count as well. With a quorum above 1,
    a worker that is cut off from the store waits until the store is reachable, and joins again.
    A worker may consist of multiple processes that train a model together, as with DDP or FSDP.
    Pass their process group as `inner_group`, and an equal number in all of these processes.
    Workers sign all values in the store with `secret`, which must be equal on every worker, and
    ignore other values.
    Omitted arguments are read from environment variables that `manyhands run` sets:
    MANYHANDS_STORE, MANYHANDS_SECRET, MANYHANDS_WORKER, MANYHANDS_WORKERS, MANYHANDS_STALL,
    MANYHANDS_PATIENCE and MANYHANDS_QUORUM.

    If there is no store, the crew has a single worker, starts no threads, and keeps all rounds.

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
        self.connection: StoreConnection | None = None
        if self.store:
            parse_address(self.store)  # raises if malformed
            if number is None and not os.environ.get("MANYHANDS_WORKER"):
                raise ValueError(
                    "a worker of a crew needs a unique number, and got none. Set MANYHANDS_WORKER "
                    "(`manyhands run` does), or pass number=."
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
                f"quorum must be 1 for workers with multiple processes, got {self.quorum}. The "
                "processes of an inner_group cannot wait for the store and join again separately. "
                "Remove quorum."
            )
        self.regroup_due = False
        self._set_members(0, ())
        self._round = 0  # index of the current round of this generation
        self._enrollment: Enrollment | None = None  # None before join() and after leaving
        self._transport: Transport | None = None
        # Connects the members of a generation.
        self.connect: Callable[..., Transport] = GlooTransport
        if self.store:
            self.connection = StoreConnection(self.store, Signer.from_environment(secret))

    def _set_members(
        self,
        generation: int,
        members: tuple[int, ...],
        rank: int = 0,
        source: int = 0,
        joiners: tuple[int, ...] = (),
    ) -> None:
        self.generation = generation
        self.members = members  # numbers of the workers, in rank order
        self.rank = rank
        self.source = source  # rank that sends state to joiners
        self.joiners = joiners  # ranks that need the state

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The members' gloo group; None in a crew of a single worker."""
        return None if self._transport is None else self._transport.group

    @property
    def run(self) -> str | None:
        """The name of the run, drawn by the first worker; None before this worker joins."""
        return None if self._enrollment is None else self._enrollment.shared.roster.run

    @property
    def ignored(self) -> int:
        """Number of values in the store that this worker ignored as invalid."""
        return 0 if self.connection is None else self.connection.signer.ignored

    # -- joining and leaving -------------------------------------------------------------------

    def join(self, version: Version = NO_VERSION, facts: MemberFacts = NO_FACTS) -> None:
        """Join the crew; return after this worker has become a member of a generation.

        `version` is this worker's progress, for example from a checkpoint. All workers must have
        equal `facts`. Differences raise an error before other workers have noticed this worker.
        """
        if self.members or self._enrollment is not None:
            raise RuntimeError(JOINED_ALREADY)
        if self.connection is None:
            self._begin_alone()
            return
        check_interface()
        try:
            self._enroll(self.connection, facts)
            # Other members need not wait for a heartbeat if a script ends without leave().
            atexit.register(self.drop_out)
            self._enter(version)
        except BaseException:
            self.drop_out()
            raise
        if self._grace is not None:
            self._grace.begin_block()

    def _enroll(self, connection: StoreConnection, facts: MemberFacts) -> None:
        monitor = HeartbeatMonitor(self.stall)
        client = StoreClient(connection.store, monitor.interval, connection.signer)
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
            raise StoreLost(connection.store, error) from error  # no route to the store

    def regroup(self, version: Version) -> None:
        """Form the next generation with all living members and all waiting processes."""
        if self.connection is None:
            self._begin_alone()
            return
        began = time.monotonic()
        while True:
            if self._joined().cut_off:
                self._return_to_store(self.connection)
            try:
                self._enter(version)
                break
            except StoreLost:
                self._note_cut()
        if self._grace is not None:
            self._grace.add_regroup(time.monotonic() - began)
            self._grace.begin_block()

    def _note_cut(self) -> None:
        """With a quorum, schedule a return to the lost store; else re-raise the current error."""
        if self.quorum == 1:
            raise
        self._joined().cut_off = True
        self.regroup_due = True

    def _return_to_store(self, connection: StoreConnection) -> None:
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
                time.sleep(1.0)  # without a route, connecting fails immediately
        # No generation contains the new id. A restarted store counts generations from 1.
        self._set_members(0, ())

    def leave(self) -> None:
        """Leave because this worker is done. Other members continue without waiting.

        The run is finished after the last members have left. Workers that join later raise
        CrewFinished.
        """
        self.drop_out(left=True)

    def abort(self) -> None:
        """Fail all pending messages of the group, here and on other members.

        The group is unusable afterwards. Threads that wait in the group end within milliseconds,
        with rare exceptions (see `_transport.py`): do not wait for these threads.
        """
        if self._transport is not None:
            self._transport.abort()

    def drop_out(self, *, left: bool = False) -> None:
        """Leave like a dead worker, or with `left` like a worker that is done."""
        enrollment = self._enrollment
        self._enrollment = None
        self.members = ()  # but not the rank, which decides who saves
        atexit.unregister(self.drop_out)
        if enrollment is None or enrollment.process != os.getpid():
            return
        id = enrollment.id
        try:
            if left:
                enrollment.shared.change(lambda roster: roster.without(id, left=True))
            else:
                enrollment.shared.change(lambda roster: roster.fail(id))
        except StoreLost:
            pass  # members cannot reach the store either
        finally:
            enrollment.close()
            self._disconnect()

    # -- a round -------------------------------------------------------------------------------

    def wait(self, done: Callable[[float], bool]) -> None:
        """Call `done(seconds)`, which waits up to this long, until it returns True.

        Raise WorkerLost as soon as the round cannot be kept.
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
        """Return whether members regroup after fewer steps than this newcomer has taken.

        These members run a round unknown to the newcomer. If so, set `regroup_due`.
        """
        if self._enrollment is None or not self._enrollment.shared.may_look():
            return False
        try:
            roster = self._enrollment.shared.refresh()
        except StoreLost:
            return False  # the next round raises the error
        awaited = roster.generation != self.generation
        for member in roster.waiting:
            if member.id in roster.ids and member.version.steps < steps:
                awaited = True
        self.regroup_due = self.regroup_due or awaited
        return awaited

    def look(self) -> Outlook:
        """Look for lost members and waiting processes, outside a round."""
        enrollment = self._enrollment
        if enrollment is None:
            return Outlook(self.generation, over=False)
        generation = self.generation
        roster = enrollment.shared.refresh()
        over = roster.generation != generation or roster.ended or bool(self._lost(roster))
        waiting = roster.present(enrollment.shared.silent)
        closed_after = min((member.steps for member in roster.closing), default=math.inf)
        return Outlook(generation, over, bool(waiting) and not over, closed_after)

    def note_progress(self) -> None:
        """Note that a loss of all workers costs work, as after a sync round."""
        if self._enrollment is not None:
            self._enrollment.shared.change(lambda roster: replace(roster, synced=True))

    def begin_blocks(self) -> None:
        """Discard measured durations after a warm-up, in which rounds follow every step."""
        if self._grace is not None:
            self._grace.forget_rounds()

    def close(self, steps: int) -> bool:
        """Announce that this worker is done; return whether to run a last round before leaving.

        True if all other members finish after an equal number of steps. Otherwise the remaining
        members run the next round alone, as after a death. With a quorum, also False if the store
        is unreachable: then `regroup_due` is set.
        """
        if self._enrollment is None or self.size == 1 == self.inner.size:
            return True
        try:
            return self._close(self._enrollment, steps)
        except StoreLost:
            self._note_cut()
            return False

    def _close(self, enrollment: Enrollment, steps: int) -> bool:
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
            # If a closing member has ended the generation after a loss, the last round takes place
            # in the next generation. If a training member has ended the generation, leave.
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
        """Return whether this round is kept, which requires that every member `arrived`.

        All members get equal answers. `sync_round` is False for a state transfer: before the first
        sync round no work can be lost, and an error ends the run.
        """
        if self.store is None:
            self.regroup_due = not arrived
            return arrived
        try:
            kept = self._settle(self._joined(), arrived, sync_round)
        except StoreLost:
            # The decision is unknown. After regrouping, members send their state.
            self._note_cut()
            return False
        if self._grace is not None:
            if kept and sync_round:
                self._grace.keep_round()
            self._grace.begin_block()
        return kept

    def _settle(self, enrollment: Enrollment, arrived: bool, sync_round: bool) -> bool:
        generation = self.generation
        round_index = self._round
        shared = enrollment.shared
        began = time.monotonic()
        pause = FIRST_PAUSE
        reported = -float("inf")
        roster = shared.roster
        missing = roster.ids  # members without a known arrival
        while (kept := roster.settled(generation, round_index, enrollment.id)) is None:
            check_not_failed(roster, generation, self.number)
            look = arrived and time.monotonic() - reported > REPEAT_ARRIVAL
            if look:
                # Repeat the report, because a stranger may have erased it.
                reported = time.monotonic()
                shared.arrive(generation, round_index, enrollment.id)
            # The last member to arrive sees all reports. In a large crew, N members would read N
            # reports, so there only the first member looks, repeatedly.
            if len(roster.ids) > WATCHED:
                look = arrived and enrollment.id == roster.ids[0]
            if look and not (missing := shared.not_arrived(generation, round_index, missing)):
                roster = shared.change(lambda r: r.keep(generation, round_index, sync_round))
                continue
            if not arrived or self._find_hindrance(roster, began):
                # Has no effect if the round was concurrently decided.
                roster = shared.change(lambda roster: roster.undo(generation, round_index))
                continue
            time.sleep(pause)
            pause = next_pause(pause, self.size)
            roster = shared.refresh()
        self._round += 1
        self.regroup_due = roster.ends_with(generation, round_index, enrollment.id)
        # After the first round all members have connected and no longer need addresses.
        if kept and round_index == 0 and self.rank == self.inner.rank == 0:
            shared.sweep(generation)
        return kept

    def _find_hindrance(self, roster: Roster, began: float) -> tuple[str, tuple[int, ...]] | None:
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
        if self._grace is None:
            return self.patience
        return min(self.patience, self._grace.seconds(self.size))

    def _lost(self, roster: Roster) -> tuple[int, ...]:
        if roster.generation != self.generation:
            return (self.number,)  # a later generation excludes this worker
        lost = (self._joined().shared.silent | roster.gone) & set(roster.ids)
        return tuple(sorted(set(map(roster.worker_of, lost))))

    def _joined(self) -> Enrollment:
        if self._enrollment is None:
            raise RuntimeError("this worker is not in the crew. Call join() first.")
        return self._enrollment

    # -- from one generation to the next -------------------------------------------------------

    def _begin_alone(self) -> None:
        self._set_members(self.generation + 1, (self.number,))
        self.regroup_due = False

    def _enter(self, version: Version) -> None:
        enrollment = self._joined()
        longest_wait = self._longest_wait
        shared = enrollment.shared
        if enrollment.id not in shared.refresh().ids:
            enrollment.begin_incarnation()
        while True:
            self._disconnect()
            roster = enrollment.wait_for_generation(version, self.generation, longest_wait)
            members = roster.workers
            rank = members.index(self.number)
            self._set_members(roster.generation, members, rank, roster.source, roster.joiners)
            self._round = 0
            self.regroup_due = False
            if roster.all_lost:
                warn(
                    "all workers of this run were lost at once, including the state that they had "
                    "agreed on. Training restarts from the initial state of this script: load the "
                    "last checkpoint, if there is one.",
                    RuntimeWarning,
                )
            if not self._connect():
                shared.change(lambda roster: roster.undo(self.generation, 0))
            # Each inner rank has a separate group, which may have failed. A round decides for all
            # processes of all workers.
            elif self.inner.size == 1 or self.settle(True, sync_round=False):
                return

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.release()
            self._transport = None

    def _connect(self) -> bool:
        if self.size == 1 or self.connection is None:
            return True
        prefix = f"{PREFIX}group/{self.generation}/{self.inner.rank}"
        transport = self.connect(self.connection, prefix, self.rank, self.size, self.patience)
        self._transport = transport
        try:
            # Unlike a join of the thread, `wait` detects members that die before connecting.
            self.wait(transport.wait)
        except WorkerLost:
            connected = False
        else:
            connected = transport.group is not None
        if not connected:
            self._disconnect()
        self.connection.count_failure(connected, transport.error, self.number)
        return connected


def _or_environment(
    value: Number | None, variable: str, parse: Callable[[str], Number], default: Number
) -> Number:
    return number_in(os.environ, variable, parse, default) if value is None else value
