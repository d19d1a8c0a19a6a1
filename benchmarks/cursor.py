"""What does a `Cursor` cost over a `DataLoader` with a `DistributedSampler`?

    python benchmarks/cursor.py            # writes docs/benchmarks/data.md; half a minute
    python benchmarks/cursor.py --quick    # a smoke test; writes nothing

CPU time of one process, which loads nothing: the samples are their numbers. So all that is measured
is how batches are chosen and counted. In turns, and the least of several, since anything else that
runs on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

import manyhands as mh
from manyhands.data._account import Account
from manyhands.data._ledger import Ledger

ROOT = Path(__file__).resolve().parents[1]
BATCH = 32
PAGE = """# What a cursor costs

CPU time of one process, for batches of {batch} samples that cost nothing to load: how they are
chosen and counted. A `DistributedSampler` draws and stores the whole order when an epoch begins; a
`Cursor` computes it where it is needed. The least of {rounds} measurements.

```bash
python benchmarks/cursor.py
```

| samples | | a step | until the first batch of an epoch |
|--:|---|--:|--:|
{steps}

So a step of {least:.1f} ms or more is at most 1 % longer. At 10 million samples the beginning of
one epoch saves what a cursor costs in {saved:,.0f} steps. A step has **no collective** more
(`test_steps_take_no_collective`); once in an epoch the ranks compare their positions.

In blocks, with the sync round: to commit what all workers took, to hand out what each takes next,
and a checksum of it, by which the workers compare their positions in the round's own message.

| workers | after each round |
|--:|--:|
{after_rounds}

{machine}
"""


class Numbers:
    """A dataset of numbers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def same(batch: Any) -> Any:
    return batch


def plain(samples: int) -> Any:
    data = Numbers(samples)
    sampler = DistributedSampler(data, 1, 0)  # type: ignore[arg-type, var-annotated]
    return DataLoader(data, BATCH, sampler=sampler, collate_fn=same)  # type: ignore[arg-type, var-annotated]


def cursor(samples: int) -> Any:
    return mh.Cursor(Numbers(samples), BATCH, collate_fn=same)


def measure(make: Callable[[int], Any], samples: int, steps: int) -> tuple[float, float]:
    """Return the CPU seconds of a step, and those until the first batch."""
    loader = make(samples)
    begin = time.process_time()
    batches = iter(loader)
    next(batches)
    first = time.process_time()
    for _ in range(steps):
        next(batches)
    return (time.process_time() - first) / steps, first - begin


def measure_round(workers: int, times: int) -> float:
    """Return the CPU seconds of one worker after a sync round."""
    account, batch = Account(), 32
    rules: Any = {"samples": 10**9, "batch": batch, "ahead": 4, "drop_last": False}
    account.begin(rules, Ledger(10**9))
    steps = dict.fromkeys(range(workers), 50)
    account.hand_out(steps)
    begin = time.process_time()
    for _ in range(times):
        account.add_to_step(50 * batch)
        account.step()
        account.checksum()
        account.commit(dict.fromkeys(steps, 50 * batch), 0)
        account.hand_out(steps)
    return (time.process_time() - begin) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds, steps = (1, 100) if args.quick else (7, 4000)
    rows, dearer, saved = [], [], 0.0
    for samples in (200_000, 10_000_000):
        found = {
            name: [measure(make, samples, steps) for _ in range(rounds)]
            for name, make in (("DataLoader", plain), ("Cursor", cursor))
        }
        least = {
            name: [min(each) for each in zip(*all_, strict=True)] for name, all_ in found.items()
        }
        dearer.append(least["Cursor"][0] - least["DataLoader"][0])
        saved = (least["DataLoader"][1] - least["Cursor"][1]) / dearer[-1]
        for name, (step, start) in least.items():
            times = f"{step * 1e6:.0f} µs | {start * 1e3:,.1f} ms"
            rows.append(f"| {samples:,} | {name} | {times} |")
            print(rows[-1], flush=True)
    lines = []
    for workers in (2, 8, 64):
        best = min(measure_round(workers, 20 if args.quick else 300) for _ in range(rounds))
        lines.append(f"| {workers} | {best * 1e6:.0f} µs |")
        print(lines[-1], flush=True)
    if args.quick:
        return
    page = PAGE.format(
        batch=BATCH,
        rounds=rounds,
        steps="\n".join(rows),
        least=100 * max(dearer) * 1e3,
        saved=saved,
        after_rounds="\n".join(lines),
        machine=f"{platform.machine()}, torch {torch.__version__}, one thread.",
    )
    (ROOT / "docs" / "benchmarks" / "data.md").write_text(page)


if __name__ == "__main__":
    main()
