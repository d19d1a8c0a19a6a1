"""Detect ranks that have ended or failed, and ranks that wait elsewhere.

Ranks that wait for each other in different calls, or for a process that has ended, would wait until
the process group's time-out. There are three signs, and no traffic while all goes well:

    connections   a process that ends, in whatever way, closes its connections, and gloo has one
                  between any two ranks of the default group. A receive from such a rank fails at
                  once; from all others it stays pending
    failures      a rank that ends by an exception, or because of a lost connection, says so in the
                  store first. Any other rank that has ended was killed, or has ended by itself
    waiting       a rank whose training thread has stood still inside torch or this library says in
                  the store in which line of the script. A thread looks every few seconds
                  (`standstill.py`)

`Presence` answers whether it is in vain to wait. `explained` turns gloo's error about a connection
into one that names ranks and steps. Training steps are collectives in which all ranks take part, so
a rank that has ended took as many as this one has completed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from traceback import format_exception_only
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from manyhands._ranks.dry_run import dry_group
from manyhands._ranks.message_box import MessageBox
from manyhands._ranks.sockets import is_connected_to
from manyhands._ranks.standstill import Standstill

LOOK = 5.0  # seconds between two looks at other ranks
WATCH = 2.0  # seconds between two looks at the training thread
BLOCKED = 10.0  # seconds for which a thread must have stood still to count as waiting
LATE = 1.0  # seconds after a lost connection in which the others with that rank close, too
NAMED = 8  # ranks that a message names
TAG = 7061  # of receives that no rank ever sends to
PREFIX = "manyhands/presence/"
LONGEST = 500  # characters of an error that other ranks are told
KILLED = "Was its process killed, for instance because the memory was full?"
UNEVEN = (
    "Every rank has to take as many steps as the others: give them equally many batches, or stop "
    "together. If they had equally many: was a process killed?"
)
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process")

_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def count_step(owner: object) -> None:
    """Count a training step that an optimizer or a model has completed."""
    _steps[owner] = _steps.get(owner, 0) + 1


class Presence:
    """Which ranks have ended, failed or wait elsewhere, by their numbers among all processes."""

    def __init__(self, store: Store) -> None:
        self._box = MessageBox(store, PREFIX)
        self._waiting = ""  # where ranks waited, when this one last looked
        self._looked = -LOOK  # when that was

    def may_look(self) -> bool:
        """Return whether `LOOK` seconds have passed since the last look, and count the next."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return False
        self._looked = now
        return True

    def find_ended(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks that have closed their connections."""
        world: Any = dist.group.WORLD
        if not _has_connections():
            return []
        ended = []
        for rank in ranks:
            if rank == world.rank():
                continue
            try:
                # Nothing is ever sent, and no rank waits for it: gloo's time-out is that of waits.
                world.recv([torch.empty(1, device="cpu")], rank, TAG)
            except RuntimeError as error:
                if _is_lost(error):
                    ended.append(rank)
        return ended

    def why_absent(self, ranks: Sequence[int]) -> str:
        """Return why waiting for all of these ranks is in vain, or "" while they may come.

        Ask when `may_look` says so: that ranks wait elsewhere counts at the second time, because
        they may have gone on since they said so.
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
        """Return in which lines all of these ranks wait; "" if any does not."""
        places: dict[str, list[int]] = {}
        for rank in ranks:
            place = self._read("waits", rank)
            if not place:
                return ""
            places.setdefault(place, []).append(rank)
        waiting = []
        for place, those in places.items():
            verb = "waits"
            if len(those) > 1:
                verb = "wait"
            waiting.append(f"{name_ranks(those)} {verb} in {place}")
        return " and ".join(waiting)

    def find_first_ended(self, ranks: Sequence[int]) -> tuple[list[int], str]:
        """Return the ranks that have ended by themselves, or else how one of them has failed.

        For an error about a lost connection. Ranks that have lost a connection fail one after the
        other; those that have ended and did not say so were the first.
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

    def count_at_work(self, own: int = 0) -> int:
        """Return how often ranks have said that they are at work, with this one's `own`."""
        return self._box.count("at work", own)

    def say(self, kind: str, text: str) -> None:
        """Tell the other ranks that this one has "failed", and why, or in which line it "waits"."""
        with suppress(RuntimeError):  # the store ends in this moment
            if self._answers():
                self._box.put(f"{kind}/{dist.get_rank()}", text)

    def _read(self, kind: str, rank: int) -> str:
        with suppress(RuntimeError):
            return self._box.read(f"{kind}/{rank}")
        return ""

    def _answers(self) -> bool:
        """Return whether the store is there: a request to one that has ended prints a stack."""
        store: Any = self._box.store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return not isinstance(store, TCPStore) or is_connected_to(store.port)


def name_ranks(ranks: Sequence[int]) -> str:
    """Such as "ranks 1, 2"."""
    listed = ", ".join(map(str, ranks[:NAMED]))
    if len(ranks) > NAMED:
        listed += ", ..."
    if len(ranks) > 1:
        return f"ranks {listed}"
    return f"rank {listed}"


def have_ended(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} ended"


def _is_lost(error: BaseException) -> bool:
    """Return whether an error of torch's says that another process has ended."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)


def _has_connections() -> bool:
    """Return whether gloo has connected all ranks of the default group to each other."""
    if not dist.is_initialized() or dry_group() is not None:
        return False
    lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "true", "yes", "y", "on")
    return "cpu:gloo" in dist.get_backend_config().split(",") and not lazy


# -- errors ----------------------------------------------------------------------------------------


class HasRanks(Protocol):
    """A `RankGroup`, which is asked for its ranks only if there is an error."""

    @property
    def ranks(self) -> list[int]: ...


@contextmanager
def explained(among: HasRanks | None = None, text: str = "") -> Iterator[None]:
    """Let the error of a lost connection among some ranks (default: all) say which has ended.

    `text` is how the sentence goes on, such as "while it loaded a checkpoint.". By default the
    ranks train, and the error has their numbers of steps.
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
    """Return an error that says which ranks have ended, if `error` is that of a lost connection."""
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
    """Tell the other ranks of an exception that ends the script, and explain a lost connection."""
    # DDP waits for the other ranks in C++, where no code of ours sees its errors.
    with suppress(Exception):  # the error itself must be shown
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
    """Says in the store if the thread that makes this object waits for other ranks for long."""

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
                # The store may end in this moment, or the process group (a ValueError).
                with suppress(RuntimeError, ValueError):
                    # A separate connection: requests of the training thread may block the other.
                    store: Any = _get_default_store()
                    Presence(store.clone()).say("waits", place)
                    self._said = place

    def end(self) -> None:
        """End the thread, as Python ends."""
        self._over.set()
        self.join(1.0)


_watched = 0  # the process whose training thread is watched


def begin() -> None:
    """Watch the calling thread from the first call on, and explain uncaught errors."""
    # Called wherever several ranks meet.
    global _watched
    if _watched == os.getpid() or dry_group() is not None:
        return
    if _watched == 0:  # a fork has it already
        sys.excepthook = partial(_explain_uncaught, sys.excepthook)
    _watched = os.getpid()
    _steps.clear()
    watch = _Watch()
    watch.start()
    atexit.register(watch.end)
