"""Who is in the meeting: workers that come, go, stall and die, and agree about each meeting.

A *meeting* is one exchange between the members of a *generation*, which have a process group
together. It is kept if every one of them says that all has arrived, and undone otherwise, by one
decision for all. After a meeting that was undone, or when somebody waits to come in or has left,
the living form the next generation.

    crew = Crew()
    crew.join(version, terms)               version: how many meetings' results this worker holds
    while training:
        if crew.newcomers:                  they need the state, which `source` brings over `group`
            bring(crew.group, crew.source, crew.newcomers); crew.settle(True)
        take_steps()
        start_exchange(crew.group)
        try:
            crew.wait(finished)             raises WorkerLost when there is no use in waiting
        except WorkerLost:
            crew.abort()
        if crew.settle(arrived):            one answer for all members
            version += 1
        if crew.regroup_due:
            crew.regroup(version)
    if crew.close(steps):                   all others are done after as many steps
        exchange_a_last_time()
    crew.leave()

What is agreed on, and how, is in _roster.py, and what a worker has to have like the others in
_terms.py. The state itself is the caller's.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from manyhands._core.ranks import RankGroup
from manyhands.blocks._arguments import real, whole
from manyhands.blocks.crew._base import QUICK, SLOW, Members
from manyhands.blocks.crew._heartbeat import HeartbeatMonitor
from manyhands.blocks.crew._roster import Roster, number_of
from manyhands.blocks.crew._shared_roster import PLACE, SharedRoster
from manyhands.blocks.crew._store import Signer, StoreClient, address
from manyhands.blocks.crew._terms import NO_TERMS, Terms
from manyhands.blocks.crew._transport import StoreConnection
from manyhands.errors import CrewFinished, JoinRefused, StoreLost, WorkerLost

AGAIN = 1.0  # seconds until a worker says again that it has arrived: a stranger may have erased it
START = 30.0  # seconds that the first to come wait for as many as are expected


class Crew(Members):
    """The workers of a run, and this one's place among them.

    `store` is "host:port" of a torch TCPStore, `number` this worker's own number, which it keeps
    when it is started again, `expected` how many workers there are at the start. Who does not beat
    for `stall` seconds is lost; who does is waited for, but no longer than `patience` seconds.
    A worker may be several processes that train one model together, as under DDP or FSDP:
    `inner_group` is their process group, and the number is the same in all of them.
    All workers sign what they write to the store with `secret`, the same text for all of them, and
    believe nothing else that is in it.
    What is left out comes from the environment that `manyhands run` sets: MANYHANDS_STORE,
    MANYHANDS_SECRET, MANYHANDS_WORKER, MANYHANDS_WORKERS, MANYHANDS_STALL and MANYHANDS_PATIENCE.

    Without a store it is a crew of one: there are no threads, and every meeting is kept.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        number: int | None = None,
        expected: int | None = None,
        stall: float | None = None,
        patience: float | None = None,
        inner_group: Any = None,
        secret: str | None = None,
    ) -> None:
        super().__init__()
        self.inner = RankGroup() if inner_group is None else RankGroup.of(inner_group)
        self.store = store or os.environ.get("MANYHANDS_STORE") or None
        if self.store:
            address(self.store)  # or an error
        own = _given(number, "MANYHANDS_WORKER", int, None if self.store else 0)
        if own is None:
            raise ValueError(
                "a worker of a crew needs a number that no other worker has, and got none. Set "
                "MANYHANDS_WORKER (`manyhands run` does), or give number=."
            )
        self.number = whole("number", own)
        self.expected = whole("expected", _given(expected, "MANYHANDS_WORKERS", int, 1), 1)
        self.stall = real("stall", _given(stall, "MANYHANDS_STALL", float, 5.0), least=0.1)
        self.patience = real(
            "patience",
            _given(patience, "MANYHANDS_PATIENCE", float, 600.0),
            least=self.stall,
            why="It is at least as long as stall.",
        )
        self._id = ""
        self._team = 0
        self._mates: frozenset[str] = frozenset()  # the worker's other processes, once known
        self._board: SharedRoster | None = None
        self._door = None
        if self.store is not None:
            self._signer = Signer.from_environment(secret)
            self._door = StoreConnection(self.store, self._signer)
        self._pid = 0

    @property
    def _own_number(self) -> int:
        """Of this process."""
        return self.number * self.inner.size + self.inner.rank

    @property
    def ignored(self) -> int:
        """Values in the store that this worker has ignored, as no member can have written them."""
        return 0 if self.store is None else self._signer.ignored

    # -- coming and going ----------------------------------------------------------------------

    def join(self, version: int = -1, terms: Terms = NO_TERMS) -> None:
        """Come in: returns when this worker is in a generation.

        `version` is how many meetings' results it holds, as from a checkpoint; -1 is nothing.
        `terms` are what it has to have like the others; an error says what differs, before any of
        the others has noticed that it is there.
        """
        if self.members or self._board is not None:
            raise RuntimeError("this worker has joined already. Call regroup() to meet anew.")
        if self.store is None:
            self._alone()
            return
        pulse = HeartbeatMonitor(self.stall)
        line = StoreClient(self.store, pulse.interval, self._signer)
        try:
            self._board = SharedRoster(line, pulse, self.inner.size)
            self._pid = os.getpid()
            atexit.register(self._go)  # an end without leave(): lost, but known to be
            self._team = self._agreed_team(self._board)
            self._agree(self._board, terms)
            self._enter(version)
        except BaseException:
            self._go()
            raise

    def regroup(self, version: int) -> None:
        """Form the next generation with all that live and all that wait to come in."""
        if self.store is None:
            self._alone()
        else:
            self._enter(version)

    def leave(self) -> None:
        """This worker is done: the others go on without it, and need not wait for its silence.

        Only who is done leaves. When the last ones have left the run is finished, and who comes
        after that is told so.
        """
        self._go(left=True)

    def drop_out(self) -> None:
        """Be gone, as if dead, so that nobody waits for this worker."""
        self._go()

    def _go(self, left: bool = False) -> None:
        board, self._board, self.members = self._board, None, ()
        atexit.unregister(self._go)
        if board is None or self._pid != os.getpid():
            return
        try:
            if left:
                board.change(lambda roster: roster.without(self._id, left=True))
            else:
                board.change(lambda roster: roster.fail(self._id))
        except StoreLost:
            pass  # nobody is there to be told
        finally:
            board.line.close()
            self._drop()

    # -- a meeting -----------------------------------------------------------------------------

    def wait(self, done: Callable[[float], bool]) -> None:
        """Call `done(seconds)`, which waits up to so long and says whether all is done, until so.

        Raises WorkerLost as soon as the meeting cannot be kept any more.
        """
        began, pause = time.monotonic(), QUICK
        while not done(pause):
            if self._board is None:
                continue
            roster = self._board.look()
            if roster.settled(self.generation, self._meeting, self._id) is not None:
                raise WorkerLost("another worker has given up this meeting.", self._lost(roster))
            self._check_closing(roster)
            self._check(roster, began)
            pause = min(1.5 * pause, SLOW)

    def close(self, steps: int) -> bool:
        """This worker is done: whether to hold a last meeting before it leaves.

        True once all others are done after as many steps. False if they go on, or have taken more
        steps: they hold their next meeting without this worker, as if it had died.
        """
        if self._board is None or self.size == 1 == self.inner.size:
            return True
        board, generation, meeting = self._joined(), self.generation, self._meeting
        roster = board.change(lambda roster: roster.close(self._id, generation, meeting, steps))
        began, pause = time.monotonic(), QUICK
        while True:
            there = roster.closing_at(meeting).items()
            closing = {id: at for id, at in there if id not in roster.gone}
            if roster.generation != generation or self._id not in closing:
                return False
            all_known = {*closing, *roster.gone, *self._silent()} >= {*roster.ids}
            if all_known and {*closing.values()} == {steps}:
                return True
            further = max(closing.values()) > steps
            if further or roster.over or time.monotonic() - began > self.patience:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, SLOW)
            roster = board.look()

    def settle(self, arrived: bool, sync_round: bool = True) -> bool:
        """Whether this meeting is kept: if every member says `arrived`. The same answer for all.

        `sync_round` is whether there is something to lose from then on.
        """
        if self.store is None:
            self.regroup_due = not arrived
            return arrived
        board, generation, meeting = self._joined(), self.generation, self._meeting
        began, pause, said = time.monotonic(), QUICK, -float("inf")
        roster = board.roster
        while (kept := roster.settled(generation, meeting, self._id)) is None:
            self._check_failed(roster)
            if arrived and time.monotonic() - said > AGAIN:
                said = time.monotonic()
                board.arrive(generation, meeting, self._id)
                if board.have_arrived(generation, meeting, roster.ids):
                    roster = board.change(lambda r: r.keep(generation, meeting, sync_round))
                    continue
            try:
                if not arrived:
                    raise WorkerLost("")
                self._check_closing(roster)
                self._check(roster, began)
            except WorkerLost:
                roster = board.change(lambda roster: roster.undo(generation, meeting))
                continue
            time.sleep(pause)
            pause = min(1.5 * pause, SLOW)
            roster = board.look()
        self._meeting += 1
        self.regroup_due = roster.ends_with(generation, meeting, self._id)
        if kept and meeting == 0 and self.rank == self.inner.rank == 0:
            board.sweep(generation)
        return kept

    def _check_failed(self, roster: Roster) -> None:
        """Raise if a member has ended with an error before the first sync round."""
        if roster.failed and roster.generation == self.generation:
            numbers = sorted({roster.worker_of(id) for id in roster.failed} - {self.number})
            raise RuntimeError(
                f"worker {', '.join(map(str, numbers))} has ended with an error before the first "
                "sync round, and the run ends with it: see what it has said."
            )

    def _check_closing(self, roster: Roster) -> None:
        """Raise WorkerLost if a member does not come to this meeting, because it is done."""
        closing = roster.closing_at(self._meeting)
        if closing and roster.generation == self.generation and self._id not in closing:
            numbers = tuple(sorted({roster.worker_of(id) for id in closing}))
            which = ", ".join(map(str, numbers))
            raise WorkerLost(f"worker {which} is done, and leaves between meetings.", numbers)

    def _check(self, roster: Roster, began: float) -> None:
        """Raise WorkerLost if a member is lost, or all were waited for long enough."""
        if lost := self._lost(roster):
            which = ", ".join(map(str, lost))
            raise WorkerLost(f"worker {which} is lost: it left, died or stalled.", lost)
        if time.monotonic() - began > self.patience:
            raise WorkerLost(f"a worker is so slow that {self.patience:g} s were not enough.")

    def _lost(self, roster: Roster) -> tuple[int, ...]:
        """The numbers of the members that are lost, as far as this worker knows."""
        if roster.generation != self.generation:
            return (self.number,)  # the others went on without us
        lost = (self._silent() | roster.gone) & set(roster.ids)
        return tuple(sorted({roster.worker_of(id) for id in lost}))

    def _silent(self) -> frozenset[str]:
        return self._joined().pulse.silent - {self._id}

    def _joined(self) -> SharedRoster:
        if self._board is None:
            raise RuntimeError("this worker is not in the crew. Call join() first.")
        return self._board

    # -- from one generation to the next -------------------------------------------------------

    def _agreed_team(self, board: SharedRoster) -> int:
        """The how manyth processes these are of this worker: the same in all of them."""
        if self.inner.size == 1:
            return 0
        roster = board.look()
        if self.inner.rank == 0:
            roster = board.change(lambda roster: roster.gathers(self.number))
        told = [float(self.number), float(dict(roster.teams).get(self.number, 0))]
        cpu = torch.device("cpu")
        device = cpu if self.inner.has_backend(cpu) else torch.device("cuda")  # (NCCL has no other)
        numbers, teams = zip(*self.inner.all_gather(told, device), strict=True)
        if len(set(numbers)) > 1:
            listed = ", ".join(f"{number:.0f}" for number in numbers[:8])
            raise ValueError(
                f"the processes of an inner_group are one worker of the crew, and have different "
                f"numbers: {listed}. Give all of them the same (MANYHANDS_WORKER)."
            )
        return int(teams[0])

    def _agree(self, board: SharedRoster, terms: Terms) -> None:
        """Raise if the run has other terms; the first to come says what they are."""
        part, digest = self.inner.rank, terms.digest
        key = f"{PLACE}terms/{part}"
        agreed = dict(board.change(lambda roster: roster.agree(part, digest)).terms)[part]
        told = board.line.verified(key, board.line.fetch(key))
        if agreed == digest:
            if told != terms.text:
                board.line.put(key, terms.text)
            return
        differs = terms.differences(told, agreed)
        if not differs:
            return
        board.change(lambda roster: roster.refuse(self._own_number))
        raise JoinRefused(self.number, differs)

    def _alone(self) -> None:
        self.generation += 1
        self.members = (self.number,)
        self.newcomers = ()
        self.regroup_due = False

    def _enter(self, version: int) -> None:
        """Ask to be in the next generation until this worker is in one that is connected."""
        board = self._joined()
        assert self._door is not None
        if self._id not in board.look().ids:
            self._begin_life()
        while True:
            self._drop()
            roster = self._wait_for_generation(version)
            self.members = roster.workers
            self.rank = self.members.index(self.number)
            self._mates = frozenset(
                id for id in roster.ids if roster.worker_of(id) == self.number and id != self._id
            )
            self.generation, self._meeting = roster.generation, 0
            self.source, self.newcomers = roster.source, roster.newcomers
            self.regroup_due = False
            if roster.anew:
                warnings.warn(
                    "all workers of this run were lost at once, and with them all that they had "
                    "agreed on. Training begins anew with what this script starts from: let it "
                    "load the last checkpoint, if there is one.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            if not self._connect(self._door, f"{PLACE}gen/{self.generation}/{self.inner.rank}"):
                board.change(lambda roster: roster.undo(self.generation, 0))
            elif self.inner.size == 1 or self.settle(True, sync_round=False):
                return  # (each of several parts has had connections to make)

    def _begin_life(self) -> None:
        """Take an id that nobody has had: whoever was here before under our number is not us."""
        board = self._joined()
        roster = board.change(lambda roster: roster.born(self._own_number))
        self._id = f"{self._own_number}.{dict(roster.lives)[self._own_number]}"
        board.line.beat(f"{PLACE}beat/{self._id}")
        board.pulse.forget()

    def _wait_for_generation(self, version: int) -> Roster:
        """Wait at the door until a generation with this worker in it begins, or begin it."""
        board = self._joined()
        before, began, pause = self.generation, time.monotonic(), QUICK
        board.change(lambda roster: roster.knock(self._id, version, self._team))
        while True:
            roster = board.look()
            if self._id in roster.ids and roster.generation > before:
                return roster
            self._check_failed(roster)
            if roster.finished:
                raise CrewFinished(
                    "manyhands: the run has ended: all others have left before worker "
                    f"{self.number} was in. Start a new run, with a store of its own, to train on."
                )
            if not any(member.id == self._id for member in roster.waiting):
                self._begin_life()  # the others took us for lost
                board.change(lambda roster: roster.knock(self._id, version, self._team))
                began = time.monotonic()
            self._check_twin(roster)
            waited = time.monotonic() - began
            silent = self._silent()
            self._check_mates(roster, waited)
            if waited > self.patience:
                silent |= set(roster.absent(silent))
            if roster.complete(silent, self.expected, late=waited > START):
                board.change(self._next(roster, silent, late=waited > START))
                pause = QUICK
                continue
            time.sleep(pause)
            pause = min(1.5 * pause, SLOW)

    def _next(self, seen: Roster, silent: frozenset[str], late: bool) -> Callable[[Roster], Roster]:
        """Begin the next generation, if it still can be after another's change."""

        def begin(roster: Roster) -> Roster:
            same = roster.generation == seen.generation
            ready = same and roster.complete(silent, self.expected, late)
            return roster.next(silent) if ready else roster

        return begin

    def _check_mates(self, roster: Roster, waited: float) -> None:
        """Raise if this worker can never be whole again: a process of it is gone, or started anew.

        (A stopped one may wake up. As long as it sleeps, nothing is done without it.)
        """
        if self.inner.size == 1:
            return
        named = (*roster.members, *roster.waiting)
        mine = [member for member in named if roster.worker_of(member.id) == self.number]
        anew = any(member.team > self._team for member in mine)
        team = [m for m in roster.waiting if m.team == self._team and m in mine]
        whole = len(team) == self.inner.size
        if anew or self._mates & roster.gone or (waited > self.patience and not whole):
            raise RuntimeError(
                f"another process of worker {self.number} is lost, and this one cannot train "
                "without it. It ends here, so that all processes of the worker are started again."
            )

    def _check_twin(self, roster: Roster) -> None:
        """Raise if another process with our number is alive."""
        pulse = self._joined().pulse
        everyone = {*roster.ids, *(member.id for member in roster.waiting)} - {self._id}
        for id in everyone:
            same = number_of(id) == self._own_number and _life(id) < _life(self._id)
            if same and pulse.moved(id):
                raise RuntimeError(
                    f"two workers with the number {self.number} are alive. Give each worker a "
                    "number (MANYHANDS_WORKER) of its own; `manyhands run --numbers` does on "
                    "further hosts."
                )


def _life(id: str) -> int:
    return int(id.partition(".")[2])


def _given(value: Any, variable: str, kind: Callable[[str], Any], default: Any) -> Any:
    """An argument, or what the environment says instead, or the default."""
    if value is not None:
        return value
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{variable} must be a number, got {text!r}.") from error
