"""Workers of different speed: how much of their summed speed is used, and what does it cost?

    python benchmarks/blocks_unequal.py --data FOLDER    # mnist.npz, tinyshakespeare.txt.xz; writes
    python benchmarks/blocks_unequal.py --data FOLDER --only loss    # as long as it takes; writes
    python benchmarks/blocks_unequal.py --data FOLDER --faults   # only these, 20 minutes; writes
    python benchmarks/blocks_unequal.py --data FOLDER --quick    # a smoke test, writes nothing
    python benchmarks/blocks_unequal.py --draw           # the page from the results so far

8 workers at speeds from 1 to 4 train in blocks of a stated time, and each takes steps of its own
(`Seconds(..., own_steps=True)`). Three kinds of runs:

speed    a worker sleeps until a step has taken as long as its speed says, so that 2 cores suffice.
         Steps that count, over the time from the first round to the last, against what all workers
         together can take, and against equal steps, where all have the pace of the slowest
loss     nobody sleeps: blocks see a clock that each step advances by the time of that worker. The
         loss on held-out data after as many samples as with equal steps, and as one worker with the
         batch of all eight (synchronous training); also with equal weights instead of the steps'

faults   a crew (`faults/worker.py`, `manyhands run --patience auto --quorum ...`): 8 workers for 5
         minutes with a kill or a stop every 15 s, and 16 for 10 minutes with kills, stops and cut
         lines in turn, every 19 s

Each finished run is one line in results/blocks-unequal.jsonl, and the same command goes on where it
was interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

peers.this_checkout()
os.environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).resolve().parent)  # for faults.worker

import json_lines  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from blocks.learning import TASKS, Task, in_processes, loss_of, lr_at  # noqa: E402
from faults import harm, tally  # noqa: E402

import manyhands as mh  # noqa: E402
from manyhands.blocks.averaging import _round  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "blocks-unequal.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "blocks-unequal.md"
SEEDS = (0, 1, 2)
SPEEDS = tuple(1 + 3 * rank / 7 for rank in range(8))
SYNCHRONOUS, EQUAL, OWN = "one worker, all eight batches", "equal steps", "own steps"
UNWEIGHTED = "own steps, equal weights"
LOSSES = (SYNCHRONOUS, EQUAL, OWN, UNWEIGHTED)
KINDS = ("speed", "loss")
WITHIN, KEPT = 0.005, 0.88


@dataclass(frozen=True)
class Plan:
    """A run: its task, and the time of a block."""

    task: Task
    pace: float  # seconds that a step takes at speed 1
    seconds: float  # of a block
    speeds: tuple[float, ...] = SPEEDS
    speed_batch: int = 8  # in runs of the kind "speed", which must not be bound by the cores

    @property
    def every(self) -> int:
        """Steps of a block with equal steps: as many as the workers take in the mean."""
        return round(self.seconds / self.pace * statistics.mean(self.speeds))

    def took(self, rank: int) -> float:
        return self.pace / self.speeds[rank]


PLANS = {
    "MNIST": Plan(replace(TASKS["MNIST"], batch=8), pace=0.2, seconds=2.56),
    "Shakespeare": Plan(TASKS["Shakespeare"], pace=0.8, seconds=10.24, speed_batch=2),
}
OUTER: dict[str, Any] = {"lr": 1.0, "momentum": 0.8}


CREW = harm.Plan(
    workers=8,
    steps=0,
    every=20,
    batch=8,
    pace=0.4,
    lr=4e-3,
    stall=2.0,
    asleep=10.0,
    fastest=4.0,
    seconds=3.0,
    quorum=5,
    patience="auto",
)
EIGHT, SIXTEEN = "8 workers, a fault every 15 s", "16 workers, kills, stops and cut lines"


def crews(minutes: float) -> dict[str, harm.Plan]:
    """Return the runs of crews, by name, without and with faults; the first are so long."""
    eight = replace(CREW, steps=_steps(CREW, minutes))
    sixteen = replace(CREW, workers=16, pace=0.8, seconds=6.0, quorum=9, apart=4)
    sixteen = replace(sixteen, steps=_steps(sixteen, 2 * minutes))
    turns = {"interval": 19.0, "jitter": 2.0, "kinds": ("kill", "stop", "partition")}
    return {
        "8 workers": eight,
        EIGHT: replace(eight, interval=15.0, jitter=2.0),
        SIXTEEN: replace(sixteen, **turns),
    }


def _steps(plan: harm.Plan, minutes: float) -> int:
    return round(60 * minutes / plan.pace * statistics.mean(plan.speeds))


class StatedClock:
    """The time that blocks see, which only steps advance. Every rank has its own process."""

    def __init__(self) -> None:
        self.now = 0.0
        _round.time = SimpleNamespace(perf_counter=lambda: self.now)  # type: ignore[attr-defined]


def train(plan: Plan, folder: Path, seed: int, name: str, asleep: bool) -> dict[str, float]:
    """Train on this rank; return its figures."""
    torch.set_num_threads(1)
    task, data = plan.task, plan.task.load(folder)
    alone = name == SYNCHRONOUS
    rank = 0 if alone else dist.get_rank()
    torch.manual_seed(seed)
    model = task.model(data)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=task.lr, betas=(0.9, 0.95))
    clock = None if asleep else StatedClock()
    if not alone:
        own = name in (OWN, UNWEIGHTED)
        first = plan.every
        every = mh.Seconds(plan.seconds, first=first, own_steps=True) if own else first
        warmup = 0 if asleep else task.steps // 4
        optimizer = mh.DiLoCo(optimizer, every=every, warmup=warmup, **OUTER)
        if name == UNWEIGHTED:
            optimizer._sync.samples.weight = lambda work, drawn: 1.0
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    count = task.batch * (len(plan.speeds) if alone else 1)
    step, began = 0, (0.0, 0)
    while step < task.steps:
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = task.lr * lr_at(step, task.steps)
        x, y = task.draw(data, count, generator)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if clock is not None:
            clock.now += plan.took(rank)
        else:
            time.sleep(max(0.0, start + plan.took(rank) - time.perf_counter()))
        optimizer.step()
        step = step + 1 if alone else optimizer.steps
        if not alone and optimizer.rounds == 2 and not began[1]:
            began = (time.perf_counter(), optimizer.own_steps)
    if not alone:
        optimizer.synchronize()
    seconds = time.perf_counter() - began[0]
    own_steps = 0 if alone else optimizer.own_steps - began[1]
    loss = task.loss_at_the_end(data, model) if rank == 0 else 0.0
    return {"loss": loss, "steps": own_steps, "seconds": seconds}


def run(plan: Plan, folder: Path, seed: int, name: str, asleep: bool = False) -> dict[str, Any]:
    """Train in processes of its own; return the figures of all ranks."""
    workers = 1 if name == SYNCHRONOUS else len(plan.speeds)
    ranks = in_processes(workers, lambda: train(plan, folder, seed, name, asleep), name)
    return {
        "loss": max(each["loss"] for each in ranks),
        "rate": sum(each["steps"] for each in ranks) / max(each["seconds"] for each in ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--task", choices=list(PLANS), action="append", help="only this one")
    parser.add_argument("--seed", type=int, action="append", help="only this one")
    parser.add_argument("--only", choices=KINDS, action="append", help="only runs of this kind")
    parser.add_argument("--faults", action="store_true", help="only the runs of crews")
    parser.add_argument("--minutes", type=float, default=5.0, help="of a run of 8 in a crew")
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--draw", action="store_true", help="write the page again")
    args = parser.parse_args()
    if args.draw:
        PAGE.write_text(page(json_lines.read(RESULTS)))
        return
    if args.data is None:
        parser.error("--data FOLDER is needed: where mnist.npz and tinyshakespeare.txt.xz are")
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # what it imports is not imported again
    for name in [] if args.faults else args.task or list(PLANS):
        seeds = args.seed or SEEDS[: 1 if args.quick else None]
        measure(PLANS[name], args.data, seeds, args.quick, args.only or KINDS)
    if args.faults or not (args.task or args.quick or args.only):
        measure_crews(args.data, args.minutes, args.quick)
    if not args.quick:
        PAGE.write_text(page(json_lines.read(RESULTS)))


def measure(plan: Plan, folder: Path, seeds: Any, quick: bool, kinds: Sequence[str]) -> None:
    """Make all runs of a task that are not in the results yet."""
    plan.task.load(folder)  # in this process, whose forks have it
    if quick:
        plan = replace(plan, task=replace(plan.task, steps=96))
    short = replace(plan, task=replace(plan.task, steps=6 * plan.every, batch=plan.speed_batch))
    runs = [("speed", short, 0, name) for name in (EQUAL, OWN)]
    runs += [("loss", plan, seed, name) for seed in seeds for name in LOSSES]
    done = {row["key"] for row in json_lines.read(RESULTS)} if not quick else set()
    for kind, chosen, seed, name in [run for run in runs if run[0] in kinds]:
        settings = f"{chosen.task.batch}/{chosen.pace}/{chosen.seconds}/{OUTER}"
        key = f"{chosen.task.name}/{chosen.task.steps}/{settings}/{kind}/{name}/{seed}"
        if key in done:
            continue
        found = run(chosen, folder, seed, name, asleep=kind == "speed")
        row = {"key": key, "task": plan.task.name, "kind": kind, "name": name, "seed": seed}
        print(plan.task.name, kind, name, seed, found, flush=True)
        if not quick:
            json_lines.append(RESULTS, {**row, **found})


def measure_crews(folder: Path, minutes: float, quick: bool) -> None:
    """Make the runs of crews that are not in the results yet."""
    done = {row["key"] for row in json_lines.read(RESULTS)} if not quick else set()
    for name, plan in crews(minutes).items():
        key = f"crew/{name}/{plan}"
        if key in done:
            continue
        found = tally.tally_unequal(harm.run(plan, folder))
        kept = found["rate"] / found["possible"]
        print(f"{name}: {100 * kept:.1f} % of the summed speed", found, flush=True)
        row = {"key": key, "task": "crew", "kind": "faults", "name": name, "seed": 0, **found}
        if not quick:
            json_lines.append(RESULTS, {**row, "minutes": minutes})


def crew_table(rows: list[dict[str, Any]]) -> str:
    newest = {row["name"]: row for row in rows if row["kind"] == "faults"}
    if not newest:
        return ""
    lines = [
        "| a crew | minutes | faults | of the summed speed | thrown away | states | differing "
        "| loss |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in newest.items():
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(row["faults"].items()))
        kept = 100 * row["rate"] / row["possible"]
        sound = row["finals"] == 1 and not row["code"]
        lines.append(
            f"| {name} | {row['seconds'] / 60:.1f} | {faults or 'none'} | {kept:.1f} % "
            f"| {row['thrown_away']} | {row['compared']:,} | {row['differing']} "
            f"| {row['loss']:.4f}{'' if sound else ' (**not sound**)'} |"
        )
    return CREWS.format(table="\n".join(lines))


CREWS = """## With faults

Crews at speeds from 1 to 4, started by `manyhands run --patience auto --quorum ...`, train an LSTM.
Workers are killed (and started again by the command), stopped for 10 s, and the line between the
store and the last quarter of the workers is cut for 10 s.

{table}

"Of the summed speed": steps that are in the mean of a kept round, over the time from the first
round to the last, against what all workers together could take if none were ever away. A killed
worker is away while Python and torch start, a stopped one for 10 s. "Thrown away" are steps of
workers that were not hit, "states" are SHA-1 sums of anchor and outer momentum that were compared
after rounds, and "differing" the rounds after which two members had different ones.
"""


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page of these results."""
    speeds = [row for row in rows if row["kind"] == "speed"]
    return f"""# Blocks: workers of different speed

```bash
python benchmarks/blocks_unequal.py --data FOLDER  # mnist.npz and tinyshakespeare.txt.xz
```

{len(SPEEDS)} workers at speeds from 1 to 4 train in blocks with `mh.DiLoCo` (AdamW inside). With
*equal steps* each block has a fixed number of steps, and all wait for the slowest worker. With *own
steps* (`every=mh.Seconds(..., own_steps=True)`) each takes as many steps as it can in the time of a
block, and the mean is weighted by the steps.

{speed_table(speeds)}

Steps that count, a second. Each worker sleeps until a step has taken as long as its speed says;
"possible" is the sum of the speeds.

{chr(10).join(loss_table(name, rows) for name in PLANS)}
Loss (in nats) on held-out data after as many samples: mean ± standard deviation of the seeds, and
how much more it is than synchronous training (one worker with all batches at each step) and than
equal steps, seed by seed. These workers do not sleep: blocks see a clock that each step advances by
the time that it takes at the worker's speed. The first quarter is a warm-up in which all step
together.

{crew_table(rows)}"""


def speed_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "(Speeds are still to be measured, on a quiet machine.)"
    lines = [
        "| task | possible | equal steps | own steps | of what is possible |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, plan in PLANS.items():
        rates = {row["name"]: row["rate"] for row in rows if row["task"] == name}
        if not {EQUAL, OWN} <= rates.keys():
            continue
        possible = sum(plan.speeds) / plan.pace
        kept = rates[OWN] / possible
        met = "met" if kept >= KEPT else "not met"
        aim = f"{100 * kept:.1f} % (at least {100 * KEPT:.0f} % was the aim: {met})"
        lines.append(f"| {name} | {possible:.1f} | {rates[EQUAL]:.1f} | {rates[OWN]:.1f} | {aim} |")
    return "\n".join(lines)


def loss_table(name: str, rows: list[dict[str, Any]]) -> str:
    found = {
        label: {
            r["seed"]: r["loss"]
            for r in rows
            if (r["kind"], r["name"], r["task"]) == ("loss", label, name)
        }
        for label in LOSSES
    }
    if OWN not in found or not found[OWN]:
        return ""
    lines = [f"| {name} | loss | over synchronous | over equal steps |", "|---|--:|--:|--:|"]
    for label, losses in found.items():
        if not losses:
            continue
        spread = f" ± {statistics.stdev(losses.values()):.4f}" if len(losses) > 1 else ""
        over = [excess(losses, found[other]) for other in (SYNCHRONOUS, EQUAL)]
        shown = " | ".join("" if math.isnan(each) else f"{100 * each:+.2f} %" for each in over)
        mean = statistics.mean(losses.values())
        many = f"{len(losses)} seed{'s' * (len(losses) > 1)}"
        lines.append(f"| {label}, {many} | {mean:.4f}{spread} | {shown} |")
    aims = (excess(found[OWN], found[other]) for other in (SYNCHRONOUS, EQUAL))
    met = ["met" if over <= WITHIN else "not met" for over in aims]
    lines.append("")
    lines.append(
        f"At most {100 * WITHIN:g} % above synchronous training was the aim: {met[0]}. "
        f"Above equal steps: {met[1]}.\n"
    )
    return "\n".join(lines) + "\n"


def excess(losses: dict[int, float], others: dict[int, float]) -> float:
    """Return by how much the losses are above the others, on the seeds that both have."""
    common = losses.keys() & others.keys()
    if not common or losses == others:
        return math.nan
    return statistics.mean(losses[seed] / others[seed] - 1 for seed in common)


if __name__ == "__main__":
    main()
