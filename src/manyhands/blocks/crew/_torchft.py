"""A crew whose members torchft's lighthouse keeps, in place of a store and a roster.

The lighthouse answers a *round*: it waits for those who are alive (but no longer than its
`--join_timeout_ms` for who does not ask, if most do), drops who is not, and gives all of them the
same list, with what each has said. That is enough for both questions of a crew:

    form      who is in the next generation?       all who are in a round in which all ask this
    settle    is the meeting kept?                 if every member of the generation is in the
                                                   round, for this meeting, and says `arrived`

so that there is one decision for all, as in `_crew.py`. Who was away when it was taken meets nobody
of its own meeting in its next round, takes that for undone, and is brought the state of the others.

What the lighthouse does not tell is who has fallen silent while an exchange waits for it: a death
breaks the connections, but a stopped worker is waited for, for `patience` seconds.

It believes whoever reaches it: nothing that is said in a round is signed.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from manyhands._core.ranks import RankGroup
from manyhands.blocks._arguments import real
from manyhands.blocks.crew._base import QUICK, SLOW, Members
from manyhands.blocks.crew._roster import Member, Roster
from manyhands.blocks.crew._store import VARIABLE, Signer, connect, serve
from manyhands.blocks.crew._terms import NO_TERMS, Terms
from manyhands.blocks.crew._transport import StoreConnection, own_address
from manyhands.errors import JoinRefused, LighthouseLost, WorkerLost

CONNECTING = timedelta(seconds=30)
BEAT = timedelta(seconds=2)  # in which the lighthouse answers a heartbeat, if it is there
TWIN = 10.0  # seconds: who has a number that was taken for so long gives up
FORM, SETTLE = "form", "settle"
TERMS = "terms"  # under which each worker's own store has its text


@dataclass(frozen=True)
class Told:
    """What a worker says in a round."""

    number: int
    kind: str
    generation: str  # that it was in last
    meeting: int
    arrived: bool
    version: int
    store: str  # which it serves
    name: str  # of the generation, if this worker is the first of it
    terms: str  # a checksum of what it must have like the others


class TorchftCrew(Members):
    """The workers of a run, as torchft's lighthouse knows them. A `Crew` in all that it does.

    Start a lighthouse (`torchft_lighthouse --min_replicas 2`), and the workers, each with a
    number of its own, by whatever starts them again when they die. `lighthouse` is the address
    that it prints, `number` this worker's own number. What is left out comes from the
    environment: TORCHFT_LIGHTHOUSE and MANYHANDS_WORKER.

    A worker that is killed is missed after the lighthouse's `--heartbeat_timeout_ms`. One that is
    stopped while others wait for it is given up after `patience` seconds.
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
        self._signer = Signer(os.environ.get(VARIABLE, ""))  # the lighthouse believes anybody
        self._id = f"{self.number}:{uuid.uuid4()}"
        self._name = ""  # of the generation
        self._version = -1
        self._terms = NO_TERMS
        self._client: Any = None
        self._over = threading.Event()
        self._beating: threading.Thread | None = None

    # -- coming and going ----------------------------------------------------------------------

    def join(self, version: int = -1, terms: Terms = NO_TERMS) -> None:
        """Come in: returns when this worker is in a generation."""
        self._terms = terms
        if self._client is not None:
            raise RuntimeError("this worker has joined already. Call regroup() to meet anew.")
        self._client = _client(self.lighthouse)
        where = self.lighthouse.removeprefix("http://").removeprefix("https://").rstrip("/")
        self._served, self._store = serve(own_address(where))
        self._served.set(TERMS, terms.text)
        beat = threading.Thread(
            target=self._beat, args=(_client(self.lighthouse),), name="manyhands beat", daemon=True
        )
        self._beating = beat
        beat.start()
        atexit.register(self._fall_silent)  # (a thread in torchft's code must not be cut off)
        try:
            self._enter(version)
        except BaseException:
            self._fall_silent()
            raise

    def regroup(self, version: int) -> None:
        """Form the next generation with all that live."""
        self._enter(version)

    def leave(self) -> None:
        """This worker is done. The others miss it when its heartbeat has timed out."""
        self.drop_out()

    def drop_out(self) -> None:
        """Be gone, as if dead."""
        self._fall_silent()
        self._drop()
        self.members = ()

    def _fall_silent(self) -> None:
        self._over.set()
        atexit.unregister(self._fall_silent)
        if self._beating is not None:
            self._beating.join(2 * BEAT.total_seconds())

    # -- a meeting -----------------------------------------------------------------------------

    def wait(self, done: Callable[[float], bool]) -> None:
        """Call `done(seconds)` until it says that all is done; WorkerLost after `patience`."""
        began, pause = time.monotonic(), QUICK
        while not done(pause):
            if time.monotonic() - began > self.patience:
                raise WorkerLost(f"a worker has not come for {self.patience:g} s.")
            pause = min(1.5 * pause, SLOW)

    def settle(self, arrived: bool, sync_round: bool = True) -> bool:
        """Whether this meeting is kept: if every member says `arrived`. The same answer for all."""
        if not arrived:
            self.abort()  # for those who wait for a message that does not come from the dead
        told = self._round(SETTLE, arrived)
        here = (self._name, self._meeting)
        same = [t for t in told if t.kind == SETTLE and (t.generation, t.meeting) == here]
        kept = len(same) == self.size and all(t.arrived for t in same)
        self._meeting += 1
        self.regroup_due = not kept or len(told) > self.size
        return kept

    # -- from one generation to the next -------------------------------------------------------

    def _enter(self, version: int) -> None:
        self._version, began = version, time.monotonic()
        while True:
            self._drop()
            told = self._round(FORM)
            if any(t.kind != FORM for t in told):
                continue  # they settle something first, and have seen that we wait
            if len({t.number for t in told}) < len(told):
                self._check_twin(told, time.monotonic() - began)
                time.sleep(SLOW)
                continue
            if self._differs(told):
                continue
            self._take_place(told)
            door = StoreConnection(told[0].store, self._signer)
            connected = self._connect(door, f"manyhands/{self._name}")
            if self.settle(connected):
                return

    def _check_twin(self, told: list[Told], waited: float) -> None:
        """Raise if another worker had our number first; it may also be our last life's request."""
        numbers = [t.number for t in told]
        if numbers.count(self.number) > 1 and not self._name and waited > TWIN:
            raise RuntimeError(
                f"two workers have the same number: {numbers}. Give each worker a number "
                "(MANYHANDS_WORKER) of its own."
            )

    def _differs(self, told: list[Told]) -> bool:
        """Whether somebody came with other terms than those who hold the most; who did gives up."""
        versions = [t.version for t in told]
        first = told[versions.index(max(versions))]
        if differs := self._differences(first):
            self.drop_out()
            raise JoinRefused(self.number, differs)
        if any(self._differences(t) for t in told if t.terms != first.terms):
            time.sleep(SLOW)  # until it is gone
            return True
        return False

    def _differences(self, other: Told) -> list[str]:
        """What another worker has that we do not have alike."""
        if other.terms == self._terms.digest:
            return []
        try:
            text = bytes(connect(other.store).get(TERMS)).decode()
        except (OSError, dist.DistError):  # it is gone
            text = None
        return self._terms.differences(text, other.terms)

    def _take_place(self, told: list[Told]) -> None:
        numbers = [t.number for t in told]
        roster = Roster(members=tuple(Member(f"{t.number}.1", t.version) for t in told))
        self.members, self.rank = tuple(numbers), numbers.index(self.number)
        self.source, self.newcomers = roster.source, roster.newcomers
        self.generation, self._name, self._meeting = self.generation + 1, told[0].name, 0

    # -- the lighthouse ------------------------------------------------------------------------

    def _round(self, kind: str, arrived: bool = False) -> list[Told]:
        """What all who are alive say now, by their numbers; the same for all of them."""
        mine = Told(
            self.number,
            kind,
            self._name,
            self._meeting,
            arrived,
            self._version,
            self._store,
            uuid.uuid4().hex,
            self._terms.digest,
        )
        while (quorum := self._asked(vars(mine))) is None:
            pass
        if not all(p.data and p.data.keys() == vars(mine).keys() for p in quorum.participants):
            raise RuntimeError(
                f"somebody else asks the lighthouse at {self.lighthouse}, too. Start one for each "
                "run: all who ask it are taken for workers of one run."
            )
        return sorted((Told(**p.data) for p in quorum.participants), key=lambda t: t.number)

    def _asked(self, data: dict[str, Any]) -> Any:
        """The lighthouse's answer; None if it has none yet, as others have not come."""
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
            if self._answers():
                return None
            raise self._lost("it does not answer") from None
        except RuntimeError as error:
            raise self._lost(error) from error

    def _answers(self) -> bool:
        """Whether the lighthouse is there."""
        try:
            self._client.heartbeat(self._id, BEAT)
        except (RuntimeError, TimeoutError):
            return False
        return True

    def _lost(self, why: object) -> LighthouseLost:
        return LighthouseLost(
            f"torchft's lighthouse at {self.lighthouse} is lost: {why}. Without it workers cannot "
            "agree on who takes part: start it and all workers again, from a checkpoint."
        )

    def _beat(self, client: Any) -> None:
        """Tell the lighthouse that this worker lives."""
        while not self._over.wait(0.1):
            try:
                client.heartbeat(self._id, BEAT)
            except (RuntimeError, TimeoutError):
                self._over.wait(1.0)  # the next round says that the lighthouse is lost


def _client(lighthouse: str) -> Any:
    try:
        from torchft.coordination import LighthouseClient
    except ImportError as error:
        raise ImportError(
            "a TorchftCrew needs torchft, which is not installed: pip install torchft. `Crew` "
            "needs nothing else."
        ) from error
    return LighthouseClient(lighthouse, CONNECTING)
