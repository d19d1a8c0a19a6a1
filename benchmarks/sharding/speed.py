"""Measure the speed of contenders that take turns, each with processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import pages
import torch
import torch.distributed as dist
from rounds import Ratio, Times, in_turns, ratio, restored, spent
from team import Team, Work
from torch.distributed.tensor import DTensor

from sharding import models
from sharding.contenders import CONTROL, DDP, Contender, import_early

WARM_UP = 2
SAMPLED = 2000  # elements of parameters that are compared
Result = dict[str, Any]
HowTimes = Times[tuple[str, str]]  # by contender and choice


@dataclass(frozen=True)
class Row:
    """One contender, with one way to compute AdamW."""

    name: str
    choice: str
    cpu_ms: float  # of all ranks, all threads
    wall_ms: float
    cpu: Ratio  # DDP's over the contender's: above 1 is faster than DDP
    wall: Ratio
    sent: int  # bytes, by a rank in a step
    rival: Ratio | None = None  # wall of the contender it is compared with, over its own
    rival_cpu: Ratio | None = None  # the same of CPU time


@dataclass(frozen=True)
class Workload:
    """A model on some ranks. Each group of contenders is in memory at once, DDP in every one."""

    size: str
    ranks: int
    rounds: int
    steps: int  # of each contender in a round
    groups: tuple[tuple[str, ...], ...]
    one_ddp: bool = False  # the control is DDP's own processes once more: there is no room

    @property
    def name(self) -> str:
        return f"{self.size}x{self.ranks}"

    @property
    def title(self) -> str:
        tokens = models.SIZES[self.size].batch * models.SIZES[self.size].context
        return f"{self.size} parameters, {self.ranks} ranks, {tokens} tokens on each"


@dataclass(frozen=True)
class Measured:
    """The results of one workload."""

    title: str
    rows: list[Row]

    def select(self, choice: str) -> Measured:
        return replace(self, rows=[row for row in self.rows if row.choice == choice])


@dataclass(frozen=True)
class Speed:
    """A comparison, its file in benchmarks/results, and the part of a page that shows it."""

    results: str
    page: str
    part: str
    contenders: Mapping[str, Contender]
    choices: Sequence[str]  # of `contenders.CHOICES`
    rivals: Mapping[str, str]  # who is compared with whom
    tables: Callable[[list[Measured]], str]

    def measured(self, workload: Workload) -> list[Row]:
        """Return all contenders of a workload as rows, DDP's first."""
        rows: dict[tuple[str, str], Row] = {}
        for group in workload.groups:
            some = {name: self.contenders[name] for name in group}
            present = {name: one for name, one in some.items() if one.present}
            for row in self._group(workload, present):
                rows.setdefault((row.name, row.choice), row)
        return sorted(rows.values(), key=lambda row: self.choices.index(row.choice))

    def _group(self, workload: Workload, contenders: Mapping[str, Contender]) -> list[Row]:
        with ExitStack() as stack:
            teams: dict[str, Team] = {}
            for name, contender in contenders.items():
                if name == CONTROL and workload.one_ddp:
                    teams[name] = teams[DDP]
                    continue
                work = training(contender, models.SIZES[workload.size])
                teams[name] = stack.enter_context(Team(workload.ranks, work))
            turns = {}
            for choice in self.choices:
                for team in dict.fromkeys(teams.values()):
                    team.ask({"do": "timed", "choice": choice, "steps": WARM_UP})
                order = {"do": "timed", "choice": choice, "steps": workload.steps}
                for name, team in teams.items():
                    turns[name, choice] = partial(team.ask, order)
            _check_same(teams)
            times = in_turns(turns, workload.rounds)
        return [self._row(name, choice, times) for name, choice in times]

    def _row(self, name: str, choice: str, times: HowTimes) -> Row:
        seen = times[name, choice]
        base = times[DDP, choice]
        rival = times.get((self.rivals.get(name, ""), choice))  # if in memory beside it
        return Row(
            name,
            choice,
            cpu_ms=1e3 * median(seen["cpu"]),
            wall_ms=1e3 * median(seen["wall"]),
            cpu=ratio(base["cpu"], seen["cpu"]),
            wall=ratio(base["wall"], seen["wall"]),
            sent=round(median(seen["sent"])),
            rival=ratio(rival["wall"], seen["wall"]) if rival else None,
            rival_cpu=ratio(rival["cpu"], seen["cpu"]) if rival else None,
        )

    def run(self, doc: str | None, workloads: Sequence[Workload], quick: Workload) -> None:
        parser = pages.parser(doc)
        parser.add_argument("--workload", action="append", help="only 25Mx2 and so on")
        args = parser.parse_args()
        if args.draw:
            self.draw(pages.read(self.results))
            return
        import_early()
        result: Result = {**pages.conditions(), "workloads": {}}
        if args.workload:  # what is not measured again stays
            result["workloads"] = pages.read(self.results)["workloads"]
        for workload in [quick] if args.quick else workloads:
            if args.workload and workload.name not in args.workload:
                continue
            load = pages.conditions()["load"]
            rows = self.measured(workload)
            for row in rows:
                print(workload.title, row.name, row.choice, row.cpu, row.wall, row.sent, flush=True)
            if not args.quick:
                found = {"load": load, "rows": [asdict(row) for row in rows]}
                result["workloads"][workload.title] = found
                pages.store(self.results, result)
                self.draw(result)

    def draw(self, result: Result) -> None:
        measured = []
        for title, found in result["workloads"].items():
            rows = [restored(Row, row) for row in found["rows"]]
            measured.append(Measured(title, rows))
        pages.fill(self.page, result, **{self.part: self.tables(measured)})


def by_workload(measured: list[Measured], names: Iterable[str], cell: Callable[[Row], str]) -> str:
    """Return a table with a line for each contender and a column for each workload.

    The last column has the bytes sent, over DDP's.
    """
    lines = []
    for name in names:
        line = [name]
        sent = set()
        for one in measured:
            rows = {row.name: row for row in one.rows}
            line.append(cell(rows[name]) if name in rows else "–")
            if name in rows:
                sent.add(f"{rows[name].sent / rows[DDP].sent:.2f}")
        if sent:
            lines.append([*line, "–".join(sorted({min(sent), max(sent)}))])
    titles = [one.title.replace(" parameters", "").rpartition(",")[0] for one in measured]
    return pages.table(" | ".join(["contender", *titles, "bytes"]), lines)


def _check_same(teams: dict[str, Team]) -> None:
    """A contender that does not train as DDP does is not compared with it."""
    samples = {name: torch.tensor(team.ask({"do": "sample"})) for name, team in teams.items()}
    expected = samples[DDP][0]
    for name, ranks in samples.items():
        apart = float((ranks - expected).norm(dim=1).max() / expected.norm())
        if apart > 1e-4:
            raise RuntimeError(f"{name} trains differently from DDP: parameters {apart:.1e} apart.")


def times(value: Ratio | None) -> str:
    return "" if value is None else f"{value.value:.2f} ({value.low:.2f}–{value.high:.2f})"


class Training:
    """Steps of one contender; every order is carried out by all of its ranks together."""

    def __init__(self, contender: Contender, size: models.Size, rank: int) -> None:
        model = models.decoder(size)
        self.names = [name for name, _ in model.named_parameters()]
        self.trained = contender.make(model)
        self.batches = models.batches(size, rank)
        self.params = list(model.parameters())
        self.done = 0

    def step(self) -> None:
        self.trained.step(self.batches[self.done % len(self.batches)])
        self.done += 1

    def timed(self, choice: str, steps: int) -> dict[str, float]:
        """Return the costs of a step, to the end of the slowest rank's."""
        self.trained.choose(choice)

        def train() -> None:
            for _ in range(steps):
                self.step()
            dist.barrier()

        return {kind: value / steps for kind, value in spent(train).items()}

    def sample(self) -> list[float]:
        """Return some elements of the parameters, spread over all of them."""
        if self.trained.state is not None:
            state = self.trained.state()
            whole = [state[name] for name in self.names]
        else:
            whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.params]
        flat = torch.cat([p.detach().reshape(-1)[:: max(1, p.numel() // 50)] for p in whole])
        return flat[:: max(1, len(flat) // SAMPLED)].tolist()


def training(contender: Contender, size: models.Size) -> Work:
    def work(rank: int) -> Callable[[dict[str, Any]], Any]:
        one = Training(contender, size, rank)
        return lambda order: getattr(one, order.pop("do"))(**order)

    return work
