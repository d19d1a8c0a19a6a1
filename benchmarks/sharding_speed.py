"""How fast is a step with sharded optimizer state and gradients, over DDP's?

    python benchmarks/peers.py                     once, to have fairscale in the comparison
    python benchmarks/sharding_speed.py            about ten minutes; writes the page and the figure
    python benchmarks/sharding_speed.py --quick    a smoke test: a small model, writes nothing

AdamW on a decoder of 25 M and of 100 M parameters, on 2 and 4 ranks of this machine (gloo, one
thread each). `sharding/contenders.py` lists who is compared, `sharding/team.py` says why each has
processes of its own. `rounds.py` says how times become ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import torch  # noqa: E402
from rounds import ratio, shuffled  # noqa: E402
from sharding.contenders import (  # noqa: E402
    CHOICES,
    CONTENDERS,
    CONTROL,
    DDP,
    OURS,
    OVERLAP,
    SHARED,
    WHOLE_GRADIENTS,
)
from sharding.models import SIZES  # noqa: E402
from sharding.speed_page import Row  # noqa: E402
from sharding.team import Team  # noqa: E402
from sharding.training import training  # noqa: E402

from sharding import speed_page  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "sharding-speed.json"
WARM_UP = 2


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
        tokens = SIZES[self.size].batch * SIZES[self.size].context
        return f"{self.size} parameters, {self.ranks} ranks, {tokens} tokens on each"


ALL = tuple(CONTENDERS)
PEERS = tuple(name for name in ALL if not CONTENDERS[name].ours and name not in (DDP, CONTROL))
THIRDS = (  # what fits into 24 GB together
    (DDP, CONTROL, OURS, OVERLAP, SHARED),
    (DDP, WHOLE_GRADIENTS, *PEERS[:1]),
    (DDP, *PEERS[1:]),
)
WORKLOADS = (
    Workload("25M", 2, rounds=12, steps=2, groups=(ALL,)),
    Workload("25M", 4, rounds=8, steps=2, groups=(ALL,)),
    Workload("100M", 2, rounds=7, steps=1, groups=(ALL,), one_ddp=True),
    Workload("100M", 4, rounds=5, steps=1, groups=THIRDS, one_ddp=True),
)
QUICK = (Workload("tiny", 2, rounds=2, steps=1, groups=(ALL,)),)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument(
        "--workload", action="append", metavar="NAME", help="25Mx2 and the like; writes nothing"
    )
    parser.add_argument("--rounds", type=float, default=1.0, help="times as many rounds")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        speed_page.write(json.loads(RESULTS.read_text()))
        return
    # Ranks are forked; what torch imports late is imported here, once.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    load = [round(os.getloadavg()[0], 1)]
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "workloads": {},
    }
    for workload in QUICK if args.quick else WORKLOADS:
        if not args.workload or workload.name in args.workload:
            rows = measured(workload, max(2, round(workload.rounds * args.rounds)))
            print(f"\n{workload.title}\n{speed_page.table(rows)}", flush=True)
            result["workloads"][workload.title] = [asdict(row) for row in rows]
            if not args.quick and not args.workload:
                RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    result["load"] = [*load, round(os.getloadavg()[0], 1)]
    if not args.quick and not args.workload:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        speed_page.write(result)


def measured(workload: Workload, rounds: int) -> list[Row]:
    """All contenders of a workload as rows, DDP's first."""
    rows: list[Row] = []
    for group in workload.groups:
        names = [name for name in group if CONTENDERS[name].present]
        known = {(row.name, row.choice) for row in rows}
        rows += [
            row for row in _group(workload, names, rounds) if (row.name, row.choice) not in known
        ]
    order = list(CHOICES)
    return sorted(rows, key=lambda row: order.index(row.choice))


def _group(workload: Workload, names: list[str], rounds: int) -> list[Row]:
    """Contenders that are in memory at the same time."""
    with ExitStack() as stack:
        teams: dict[str, Team] = {}
        for name in names:
            if name == CONTROL and workload.one_ddp:
                teams[name] = teams[DDP]
                continue
            work = training(CONTENDERS[name], SIZES[workload.size])
            teams[name] = stack.enter_context(Team(workload.ranks, work))
        for choice in CHOICES:
            order = {"do": "timed", "with": {"choice": choice, "steps": WARM_UP}}
            for team in dict.fromkeys(teams.values()):
                team.ask(order)
        _check_same(teams)
        times = _times(workload, teams, rounds)
        collectives = {name: len(team.ask({"do": "counted"})[0]) for name, team in teams.items()}
    return [
        Row(
            name,
            choice,
            1e3 * median(seen["cpu"]),
            1e3 * median(seen["wall"]),
            ratio(times[DDP, choice]["cpu"], seen["cpu"]),
            ratio(times[DDP, choice]["wall"], seen["wall"]),
            round(median(seen["sent"])),
            collectives[name],
        )
        for (name, choice), seen in times.items()
    ]


def _times(
    workload: Workload, teams: dict[str, Team], rounds: int
) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Per contender and choice: CPU summed over ranks, wall of the slowest, bytes of one."""
    turns = {f"{name}|{choice}": (name, choice) for choice in CHOICES for name in teams}
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


if __name__ == "__main__":
    main()
