"""The numbers that one step sends through the one small collective, and what comes back.

Sent by each worker, as one vector:

    squares[group]      sum of |g_i|^2 over this worker's small batches
    mean[group]         |G|^2 over this worker's share of the parameters (see `_tap.py`)
    slots[worker][3]    passes, scale and a witness; every worker fills its own, zeros elsewhere

Summed over the workers, the first two are what the estimate needs and the slots are a table of
what each worker believes. Workers that disagree therefore all notice, in the same step, and all
raise the same error: no further collective in which one of them could be left waiting.

The witness is the squared norm of some averaged gradients, which must be the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.scaling._noise import Reading

SLOTS = 3
WITNESS_TOLERANCE = 1e-5


@dataclass
class Sample:
    """One step's numbers, on the device until `read`."""

    numbers: Tensor
    work: dist.Work | None
    groups: int
    workers: int
    passes: int
    count: int  # small batches in it; 1 where there was nothing to compare with
    scale: float
    differenced: bool = False
    _host: Tensor | None = None
    _copied: torch.cuda.Event | None = None

    def start_copy(self) -> None:
        """Begin to bring the numbers to the host, without waiting for them."""
        if self.work is not None:
            self.work.wait()
        if self.numbers.device.type == "cuda":
            self._host = torch.empty_like(self.numbers, device="cpu", pin_memory=True)
            self._host.copy_(self.numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self, extras: Sequence[Tensor] = ()) -> tuple[Reading | None, list[float]]:
        """The reading, if there is one, and the one-element `extras`: one copy for all."""
        if self._host is not None and self._copied is not None:
            self._copied.synchronize()
            numbers = self._host.tolist() + [float(extra) for extra in extras]
        else:
            if self.work is not None:
                self.work.wait()
            more = [extra.detach().to(self.numbers).view(1) for extra in extras]
            numbers = torch.cat([self.numbers, *more]).tolist()
        groups, end = self.groups, self.numbers.numel()
        if self.workers > 1:
            _check_agreement(numbers[2 * groups : end], self.workers)
        if self.count < 2:
            return None, numbers[end:]
        reading = Reading(
            tuple(numbers[:groups]),
            tuple(numbers[groups : 2 * groups]),
            self.count,
            self.scale,
            self.differenced,
        )
        return reading, numbers[end:]


def _check_agreement(slots: list[float], workers: int) -> None:
    table = [slots[i * SLOTS : (i + 1) * SLOTS] for i in range(workers)]
    passes, scales, witnesses = zip(*table, strict=True)
    for name, values in (
        ("backward passes per step (num_gradients_to_accumulate)", passes),
        ("scale", scales),
    ):
        if max(values) != min(values):
            raise RuntimeError(
                f"workers disagree on the {name}: {_by_rank(values)}. "
                "Every worker must be given the same."
            )
    largest, smallest = max(witnesses), min(witnesses)
    if not math.isfinite(largest + smallest):
        return  # a non-finite gradient is the estimate's business
    if largest - smallest > WITNESS_TOLERANCE * abs(largest):
        lengths = tuple(math.sqrt(max(value, 0.0)) for value in witnesses)
        raise RuntimeError(
            f"after the step's last backward() the workers' gradients still differ (norms of the "
            f"compared ones: {_by_rank(lengths)}). Was that pass inside no_sync()? Only the "
            "passes before it may be. Without DistributedDataParallel around the model, "
            "gradients must be averaged before backward() returns, or each worker be left on its "
            "own with world_size=1."
        )


def _by_rank(values: tuple[float, ...]) -> str:
    """`rank 0: 1, ranks 1-3: 2`, at most eight entries."""
    runs: list[list[int]] = []
    for rank, value in enumerate(values):
        if runs and values[runs[-1][0]] == value:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    named = [
        f"rank {a}: {values[a]:.6g}" if a == b else f"ranks {a}-{b}: {values[a]:.6g}"
        for a, b in runs[:8]
    ]
    return ", ".join(named) + (", ..." if len(runs) > 8 else "")
