"""What does one synchronization of a block cost?

    python benchmarks/peers.py                     once, to have the peers as well
    python benchmarks/blocks_sync.py               ten minutes; writes the page
    python benchmarks/blocks_sync.py --quick       a smoke test: a small model, writes nothing

10 M parameters in about 150 tensors, on 2 ranks of this machine (gloo, one thread each).
`blocks/contenders.py` lists what is compared, `team.py` says why each has processes of its
own, and `rounds.py` how times become ratios.
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

from blocks.contenders import (  # noqa: E402
    BMUF,
    BMUF_SHARED,
    CONTROL,
    LOCAL_SGD,
    LOCAL_SGD_SHARED,
    PER_TENSOR,
    PERIODIC,
    RIVALS,
    SYNCS,
    Contender,
)
from blocks.model import QUICK, SIZE, parameters  # noqa: E402
from blocks.syncing import held, syncing  # noqa: E402
from rounds import Times, in_turns, ratio  # noqa: E402
from sharding.models import Size  # noqa: E402
from team import Team  # noqa: E402

RANKS = 2
WARM_UP = 2
Row = dict[str, Any]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    if args.draw:
        draw(pages.read("blocks-sync"))
        return
    size, rounds = (QUICK, 3) if args.quick else (SIZE, 30)
    params = parameters(size)
    conditions = pages.conditions()
    rows = measured({n: one for n, one in SYNCS.items() if one.present}, size, rounds)
    print(table(rows))
    result: dict[str, Any] = {
        **conditions,
        "elements": sum(p.numel() for p in params),
        "tensors": len(params),
        "rounds": rounds,
        "load": [conditions["load"], round(os.getloadavg()[0], 1)],
        "rows": rows,
    }
    if not args.quick:
        pages.store("blocks-sync", result)
        draw(result)


def measured(contenders: dict[str, Contender], size: Size, rounds: int) -> list[Row]:
    """All contenders as rows, after each was seen to compute what its formula says."""
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
            holds = team.ask({})
        rows.append(
            {
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
                **{what: max(rank[what] for rank in holds) for what in holds[0]},
            }
        )
    return rows


def _faster(
    times: Times[str], base: str | None, name: str, kind: str = "wall"
) -> dict[str, Any] | None:
    """The time of the base over that of the other."""
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
        speed = row["speed"]
        shown = f"{speed['value']:.2f} ({speed['low']:.2f}–{speed['high']:.2f})"
        seen = [f"{row['sent'] / 1e6:.1f}", f"{row['kept']:.2f}", f"{_most(row):.2f}"]
        times = [f"{row['wall_ms']:,.0f}", shown, f"{row['cpu_ms']:,.0f}"]
        cells.append([row["name"], row["formula"], *times, *seen])
    head = (
        "contender | formula | wall ms | × per tensor's speed (95 %) | CPU ms | MB sent "
        "| kept, models | more at its peak"
    )
    return pages.table(head, cells, left=2)


def verdict(rows: list[Row]) -> str:
    """What is compared most often, in words."""
    named = {row["name"]: row for row in rows}
    wanted = (BMUF, BMUF_SHARED, LOCAL_SGD, LOCAL_SGD_SHARED)
    bmuf, bmuf_shared, average, average_shared = (named[contender.name] for contender in wanted)
    return (
        f"- **With momentum:** {_times_as(bmuf_shared['speed'])} as fast as one all-reduce for "
        f"each tensor by wall time, {bmuf_shared['cpu_speed']['value']:.2f} × by CPU time; through "
        f"sockets {_times_as(bmuf['speed'])} and {bmuf['cpu_speed']['value']:.2f} ×.\n"
        f"- **A plain average:** {_times_as(average_shared['beside_torch'])} the speed of torch's "
        "PeriodicModelAverager; through sockets (`shared_memory=False`) "
        f"{_times_as(average['beside_torch'])}.\n"
        f"- **Memory:** BMUF keeps {bmuf['kept']:.2f} models between synchronizations and has "
        f"{_most(bmuf):.2f} more during one; what workers of one host read of each other is "
        f"{bmuf_shared['kept'] - bmuf['kept']:.2f} of a model."
    )


def _most(row: Row) -> float:
    return max(row["most"], row["resident"])


def _times_as(speed: dict[str, float]) -> str:
    return f"{speed['value']:.2f} × (95 %: {speed['low']:.2f} to {speed['high']:.2f})"


PAGE = """# The cost of one sync round

One sync round, measured by itself: {millions:.1f} M parameters in {tensors} tensors, on 2 ranks of
one machine with one thread each. "As it comes" is shared memory; everything else goes through gloo,
as between machines. Measured on {machine}, with {versions}; load average {load[0]} before and
{load[1]} after.

```bash
python benchmarks/peers.py            # once: an environment with the peers
python benchmarks/blocks_sync.py
```

{verdict}

{table}

- "{per_tensor}" is fairseq's block momentum (Chen & Huo, 2016), as published, with one all-reduce
  for each tensor.
- "× per tensor's speed" is a ratio of median wall times over {rounds} rounds with its bootstrap
  interval: **above 1 is faster.** Each contender has processes of its own; they take turns in a
  random order. "{control}" is the same a second time: its distance from 1 is noise.
- Every contender was first checked against its formula, written out tensor by tensor.
- torchft 0.2.0: every rank is a replica group; a quorum comes before each round. With several
  buckets its result was not the mean, so it is measured with one, too. accelerate 1.15.0 has a
  barrier and an all-reduce for each tensor.
- Memory is in units of the model's parameters. "Kept" is what a rank holds between rounds besides
  parameters and gradients; "more at its peak" is the larger of what its tensors and its process
  grow by in a round.
"""


def draw(result: dict[str, Any]) -> None:
    """Write the page of a run."""
    parts = {"verdict": verdict(result["rows"]), "table": table(result["rows"])}
    names = {"per_tensor": PER_TENSOR.name, "control": CONTROL.name}
    pages.write("blocks-sync", PAGE, result, **parts, **names, millions=result["elements"] / 1e6)


if __name__ == "__main__":
    main()
