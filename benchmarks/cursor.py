"""What does a `Cursor` cost over a `DataLoader` with a `DistributedSampler`?

    python benchmarks/cursor.py            # writes docs/benchmarks/data.md; half a minute
    python benchmarks/cursor.py --quick    # a smoke test; writes nothing

CPU time of one process, which loads nothing: the samples are their numbers. So all that is measured
is how batches are chosen and counted. In turns, and the least of several, since anything else that
runs on the machine only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pages
import torch
from torch.utils.data import DataLoader, DistributedSampler

import manyhands as mh
from manyhands.data._account import Account
from manyhands.data._ledger import Ledger

BATCH = 32
PAGE = """# What a cursor costs

CPU time of one process, for batches of {batch} samples that cost nothing to load: how they are
chosen and counted. A `DistributedSampler` draws and stores the whole order when an epoch begins; a
`Cursor` computes it where it is needed. The least of {rounds} measurements.

```bash
python benchmarks/cursor.py
```

{steps}

So a step of {least:.1f} ms or more is at most 1 % longer. At 10 million samples the beginning of
one epoch saves what a cursor costs in {saved:,.0f} steps. A step has **no collective** more
(`test_steps_take_no_collective`); once in an epoch the ranks compare their positions.

In blocks, with the sync round: to commit what all workers took, to hand out what each takes next,
and a checksum of it, by which the workers compare their positions in the round's own message.

{after_rounds}

Measured on {machine}, with {versions}, one thread.
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
    quick = pages.parser(__doc__).parse_args().quick
    torch.set_num_threads(1)
    rounds, steps = (1, 100) if quick else (7, 4000)
    rows, dearer, saved = [], [], 0.0
    for samples in (200_000, 10_000_000):
        least = {}
        for name, make in (("DataLoader", plain), ("Cursor", cursor)):
            found = [measure(make, samples, steps) for _ in range(rounds)]
            step, start = least[name] = tuple(map(min, zip(*found, strict=True)))
            rows.append([name, f"{samples:,}", f"{step * 1e6:.0f} µs", f"{start * 1e3:,.1f} ms"])
        dearer.append(least["Cursor"][0] - least["DataLoader"][0])
        saved = (least["DataLoader"][1] - least["Cursor"][1]) / dearer[-1]
    lines = []
    for workers in (2, 8, 64):
        best = min(measure_round(workers, 20 if quick else 300) for _ in range(rounds))
        lines.append([workers, f"{best * 1e6:.0f} µs"])
    parts = {
        "steps": pages.table("loader | samples | a step | first batch of an epoch", rows),
        "after_rounds": pages.table("workers | after each round", lines),
    }
    print(*parts.values(), sep="\n\n")
    if not quick:
        known = {**pages.conditions(), "batch": BATCH, "rounds": rounds, "saved": saved, **parts}
        pages.write("data", PAGE, least=100 * max(dearer) * 1e3, **known)


if __name__ == "__main__":
    main()
