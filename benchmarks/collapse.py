"""Train under AdaScale where gradients explode now and then.

    python benchmarks/collapse.py            an hour; the same command continues where it stopped

Four small models learn at rates that are right for one worker, and so high that a gradient explodes
now and then. Each is trained with SGD and a cosine by progress, at scale 1 and under AdaScale at
16, 32 and 64 and with `Ramp`, once with the noise of a step limited (the default) and once without.
A run has collapsed if its accuracy is 7 points below that of scale 1 with the same seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import median
from typing import Any

import pages
import torch
from quality.training import cosine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh
from manyhands.scaling import _noise
from ramp import StatedClock

RESULTS = pages.RESULTS / "collapse.jsonl"
SEEDS = 40
SETTINGS = ("16", "32", "64", "Ramp")
LIMITS = {"limited": _noise.OUTLIER_DEVIATIONS, "not limited": math.inf}
POINTS = 7.0
BATCH = 16
LARGEST = 64
OVERHEAD = 8.0  # of a step, in passes
FEATURES = 13
CLASSES = 10


class Recurrent(nn.Module):
    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, hidden, layers, batch_first=True)
        self.readout = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend = nn.ModuleList((nn.Linear(width, 3 * width), nn.Linear(width, width)))
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.readout = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        parts = self.attend[0](self.norms[0](x)).unflatten(-1, (3, 2, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value)
        x = x + self.attend[1](mixed.transpose(1, 2).flatten(-2))
        x = x + self.mlp(self.norms[1](x))
        return self.readout(x.mean(dim=1))


@dataclass(frozen=True)
class Task:
    name: str
    title: str
    model: Callable[[], nn.Module]
    lr: float
    length: int  # of a sequence
    noise: float
    steps: int  # at scale 1


TASKS = (
    Task("lstm", "LSTM of 32", lambda: Recurrent(32, 1), 0.4, 20, 0.7, 800),
    Task("wide", "LSTM of 48", lambda: Recurrent(48, 1), 0.45, 16, 0.9, 800),
    Task("deep", "LSTM of 2 x 24", lambda: Recurrent(24, 2), 0.4, 12, 0.7, 800),
    Task("transformer", "transformer", lambda: Transformer(12, 16), 0.08, 12, 0.7, 600),
)


@cache
def sequences(task: Task, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Every class has its own slow course in each feature; loudness differs, and noise is added."""
    shapes = torch.Generator().manual_seed(7)
    courses = 0.5 * torch.randn(CLASSES, 3, FEATURES, generator=shapes)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    t = math.pi * torch.linspace(0.0, 1.0, task.length)
    basis = torch.stack([torch.ones(task.length), torch.sin(2 * t), torch.cos(3 * t)])
    loudness = torch.exp(0.3 * torch.randn(count, 1, 1, generator=generator))
    x = torch.einsum("nkf,kt->ntf", courses[y], basis) * loudness
    return x + task.noise * torch.randn(x.shape, generator=generator), y


def train(task: Task, setting: str, limit: str, seed: int, steps: int) -> dict[str, Any]:
    _noise.OUTLIER_DEVIATIONS = LIMITS[limit]
    torch.manual_seed(seed)
    model = task.model()
    generator = torch.Generator().manual_seed(1000 + seed)
    passes = int(setting) if setting != "Ramp" else 1
    sgd = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.9)
    optimizer = mh.AdaScale(sgd, num_gradients_to_accumulate=passes)
    clock = StatedClock(OVERHEAD)
    ramp = mh.Ramp(optimizer, LARGEST) if setting == "Ramp" else None
    schedule = mh.ProgressScheduler(
        LambdaLR(optimizer, lambda k: cosine(k, steps)), optimizer, end=steps
    )
    x, y = sequences(task, 20_000, 1)
    taken = 0
    most = 1.0
    start = time.process_time()
    loss = torch.zeros(())
    while not schedule.done and loss.isfinite():
        passes = passes if ramp is None else ramp.passes
        for _ in range(passes):
            some = torch.randint(len(x), (BATCH,), generator=generator)
            loss = cross_entropy(model(x[some]), y[some]) / passes
            loss.backward()
        clock.step(passes)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        taken += 1
        most = max(most, optimizer.gain())
    x, y = sequences(task, 2_000, 2)
    with torch.no_grad():
        score = 100.0 * (model(x).argmax(dim=1) == y).double().mean().item()
    seconds = round(time.process_time() - start, 2)
    run = {"task": task.name, "setting": setting, "limit": limit, "seed": seed}
    found = {"score": round(score, 2), "steps": taken, "largest_gain": round(most, 2)}
    return {**run, **found, "cpu_seconds": seconds}


def run() -> None:
    settings = [("1", "limited"), *product(SETTINGS, LIMITS)]
    done = {key(row) for row in pages.read_rows(RESULTS)}
    for seed, task, (setting, limit) in product(range(SEEDS), TASKS, settings):
        if (task.name, setting, limit, seed) not in done:
            pages.add_row(RESULTS, train(task, setting, limit, seed, task.steps))


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["setting"], row["limit"], row["seed"]


def cells(rows: list[dict[str, Any]]) -> list[list[object]]:
    """Return a table row for each task: median accuracies, and how many runs collapsed."""
    scores = {key(row): row["score"] for row in rows}
    table: list[list[object]] = []
    for task in TASKS:
        base = [scores[task.name, "1", "limited", seed] for seed in range(SEEDS)]
        found: list[object] = [task.title, f"{median(base):.1f}"]
        for setting in SETTINGS:
            ends = [scores[task.name, setting, "limited", seed] for seed in range(SEEDS)]
            found.append(f"{median(ends):.1f}")
        for limit in LIMITS:
            low = 0
            for setting, seed in product(SETTINGS, range(SEEDS)):
                low += scores[task.name, setting, limit, seed] < base[seed] - POINTS
            found.append(f"{low}/{len(SETTINGS) * SEEDS}")
        table.append(found)
    return table


def main() -> None:
    arguments = pages.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        for setting in SETTINGS:
            print(train(TASKS[0], setting, "limited", 0, 60))
        return
    if not arguments.draw:
        run()
    head = " | ".join(["model", "scale 1", *SETTINGS, "collapsed", "collapsed without limit"])
    pages.fill("collapse", table=pages.table(head, cells(pages.read_rows(RESULTS))))


if __name__ == "__main__":
    main()
