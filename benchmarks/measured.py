"""What `measured=1/8` and `measure_every` change in the gain, beside the error that it has anyway.

    python benchmarks/measured.py            ten minutes; prints the table of docs/notes.md
    python benchmarks/measured.py --every    the other table: some steps are not measured
    python benchmarks/measured.py --quick    a smoke test

A model is trained with AdaScale, which measures all of every gradient. `NoiseScale`s with other
shares watch the same gradients, and average as long. Their gains are therefore of the same run, and
differ from AdaScale's by what they have not measured. Beside it: how far exact gains of several
seeds are from each other at the same step.

With `--every`, the numbers of each step of an AdaScale that measures every step are averaged once
more, by hand: all of them until the averages hold as many steps as their memory, and from then on
those of every k-th step. Gains are compared in the steps after that.
"""

from __future__ import annotations

import argparse
import lzma
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.scaling._noise import NoiseAverage, NormSums, gain

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SHARES = (2, 8, 16)  # 1/2, 1/8, 1/16
PERIODS = (2, 4, 8)  # steps of which one is measured
Draw = Callable[[torch.Generator], tuple[Tensor, Tensor]]


class Characters(nn.Module):
    """A transformer of two layers that predicts the next character."""

    def __init__(self, width: int = 256, length: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        hidden = self.embedding(x) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden).flatten(0, 1)


def rows() -> nn.Module:
    """The next character from the last two: one row of the table for each pair.

    A batch has a gradient in a few of its rows only, and most of it in the rows of frequent pairs.
    """
    return nn.Sequential(nn.Embedding(128 * 128, 64), nn.Flatten(0, 1), nn.Linear(64, 128))


def perceptron() -> nn.Module:
    """1.9 M parameters."""
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def pictures(batch: int) -> Draw:
    with np.load(DATA / "mnist.npz") as file:
        x, y = (torch.from_numpy(file[name]) for name in ("x_train", "y_train"))
    inputs, labels = x.float().div(255.0).sub(0.1307).div(0.3081), y.long()

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(labels), (batch,), generator=random)
        return inputs[chosen].flatten(1), labels[chosen]

    return draw


def text(batch: int, length: int, *, pairs: bool = False, by_frequency: bool = False) -> Draw:
    """Return what draws text; frequent pairs have small numbers if `by_frequency`."""
    raw = lzma.decompress((DATA / "tinyshakespeare.txt.xz").read_bytes())
    characters = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy()).long()

    number = torch.arange(128 * 128)
    if by_frequency:  # as the tokens of a vocabulary that was learnt from text
        counts = torch.bincount(characters[1:] + 128 * characters[:-1], minlength=128 * 128)
        number[counts.argsort(descending=True, stable=True)] = torch.arange(128 * 128)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(1, len(characters) - length - 1, (batch, 1), generator=random)
        at = starts + torch.arange(length)
        inputs = number[characters[at] + 128 * characters[at - 1]] if pairs else characters[at]
        return inputs, characters[at + 1].flatten()

    return draw


@dataclass(frozen=True)
class Workload:
    """What is trained, and how."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Draw]
    lr: float
    steps: int


WORKLOADS = (
    Workload("MNIST, MLP of 1.9 M", perceptron, lambda: pictures(16), 0.01, 150),
    Workload("Shakespeare, transformer", Characters, lambda: text(4, 32), 0.02, 100),
    Workload("Shakespeare, table of pairs", rows, lambda: text(4, 32, pairs=True), 0.2, 150),
    Workload(
        "the same, by frequency",
        rows,
        lambda: text(4, 32, pairs=True, by_frequency=True),
        0.2,
        150,
    ),
)


def set_up(workload: Workload, scale: int, seed: int) -> tuple[mh.AdaScale, Callable[[], None]]:
    """Return an optimizer that measures everything, and what trains one step with it."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    model, draw = workload.model(), workload.data()
    optimizer = mh.AdaScale(
        torch.optim.SGD(model.parameters(), lr=workload.lr, momentum=0.9),
        num_gradients_to_accumulate=scale,
        measured=1,
    )

    def step() -> None:
        for _ in range(scale):
            inputs, targets = draw(random)
            (F.cross_entropy(model(inputs), targets) / scale).backward()
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, step


def gains(workload: Workload, scale: int, seed: int, steps: int) -> list[list[float]]:
    """Train, and return each step's gains: AdaScale's, and that of each share."""
    optimizer, step = set_up(workload, scale, seed)
    watchers = [
        mh.NoiseScale(
            optimizer.optimizer,
            num_gradients_to_accumulate=scale,
            smoothing=optimizer.smoothing,
            measured=1 / k,
        )
        for k in SHARES
    ]
    found = []
    for _ in range(steps):
        step()
        shares = [gain(max(w.squared_norm, 0.0), w.variance, float(scale)) for w in watchers]
        found.append([optimizer.gain(), *shares])
    return found


def gains_of_sums(sums: Sequence[NormSums], smoothing: float, scale: int, k: int) -> list[float]:
    """Return the gain after each step whose averages are settled, if every k-th is measured."""
    average, found = NoiseAverage(1), []
    memory = math.ceil(1.0 / (1.0 - smoothing))
    for step, each in enumerate(sums):
        if step < memory:
            average = average.add(each, smoothing)
            continue
        if (step - memory) % k == k - 1:
            average = average.add(each, smoothing**k)
        found.append(average.gain(float(scale)))
    return found


def sums_of_steps(workload: Workload, scale: int, seed: int, steps: int) -> list[NormSums]:
    """Train, and return the numbers that AdaScale has measured in each step."""
    optimizer, step = set_up(workload, scale, seed)
    found = []
    for _ in range(steps):
        step()
        found.append(optimizer._tracker.sums)
    return found


def row_of_periods(workload: Workload, scale: int, seeds: int, memories: float) -> str:
    """Errors in per cent of the gain, over the steps whose averages are settled."""
    smoothing = 1.0 - scale / 1000.0
    steps = round(memories / (1.0 - smoothing))
    runs = [sums_of_steps(workload, scale, seed, steps) for seed in range(seeds)]
    exact = [gains_of_sums(run, smoothing, scale, 1) for run in runs]
    own = root_mean_square([stdev(at) / mean(at) for at in zip(*exact, strict=True)])
    cells = [workload.name, f"{scale}", f"{mean(map(mean, exact)):.2f}", f"{100 * own:.1f} %"]
    for k in PERIODS:
        found = [gains_of_sums(run, smoothing, scale, k) for run in runs]
        pairs = [
            each
            for ours, theirs in zip(found, exact, strict=True)
            for each in zip(ours, theirs, strict=True)
        ]
        errors = [ours / theirs - 1.0 for ours, theirs in pairs]
        cells.append(f"{100 * root_mean_square(errors):.2f} % ({100 * mean(errors):+.2f})")
    return f"| {' | '.join(cells)} |"


def table_of_periods(seeds: int, quick: bool) -> None:
    """Print how far gains are off if only every k-th step is measured."""
    heads = " | ".join(f"every {k}. (mean)" for k in PERIODS)
    print(f"| workload | scale | gain | over seeds | {heads} |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for workload in WORKLOADS[: 1 if quick else 3]:
        for scale in (32,) if quick else (2, 4, 8):
            print(row_of_periods(workload, scale, seeds, 1.5 if quick else 3.0), flush=True)


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(mean(value * value for value in values))


def row(workload: Workload, scale: int, seeds: int, steps: int) -> str:
    """Errors in per cent of the gain, over the steps of which not everything was measured."""
    runs = [gains(workload, scale, seed, steps) for seed in range(seeds)]
    first = min(2 * max(SHARES), steps // 2)
    exact = [[step[0] for step in run[first:]] for run in runs]
    own = root_mean_square([stdev(at) / mean(at) for at in zip(*exact, strict=True)])
    errors = [
        root_mean_square([step[1 + i] / step[0] - 1.0 for run in runs for step in run[first:]])
        for i in range(len(SHARES))
    ]
    bias = mean(step[2] / step[0] - 1.0 for run in runs for step in run[first:])
    cells = [workload.name, f"{scale}", f"{mean(map(mean, exact)):.2f}", f"{100 * own:.1f} %"]
    cells += [f"{100 * error:.2f} %" for error in errors]
    return f"| {' | '.join(cells)} | {100 * bias:+.2f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--every", action="store_true", help="measure every k-th step only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.every:
        table_of_periods(2 if args.quick else args.seeds, args.quick)
        return
    shares = " | ".join(f"1/{k}" for k in SHARES)
    print(f"| workload | scale | gain | over seeds | {shares} | mean of 1/8 |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for workload in WORKLOADS:
        for scale in (2, 8, 32):
            # at scale 32 the averages are too short for 1/16: everything is measured
            steps = 4 if args.quick else workload.steps if scale < 32 else workload.steps // 2
            print(row(workload, scale, 2 if args.quick else args.seeds, steps), flush=True)


if __name__ == "__main__":
    main()
