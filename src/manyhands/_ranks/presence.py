"""Detect ranks that have ended or failed, and ranks that wait elsewhere.

Ranks that wait for each other in different calls, or for an ended process, would wait until the
timeout of the process group. Three signs reveal this, without traffic in normal operation:

    connections   a receive from an ended rank of the default group fails immediately, because the
                  process has closed all connections; other receives stay pending
    failures      before a rank ends by an exception or a lost connection, it writes the reason to
                  the store. Other ended ranks were killed, or have finished
    waiting       if the training thread stands still inside torch or this library, a second thread
                  writes the waiting line of the script to the store (`standstill.py`)

`Presence` answers whether waiting is in vain. `RollCall` waits until all ranks make a call.
`explained` converts gloo's connection errors to errors that name ranks and steps: training steps
contain collectives of all ranks, so an ended rank is in the same step as this rank.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from traceback import format_exception_only
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from manyhands._ranks.dry_run import dry_group
from manyhands._ranks.groups import TCP_ESTABLISHED, internet_sockets, state_of
from manyhands._ranks.message_box import MessageBox
from manyhands._ranks.standstill import Standstill
from manyhands._warn import warn

FIRST_PAUSE = 0.001  # seconds between two checks of a roll call: initial value,
LONGEST_PAUSE = 1.0  # and maximum
LOOK = 5.0  # seconds between two checks of other ranks
WATCH = 2.0  # seconds between two checks of the training thread
BLOCKED = 10.0  # seconds without processor time after which a thread counts as waiting
LATE = 1.0  # seconds within which ranks follow a lost connection to a rank
NAMED = 8  # maximum number of ranks in a message
TAG = 7061  # of receives without a matching send
PREFIX = "manyhands/presence/"
LONGEST = 500  # characters of an error sent to other ranks
CALL = "Call it on every worker."
KILLED = "Was its process killed, for instance because the memory was full?"
UNEVEN = (
    "Every rank has to take as many steps as the others: give them equally many batches, or stop "
    "together. If they had equally many: was a process killed?"
)
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process")

_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def count_step(owner: object) -> None:
    _steps[owner] = _steps.get(owner, 0) + 1


class Presence:
    """Finds ranks that have ended, failed or wait elsewhere. Ranks are global."""

    def __init__(self, store: Store) -> None:
        self._box = MessageBox(store, PREFIX)
        self._waiting = ""  # where ranks waited at the last look
        self._looked = -LOOK  # time of the last look

    def may_look(self) -> bool:
        """Return whether `LOOK` seconds have passed since the last look."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return False
        self._looked = now
        return True

    def find_ended(self, ranks: Sequence[int]) -> list[int]:
        world: Any = dist.group.WORLD
        if not _has_connections():
            return []
        ended = []
        for rank in ranks:
            if rank == world.rank():
                continue
            try:
                # No rank sends or waits. Only waiting is subject to gloo's timeout.
                world.recv([torch.empty(1, device="cpu")], rank, TAG)
            except RuntimeError as error:
                if _is_lost(error):
                    ended.append(rank)
        return ended

    def why_absent(self, ranks: Sequence[int]) -> str:
        """Return why waiting for these ranks is in vain, or "". Call after `may_look`.

        Waiting elsewhere counts at the second look, because a rank may have continued.
        """
        ended = self.find_ended(ranks)
        if ended:
            return have_ended(ended)
        before = self._waiting
        self._waiting = ""
        if self._answers():
            self._waiting = self._find_waiting(ranks)
        if self._waiting != before:
            return ""
        return self._waiting

    def _find_waiting(self, ranks: Sequence[int]) -> str:
        places: dict[str, list[int]] = {}
        for rank in ranks:
            place = self._read("waits", rank)
            if not place:
                return ""
            places.setdefault(place, []).append(rank)
        waiting = []
        for place, there in places.items():
            verb = "wait" if len(there) > 1 else "waits"
            waiting.append(f"{name_ranks(there)} {verb} in {place}")
        return " and ".join(waiting)

    def find_first_ended(self, ranks: Sequence[int]) -> tuple[list[int], str]:
        """Return the ranks that ended first after a lost connection, with the failure of a rank.

        Ranks that lose a connection report a failure. Ended ranks with no report were the first.
        """
        ended = self.find_ended(ranks)
        deadline = time.monotonic() + LATE
        while not ended and time.monotonic() < deadline:
            time.sleep(0.02)
            ended = self.find_ended(ranks)
        first = []
        failed = ""
        answers = self._answers()
        for rank in ended:
            text = self._read("failed", rank) if answers else ""
            if not text:
                first.append(rank)
            elif not failed:
                failed = f"rank {rank} has failed: {text}"
        return first, failed

    def say(self, kind: str, text: str) -> None:
        """Report why this rank "failed", or the line where this rank "waits"."""
        with suppress(RuntimeError):  # the store ends concurrently
            if self._answers():
                self._box.put(f"{kind}/{dist.get_rank()}", text)

    def _read(self, kind: str, rank: int) -> str:
        with suppress(RuntimeError):
            return self._box.read(f"{kind}/{rank}")
        return ""

    def _answers(self) -> bool:
        """Return whether the store is alive: requests to an ended store print a stack trace."""
        store: Any = self._box.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return True
        for end in internet_sockets():
            with closing(end):
                # The state is available on Linux only.
                is_open = sys.platform != "linux" or state_of(end) == TCP_ESTABLISHED
                with suppress(OSError):  # not connected
                    if is_open and end.getpeername()[1] == store.port:
                        return True
        return False


def name_ranks(ranks: Sequence[int]) -> str:
    """Return text such as "ranks 1, 2"."""
    listed = ", ".join(map(str, ranks[:NAMED]))
    if len(ranks) > NAMED:
        listed += ", ..."
    if len(ranks) > 1:
        return f"ranks {listed}"
    return f"rank {listed}"


def have_ended(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} ended"


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)


def _has_connections() -> bool:
    """Return whether gloo has connected all pairs of ranks of the default group."""
    if not dist.is_initialized() or dry_group() is not None:
        return False
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "true", "yes", "y", "on")
    return "cpu:gloo" in dist.get_backend_config().split(",") and not lazy


class RollCall:
    """Waits until all ranks make a call, before a collective.

    If a script calls the function on some ranks only, an error follows instead of a hang.
    """

    # Seconds, long enough for other ranks to write files.
    warn_after = 30.0
    give_up_after = 600.0
    look_after = 10.0  # until the first check whether missing ranks have ended

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        prefix: str = "manyhands/call",
        ranks: Sequence[int] = (),
    ) -> None:
        self.box = MessageBox(store, prefix)
        self._rank = rank
        self._size = size
        self._ranks = ranks  # global ranks, if known

    def wait(self, call: str, in_vain: Callable[[], str] = str) -> None:
        """Wait until all ranks have called; warn after a while, then raise.

        `in_vain` may return an error message to end the wait early.
        """
        began = time.monotonic()
        warned = False
        pause = FIRST_PAUSE
        count = self.box.count("", 1)
        everyone = -(-count // self._size) * self._size  # count after all ranks have called
        first = count == everyone - self._size + 1
        if count < everyone:
            self.box.put(f"/{self._rank}", str(everyone))
        if first and self._size > 1:
            self._note_problem("")
        others = Presence(self.box.store)
        while count < everyone:
            waited = time.monotonic() - began
            problem = ""
            if waited > self.look_after:
                problem = in_vain()
                if not problem and others.may_look():
                    problem = self._look_for_missing(others, call, everyone, first)
            late = waited > self.give_up_after
            if not problem and (late or (waited > self.warn_after and not warned)):
                missing = self._missing(everyone) if first else []  # limits requests to the store
                who = f"rank(s) {missing[:8]}"
                if not missing:
                    who = f"{everyone - count} of {self._size} ranks"
                if late:
                    problem = f"{who} have not called {call} within {waited:.3g} s. {CALL}"
                else:
                    warned = True
                    warn(f"{call} waits: {who} have not called it. {CALL}")
            if problem and self._leave(everyone):
                raise RuntimeError(problem)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if waited < self.look_after:
                pause = min(pause, 0.05)
            count = self.box.count("", 0)

    def _look_for_missing(self, others: Presence, call: str, everyone: int, first: bool) -> str:
        """Return an error message if missing ranks cannot make the call, else ""."""
        if not self._ranks:
            return ""
        if first:
            reason = others.why_absent([self._ranks[rank] for rank in self._missing(everyone)])
            self._note_problem(reason)
        else:  # only the first rank looks for missing ranks
            number, reason = json.loads(self.box.read("/first"))
            reason = reason or others.why_absent([self._ranks[number]])
        return reason and f"rank {self._rank} has called {call}, and {reason}. {CALL}"

    def _note_problem(self, reason: str) -> None:
        """Publish the first rank's number, and why missing ranks cannot call."""
        self.box.put("/first", json.dumps([self._rank, reason]))

    def _missing(self, everyone: int) -> list[int]:
        return [n for n in range(self._size) if self.box.read(f"/{n}") != str(everyone)]

    def _leave(self, everyone: int) -> bool:
        """Withdraw this rank's call; return False if all ranks have called meanwhile."""
        if self.box.count("", -1) < everyone - 1:
            return True
        self.box.count("", 1)
        return False


# -- errors ----------------------------------------------------------------------------------------


class HasRanks(Protocol):
    """A `RankGroup`, whose ranks are computed only after an error."""

    @property
    def ranks(self) -> list[int]: ...


@contextmanager
def explained(among: HasRanks | None = None, text: str = "") -> Iterator[None]:
    """Convert errors of lost connections among ranks (default: all) to errors that name the rank.

    `text` completes the sentence. By default the error contains numbers of training steps.
    """
    try:
        yield
    except RuntimeError as error:
        better = explain(error, among, text)
        if better is None:
            raise
        raise better from error


def explain(
    error: BaseException, among: HasRanks | None = None, text: str = ""
) -> RuntimeError | None:
    """Return an error that names the ended ranks, if `error` reports a lost connection."""
    if not (_is_lost(error) and dist.is_initialized()):
        return None
    own = dist.get_rank()
    ranks = range(dist.get_world_size()) if among is None else among.ranks
    presence = Presence(_get_default_store())
    presence.say("failed", "it has lost its connection to another rank.")
    ended, failed = presence.find_first_ended(ranks)
    if failed and not ended:
        return RuntimeError(failed)
    if not ended:
        return None
    if text:
        return RuntimeError(f"{have_ended(ended)} {text}")
    steps = max(_steps.values(), default=0)
    counts = ""
    if steps:
        counts = f" after {steps} steps, and rank {own} is in step {steps + 1}"
    return RuntimeError(f"{have_ended(ended)}{counts}. {UNEVEN}")


def _explain_uncaught(
    before: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Report an uncaught exception to other ranks, and explain lost connections."""
    # DDP waits in C++, so `explained` cannot catch its errors.
    with suppress(Exception):  # always show the original error
        better = explain(error)
        if better is not None:
            better.__cause__ = error
            kind = type(better)
            error = better
            trace = None
    before(kind, error, trace)
    if dist.is_initialized():
        text = "".join(format_exception_only(kind, error)).strip()
        Presence(_get_default_store()).say("failed", text[:LONGEST])


# -- the training thread ---------------------------------------------------------------------------


class _Watch(threading.Thread):
    """Reports to the store if the creating thread waits for other ranks."""

    def __init__(self) -> None:
        super().__init__(name="manyhands presence", daemon=True)
        self._standstill = Standstill()
        self._over = threading.Event()
        self._said = ""

    def run(self) -> None:
        while not self._over.wait(WATCH):
            place = ""
            if self._standstill.look() >= BLOCKED:
                place = self._standstill.place()
            if place != self._said and dist.is_initialized():
                # The store or the process group (ValueError) may end concurrently.
                with suppress(RuntimeError, ValueError):
                    # A separate connection, because the training thread may block its connection.
                    store: Any = _get_default_store()
                    Presence(store.clone()).say("waits", place)
                    self._said = place

    def end(self) -> None:
        """End the thread at exit."""
        self._over.set()
        self.join(1.0)


_watched = 0  # id of the process with a watched training thread


def begin() -> None:
    """Watch the calling thread from the first call on, and explain uncaught errors."""
    global _watched
    if _watched == os.getpid() or dry_group() is not None:
        return
    if _watched == 0:  # forks inherit the hook
        sys.excepthook = partial(_explain_uncaught, sys.excepthook)
    _watched = os.getpid()
    _steps.clear()
    watch = _Watch()
    watch.start()
    atexit.register(watch.end)
