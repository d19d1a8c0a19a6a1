"""Simulate crews of many workers while one dies and one comes every second.

    python benchmarks/crews.py    half an hour; writes its section of docs/benchmarks/scale.md

The workers run the library's own `Crew` in threads, one at a time, on the clock of a simulation.
How long the store takes for a request, and a worker to read a roster or to connect to another one,
are constants below. Training and the exchange are a sleep.
"""

from __future__ import annotations

import atexit
import heapq
import os
import random
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import count
from operator import methodcaller
from statistics import median
from types import SimpleNamespace
from typing import Any

import pages
from torch.distributed import HashStore

from manyhands._ranks.message_box import HeartbeatMonitor
from manyhands.blocks.crew import _crew, _enrollment, _shared_roster, _store
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._roster import Member, Roster, Version
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import Signer, StoreClient
from manyhands.errors import WorkerLost

BLOCK = 30.0  # seconds, as all below
EXCHANGE = 0.3
STALL = 5.0
AWAY = 10.0  # until a worker that died is started again
REPORTED = 0.1  # until a death is reported
TRIP = 0.2e-3  # to the store
REQUEST = 15e-6  # of the store
BANDWIDTH = 1e9  # of the store, bytes a second
ENTRY = 5e-6  # reading a member of a roster
OPEN = 0.3e-3  # connecting to a member
ADDRESS = 400  # bytes
UNREPORTED = 0.05  # of the deaths: a host is cut off, and nobody reports it
SIZES = (16, 64, 256, 512, 1024)
SECONDS = 100.0
SECRET = "the secret of a simulated crew"


class Dead(BaseException):
    """Ends the threads of a worker that was killed."""


class Clock:
    """Lets the thread run whose time has come, and no other. Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queue: list[tuple[float, int, Any]] = []
        self.order = count()

    def monotonic(self) -> float:
        return self.now

    def line_up(self, seconds: float, turn: Any = None) -> Any:
        if turn is None:
            turn = threading.Lock()
            turn.acquire()
        heapq.heappush(self.queue, (self.now + seconds, next(self.order), turn))
        return turn

    def pass_on(self) -> None:
        self.now, _, turn = heapq.heappop(self.queue)
        turn.release()

    def sleep(self, seconds: float) -> None:
        if not self.queue or self.queue[0][0] > self.now + seconds:
            self.now += seconds
            return
        turn = self.line_up(seconds)
        self.pass_on()
        turn.acquire()

    def start(self, work: Any, *args: Any) -> None:
        def run() -> None:
            turn.acquire()
            with suppress(Dead):
                work(*args)
            self.pass_on()

        turn = self.line_up(0.0)
        threading.Thread(target=run, daemon=True).start()


class Lock:
    """Stands in for `threading.RLock`."""

    def __init__(self) -> None:
        self.owner = 0
        self.depth = 0
        self.waiting: list[Any] = []

    def __enter__(self) -> None:
        while self.depth and self.owner != threading.get_ident():
            turn = threading.Lock()
            turn.acquire()
            self.waiting.append(turn)
            World.clock.pass_on()
            turn.acquire()
        self.owner = threading.get_ident()
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1
        if not self.depth and self.waiting:
            World.clock.line_up(0.0, self.waiting.pop(0))


class Client(StoreClient):
    def __init__(self, store: str, interval: float, signer: Signer) -> None:
        self.signer = signer
        self.known_revision = 0
        self._interval = interval
        self.key = ""
        self.totals = [0, 0, 0]  # heartbeats, requests, bytes

    def call(self, name: str, *args: Any) -> Any:
        answer = getattr(World.store, name)(*args)
        parts = [*args, answer]
        parts += [each for part in parts if isinstance(part, list) for each in part]
        if name == "multi_get" and "heartbeat" in args[0][0]:
            self.totals[0] += len(args[0])
        self.ask(sum(len(part) for part in parts if isinstance(part, str | bytes)))
        return answer

    def ask(self, size: int) -> None:
        clock = World.clock
        if self.key in World.died:
            raise Dead
        self.totals[1] += 1
        self.totals[2] += size
        World.free = max(World.free, clock.now) + REQUEST + size / BANDWIDTH
        clock.sleep(World.free - clock.now + TRIP)

    def start_heartbeat(self, key: str) -> None:
        def beat() -> None:
            while self.key == key:
                self.put(key, self._next_heartbeat())
                World.clock.sleep(self._interval)

        self._heartbeats = 0
        self.key = key
        World.clock.start(beat)

    def close(self) -> None:
        World.died.setdefault(self.key, World.clock.now)


def shared_roster(crew: Crew) -> SharedRoster:
    assert crew._enrollment is not None
    return crew._enrollment.shared


def client_of(crew: Crew) -> Any:
    return shared_roster(crew).client


class World:
    """A crew, its store, and what was seen: one at a time, so these are of the class."""

    size: int
    clock: Clock
    store: Any
    free: float  # the time at which the store can take a request
    died: dict[str, float]  # when, by the key of the heartbeat
    living: dict[int, Crew]
    dice: random.Random
    came: dict[tuple[int, int], set[int]]  # members, by generation and round
    seen: dict[str, dict[Any, float]]
    kept: dict[tuple[int, int], bool]  # rounds
    repeating: bool

    def __init__(self, size: int) -> None:
        World.size = size
        World.clock = Clock()
        World.store = HashStore()
        World.free = 0.0
        World.died = {}
        World.living = {}
        World.dice = random.Random(size)
        World.came = defaultdict(set)
        World.seen = defaultdict(dict)
        World.kept = {}
        World.repeating = False

    def live(self, number: int, pause: float = 0.0) -> None:
        self.clock.sleep(pause)
        began = self.clock.now
        rounds = 0
        own = Crew("127.0.0.1:1", number=number, expected=self.size, stall=STALL, secret=SECRET)
        self.living[number] = own
        own.join()
        if self.size > 65:
            self.clock.start(self.watch, shared_roster(own))
        while True:
            if not self.repeating:
                self.clock.sleep(BLOCK * self.dice.uniform(0.95, 1.0))
            try:
                self.meet(own, own._round + 1, EXCHANGE)
                kept = own.settle(True)
            except WorkerLost:
                kept = own.settle(False)
            rounds += kept
            World.repeating = not kept
            self.kept.setdefault((own.generation, own._round), kept)
            if own.regroup_due:
                began = self.clock.now
                own.regroup(Version(rounds))
                self.seen["regroup"][number, began] = self.clock.now - began

    def meet(self, own: Crew, what: int, seconds: float) -> None:
        """Wait for all members, and then for so long."""
        came = self.came[own.generation, what]
        came.add(own.number)

        def done(pause: float) -> bool:
            whole = len(came) == own.size
            self.clock.sleep(seconds if whole else pause)
            return whole and len(came) == own.size

        own.wait(done)

    def connect(self, own: Crew) -> bool:
        for size in (ADDRESS, ADDRESS, 40 * own.size, ADDRESS * own.size):
            client_of(own).ask(size)
        try:
            self.meet(own, 0, OPEN * own.size)
        except WorkerLost:
            return False
        return True

    def watch(self, shared: SharedRoster) -> None:
        while True:
            self.clock.sleep(shared.monitor.interval)
            shared.observe_heartbeats()

    def kill(self, launcher: SharedRoster) -> None:
        """Kill a random worker, report it as its launcher does, and start it again."""
        number = self.dice.choice(sorted(self.living))
        client_of(self.living.pop(number)).close()
        for came in self.came.values():
            came.discard(number)
        self.clock.start(self.after, number, launcher, self.dice.random() > UNREPORTED)

    def after(self, number: int, launcher: SharedRoster, reported: bool) -> None:
        self.clock.sleep(REPORTED)
        if reported:
            launcher.report_end(number)
        self.live(number, AWAY)


def simulate(size: int) -> dict[str, Any]:
    """Let a crew begin, and then let a worker die and another come every second, at random."""
    world = World(size)
    clock = world.clock
    for module in (_crew, _enrollment, _shared_roster, _store):
        put(module, time=clock)
    put(Crew, _connect=lambda own: world.connect(own))
    for number in range(size):
        clock.start(world.live, number, 0.01 * number)
    while not any(world.kept.values()):
        clock.sleep(1.0)
    clock.sleep(1.0)  # until all have seen that
    launcher = SharedRoster(Client("", 1.0, Signer(SECRET)), HeartbeatMonitor(60.0))
    put(launcher, watched=lambda roster: ())
    clients = [client_of(crew) for crew in world.living.values()]
    before = [client.totals[:] for client in clients]
    began = clock.now
    world.seen.clear()
    world.kept.clear()
    while clock.now < began + SECONDS:
        clock.sleep(world.dice.expovariate(1.0))
        world.kill(launcher)
    rates = []
    for client, earlier in zip(clients, before, strict=True):
        if client.key not in world.died:
            more = [now - was for now, was in zip(client.totals, earlier, strict=True)]
            rates.append([total / (clock.now - began) for total in more])
    row: dict[str, Any] = {"rates": [round(median(rate), 1) for rate in zip(*rates, strict=True)]}
    for what, seen in world.seen.items():
        row[what] = [round(value, 2) for value in (median(seen.values()), max(seen.values()))]
    kept = sum(world.kept.values())
    return row | {"rounds": [kept, len(world.kept) - kept]}


def measure_roster(size: int) -> dict[str, Any]:
    """Measure the length of a roster's text, and the changes of it in a second."""
    server, address = _store.serve_store("127.0.0.1")
    shared = SharedRoster(StoreClient(address, 60.0, Signer(SECRET)), HeartbeatMonitor(5.0))
    members = tuple(Member(f"{number}.1", Version(30, True, 500)) for number in range(size))
    shared.change(lambda roster: replace(roster, generation=5, members=members))
    length = len(shared.roster.text)
    began = time.perf_counter()
    made = 0
    while time.perf_counter() < began + 1.0:
        asking = Member(f"{made % size}.1", Version(31, True, made))
        shared.change(methodcaller("ask_to_join", asking))
        made += 1
    decisions = round(made / (time.perf_counter() - began))
    shared.client.close()
    del server
    return {"workers": size, "text": length, "decisions": decisions}


def put(owner: Any, **replacements: Any) -> None:
    for name, value in replacements.items():
        setattr(owner, name, value)


def remember(calculate: Any) -> Any:
    """Calculate something of a roster once for all workers that have read it."""
    known: dict[Any, Any] = {}

    def ask(roster: Roster, *args: Any) -> Any:
        key = (id(roster), *args)
        if key not in known:
            if len(known) > 4096:
                known.clear()
            known[key] = calculate(roster, *args), roster
        return known[key][0]

    return ask


def patch() -> None:
    """Let the crew's code run in the simulation, and remember what all workers calculate alike."""
    parse = lru_cache(64)(Roster.of)
    write = SharedRoster._sign
    report = Roster.report

    def charge(roster: Roster) -> Roster:
        World.clock.sleep(ENTRY * (len(roster.members) + len(roster.waiting)))
        return roster

    def noted(roster: Roster, counts: Any, silent: Any) -> Roster:
        new = report(roster, counts, silent)
        for key in {f"{_store.PREFIX}heartbeat/{id}" for id, _ in new.silent} & World.died.keys():
            World.seen["silent"].setdefault(key, World.clock.now - World.died[key])
        return new

    put(Roster, of=lambda text: charge(parse(text)), report=noted)
    put(SharedRoster, _sign=lambda shared, roster: write(shared, charge(roster)))
    for name in ("ids", "everyone", "gone", "here", "workers", "source", "joiners"):
        setattr(Roster, name, property(remember(getattr(Roster, name).fget)))
    for name in ("complete", "absent", "watched_by"):
        setattr(Roster, name, remember(getattr(Roster, name)))
    put(_enrollment.Enrollment, _check_number_is_free=lambda *_: None)
    length = _store.SIGNATURE_LENGTH
    put(Signer, sign=lambda self, key, text: "0" * length + text)
    put(Signer, verify=lambda self, key, value: value[length:].decode())
    put(_crew, StoreClient=Client)
    put(_shared_roster, threading=SimpleNamespace(RLock=Lock))
    idle = SimpleNamespace(ident=1, is_alive=lambda: False)  # `World.watch` stands in for it
    threads = SimpleNamespace(Event=threading.Event, Thread=lambda **_: idle)
    put(_enrollment, threading=threads)


HEAD = (
    "workers | roster, kB | decisions/s | heartbeats/s | requests/s | kB/s | regrouping, s "
    "| silence known after, s | rounds kept, undone"
)


def table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        cells.append([f"{row['workers']:,}", f"{row['text'] / 1e3:.0f}", f"{row['decisions']:,}"])
        heartbeats, requests, size = row.get("rates", (0, 0, 0))
        for value in (heartbeats, requests, size / 1e3):
            cells[-1].append(f"{value:.1f}" if value else "–")
        for what in ("regroup", "silent", "rounds"):
            one, other = row.get(what, ("–", "–"))
            cells[-1].append(f"{one}, {other}")
    return pages.table(HEAD, cells)


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    result = pages.conditions() | {"rows": [measure_roster(size) for size in SIZES]}
    patch()
    for row in result["rows"][1 : 2 if args.quick else None]:  # of 16 most would be away
        row |= simulate(row["workers"])
        print(table(result["rows"]), flush=True)
        atexit._clear()  # the threads of this crew stay where they are
    if not args.quick:
        pages.store("crews", result)
        pages.fill("scale", crews=table(result["rows"]))
    os._exit(0)  # not those threads' atexit


if __name__ == "__main__":
    main()
