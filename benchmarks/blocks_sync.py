"""What does one synchronization of a block cost?

    python benchmarks/peers.py                     once, to have the peers as well
    python benchmarks/blocks_sync.py               ten minutes; writes the page

10 M parameters in about 150 tensors, on 2 ranks. `blocks/contenders.py` lists what is compared.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import pages
import peers

peers.run_again_beside_peers()  # before torch, which this Python may not have

from blocks.contenders import PER_TENSOR, PERIODIC, RIVALS, SYNCS, Contender  # noqa: E402
from blocks.model import QUICK, SIZE, parameters  # noqa: E402
from blocks.syncing import held, syncing  # noqa: E402
from rounds import Times, in_turns, ratio  # noqa: E402
from sharding.models import Size  # noqa: E402
from team import Team, largest  # noqa: E402

RANKS = 2
WARM_UP = 2
LEFT_OUT = (  # of the page; the file has them
    "per tensor, average",
    "manyhands DiLoCo, float32",
    "manyhands BMUF, int4",
    "manyhands BMUF, bfloat16",
    "torchft DiLoCo",  # its result is not the mean
)
Row = dict[str, Any]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    if not args.draw:
        size, rounds = (QUICK, 3) if args.quick else (SIZE, 30)
        params = parameters(size)
        conditions = pages.conditions()
        rows = measured({n: one for n, one in SYNCS.items() if one.present}, size, rounds)
        if args.quick:
            print(table(rows))
            return
        known = {
            "elements": sum(p.numel() for p in params),
            "tensors": len(params),
            "rounds": rounds,
            "load": [conditions["load"], round(os.getloadavg()[0], 1)],
            "rows": rows,
        }
        pages.store("blocks-sync", {**conditions, **known})
    result = pages.read("blocks-sync")
    before, after = result["load"]
    load = f"{before} before and {after} after"
    pages.fill("blocks-sync", result, load=load, table=table(result["rows"]))


def measured(contenders: dict[str, Contender], size: Size, rounds: int) -> list[Row]:
    """Check and measure all contenders."""
    with ExitStack() as stack:
        teams = {
            name: stack.enter_context(Team(RANKS, syncing(contender, size)))
            for name, contender in contenders.items()
        }
        for name, team in teams.items():
            check(contenders[name], team)
        for team in teams.values():
            for _ in range(WARM_UP):
                team.ask({"do": "timed"})
        turns = {name: partial(team.ask, {"do": "timed"}) for name, team in teams.items()}
        times = in_turns(turns, rounds)
    rows = []
    for name, seen in times.items():
        with Team(RANKS, held(contenders[name], size)) as team:
            holds = largest(team.ask({}))
        row: Row = {
            "name": name,
            "formula": contenders[name].formula,
            "wall_ms": 1e3 * median(seen["wall"]),
            "cpu_ms": 1e3 * median(seen["cpu"]),  # of both ranks, all threads
            "speed": _faster(times, PER_TENSOR.name, name),
            "cpu_speed": _faster(times, PER_TENSOR.name, name, "cpu"),
            "beside_torch": _faster(times, PERIODIC.name, name),
            "rival": _faster(times, RIVALS.get(name), name),
            "rival_cpu": _faster(times, RIVALS.get(name), name, "cpu"),
            "sent": round(median(seen["sent"])),  # bytes, by a rank
        }
        rows.append({**row, **holds})
    return rows


def _faster(
    times: Times[str], base: str | None, name: str, kind: str = "wall"
) -> dict[str, Any] | None:
    """Return the time of the base over that of the other."""
    return asdict(ratio(times[base][kind], times[name][kind])) if base else None


def check(contender: Contender, team: Team) -> None:
    """A contender that computes something else is not compared."""
    seen = team.ask({"do": "compared"})
    apart = max(rank["apart"] for rank in seen)
    if apart > contender.about:
        raise RuntimeError(
            f"{contender.name} is {apart:.1e} of the way from what its formula gives "
            f"({contender.formula}); at most {contender.about} was expected."
        )
    if not all(rank["agree"] for rank in seen):
        raise RuntimeError(f"{contender.name}: ranks have different parameters after it.")


def table(rows: list[Row]) -> str:
    cells = []
    for row in rows:
        if row["name"] in LEFT_OUT:
            continue
        speed = row["speed"]
        shown = f"{speed['value']:.2f} ({speed['low']:.2f}–{speed['high']:.2f})"
        seen = [
            f"{row['sent'] / 1e6:.1f}",
            f"{row['kept']:.2f}",
            f"{max(row['most'], row['resident']):.2f}",
        ]
        times = [f"{row['wall_ms']:,.0f}", shown, f"{row['cpu_ms']:,.0f}"]
        cells.append([row["name"], row["formula"], *times, *seen])
    head = (
        "contender | formula | wall ms | × per tensor's speed (95 %) | CPU ms | MB sent "
        "| kept, models | more at its peak"
    )
    return pages.table(head, cells, left=2)


if __name__ == "__main__":
    main()
