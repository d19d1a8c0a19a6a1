"""Workers of different speed: how much of their summed speed is used, and what does it cost?

    python benchmarks/blocks_unequal.py --data FOLDER    # mnist.npz, tinyshakespeare.txt.xz; writes
    python benchmarks/blocks_unequal.py --data FOLDER --quick    # a smoke test, writes nothing
    python benchmarks/blocks_unequal.py --draw           # the page from the results so far

8 workers at speeds from 1 to 4 train in blocks of a stated time, and each takes steps of its own
(`Seconds(..., own_steps=True)`). Two kinds of runs:

speed    a worker sleeps until a step has taken as long as its speed says, so that 2 cores suffice.
         Steps that count, over the time from the first round to the last, against what all workers
         together can take, and against equal steps, where all have the pace of the slowest
loss     nobody sleeps: blocks see a clock that each step advances by the time of that worker. The
         loss on held-out data after as many samples as with equal steps, and as one worker with the
         batch of all eight (synchronous training); also with equal weights instead of the steps'

Each finished run is one line in results/blocks-unequal.jsonl, and the same command goes on where it
was interrupted.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pages
import peers

peers.this_checkout()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from blocks.learning import TASKS, Task, in_processes, loss_of, lr_at  # noqa: E402

import manyhands as mh  # noqa: E402
from manyhands.blocks.averaging import _round  # noqa: E402

RESULTS = pages.RESULTS / "blocks-unequal.jsonl"
SEEDS = (0, 1, 2)
SPEEDS = tuple(1 + 3 * rank / 7 for rank in range(8))
SYNCHRONOUS, EQUAL, OWN = "one worker, all eight batches", "equal steps", "own steps"
UNWEIGHTED = "own steps, equal weights"
LOSSES = (SYNCHRONOUS, EQUAL, OWN, UNWEIGHTED)
OUTER: dict[str, Any] = {"lr": 1.0, "momentum": 0.8}
WITHIN, KEPT = 0.005, 0.88


@dataclass(frozen=True)
class Plan:
    """A run: its task, and the time of a block."""

    task: Task
    pace: float  # seconds that a step takes at speed 1
    seconds: float  # of a block
    speed_batch: int = 8  # in runs of the kind "speed", which must not be bound by the cores

    @property
    def every(self) -> int:
        """Steps of a block with equal steps: as many as the workers take in the mean."""
        return round(self.seconds / self.pace * statistics.mean(SPEEDS))

    def took(self, rank: int) -> float:
        return self.pace / SPEEDS[rank]


PLANS = {
    "MNIST": Plan(replace(TASKS["MNIST"], batch=8), pace=0.2, seconds=2.56),
    "Shakespeare": Plan(TASKS["Shakespeare"], pace=0.8, seconds=10.24, speed_batch=2),
}


class StatedClock:
    """The time that blocks see, which only steps advance. Every rank has its own process."""

    def __init__(self) -> None:
        self.now = 0.0
        _round.time = SimpleNamespace(perf_counter=lambda: self.now)  # type: ignore[attr-defined]


def train(plan: Plan, folder: Path, seed: int, name: str, asleep: bool) -> dict[str, float]:
    """Train on this rank; return its figures."""
    task, data = plan.task, plan.task.load(folder)
    alone = name == SYNCHRONOUS
    rank = 0 if alone else dist.get_rank()
    torch.manual_seed(seed)
    model = task.model(data)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=task.lr, betas=(0.9, 0.95))
    clock = None if asleep else StatedClock()
    if not alone:
        every: Any = plan.every
        if name in (OWN, UNWEIGHTED):
            every = mh.Seconds(plan.seconds, first=every, own_steps=True)
        warmup = 0 if asleep else task.steps // 4
        optimizer = mh.DiLoCo(optimizer, every=every, warmup=warmup, **OUTER)
        if name == UNWEIGHTED:
            optimizer._sync.samples.weight = lambda work, drawn: 1.0
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    count = task.batch * (len(SPEEDS) if alone else 1)
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
    loss = task.at_the_end(data, model) if rank == 0 else 0.0
    return {"loss": loss, "steps": own_steps, "seconds": seconds}


def run(plan: Plan, folder: Path, seed: int, name: str, asleep: bool) -> dict[str, Any]:
    """Train in processes of its own; return the figures of all ranks."""
    workers = 1 if name == SYNCHRONOUS else len(SPEEDS)
    ranks = in_processes(workers, lambda: train(plan, folder, seed, name, asleep))
    return {
        "loss": max(each["loss"] for each in ranks),
        "rate": sum(each["steps"] for each in ranks) / max(each["seconds"] for each in ranks),
    }


def main() -> None:
    parser = pages.parser(__doc__, data="mnist.npz and tinyshakespeare.txt.xz")
    args = parser.parse_args()
    if not args.draw:
        if args.data is None:
            parser.error("--data FOLDER is needed: where mnist.npz and tinyshakespeare.txt.xz are")
        for plan in PLANS.values():
            measure(plan, args.data, args.quick)
    if not args.quick:
        draw(pages.read_rows(RESULTS))


def measure(plan: Plan, folder: Path, quick: bool) -> None:
    """Make all runs of a task that are not in the results yet."""
    plan.task.load(folder)  # in this process, whose forks have it
    if quick:
        brief = replace(plan.task, steps=96)
        plan = replace(plan, task=brief, pace=plan.pace / 8, seconds=plan.seconds / 8)
    short = replace(plan, task=replace(plan.task, steps=6 * plan.every, batch=plan.speed_batch))
    runs = [("speed", short, 0, name) for name in (EQUAL, OWN)]
    runs += [
        ("loss", plan, seed, name) for seed in SEEDS[: 1 if quick else None] for name in LOSSES
    ]
    done = {row["key"] for row in pages.read_rows(RESULTS)} if not quick else set()
    for kind, chosen, seed, name in runs:
        settings = f"{chosen.task.batch}/{chosen.pace}/{chosen.seconds}/{OUTER}"
        key = f"{chosen.task.name}/{chosen.task.steps}/{settings}/{kind}/{name}/{seed}"
        if key in done:
            continue
        found = run(chosen, folder, seed, name, asleep=kind == "speed")
        row = {"key": key, "task": plan.task.name, "kind": kind, "name": name, "seed": seed}
        print(plan.task.name, kind, name, seed, found, flush=True)
        if not quick:
            pages.add_row(RESULTS, {**row, **found})


PAGE = """# Blocks: workers of different speed

```bash
python benchmarks/blocks_unequal.py --data FOLDER  # mnist.npz and tinyshakespeare.txt.xz
```

{workers} workers at simulated speeds from 1 to 4 train with `mh.DiLoCo` (AdamW inside), in
blocks of equal steps or with `every=mh.Seconds(..., own_steps=True)`. Steps that count, a second:

{speeds}

Losses (in nats) on held-out data after as many samples, and how much more it is, seed by seed. The
first quarter is a warm-up in which all step together.

{losses}
"""


def draw(rows: list[dict[str, Any]]) -> None:
    """Write the page of these results."""
    losses = "\n\n".join(loss_table(name, rows) for name in PLANS)
    parts = {"workers": len(SPEEDS), "speeds": speed_table(rows), "losses": losses}
    pages.write("blocks-unequal", PAGE, **parts)


def speed_table(rows: list[dict[str, Any]]) -> str:
    cells = []
    for name, plan in PLANS.items():
        speeds = [row for row in rows if (row["kind"], row["task"]) == ("speed", name)]
        rates = {row["name"]: row["rate"] for row in speeds}
        possible = sum(SPEEDS) / plan.pace
        kept = rates[OWN] / possible
        aim = f"aim {100 * KEPT:.0f} %: {'met' if kept >= KEPT else 'not met'}"
        shown = [f"{each:.1f}" for each in (possible, rates[EQUAL], rates[OWN])]
        cells.append([name, *shown, f"{100 * kept:.1f} % ({aim})"])
    return pages.table("task | possible | equal steps | own steps | of what is possible", cells)


def loss_table(name: str, rows: list[dict[str, Any]]) -> str:
    ours = [row for row in rows if (row["kind"], row["task"]) == ("loss", name)]
    found = {
        label: {row["seed"]: row["loss"] for row in ours if row["name"] == label}
        for label in LOSSES
    }
    cells = []
    for label, losses in found.items():
        mean, spread = statistics.mean(losses.values()), statistics.stdev(losses.values())
        over = [
            "" if other == label else f"{100 * excess(losses, found[other]):+.2f} %"
            for other in (SYNCHRONOUS, EQUAL)
        ]
        cells.append([label, f"{mean:.4f} ± {spread:.4f}", *over])
    aims = (excess(found[OWN], found[other]) for other in (SYNCHRONOUS, EQUAL))
    met = " and ".join("met" if over <= WITHIN else "not met" for over in aims)
    table = pages.table(f"{name} | loss | over synchronous | over equal steps", cells)
    return f"{table}\n\nAt most {100 * WITHIN:g} % above either was the aim: {met}."


def excess(losses: dict[int, float], others: dict[int, float]) -> float:
    """Return by how much the losses are above the others, on the seeds that both have."""
    return statistics.mean(
        losses[seed] / others[seed] - 1 for seed in losses.keys() & others.keys()
    )


if __name__ == "__main__":
    main()
