"""What does one synchronisation of a block cost?

    python benchmarks/peers.py                     once, to have the peers as well
    python benchmarks/blocks_sync.py               ten minutes; writes the page
    python benchmarks/blocks_sync.py --quick       a smoke test: a small model, writes nothing
    python benchmarks/blocks_sync.py --only BMUF   whose names contain it; writes nothing

10 M parameters in about 150 tensors, on 2 ranks of this machine (gloo, one thread each).
`blocks/contenders.py` lists what is compared, `sharding/team.py` says why each has processes of its
own, and `rounds.py` how times become ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

peers.run_again_beside_peers()  # before torch, which this Python may not have

import torch  # noqa: E402
from blocks.contenders import PER_TENSOR, PERIODIC, RIVALS, SYNCS, Contender  # noqa: E402
from blocks.model import QUICK, SIZE, parameters  # noqa: E402
from blocks.sync_page import Row  # noqa: E402
from blocks.syncing import held, syncing  # noqa: E402
from rounds import Ratio, ratio, shuffled  # noqa: E402
from sharding.models import Size  # noqa: E402
from sharding.team import Team  # noqa: E402

from blocks import sync_page  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "blocks-sync.json"
RANKS = 2
WARM_UP = 2
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only with this in the name; writes nothing"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        sync_page.write(json.loads(RESULTS.read_text()))
        return
    torch.set_num_threads(1)
    size = QUICK if args.quick else SIZE
    params = parameters(size)
    load = [round(os.getloadavg()[0], 1)]
    chosen = {name: contender for name, contender in SYNCS.items() if _wanted(contender, args.only)}
    rows = measured(chosen, size, 3 if args.quick else args.rounds)
    print(sync_page.table(rows))
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "elements": sum(p.numel() for p in params),
        "tensors": len(params),
        "rounds": args.rounds,
        "load": [*load, round(os.getloadavg()[0], 1)],
        "rows": [asdict(row) for row in rows],
    }
    if not args.quick and not args.only:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        sync_page.write(result)


def _wanted(contender: Contender, only: list[str] | None) -> bool:
    """Whether it takes part: both bases of ratios always do, and a peer only if installed."""
    if not contender.present:
        return False
    if only is None or contender in (PER_TENSOR, PERIODIC):
        return True
    return any(part in contender.name for part in only)


def measured(contenders: dict[str, Contender], size: Size, rounds: int) -> list[Row]:
    """All contenders as rows, after each was seen to compute what its formula says."""
    with ExitStack() as stack:
        teams = {
            name: stack.enter_context(Team(RANKS, syncing(contender, size)))
            for name, contender in contenders.items()
        }
        apart = {name: _check(contenders[name], team) for name, team in teams.items()}
        for team in teams.values():
            for _ in range(WARM_UP):
                team.ask({"do": "timed"})
        times = _times(teams, rounds)
        started = {name: len(team.ask({"do": "counted"})[0]) for name, team in teams.items()}
    rows = []
    for name, seen in times.items():
        with Team(RANKS, held(contenders[name], size)) as team:
            holds = team.ask({})
        rows.append(
            Row(
                name,
                contenders[name].formula,
                wall_ms=1e3 * median(seen["wall"]),
                least_ms=1e3 * min(seen["wall"]),
                cpu_ms=1e3 * median(seen["cpu"]),
                speed=ratio(times[PER_TENSOR.name]["wall"], seen["wall"]),
                cpu_speed=ratio(times[PER_TENSOR.name]["cpu"], seen["cpu"]),
                beside_torch=ratio(times[PERIODIC.name]["wall"], seen["wall"]),
                rival=_rival("wall", name, times),
                rival_cpu=_rival("cpu", name, times),
                sent=round(median(seen["sent"])),
                collectives=started[name],
                apart=apart[name],
                elsewhere=contenders[name].elsewhere,
                **{what: max(rank[what] for rank in holds) for what in holds[0]},
            )
        )
    return rows


def _rival(kind: str, name: str, times: Times) -> Ratio | None:
    """The time of what of ours does the same, over its own."""
    rival = RIVALS.get(name)
    return ratio(times[rival][kind], times[name][kind]) if rival in times else None


def _check(contender: Contender, team: Team) -> float:
    """A contender that computes something else is not compared."""
    seen = team.ask({"do": "compared"})
    apart = max(rank["apart"] for rank in seen)
    if apart > contender.about:
        raise RuntimeError(
            f"{contender.name} is {apart:.1e} of the way from what its formula gives "
            f"({contender.formula}); at most {contender.about} was expected."
        )
    if not contender.elsewhere and not all(rank["agree"] for rank in seen):
        raise RuntimeError(f"{contender.name}: ranks have different parameters after it.")
    return apart


def _times(teams: dict[str, Team], rounds: int) -> Times:
    """Per contender: CPU summed over ranks, wall of the slowest, bytes of one."""
    times: Times = {name: {"wall": [], "cpu": [], "sent": []} for name in teams}
    for number in range(rounds):
        for name in shuffled(list(teams), number):
            ranks = teams[name].ask({"do": "timed"})
            times[name]["wall"].append(max(rank["wall"] for rank in ranks))
            times[name]["cpu"].append(sum(rank["cpu"] for rank in ranks))
            times[name]["sent"].append(fmean(rank["sent"] for rank in ranks))
    return times


if __name__ == "__main__":
    main()
