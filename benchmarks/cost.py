"""What a step with a scaling rule costs, over the same step of bare DDP.

    python benchmarks/peers.py           once, to have fairscale and adaptdl in the comparison
    python benchmarks/cost.py            some minutes; writes the table, the page and the figure
    python benchmarks/cost.py --quick    a smoke test: a few steps, writes nothing

Two ranks (gloo, one thread each) train every variant of `contenders.py` in turns; `rounds.py`
says how the times become ratios. Collectives are counted in one step of each, afterwards.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import peers
from rounds import Ratio, measure, ratio

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
CONTROL = "again (A/A)"


@dataclass(frozen=True)
class Row:
    """One variant on one workload: its cost per step, and over that of its base."""

    variant: str
    base: str
    cpu_ms: float  # of both ranks, all threads
    wall_ms: float
    cpu: Ratio
    wall: Ratio
    collectives: float
    sent_bytes: int  # of the tensors given to collectives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workload", action="append", help="resnet-8, resnet-32, mlp; default all")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    parser.add_argument("--rank-writes", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_writes:
        _rank(args)
        return
    peers.run_again_beside_peers()
    result = json.loads(_results().read_text()) if args.draw else _run(args)
    rows = {title: [_row(row) for row in table] for title, table in result["workloads"].items()}
    for title, table in rows.items():
        print(f"\n{title}\n{_table(table)}")
    if args.quick or args.workload:
        return
    _results().parent.mkdir(parents=True, exist_ok=True)
    _results().write_text(json.dumps(result, indent=1) + "\n")
    _write_page(rows, result)


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Help that shows the module's docstring as it is."""


def _results() -> Path:
    return ROOT / "benchmarks" / "results" / "cost.json"


# -- starting the ranks, and putting their times together ----------------------------------------


def _run(args: argparse.Namespace) -> dict[str, Any]:
    """Both ranks' times as rows, with what they were measured on."""
    load = [round(os.getloadavg()[0], 1)]
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(RANKS), __file__, "--rank-writes", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*launch, *sys.argv[1:]], check=True, env=environment)
        ranks = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(RANKS)]
    workloads = {title: _rows([rank[title] for rank in ranks]) for title in ranks[0]}
    import torch

    return {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "load": [*load, round(os.getloadavg()[0], 1)],
        "rounds": args.rounds,
        "workloads": {title: [asdict(row) for row in rows] for title, rows in workloads.items()},
    }


def _rows(ranks: list[dict[str, Any]]) -> list[Row]:
    """CPU seconds are summed over the ranks; a step is as long as the slowest rank's."""

    def over_ranks(name: str, kind: str, join: Callable[..., float]) -> list[float]:
        return [join(x) for x in zip(*(rank[name][kind] for rank in ranks), strict=True)]

    cpu = {name: over_ranks(name, "cpu", sum) for name in ranks[0]}
    wall = {name: over_ranks(name, "wall", max) for name in ranks[0]}
    return [
        Row(
            name,
            known["base"],
            1e3 * median(cpu[name]),
            1e3 * median(wall[name]),
            ratio(cpu[name], cpu[known["base"]]),
            ratio(wall[name], wall[known["base"]]),
            len(known["collectives"]) / known["period"],
            sum(known["collectives"]) // known["period"],
        )
        for name, known in ranks[0].items()
    ]


def _row(row: dict[str, Any]) -> Row:
    return Row(**{**row, "cpu": Ratio(**row["cpu"]), "wall": Ratio(**row["wall"])})


# -- one rank ------------------------------------------------------------------------------------


def _rank(args: argparse.Namespace) -> None:
    """Train all variants in turns, and write this rank's times to a file."""
    import torch
    import torch.distributed as dist
    from contenders import WORKLOADS, training

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result = {}
    for name in args.workload or WORKLOADS:
        workload = WORKLOADS[name]
        present = [v for v in workload.variants if v.needs is None or _installed(v.needs)]
        steps = {v.name: training(workload, v, rank) for v in present}
        for variant in present:
            for _ in range(2 if args.quick else variant.warm_up):
                steps[variant.name]()
        gc.collect()
        rounds, per_round = (2, 1) if args.quick else (args.rounds, workload.steps_per_round)
        times: dict[str, dict[str, Any]] = dict(measure(steps, rounds, per_round, dist.barrier))
        for variant in present:
            times[variant.name] |= {"base": variant.base, "period": variant.period}
            with _collectives() as seen:
                for _ in range(variant.period):
                    steps[variant.name]()
            times[variant.name]["collectives"] = seen
        result[workload.title] = times
    (Path(args.rank_writes) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def _collectives() -> Iterator[list[int]]:
    """The bytes of each collective started meanwhile, DDP's own among them."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                seen.append(sum(x.nbytes for x in tree_leaves(args[0]) if isinstance(x, Tensor)))
            return func(*args, **(kwargs or {}))

    seen: list[int] = []
    with Listener():
        yield seen


# -- the page and the figure ---------------------------------------------------------------------


def _table(rows: list[Row]) -> str:
    head = "| variant | CPU ms | × bare | 95 % | wall ms | × bare | 95 % | collectives | bytes |"
    lines = [head, "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        lines.append(
            f"| {row.variant} | {row.cpu_ms:.1f} | {_times(row, row.cpu)} "
            f"| {row.wall_ms:.1f} | {_times(row, row.wall)} "
            f"| {row.collectives:g} | {row.sent_bytes:,} |"
        )
    return "\n".join(lines)


def _times(row: Row, value: Ratio) -> str:
    if row.variant == row.base:
        return "1 | "
    return f"{value.value:.3f} | {value.low:.3f}–{value.high:.3f}"


PAGE = """# What a scaling rule costs

What a step with AdaScale or AdamScale costs over the same step without it, with manyhands and
with its two peers. Measured on {machine}, with {versions};
two ranks on gloo, one thread each. Other work on the machine when the run began and ended: a load
average of {load[0]} and {load[1]} (the second includes the run's own two processes).

```bash
python benchmarks/peers.py   # once: an environment with fairscale 0.4.13 and adaptdl 0.2.11
python benchmarks/cost.py --rounds {rounds}
```

![CPU time of a step over bare DDP's](../figures/cost.svg)

All variants of a workload live in the same two processes and take turns, in {rounds} rounds, each
in an order of its own. "× bare" is a ratio of medians over rounds and "95 %" its bootstrap
interval. CPU time is that of both ranks with all their threads (gloo's too) and is the firmer
figure; wall time is the slower rank's and depends on what else the machine does. **The row "again
(A/A)" is the base a second time: what it is away from 1 is noise.** Collectives are those of one
step, DDP's own among them, with the bytes of the tensors that each rank gives to them (a mean over
four steps where one in four is measured).

{tables}

Reading the tables:

- To a small model's step a rule adds a nearly constant time: a hook per parameter, some Python,
  and one collective of a few numbers. What that is in proportion depends on how long the step is,
  so the ResNet is shown at two batch sizes.
- The MLP at batch 7 is the unfavourable end. Its ten million gradients come from seven samples,
  so that moving them through memory is nearly all of the step. To measure all of them AdaScale
  has to read them one and a half times more: each worker's own, and the mean's, which two workers
  share. AdamScale divides them by their second moments: it reads twice as much, and computes.
- By default a step measures an eighth of long tensors, and the next step another eighth
  ([scaling](../scaling.md#what-it-costs)): of the MLP's, blocks of 126 KB. With `measured=1`
  it reads everything. The ResNet has no long tensor: nothing changes there.
- With `measure_every=4` one step in four is measured, once the averages have seen as many steps as
  they look back over: with two workers 500. The row shows the steps after that. In the three steps
  between, the hooks return at once, and nothing is sent.
- "and Ramp" measures and decides at a batch that has nowhere to grow. It is shown twice,
  over DDP and over AdaScale.
{aims}
  What stays where every step is measured are the hooks, the norms of short tensors, the collective
  and some Python. Of the ResNet's step at batch 8, 37 to 41 ms of CPU a worker on a busy machine,
  59 norms of small tensors took 0.4 to 0.6 ms, the mean's 0.2 to 0.4, the collective 0.3: 2.5 to
  3.3 % before any Python
  ([the notes](../notes.md)).
- adaptdl is measured without its data loader and the data-parallel class that only runs inside
  that loader: its statistics and its rule sit on torch's DDP, in its favour.
- Nothing here was measured on a GPU or over a network.
"""


def _aims(rows: dict[str, list[Row]]) -> str:
    """How ours stand to the aims, by CPU time."""
    found = [
        f"{title}{row.variant.removeprefix(name)} {row.cpu.value:.3f} of {aim}, "
        f"{'met' if row.cpu.value <= aim else '**not met**'}"
        for title, table in rows.items()
        for row in table
        for name, aim in (("manyhands AdaScale", 1.03), ("manyhands AdamScale", 1.10))
        if row.variant in (name, f"{name}, measure_every=4")
    ]
    return f"- **The aims**, by CPU time, AdaScale 1.03 and AdamScale 1.10: {'; '.join(found)}."


def _write_page(rows: dict[str, list[Row]], result: dict[str, Any]) -> None:
    tables = "\n\n".join(f"## {title}\n\n{_table(table)}" for title, table in rows.items())
    page = ROOT / "docs" / "benchmarks" / "cost.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    known = {name: result[name] for name in ("machine", "versions", "rounds", "load")}
    page.write_text(PAGE.format(tables=tables, aims=_aims(rows), **known))
    if _installed("matplotlib"):
        _draw(rows, ROOT / "docs" / "figures" / "cost.svg")
    else:
        print(f"\nThe figure needs matplotlib, which is in the peers' environment: {peers.HOW}")


def _draw(rows: dict[str, list[Row]], path: Path) -> None:
    """Each variant's CPU time over its base's, with its interval; the A/A control in grey."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "manyhands"
    from matplotlib import pyplot

    heights = [len(table) for table in rows.values()]
    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=(8, 0.3 * sum(heights)), height_ratios=heights, layout="constrained"
    )
    for axis, (title, table) in zip(axes, rows.items(), strict=True):
        shown = [row for row in table if row.variant != row.base][::-1]
        for y, row in enumerate(shown):
            ours, control = row.variant.startswith("manyhands"), row.variant.endswith(CONTROL)
            colour = "#1b7f5c" if ours else "#999999" if control else "#c2571a"
            axis.plot([row.cpu.low, row.cpu.high], [y, y], color=colour, linewidth=2)
            axis.plot(row.cpu.value, y, "o", color=colour)
            text = f"  {row.cpu.value:.2f}"
            axis.annotate(text, (row.cpu.high, y), va="center", color=colour, fontsize=8)
        axis.axvline(1, color="#555555", linewidth=0.8)
        axis.set_yticks(range(len(shown)), [row.variant for row in shown], fontsize=8)
        axis.set_ylim(-0.6, len(shown) - 0.4)
        axis.margins(x=0.12)
        axis.set_title(title, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("CPU time of a step / bare DDP's (95 % interval)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
