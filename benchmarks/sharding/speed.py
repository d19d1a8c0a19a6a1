"""How the speed benchmarks measure: contenders in turns, each with processes of its own.

`run` parses the arguments, measures, stores what was found, and has the page written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import pages
import torch
import torch.distributed as dist
from rounds import Ratio, Times, in_turns, ratio, restored, spent
from team import Team, Work

from sharding import models
from sharding.contenders import CONTROL, DDP, Contender, import_early

WARM_UP = 2
SAMPLED = 2000  # elements of parameters that are compared
Contenders = Mapping[str, Contender]
Result = dict[str, Any]
Rows = dict[str, list["Row"]]  # by the title of the workload

HOW = """Ratios are of medians over rounds, with bootstrap intervals (95 %): **above 1 is faster.**
Contenders take turns, in an order drawn anew in each round, in processes of their own; groups that
do not fit in memory together run apart, each beside a DDP of its own. **"DDP again (A/A)" is DDP a
second time: its distance from 1 is noise.** Bytes are what a rank's sockets send in a step. Each
contender was first checked to train the same parameters as DDP."""


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


def measured(
    workload: Workload,
    contenders: Contenders,
    choices: Mapping[str, Any],
    rivals: Mapping[str, str],
) -> list[Row]:
    """All contenders of a workload as rows, DDP's first; `rivals`: who is compared with whom."""
    rows: list[Row] = []
    for group in workload.groups:
        present = {name: contenders[name] for name in group if contenders[name].present}
        known = {(row.name, row.choice) for row in rows}
        rows += [
            row
            for row in _group(workload, present, choices, rivals)
            if (row.name, row.choice) not in known
        ]
    order = list(choices)
    return sorted(rows, key=lambda row: order.index(row.choice))


def _group(
    workload: Workload,
    contenders: Contenders,
    choices: Mapping[str, Any],
    rivals: Mapping[str, str],
) -> list[Row]:
    """Contenders that are in memory at the same time."""
    with ExitStack() as stack:
        teams: dict[str, Team] = {}
        for name, contender in contenders.items():
            if name == CONTROL and workload.one_ddp:
                teams[name] = teams[DDP]
                continue
            work = training(contender, models.SIZES[workload.size])
            teams[name] = stack.enter_context(Team(workload.ranks, work))
        for choice in choices:
            order = {"do": "timed", "with": {"choice": choice, "steps": WARM_UP}}
            for team in dict.fromkeys(teams.values()):
                team.ask(order)
        _check_same(teams)
        steps = {"steps": workload.steps}
        turns = {
            (name, choice): partial(team.ask, {"do": "timed", "with": {"choice": choice, **steps}})
            for choice in choices
            for name, team in teams.items()
        }
        times = in_turns(turns, workload.rounds)
    return [
        Row(
            name,
            choice,
            1e3 * median(seen["cpu"]),
            1e3 * median(seen["wall"]),
            ratio(times[DDP, choice]["cpu"], seen["cpu"]),
            ratio(times[DDP, choice]["wall"], seen["wall"]),
            round(median(seen["sent"])),
            *(_rival(kind, rivals.get(name), name, choice, times) for kind in ("wall", "cpu")),
        )
        for (name, choice), seen in times.items()
    ]


def _rival(
    kind: str, rival: str | None, name: str, choice: str, times: Times[tuple[str, str]]
) -> Ratio | None:
    """A rival's time over the contender's, if it was in memory beside it."""
    if rival is None or (rival, choice) not in times:
        return None
    return ratio(times[rival, choice][kind], times[name, choice][kind])


def _check_same(teams: dict[str, Team]) -> None:
    """A contender that does not train as DDP does is not compared with it."""
    samples = {name: torch.tensor(team.ask({"do": "sample"})) for name, team in teams.items()}
    expected = samples[DDP][0]
    for name, ranks in samples.items():
        apart = float((ranks - expected).norm(dim=1).max() / expected.norm())
        if apart > 1e-4:
            raise RuntimeError(f"{name} trains differently from DDP: parameters {apart:.1e} apart.")


# -- one rank ------------------------------------------------------------------------------------


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
        loss = self.trained.model(self.batches[self.done % len(self.batches)])
        self.trained.backward(loss)
        self.trained.optimizer.step()
        self.trained.clear()
        self.done += 1

    def timed(self, choice: str, steps: int) -> dict[str, float]:
        """What a step spends, to the end of the slowest rank's."""
        self.trained.choose(choice)

        def train() -> None:
            for _ in range(steps):
                self.step()
            dist.barrier()

        return {kind: value / steps for kind, value in spent(train).items()}

    def sample(self) -> list[float]:
        """Some elements of the parameters, spread over all of them."""
        if self.trained.state is not None:
            state = self.trained.state()
            whole = [state[name] for name in self.names]
        else:
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.params]
        flat = torch.cat([p.detach().reshape(-1)[:: max(1, p.numel() // 50)] for p in whole])
        return flat[:: max(1, len(flat) // SAMPLED)].tolist()


def training(contender: Contender, size: models.Size) -> Work:
    """What a team's ranks do."""

    def work(rank: int) -> Callable[[dict[str, Any]], Any]:
        one = Training(contender, size, rank)
        return lambda order: getattr(one, order["do"])(**order.get("with", {}))

    return work


# -- the page -------------------------------------------------------------------------------------


def run(
    doc: str | None,
    name: str,
    workloads: Sequence[Workload],
    quick: Sequence[Workload],
    contenders: Contenders,
    choices: Mapping[str, Any],
    write: Callable[[Result], None],
    rivals: Mapping[str, str],
) -> None:
    """Parse the arguments, and measure the workloads or draw the page of what is stored."""
    parser = pages.parser(doc)
    parser.add_argument("--workload", action="append", metavar="NAME", help="only 25Mx2 and so on")
    args = parser.parse_args()
    if args.draw:
        write(pages.read(name))
        return
    import_early()
    result: Result = {**pages.conditions(), "workloads": {}}
    if args.workload:  # what is not measured again stays
        result["workloads"] = pages.read(name)["workloads"]
    for workload in quick if args.quick else workloads:
        if args.workload and workload.name not in args.workload:
            continue
        load = pages.conditions()["load"]
        rows = measured(workload, contenders, choices, rivals)
        for row in rows:
            print(workload.title, row.name, row.choice, row.cpu, row.wall, row.sent, flush=True)
        if not args.quick:
            found = {"load": load, "rows": [asdict(row) for row in rows]}
            result["workloads"][workload.title] = found
            pages.store(name, result)
            write(result)


def rows_of(result: Result) -> Rows:
    """The rows of each workload."""
    return {
        title: [restored(Row, row) for row in one["rows"]]
        for title, one in result["workloads"].items()
    }


def tables(result: Result, head: str, cells: Callable[[list[Row]], list[list[str]]]) -> str:
    """A table for each workload."""
    return "\n\n".join(
        f"## {title}\n\nLoad average before: {result['workloads'][title]['load']}\n\n"
        + pages.table(head, cells(rows))
        for title, rows in rows_of(result).items()
    )


def times(value: Ratio | None) -> str:
    """A ratio with its interval."""
    return "" if value is None else f"{value.value:.2f} ({value.low:.2f}–{value.high:.2f})"


def between(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
