"""How far the gain is off if one step in k is measured, beside the error that it has anyway.

    python benchmarks/measured.py    a minute; prints the table that docs/scaling.md quotes

Gradients are simulated, so the true gain is known. A step's small batches are the true gradient
plus normal noise. Errors are over the steps whose averages are settled, of eight runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import torch

from manyhands.scaling._noise import NoiseAverage, NormSums, gain

SIZE, RUNS = 180, 8
PERIODS = (2, 4, 8)
SCALES = ((2, 4.0), (8, 16.0), (32, 64.0))  # the scale, and the noise over |true gradient|^2


def errors(scale: int, var: float, seed: int) -> tuple[list[float], dict[int, list[float]]]:
    """Return the gain's error if every step is measured, and what one in k adds to it."""
    random = torch.Generator().manual_seed(seed)
    memory, smoothing = math.ceil(1000 / scale), 1 - scale / 1000
    truth = gain(1.0, var, scale)
    averages = {k: NoiseAverage(1) for k in (1, *PERIODS)}
    own: list[float] = []
    added: dict[int, list[float]] = {k: [] for k in PERIODS}
    for step in range(3 * memory):
        noise = torch.randn(scale, SIZE, generator=random)
        grads = (1 / SIZE) ** 0.5 + (var / SIZE) ** 0.5 * noise
        squares = float(grads.square().sum()), float(grads.mean(0).square().sum())
        sums = NormSums((squares[0],), (squares[1],), scale, float(scale))
        for k, average in averages.items():
            if step < memory or (step - memory) % k == k - 1:
                averages[k] = average.add(sums, smoothing if step < memory else smoothing**k)
        if step >= memory:
            exact = averages[1].gain(scale)
            own.append(exact / truth - 1)
            for k in PERIODS:
                added[k].append(averages[k].gain(scale) / exact - 1)
    return own, added


def percent(values: Sequence[float]) -> str:
    return f"{100 * math.sqrt(fmean(value * value for value in values)):.1f} %"


def main() -> None:
    torch.set_num_threads(1)
    print("| scale | true gain | its error, every step measured | one in 2 | in 4 | in 8 |")
    print("|--:|--:|--:|--:|--:|--:|")
    for scale, var in SCALES:
        runs = [errors(scale, var, seed) for seed in range(RUNS)]
        cells = [str(scale), f"{gain(1.0, var, scale):.2f}"]
        cells.append(percent([each for own, _ in runs for each in own]))
        cells += [percent([each for _, added in runs for each in added[k]]) for k in PERIODS]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
