"""Enrollment in a crew: compare facts, assign an id, and wait for the next generation.

    enrollment = Enrollment(shared, siblings, expected, patience)
    enrollment.siblings.agree_on_incarnation(shared)    count a start of the worker
    enrollment.check_facts(facts)                       raise if the facts differ from the run
    enrollment.begin_incarnation()                      take a new id and start a heartbeat
    roster = enrollment.wait_for_generation(version, after=0, longest_wait=600.0)

`MemberFacts` must be equal on all workers of a crew: options and averaged tensors, as JSON text.
The text of the first worker becomes the text of the run. Workers with a different text are refused
with an error that lists the differences.

    {"options": {"every": "16", ...},
     "parameter": [["encoder.weight", "(4, 3) float32 on cpu"], ...], "buffer": [...]}

Tensors are averaged by position, and only names can reveal a different order. Names are not
compared if they are unknown or if two workers share no name (one model is wrapped).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller

from torch import Tensor, nn

from manyhands._ranks.agreement import describe_tensors, names_in
from manyhands._ranks.ranks import RankGroup
from manyhands.blocks.crew._roster import Member, Roster, Version, number_of
from manyhands.blocks.crew._shared_roster import SharedRoster
from manyhands.blocks.crew._store import FIRST_PAUSE, PREFIX, next_pause
from manyhands.errors import CrewFinished, JoinRefused, StoreLost

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
        """Return the differences from the run's text with the checksum `digest`."""
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
        ids = (id for id in roster.ids if roster.worker_of(id) == self.number)
        self.ids = frozenset(ids) - {own}

    def check(self, roster: Roster, late: bool) -> None:
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
        client = self.shared.client
        number = self.siblings.process_number
        roster = self.shared.change(lambda roster: roster.count_incarnation(number))
        self.id = f"{number}.{dict(roster.incarnations)[number]}"
        self.own_ids |= {self.id}
        self.shared.id = self.id
        client.start_heartbeat(f"{PREFIX}heartbeat/{self.id}")
        self.shared.monitor.reset()

    def close(self) -> None:
        self._closed.set()
        if self._watch.is_alive():
            self._watch.join(1.0)
        self.shared.client.close()

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
                # generation, because members may be inside a block before.
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
        self.shared.ask_to_join(Member(self.id, version, self.siblings.incarnation))

    def _check_number_is_free(self, roster: Roster) -> None:
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
    names = names_in(modules, tensors) or [""] * len(tensors)
    return list(zip(names, descriptions, strict=True))


def _tensor_differences(
    kind: str, own: Sequence[DescribedTensor], run: Sequence[DescribedTensor]
) -> list[str]:
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
