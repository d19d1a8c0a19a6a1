"""Let a process into a crew: compare its facts, give it an id, wait for the next generation.

    enrollment = Enrollment(shared, siblings, expected, patience)
    enrollment.siblings.agree_on_incarnation(shared)    all processes of the worker count its starts
    enrollment.check_facts(facts)         or raise: this worker would not fit the others
    enrollment.begin_incarnation()        a new id, and a heartbeat under it
    roster = enrollment.wait_for_generation(version, after=0, longest_wait=600.0)

`Crew` (_crew.py) has the rounds and connections.

`MemberFacts` are equal on all workers of a crew: the options, and the tensors that are averaged. A
worker describes them in a text when it joins. The first worker's text is the run's. A worker whose
text differs is refused, with an error that names the differences. The ranks of a process group
compare the same things when the optimizer is made (`_ranks/agreement.py`); a crew's members are
never all present at one time.

    {"options": {"every": "16", ...},
     "parameter": [["encoder.weight", "(4, 3) float32 on cpu"], ...], "buffer": [...]}

Tensors are averaged by position, so their order matters, and only names can reveal a different
order. If names are unknown, or if two workers have no name in common (one model is wrapped), names
are not compared.

With a quorum each worker tries, before it asks to join, to connect to every other one at its
*door*: a port that accepts connections and closes them. Its request names the workers that it
cannot reach, and the next generation is the largest set of workers that all reach each other
(`Roster.together`).
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
from manyhands.blocks.crew._kept import ENVIRONMENT, describe_changes
from manyhands.blocks.crew._roster import Member, Roster, Version, number_of
from manyhands.blocks.crew._store import PREFIX, SharedRoster, parse_address
from manyhands.blocks.crew._transport import FIRST_PAUSE, next_pause, own_address
from manyhands.errors import CrewFinished, JoinRefused, StoreLost

ANSWER = 2.0  # seconds in which a door must answer
PAUSE = 0.2  # seconds until a door tries again to accept
LOOK = 0.05  # seconds until one looks again whether those whose doors do not answer are silent
START_PATIENCE = 30.0  # seconds that the first workers wait for the other expected ones
log = logging.getLogger("manyhands")

LOOK_AGAIN = 2.0  # seconds until a worker tries again to reach those that it could not reach
FINISHED = (
    "manyhands: the run has ended: all others have left before worker {} was in. Start a new run, "
    "with a store of its own, to train on."
)
LISTED = 3  # differences of a kind in an error message: more add nothing

DescribedTensor = tuple[str, str]  # name (empty if unknown), description


@dataclass(frozen=True)
class MemberFacts:
    """One worker's text."""

    text: str

    @classmethod
    def of(
        cls,
        options: Mapping[str, object],
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        modules: Sequence[nn.Module],
    ) -> MemberFacts:
        """Describe a worker's options and tensors."""
        described = {
            # As text, so that every option can be compared after a trip through JSON.
            "options": {name: str(value) for name, value in options.items()},
            "parameter": _name_all(params, describe_tensors(params, frozen=True), modules),
            "buffer": _name_all(buffers, describe_tensors(buffers), modules),
        }
        return cls(json.dumps(described, separators=(",", ":")))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def differences(self, text: str, digest: str) -> list[str]:
        """Return how this worker differs from the run's text, whose checksum is `digest`."""
        # The checksum comes from the roster, and is right. The text may be missing or forged.
        if MemberFacts(text).digest != digest:
            return ["what it trains (the store does not hold the run's description any more)"]
        own = json.loads(self.text)
        run = json.loads(text)
        found = _option_differences(own.get("options", {}), run.get("options", {}))
        for kind in ("parameter", "buffer"):
            found += _tensor_differences(kind, own.get(kind, []), run.get(kind, []))
        return found


NO_FACTS = MemberFacts("{}")


class Siblings:
    """The processes of this worker, which train one model together, and live and die together."""

    def __init__(self, number: int, inner: RankGroup) -> None:
        self.number = number  # the worker's
        self.inner = inner
        self.process_number = number * inner.size + inner.rank
        self.incarnation = 0  # of the worker
        self.ids: frozenset[str] = frozenset()  # of the other ones in the present generation

    def agree_on_incarnation(self, shared: SharedRoster) -> None:
        """Set this worker's incarnation number, identical in all its processes."""
        if self.inner.size == 1:
            return
        roster = shared.refresh()
        if self.inner.rank == 0:  # one process counts, and the others learn the number from it
            roster = shared.change(lambda roster: roster.count_worker_incarnation(self.number))
        incarnation = dict(roster.worker_incarnations).get(self.number, 0)
        own = [float(self.number), float(incarnation)]
        gathered = self.inner.all_gather(own, self.inner.any_device)
        numbers, incarnations = zip(*gathered, strict=True)
        if len(set(numbers)) > 1:
            listed = ", ".join(map("{:.0f}".format, numbers[:8]))
            raise ValueError(
                f"the processes of an inner_group are one worker of the crew, and have different "
                f"numbers: {listed}. Give all of them the same (MANYHANDS_WORKER)."
            )
        self.incarnation = int(incarnations[0])

    def enter(self, roster: Roster, own: str) -> None:
        """Note the other processes in a generation: the process `own` dies with them."""
        ids = (id for id in roster.ids if roster.worker_of(id) == self.number)
        self.ids = frozenset(ids) - {own}

    def check(self, roster: Roster, late: bool) -> None:
        """Raise if this worker can never be complete again, or is not though it is `late`.

        That is so if one of its processes is gone, or has been restarted. A stopped process may
        wake up, so it is waited for: nothing is done without it meanwhile.
        """
        if self.inner.size == 1:
            return
        newest = 0
        present = 0
        for member in roster.members:
            if roster.worker_of(member.id) == self.number:
                newest = max(newest, member.worker_incarnation)
        for member in roster.waiting:
            if roster.worker_of(member.id) == self.number:
                newest = max(newest, member.worker_incarnation)
                present += member.worker_incarnation == self.incarnation
        restarted = newest > self.incarnation
        if restarted or self.ids & roster.gone or (late and present < self.inner.size):
            raise RuntimeError(
                f"another process of worker {self.number} is lost, and this one cannot train "
                "without it. It ends here, so that all processes of the worker are started again."
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
        # Only with a quorum: without one, both halves of a divided network would go on.
        self._door: Door | None = None
        if quorum > 1:
            self._door = Door(own_address(shared.client.store))
        self._cut_from: tuple[str, ...] = ()  # ids of processes that this one cannot reach
        self.id = ""  # "number.incarnation", once there is one
        self.own_ids = former_ids  # all that this process has had: none of them is another worker
        self.facts = NO_FACTS  # once they have been checked
        self.cut_off = False  # whether the store was lost
        self.process = os.getpid()  # a fork of this process must not leave in its name
        self._closed = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_others, name="manyhands watch", daemon=True
        )

    # -- before the others notice --------------------------------------------------------------

    def check_facts(self, facts: MemberFacts) -> None:
        """Raise JoinRefused if the run has other facts. The first worker sets the run's facts."""
        self.facts = facts
        inner_rank = self.siblings.inner.rank
        digest = facts.digest
        client = self.shared.client
        key = f"{PREFIX}facts/{inner_rank}"
        roster = self.shared.change(lambda roster: roster.set_facts(inner_rank, digest))
        agreed = dict(roster.facts)[inner_rank]
        # The roster has the checksum, which decides. The text is only for the error message.
        text = client.read(key)
        if agreed == digest:
            if text != facts.text:  # not written yet, or overwritten by a stranger
                client.put(key, facts.text)
            return
        differences = facts.differences(text, agreed)
        if not differences:
            return  # the models differ in names only, as when one is wrapped
        # The launcher reads this: a refused worker is not started again.
        self.shared.change(lambda roster: roster.refuse(self.siblings.process_number))
        raise JoinRefused(self.siblings.number, differences)

    # -- into the next generation --------------------------------------------------------------

    def begin_incarnation(self) -> None:
        """Take an id that no process has had. An earlier process with our number is not us."""
        client = self.shared.client
        number = self.siblings.process_number
        if not self.own_ids:  # later changes come from libraries at work
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
        """End the connection to the store and the watch, and close the door."""
        self._closed.set()
        if self._watch.is_alive():
            self._watch.join(1.0)  # as long as the store's thread may take
        self.shared.client.close()
        if self._door is not None:
            self._door.close()

    def _find_unreachable(self) -> tuple[str, ...]:
        """Return the processes of the roster that this one cannot reach."""
        if self._door is None:
            return ()
        roster = self.shared.refresh()
        client = self.shared.client
        ids = sorted(roster.here - {self.id} - self.shared.silent)
        keys = [f"{PREFIX}door/{id}" for id in ids]
        doors = {id: text for id, text in zip(ids, client.read_all(keys), strict=True) if text}
        return unreachable(doors, self._find_silent)

    def _find_silent(self) -> frozenset[str]:
        self.shared.refresh()
        return self.shared.silent

    def wait_for_generation(self, version: Version, after: int, longest_wait: float) -> Roster:
        """Wait until a generation later than `after` includes this process, or begin it.

        Living members that have not come are waited for up to `longest_wait` seconds.
        """
        shared = self.shared
        number = self.siblings.number
        began = time.monotonic()
        pause = FIRST_PAUSE
        warned = False  # that there are too few workers
        ended: float | None = None  # when the members' generation was first seen to have ended
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
                # The others considered this process lost, as after a long stop. Ask again.
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
                # Living members that have not come for so long are treated as lost. They are late
                # only from the end of their generation on: before it they are in a block.
                silent |= set(roster.absent(silent))
            late = waited > START_PATIENCE
            if late and not warned and not roster.has_quorum(silent, self.quorum):
                warned = True
                log.warning(
                    "worker %d waits for others: a round needs %d workers.", number, self.quorum
                )
            if roster.complete(silent, self.expected, late, self.quorum):
                needed = (silent, self.expected, late, self.quorum)
                shared.change(methodcaller("begin_next", roster.generation, *needed))
                pause = FIRST_PAUSE
                continue
            time.sleep(pause)
            pause = next_pause(pause, len(roster.ids))

    def _watch_others(self) -> None:
        """Read heartbeats while this process trains: at its next round it knows who is silent."""
        while not self._closed.wait(self.shared.monitor.interval):
            try:
                self.shared.observe_heartbeats()
            except (StoreLost, ValueError):
                return  # the next call of this process raises it

    def _ask_to_join(self, version: Version) -> None:
        """Ask to be in the next generation: how far we are, and which processes we cannot reach."""
        self.shared.ask_to_join(Member(self.id, version, self.siblings.incarnation, self._cut_from))

    def _check_number_is_free(self, roster: Roster) -> None:
        """Raise if another process with our number is alive."""
        # Only an earlier incarnation counts, and only if its heartbeat advances while we watch: our
        # own last life may stand in the roster until it is known to be dead.
        # A heartbeat that this process sent as its line was cut may arrive when the line is back.
        number = self.siblings.process_number
        for id in roster.waiting_ids.union(roster.ids) - self.own_ids:
            earlier = number_of(id) == number and _incarnation_of(id) < _incarnation_of(self.id)
            if earlier and self.shared.monitor.has_advanced(id):
                raise RuntimeError(
                    f"two workers with the number {self.siblings.number} are alive. Give each "
                    "worker a number (MANYHANDS_WORKER) of its own; `manyhands run --numbers` does "
                    "on further hosts."
                )


def check_not_failed(roster: Roster, generation: int, number: int) -> None:
    """Raise if a member of our generation ended with an error before the first sync round."""
    if roster.failed and roster.generation == generation:
        numbers = sorted({roster.worker_of(id) for id in roster.failed} - {number})
        raise RuntimeError(
            f"worker {', '.join(map(str, numbers))} has ended with an error before the first "
            "sync round, and the run ends with it: see its output."
        )


def _incarnation_of(id: str) -> int:
    return int(id.partition(".")[2])


def _name_all(
    tensors: Sequence[Tensor], descriptions: Sequence[str], modules: Sequence[nn.Module]
) -> list[DescribedTensor]:
    """Return a worker's parameters or buffers, each with its name."""
    names = names_in(modules, tensors) or [""] * len(tensors)
    return list(zip(names, descriptions, strict=True))


def _option_differences(own: Mapping[str, str], run: Mapping[str, str]) -> list[str]:
    """Return a line for each option that this worker and the run have not in common."""
    found = []
    for name in {**own, **run}:  # the options of both, in order
        here = own.get(name, "missing")
        there = run.get(name, "missing")
        if here != there:
            found.append(f"{name}: {here} here, {there} in the run")
    return found


def _tensor_differences(
    kind: str, own: Sequence[DescribedTensor], run: Sequence[DescribedTensor]
) -> list[str]:
    """Return a line for each tensor that this worker and the run have not in common."""
    lines = []
    # Names that both workers have. Any other name says nothing: one model may be wrapped.
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


# -- which other workers this one can reach --------------------------------------------------------


class Door:
    """A port at which others see that this worker can be reached."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=1024)
        port = self._listening.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="manyhands door", daemon=True).start()

    def _accept(self) -> None:
        """Accept and close connections, in a thread: the answer shows that we can be reached."""
        while not self._closed.is_set():
            try:
                self._listening.accept()[0].close()
            except OSError:
                # Closed, or an error that passes: the caller has gone (ECONNABORTED), too many
                # files are open (EMFILE, ENFILE), no memory (ENOBUFS, ENOMEM), ... Connections that
                # are opened meanwhile wait in the backlog: to the other side that is an answer.
                self._closed.wait(PAUSE)

    def close(self) -> None:
        """Stop answering, and end the thread."""
        self._closed.set()
        # A thread that waits in accept() notices a shutdown, but not a close.
        with suppress(OSError):  # some systems have no shutdown of a listening socket
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def unreachable(
    addresses: Mapping[str, str], find_silent: Callable[[], frozenset[str]] = frozenset
) -> tuple[str, ...]:
    """Return the ids whose doors do not answer; `addresses` has the door of each id.

    Doors of processes that are silent are not waited for: a cut line shows in both.
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
