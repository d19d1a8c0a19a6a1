"""Enrollment in a crew: compare facts, assign an id, and wait for the next generation.

    enrollment = Enrollment(shared, siblings, expected, patience)
    enrollment.siblings.agree_on_incarnation(shared)    count a start of the worker
    enrollment.check_facts(facts)                       raise if the facts differ from the run
    enrollment.begin_incarnation()                      take a new id and start a heartbeat
    roster = enrollment.wait_for_generation(version, after=0, longest_wait=600.0)

`Crew` (_crew.py) implements rounds and connections.

`MemberFacts` must be equal on all workers of a crew: options and averaged tensors, as JSON text.
The text of the first worker becomes the text of the run. A worker with a different text is refused
with an error that lists the differences. (Ranks of a process group compare such facts when the
optimizer is created, see `_ranks/agreement.py`. The members of a crew are never present together.)

    {"options": {"every": "16", ...},
     "parameter": [["encoder.weight", "(4, 3) float32 on cpu"], ...], "buffer": [...]}

Tensors are averaged by position, so the order matters, and only names can reveal a different order.
Names are not compared if they are unknown or if two workers share no name (one model is wrapped).

With a quorum, each worker first tries to connect to all other workers at their *doors*: ports that
accept and close connections. The request to join lists unreachable workers, and the next generation
is the largest set of workers that all reach each other (`Roster.together`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from operator import methodcaller

from torch import Tensor, nn

from manyhands._ranks.agreement import describe_tensors, names_in
from manyhands._ranks.ranks import RankGroup
from manyhands.blocks.crew._fork_server import ENVIRONMENT, describe_changes
from manyhands.blocks.crew._roster import Member, Roster, Version, number_of
from manyhands.blocks.crew._store import (
    FIRST_PAUSE,
    PREFIX,
    SharedRoster,
    next_pause,
    own_address,
    parse_address,
)
from manyhands.errors import CrewFinished, JoinRefused, StoreLost

ANSWER = 2.0  # seconds within which a door must answer
PAUSE = 0.2  # seconds until a door retries accept()
LOOK = 0.05  # seconds between two checks whether processes with closed doors are silent
LOOK_AGAIN = 2.0  # seconds until a worker tries again to reach unreachable workers
START_PATIENCE = 30.0  # seconds that the first workers wait for the expected number of workers
LISTED = 3  # number of differences of each kind in an error message
FINISHED = (
    "manyhands: the run has ended: all other workers left before worker {} was in. Start a new run "
    "with a separate store to continue training."
)
log = logging.getLogger("manyhands")

DescribedTensor = tuple[str, str]  # name (empty if unknown), description


@dataclass(frozen=True)
class MemberFacts:
    """Description of a worker's options and tensors."""

    text: str

    @classmethod
    def of(
        cls,
        options: Mapping[str, object],
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        modules: Sequence[nn.Module],
    ) -> MemberFacts:
        described = {
            # As text, because not every option can be converted to JSON.
            "options": {name: str(value) for name, value in options.items()},
            "parameter": _name_all(params, describe_tensors(params, frozen=True), modules),
            "buffer": _name_all(buffers, describe_tensors(buffers), modules),
        }
        return cls(json.dumps(described, separators=(",", ":")))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def differences(self, text: str, digest: str) -> list[str]:
        """Return the differences from the run's text, whose checksum is `digest`."""
        # The roster contains the correct checksum. The text may be missing or forged.
        if MemberFacts(text).digest != digest:
            return ["training options (the store no longer contains the run's description)"]
        own = json.loads(self.text)
        run = json.loads(text)
        found = []
        for name in {**own["options"], **run["options"]}:
            here = own["options"].get(name, "missing")
            there = run["options"].get(name, "missing")
            if here != there:
                found.append(f"{name}: {here} here, {there} in the run")
        for kind in ("parameter", "buffer"):
            found += _tensor_differences(kind, own[kind], run[kind])
        return found


NO_FACTS = MemberFacts('{"options":{},"parameter":[],"buffer":[]}')


class Siblings:
    """The processes of this worker, which train a model together and end together."""

    def __init__(self, number: int, inner: RankGroup) -> None:
        self.number = number  # of the worker
        self.inner = inner
        self.process_number = number * inner.size + inner.rank
        self.incarnation = 0  # of the worker
        self.ids: frozenset[str] = frozenset()  # of the other processes in this generation

    def agree_on_incarnation(self, shared: SharedRoster) -> None:
        """Set this worker's incarnation number in all processes."""
        if self.inner.size == 1:
            return
        roster = shared.refresh()
        if self.inner.rank == 0:
            roster = shared.change(lambda roster: roster.count_worker_incarnation(self.number))
        incarnation = dict(roster.worker_incarnations).get(self.number, 0)
        own = [float(self.number), float(incarnation)]
        gathered = self.inner.all_gather(own, self.inner.any_device)
        numbers, incarnations = zip(*gathered, strict=True)
        if len(set(numbers)) > 1:
            listed = ", ".join(map("{:.0f}".format, numbers[:8]))
            raise ValueError(
                "all processes of an inner_group must have the same worker number, got "
                f"{listed}. Set MANYHANDS_WORKER to the same number in these processes."
            )
        self.incarnation = int(incarnations[0])

    def enter(self, roster: Roster, own: str) -> None:
        """Store the ids of the other processes of this worker in a generation."""
        ids = (id for id in roster.ids if roster.worker_of(id) == self.number)
        self.ids = frozenset(ids) - {own}

    def check(self, roster: Roster, late: bool) -> None:
        """Raise if a process of this worker is gone, was restarted, or is missing when `late`.

        Suspended processes may wake up, so the worker waits until `late` is set.
        """
        if self.inner.size == 1:
            return
        present = 0
        restarted = False
        for member in (*roster.members, *roster.waiting):
            if roster.worker_of(member.id) == self.number:
                restarted = restarted or member.worker_incarnation > self.incarnation
                waits = member.id in roster.waiting_ids
                present += waits and member.worker_incarnation == self.incarnation
        if restarted or self.ids & roster.gone or (late and present < self.inner.size):
            raise RuntimeError(
                f"a process of worker {self.number} is lost, and this process cannot continue "
                "alone. This process ends, so that all processes of the worker are restarted."
            )


class Enrollment:
    """This process's entry in the shared roster."""

    def __init__(
        self,
        shared: SharedRoster,
        siblings: Siblings,
        expected: int,
        patience: float,
        quorum: int = 1,
        former_ids: frozenset[str] = frozenset(),
    ) -> None:
        self.shared = shared
        self.siblings = siblings
        self.expected = expected
        self.patience = patience
        self.quorum = quorum
        # Without a quorum, both halves of a partitioned network would continue.
        self._door: Door | None = None
        if quorum > 1:
            self._door = Door(own_address(shared.client.store))
        self._cut_from: tuple[str, ...] = ()  # ids of unreachable processes
        self.id = ""  # "number.incarnation", set by `begin_incarnation`
        self.own_ids = former_ids  # all ids that this process has used
        self.facts = NO_FACTS  # set by `check_facts`
        self.cut_off = False  # whether the store was lost
        self.process = os.getpid()  # forks of this process must not leave the crew
        self._closed = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_others, name="manyhands watch", daemon=True
        )

    def check_facts(self, facts: MemberFacts) -> None:
        """Raise JoinRefused if the facts differ. The first worker sets the facts of the run."""
        self.facts = facts
        inner_rank = self.siblings.inner.rank
        digest = facts.digest
        client = self.shared.client
        key = f"{PREFIX}facts/{inner_rank}"
        roster = self.shared.change(lambda roster: roster.set_facts(inner_rank, digest))
        agreed = dict(roster.facts)[inner_rank]
        # The checksum in the roster decides. The text is only for the error message.
        text = client.read(key)
        if agreed == digest:
            if text != facts.text:  # missing, or overwritten by a stranger
                client.put(key, facts.text)
            return
        differences = facts.differences(text, agreed)
        if not differences:
            return  # only names differ, because a model is wrapped
        # Tells the launcher not to restart this worker.
        self.shared.change(lambda roster: roster.refuse(self.siblings.process_number))
        raise JoinRefused(self.siblings.number, differences)

    def begin_incarnation(self) -> None:
        """Take a new id and start a heartbeat under this id."""
        client = self.shared.client
        number = self.siblings.process_number
        if not self.own_ids:  # later changes are made by libraries
            client.put(f"{ENVIRONMENT}{number}", describe_changes(client.signer))
        roster = self.shared.change(lambda roster: roster.count_incarnation(number))
        self.id = f"{number}.{dict(roster.incarnations)[number]}"
        self.own_ids |= {self.id}
        self.shared.id = self.id
        client.start_heartbeat(f"{PREFIX}heartbeat/{self.id}")
        self.shared.monitor.reset()
        if self._door is not None:
            client.put(f"{PREFIX}door/{self.id}", self._door.address)

    def close(self) -> None:
        """End the connection to the store and the watching thread, and close the door."""
        self._closed.set()
        if self._watch.is_alive():
            self._watch.join(1.0)
        self.shared.client.close()
        if self._door is not None:
            self._door.close()

    def _find_unreachable(self) -> tuple[str, ...]:
        """Return the processes in the roster that this process cannot reach."""
        if self._door is None:
            return ()
        shared = self.shared
        ids = sorted(shared.refresh().here - {self.id} - shared.silent)
        keys = [f"{PREFIX}door/{id}" for id in ids]
        doors = {}
        for id, address in zip(ids, shared.client.read_all(keys), strict=True):
            if address:
                doors[id] = address

        def find_silent() -> frozenset[str]:
            shared.refresh()
            return shared.silent

        return unreachable(doors, find_silent)

    def wait_for_generation(self, version: Version, after: int, longest_wait: float) -> Roster:
        """Wait for a generation later than `after` that includes this process, or start it.

        Wait up to `longest_wait` seconds for living members.
        """
        shared = self.shared
        number = self.siblings.number
        began = time.monotonic()
        pause = FIRST_PAUSE
        warned = False  # about too few workers
        ended: float | None = None  # when the end of the current generation was noticed
        self._cut_from = self._find_unreachable()
        looked = time.monotonic()
        self._ask_to_join(version)
        while True:
            roster = shared.refresh()
            if self.id in roster.ids and roster.generation > after:
                self.siblings.enter(roster, self.id)
                if self._watch.ident is None:
                    self._watch.start()
                return roster
            check_not_failed(roster, after, number)
            if roster.finished:
                raise CrewFinished(FINISHED.format(number))
            if self.id not in roster.waiting_ids:
                # Members considered this process lost, as after a long suspension. Ask again.
                self.begin_incarnation()
                self._ask_to_join(version)
                began = time.monotonic()
            if self._cut_from and time.monotonic() - looked > LOOK_AGAIN:
                found = self._find_unreachable()
                looked = time.monotonic()
                if found != self._cut_from:
                    self._cut_from = found
                    self._ask_to_join(version)
                    continue
            self._check_number_is_free(roster)
            now = time.monotonic()
            waited = now - began
            silent = shared.silent
            self.siblings.check(roster, waited > self.patience)
            if not roster.ended:
                ended = None
            elif ended is None:
                ended = now
            if waited > self.patience or (ended is not None and now - ended > longest_wait):
                # Treat late living members as lost. The time counts from the end of their
                # generation, because members may be in the middle of a block before.
                silent |= set(roster.absent(silent))
            late = waited > START_PATIENCE
            if late and not warned and not roster.has_quorum(silent, self.quorum):
                warned = True
                log.warning(
                    "worker %d waits for other workers: a round needs %d workers.",
                    number,
                    self.quorum,
                )
            needed = (silent, self.expected, late, self.quorum)
            begin_next = methodcaller("begin_next", roster.generation, *needed)
            if shared.change(begin_next).generation != roster.generation:
                pause = FIRST_PAUSE
                continue
            time.sleep(pause)
            pause = next_pause(pause, len(roster.ids))

    def _watch_others(self) -> None:
        """Read heartbeats during training, so that silent members are known at the next round."""
        while not self._closed.wait(self.shared.monitor.interval):
            try:
                self.shared.observe_heartbeats()
            except (StoreLost, ValueError):
                return  # the next call of this process raises the error

    def _ask_to_join(self, version: Version) -> None:
        self.shared.ask_to_join(Member(self.id, version, self.siblings.incarnation, self._cut_from))

    def _check_number_is_free(self, roster: Roster) -> None:
        """Raise if an earlier incarnation with this number is alive."""
        # A dead incarnation may remain in the roster, so require an advancing heartbeat. Exclude
        # earlier ids of this process: a delayed heartbeat may arrive after a network cut.
        number = self.siblings.process_number
        for id in roster.waiting_ids.union(roster.ids) - self.own_ids:
            earlier = number_of(id) == number and _incarnation_of(id) < _incarnation_of(self.id)
            if earlier and self.shared.monitor.has_advanced(id):
                raise RuntimeError(
                    f"two workers with the number {self.siblings.number} are alive. Give each "
                    "worker a unique number (MANYHANDS_WORKER). On additional hosts, pass "
                    "`manyhands run --numbers`."
                )


def check_not_failed(roster: Roster, generation: int, number: int) -> None:
    """Raise if a member of this generation failed before the first sync round."""
    if roster.failed and roster.generation == generation:
        numbers = sorted({roster.worker_of(id) for id in roster.failed} - {number})
        raise RuntimeError(
            f"worker {', '.join(map(str, numbers))} has ended with an error before the first "
            "sync round, which ends the run. See the output of that worker."
        )


def _incarnation_of(id: str) -> int:
    return int(id.partition(".")[2])


def _name_all(
    tensors: Sequence[Tensor], descriptions: Sequence[str], modules: Sequence[nn.Module]
) -> list[DescribedTensor]:
    """Return (name, description) of each parameter or buffer."""
    names = names_in(modules, tensors) or [""] * len(tensors)
    return list(zip(names, descriptions, strict=True))


def _tensor_differences(
    kind: str, own: Sequence[DescribedTensor], run: Sequence[DescribedTensor]
) -> list[str]:
    """Return a line for each tensor that differs between this worker and the run."""
    lines = []
    # Compare only names that occur in both models, because one of these may be wrapped.
    common = {name for name, _ in own} & {name for name, _ in run} - {""}
    for position, (here, there) in enumerate(zip(own, run, strict=False)):
        moved = here[0] != there[0] and not common.isdisjoint((here[0], there[0]))
        if here[1] != there[1] or moved:
            texts = (" ".join(filter(None, here)), " ".join(filter(None, there)))
            lines.append("{} {}: {} here, {} in the run".format(kind, position, *texts))
    if len(lines) > LISTED:
        lines[LISTED:] = [f"and further {kind}s"]
    if len(own) != len(run):
        lines.insert(0, f"the number of {kind}s: {len(own)} here, {len(run)} in the run")
    return lines


# -- reachability of workers -----------------------------------------------------------------------


class Door:
    """A port that shows that this worker is reachable."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=1024)
        port = self._listening.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="manyhands door", daemon=True).start()

    def _accept(self) -> None:
        """Accept and close connections, in a thread."""
        while not self._closed.is_set():
            try:
                self._listening.accept()[0].close()
            except OSError:
                # Closed, or a temporary error: the caller has gone (ECONNABORTED), too many open
                # files (EMFILE, ENFILE), no memory (ENOBUFS, ENOMEM), ... New connections wait in
                # the backlog, which callers also accept as an answer.
                self._closed.wait(PAUSE)

    def close(self) -> None:
        """Stop answering, and end the thread."""
        self._closed.set()
        # shutdown() wakes a thread in accept(), unlike close().
        with suppress(OSError):  # some systems have no shutdown of a listening socket
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def unreachable(
    addresses: Mapping[str, str], find_silent: Callable[[], frozenset[str]] = frozenset
) -> tuple[str, ...]:
    """Return the ids with closed doors; `addresses` maps ids to doors.

    Do not wait for silent processes: after a network cut they have neither door nor heartbeat.
    """
    cut = set(addresses)
    left = set()
    with ExitStack() as stack, selectors.DefaultSelector() as answers:
        for id, address in addresses.items():
            family = socket.AF_INET6 if address.startswith("[") else socket.AF_INET
            with suppress(OSError):  # such as too many open files
                door = stack.enter_context(socket.socket(family))
                door.setblocking(False)
                error = door.connect_ex(parse_address(address))
                if error in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):  # else: such as no route
                    answers.register(door, selectors.EVENT_WRITE, (id, door))
                    left.add(id)
        until = time.monotonic() + ANSWER
        while left:
            answered = answers.select(LOOK)
            for key, _ in answered:
                id, door = key.data
                if not door.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    cut.remove(id)
                answers.unregister(door)
                door.close()
                left.remove(id)
            if not answered and (time.monotonic() > until or left <= find_silent()):
                break
    return tuple(id for id in addresses if id in cut)
