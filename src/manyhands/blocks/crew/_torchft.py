"""A crew whose members are kept by torchft's lighthouse, instead of a store and a roster.

The lighthouse answers in *quorums*: it waits for all living workers to ask (for those that do not
ask, if most do, no longer than its `--join_timeout_ms`), leaves out the dead, and gives all of them
the same list, with each worker's statement. That answers both questions of a crew:

    form      who is in the next generation?    all in a quorum in which every worker asks this
    settle    is the round kept?                yes, if every member of the generation is in the
                                                quorum, for this round, and says `arrived`

So there is one decision for all, as in `_crew.py`. A worker that was away when it was made finds no
other member of its round in its next quorum. It considers the round undone, and receives the state
of the others.

The lighthouse does not report which worker has stopped while an exchange waits for it. A death
breaks the connections, but a stopped worker is waited for, for `patience` seconds.

The lighthouse believes every process that reaches it: the statements in a quorum are not signed.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from manyhands._core.ranks import RankGroup
from manyhands.blocks._checks import real
from manyhands.blocks.crew._enrollment import NO_TERMS, Terms
from manyhands.blocks.crew._membership import JOINED_ALREADY, CrewBase
from manyhands.blocks.crew._roster import Member, Roster
from manyhands.blocks.crew._store import (
    SECRET_VARIABLE,
    Signer,
    connect_to_store,
    serve_store,
)
from manyhands.blocks.crew._transport import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    StoreConnection,
    own_address,
)
from manyhands.errors import JoinRefused, LighthouseLost, WorkerLost

CONNECT_TIMEOUT = timedelta(seconds=30)
HEARTBEAT_TIMEOUT = timedelta(seconds=2)  # in which a lighthouse answers, if it is there
HEARTBEAT_INTERVAL = 0.1  # seconds
NUMBER_TAKEN = 10.0  # seconds: a worker whose number is in use for so long gives up
FORM, SETTLE = "form", "settle"
TERMS_KEY = "terms"  # in each worker's own store


@dataclass(frozen=True)
class Statement:
    """What a worker states in a quorum. All workers of a run have the same fields."""

    number: int
    kind: str  # FORM or SETTLE
    generation: str  # the name of its present generation; "" before the first one
    round_index: int
    arrived: bool
    version: int  # outer steps that it holds; none if negative
    store: str  # the address of the store that it serves
    name: str  # names the new generation, if this worker has the lowest number in it
    terms: str  # the checksum of what it must have in common with the others


class Participant(Protocol):
    """A worker in a quorum."""

    data: dict[str, Any]  # the fields of its `Statement`


class Quorum(Protocol):
    """What the lighthouse answers."""

    participants: Sequence[Participant]


class Lighthouse(Protocol):
    """What we ask of torchft's `LighthouseClient`."""

    def heartbeat(self, replica_id: str, timeout: timedelta) -> None: ...

    def quorum(
        self,
        *,
        replica_id: str,
        timeout: timedelta,
        address: str,
        store_address: str,
        step: int,
        world_size: int,
        shrink_only: bool,
        data: Mapping[str, object],
    ) -> Quorum: ...


class TorchftCrew(CrewBase):
    """The workers of a run, kept by torchft's lighthouse. It is used like a `Crew`.

    Start a lighthouse (`torchft_lighthouse --min_replicas 2`) and the workers, each with a number
    of its own, with any tool that restarts them when they die. `lighthouse` is the address that
    the lighthouse prints, `number` this worker's number. Arguments that are left out come from the
    environment: TORCHFT_LIGHTHOUSE and MANYHANDS_WORKER.

    The others notice a killed worker after the lighthouse's `--heartbeat_timeout_ms`. They give up
    a stopped worker after waiting for it for `patience` seconds.

    >>> import manyhands as mh
    >>> crew = mh.TorchftCrew("http://10.0.0.1:29510", number=3)  # doctest: +SKIP
    >>> optimizer = mh.DiLoCo(optimizer, every=50, crew=crew)  # doctest: +SKIP
    """

    inner = RankGroup()  # a worker is one process

    def __init__(
        self,
        lighthouse: str | None = None,
        *,
        number: int | None = None,
        patience: float = 60.0,
    ) -> None:
        super().__init__()
        self.lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE", "")
        own = os.environ.get("MANYHANDS_WORKER", "") if number is None else str(number)
        if not self.lighthouse:
            raise ValueError(
                "a TorchftCrew needs the address of torchft's lighthouse, and got none. Set "
                "TORCHFT_LIGHTHOUSE, or give it: TorchftCrew('http://10.0.0.1:29510')."
            )
        if not own.isdigit():
            raise ValueError(
                f"a worker of a crew needs a number that no other worker has, got {own!r}. Set "
                "MANYHANDS_WORKER, or give number=."
            )
        self.number, self.patience = int(own), real("patience", patience, above=0)
        # Without a secret the signatures protect nothing, nor would they: the lighthouse itself
        # believes every process.
        self._signer = Signer(os.environ.get(SECRET_VARIABLE, ""))
        self._id = f"{self.number}:{uuid.uuid4()}"  # new in each incarnation
        self._generation_name = ""
        self._version = -1
        self._terms = NO_TERMS
        self._client: Lighthouse | None = None
        self._ended = threading.Event()
        self._heartbeat: threading.Thread | None = None

    # -- joining and leaving -------------------------------------------------------------------

    def join(self, version: int = -1, terms: Terms = NO_TERMS) -> None:
        """Join the crew: return when this worker is in a generation."""
        self._terms = terms
        if self._client is not None:
            raise RuntimeError(JOINED_ALREADY)
        self._client = _connect_to_lighthouse(self.lighthouse)
        where = self.lighthouse.removeprefix("http://").removeprefix("https://").rstrip("/")
        # Each worker serves a store: the first member's is where a generation's group is made.
        self._served, self._store = serve_store(own_address(where))
        self._served.set(TERMS_KEY, terms.text)
        # A client of its own: the other one may wait in a quorum call for a long time.
        heartbeat_client = _connect_to_lighthouse(self.lighthouse)
        self._heartbeat = threading.Thread(
            target=self._send_heartbeats,
            args=(heartbeat_client,),
            name="manyhands heartbeat",
            daemon=True,
        )
        self._heartbeat.start()
        # Python must not exit while the thread is inside torchft's native code.
        atexit.register(self._stop_heartbeat)
        try:
            self._enter(version)
        except BaseException:
            self._stop_heartbeat()
            raise

    def regroup(self, version: int) -> None:
        """Form the next generation with all living workers."""
        self._enter(version)

    def leave(self) -> None:
        """Leave because this worker is done. The others notice when its heartbeat times out."""
        self.drop_out()

    def drop_out(self) -> None:
        """Leave as if dead: the lighthouse knows no other way to leave."""
        self._stop_heartbeat()
        self._disconnect()
        self.members = ()

    def _stop_heartbeat(self) -> None:
        self._ended.set()
        atexit.unregister(self._stop_heartbeat)
        if self._heartbeat is not None:
            self._heartbeat.join(2 * HEARTBEAT_TIMEOUT.total_seconds())

    # -- a round -------------------------------------------------------------------------------

    def wait(self, done: Callable[[float], bool]) -> None:
        """Call `done(seconds)` until it returns True; raise WorkerLost after `patience`."""
        began, pause = time.monotonic(), FIRST_PAUSE
        while not done(pause):
            if time.monotonic() - began > self.patience:
                raise WorkerLost(f"a worker has not come for {self.patience:g} s.")
            pause = min(1.5 * pause, LONGEST_PAUSE)

    def settle(self, arrived: bool, sync_round: bool = True) -> bool:
        """Return whether this round is kept: whether every member `arrived`. One answer for all."""
        if not arrived:
            # Members that wait for a message from a dead one would not ask for the quorum.
            self.abort()
        statements = self._exchange_statements(SETTLE, arrived)
        own = (self._generation_name, self._round)
        same_round = [
            s for s in statements if s.kind == SETTLE and (s.generation, s.round_index) == own
        ]
        kept = len(same_round) == self.size and all(s.arrived for s in same_round)
        self._round += 1
        # More statements than members: another worker waits to join.
        self.regroup_due = not kept or len(statements) > self.size
        return kept

    # -- from one generation to the next -------------------------------------------------------

    def _enter(self, version: int) -> None:
        """Ask for a generation until this worker is in one whose members are connected."""
        self._version, began = version, time.monotonic()
        while True:
            self._disconnect()
            statements = self._exchange_statements(FORM)
            if any(s.kind != FORM for s in statements):
                continue  # they settle a round first, and have seen in it that we wait
            if len({s.number for s in statements}) < len(statements):
                self._check_number_is_free(statements, time.monotonic() - began)
                time.sleep(LONGEST_PAUSE)
                continue
            if self._has_other_terms(statements):
                continue
            self._take_place(statements)
            connection = StoreConnection(statements[0].store, self._signer)
            connected = self._connect(connection, f"manyhands/{self._generation_name}")
            if self.settle(connected):
                return

    def _check_number_is_free(self, statements: list[Statement], waited: float) -> None:
        """Raise if another worker had our number first.

        The lighthouse may also still hold the request of our own last incarnation: wait first.
        """
        numbers = [s.number for s in statements]
        first_time = not self._generation_name
        if numbers.count(self.number) > 1 and first_time and waited > NUMBER_TAKEN:
            raise RuntimeError(
                f"two workers have the same number: {numbers}. Give each worker a number "
                "(MANYHANDS_WORKER) of its own."
            )

    def _has_other_terms(self, statements: list[Statement]) -> bool:
        """Return whether a worker came with other terms than the one with the highest version.

        If that is this worker, it drops out and raises JoinRefused.
        """
        versions = [s.version for s in statements]
        first = statements[versions.index(max(versions))]
        if differences := self._differences(first):
            self.drop_out()
            raise JoinRefused(self.number, differences)
        if any(self._differences(s) for s in statements if s.terms != first.terms):
            time.sleep(LONGEST_PAUSE)  # the refused worker is about to be gone
            return True
        return False

    def _differences(self, other: Statement) -> list[str]:
        """Return how this worker differs from another one."""
        if other.terms == self._terms.digest:
            return []
        try:
            text = bytes(connect_to_store(other.store).get(TERMS_KEY)).decode()
        except (OSError, dist.DistError):  # that worker is gone, and its store with it
            text = None
        return self._terms.differences(text, other.terms)

    def _take_place(self, statements: list[Statement]) -> None:
        """Take over the members of the generation that this worker is in now."""
        numbers = [s.number for s in statements]
        # A roster of these members knows who sends the state, and who needs it.
        roster = Roster(members=tuple(Member(f"{s.number}.1", s.version) for s in statements))
        self.members, self.rank = tuple(numbers), numbers.index(self.number)
        self.source, self.joiners = roster.source, roster.joiners
        self.generation += 1
        self._generation_name, self._round = statements[0].name, 0

    # -- the lighthouse ------------------------------------------------------------------------

    def _exchange_statements(self, kind: str, arrived: bool = False) -> list[Statement]:
        """Return the statements of all living workers, by number: the same list on each of them."""
        own = Statement(
            self.number,
            kind,
            self._generation_name,
            self._round,
            arrived,
            self._version,
            self._store,
            uuid.uuid4().hex,
            self._terms.digest,
        )
        while (quorum := self._ask_for_quorum(vars(own))) is None:
            pass
        if not all(p.data and p.data.keys() == vars(own).keys() for p in quorum.participants):
            raise RuntimeError(
                f"another job asks the lighthouse at {self.lighthouse}, too. Start one for each "
                "run: it treats all processes that ask it as workers of one run."
            )
        return sorted((Statement(**p.data) for p in quorum.participants), key=lambda s: s.number)

    def _ask_for_quorum(self, data: Mapping[str, object]) -> Quorum | None:
        """Return the lighthouse's answer; None if it has none yet because others have not asked."""
        assert self._client is not None  # since `join`
        try:
            return self._client.quorum(
                replica_id=self._id,
                timeout=timedelta(seconds=self.patience),
                address="",
                store_address=self._store,
                step=max(self._version, 0),
                world_size=1,
                shrink_only=False,
                data=data,
            )
        except TimeoutError:
            # Too few workers, or no lighthouse? Only the second is an error.
            if self._is_alive(self._client):
                return None
            raise self._lighthouse_lost("it does not answer") from None
        except RuntimeError as error:
            raise self._lighthouse_lost(error) from error

    def _is_alive(self, client: Lighthouse) -> bool:
        try:
            client.heartbeat(self._id, HEARTBEAT_TIMEOUT)
        except (RuntimeError, TimeoutError):
            return False
        return True

    def _lighthouse_lost(self, why: object) -> LighthouseLost:
        return LighthouseLost(
            f"torchft's lighthouse at {self.lighthouse} is lost: {why}. Without it workers cannot "
            "agree on who takes part: start it and all workers again, from a checkpoint."
        )

    def _send_heartbeats(self, client: Lighthouse) -> None:
        """Send the lighthouse this worker's heartbeats, until the worker ends."""
        while not self._ended.wait(HEARTBEAT_INTERVAL):
            try:
                client.heartbeat(self._id, HEARTBEAT_TIMEOUT)
            except (RuntimeError, TimeoutError):
                self._ended.wait(1.0)  # the next quorum call raises, if the lighthouse is lost


def _connect_to_lighthouse(lighthouse: str) -> Lighthouse:
    try:
        from torchft.coordination import LighthouseClient
    except ImportError as error:
        raise ImportError(
            "a TorchftCrew needs torchft, which is not installed: pip install torchft. `Crew` "
            "needs nothing else."
        ) from error
    client: Lighthouse = LighthouseClient(lighthouse, CONNECT_TIMEOUT)
    return client
