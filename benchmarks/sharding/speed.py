"""How the speed benchmarks measure: contenders in turns, each with processes of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from rounds import Ratio, ratio, shuffled

from sharding import models, traffic
from sharding.contenders import CONTROL, DDP, Contender
from sharding.team import Team

WARM_UP = 2
SAMPLED = 2000  # elements of parameters that are compared
Contenders = Mapping[str, Contender]
Times = dict[tuple[str, str], dict[str, list[float]]]


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


def restored(stored: dict[str, Any]) -> Row:
    kinds = ("cpu", "wall", "rival", "rival_cpu")
    ratios = {key: Ratio(**stored[key]) for key in kinds if stored.get(key)}
    return Row(**{**stored, **ratios})


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
    rounds: int,
    rivals: Mapping[str, str] | None = None,
) -> list[Row]:
    """All contenders of a workload as rows, DDP's first; `rivals`: who is compared with whom."""
    rows: list[Row] = []
    for group in workload.groups:
        present = {name: contenders[name] for name in group if contenders[name].present}
        known = {(row.name, row.choice) for row in rows}
        rows += [
            row
            for row in _group(workload, present, choices, rounds, rivals or {})
            if (row.name, row.choice) not in known
        ]
    order = list(choices)
    return sorted(rows, key=lambda row: order.index(row.choice))


def _group(
    workload: Workload,
    contenders: Contenders,
    choices: Mapping[str, Any],
    rounds: int,
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
        times = _times(workload, teams, choices, rounds)
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


def _rival(kind: str, rival: str | None, name: str, choice: str, times: Times) -> Ratio | None:
    """A rival's time over the contender's, if it was in memory beside it."""
    if rival is None or (rival, choice) not in times:
        return None
    return ratio(times[rival, choice][kind], times[name, choice][kind])


def _times(
    workload: Workload, teams: dict[str, Team], choices: Mapping[str, Any], rounds: int
) -> Times:
    """Per contender and choice: CPU summed over ranks, wall of the slowest, bytes of one."""
    turns = {f"{name}|{choice}": (name, choice) for choice in choices for name in teams}
    times = {turn: {"cpu": [], "wall": [], "sent": []} for turn in turns.values()}
    for number in range(rounds):
        for key in shuffled(list(turns), number):
            name, choice = turns[key]
            given = {"choice": choice, "steps": workload.steps}
            ranks = teams[name].ask({"do": "timed", "with": given})
            seen = times[name, choice]
            seen["cpu"].append(sum(rank["cpu"] for rank in ranks))
            seen["wall"].append(max(rank["wall"] for rank in ranks))
            seen["sent"].append(fmean(rank["sent"] for rank in ranks))
    return times


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
        """Wall and CPU seconds (of all threads) and bytes sent, per step."""
        self.trained.choose(choice)
        dist.barrier()
        wall, cpu, sent = time.perf_counter(), time.process_time(), traffic.bytes_sent()
        for _ in range(steps):
            self.step()
        self.trained.finish()
        dist.barrier()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        sent = traffic.bytes_sent() - sent
        return {"wall": wall / steps, "cpu": cpu / steps, "sent": sent / steps}

    def sample(self) -> list[float]:
        """Some elements of the parameters, spread over all of them."""
        if self.trained.state is not None:
            state = self.trained.state()
            whole = [state[name] for name in self.names]
        else:
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.params]
        flat = torch.cat([p.detach().reshape(-1)[:: max(1, p.numel() // 50)] for p in whole])
        return flat[:: max(1, len(flat) // SAMPLED)].tolist()


def training(contender: Contender, size: models.Size) -> Callable[[int], Callable[..., Any]]:
    """What a team's ranks do (`team.Work`)."""

    def work(rank: int) -> Callable[[dict[str, Any]], Any]:
        one = Training(contender, size, rank)

        def answer(order: dict[str, Any]) -> Any:
            return getattr(one, order["do"])(**order.get("with", {}))

        return answer

    return work
