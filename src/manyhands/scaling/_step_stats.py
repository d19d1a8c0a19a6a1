"""The numbers that one step sends through the one small collective, and what comes back.

Sent by each worker, as one vector:

    squares[group]      sum of |g_i|^2 over this worker's small batches
    mean[group]         |G|^2 over this worker's share of the parameters (see `_mean_gradient.py`)
    beliefs             what this worker believes of the step: see `RankClaims`

The first two come back summed over the workers, for the estimate, and the beliefs as a table of
all workers'. Workers that disagree therefore all notice, in the same step, and all raise the
same error: no further collective in which one of them could be left waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from manyhands._core.ranks import PendingSums
from manyhands.scaling._noise import Reading

WITNESS_TOLERANCE = 1e-5
HISTORY_TOLERANCE = 1e-9


@dataclass(frozen=True)
class RankClaims:
    """What each worker says of a step, and must say the same of but for `micro_batch`.

    `announces` is 1 in a vector that only says that the number of passes was changed. `seen`
    may be less than `passes` on some workers, whose losses in the other passes used none of the
    parameters; not on all. `history` is a number made of the progress, the averages so far and
    the last factors. `micro_batch` is the number of samples in this rank's first training input,
    or 0. The witness is the squared norm of some averaged gradients.
    """

    announces: float
    passes: float
    seen: float
    scale: float
    history: float
    micro_batch: float
    witness: float

    SLOTS: ClassVar[int] = 7

    @classmethod
    def table(cls, slots: Sequence[float]) -> list[RankClaims]:
        """Every worker's beliefs, in rank order."""
        n = cls.SLOTS
        return [cls(*slots[i : i + n]) for i in range(0, len(slots), n)]

    @staticmethod
    def check(table: Sequence[RankClaims]) -> bool:
        """Whether any worker has seen all passes. Raises where the workers do not agree."""
        if len({b.announces for b in table}) > 1:
            some = ", ".join(str(rank) for rank, b in enumerate(table) if b.announces)
            raise RuntimeError(
                f"set_num_gradients_to_accumulate() was called on rank(s) {some}, while others "
                "finished a step. Call it on every worker."
            )
        for name, values in (
            ("backward passes per step", [b.passes for b in table]),
            ("scale", [b.scale for b in table]),
        ):
            if max(values) != min(values):
                raise RuntimeError(
                    f"workers disagree on the {name}: {_by_rank(values)}. "
                    "Every worker must be given the same."
                )
        if max(b.seen for b in table) < table[0].passes:
            return False  # `step` says what to do
        history = [b.history for b in table]
        if max(history) - min(history) > HISTORY_TOLERANCE * abs(max(history)):
            raise RuntimeError(
                f"workers have different statistics, progress or factors behind them: "
                f"{_by_rank(history)} (a checksum). Load the state dict on every worker, not on "
                "some, and let scale_lr() go by nothing that only one of them knows."
            )
        _check_averaged([b.witness for b in table])
        return True


@dataclass
class StepStats:
    """One step's numbers, on the device until `read`."""

    combination: PendingSums
    groups: int
    workers: int
    passes: int
    count: int  # small batches in it; 1 where there was nothing to compare with
    scale: float
    differenced: bool = False
    unit: str = "plain"
    micro_batch: float = 0.0  # samples: this rank's, and after `read` the mean over the ranks
    nobody_ready: bool = False
    wait: Callable[[], None] = lambda: None  # for the other ranks, as long as it makes sense
    seen: float = 0.0  # passes of the rank that has seen the most, after `read`
    _host: Tensor | None = None
    _copied: torch.cuda.Event | None = None
    _sent_along: int = 0

    def start_copy(self, extras: Sequence[Tensor] = ()) -> None:
        """Begin to bring the numbers and the one-element `extras` to the host, without waiting."""
        self.wait()
        numbers = self._with(extras)
        self._sent_along = len(extras)
        if numbers.device.type != "cuda":
            self._host = numbers
        else:
            self._host = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self, extras: Sequence[Tensor] = ()) -> tuple[Reading | None, list[float]]:
        """The reading, if any, and the `extras` or those sent along: one copy for all."""
        if self._host is not None:
            if self._copied is not None:
                self._copied.synchronize()
            numbers = self._host.tolist()
        else:
            self.wait()
            numbers = self._with(extras).tolist() if extras else self.combination.read()
        groups, end = self.groups, len(numbers) - (self._sent_along or len(extras))
        if self.workers > 1:
            table = RankClaims.table(numbers[2 * groups : end])
            self.nobody_ready = not RankClaims.check(table)
            self.seen = max(beliefs.seen for beliefs in table)
            known = [beliefs.micro_batch for beliefs in table if beliefs.micro_batch]
            self.micro_batch = sum(known) / len(known) if known else 0.0
        if self.count < 2:
            return None, numbers[end:]
        reading = Reading(
            tuple(numbers[:groups]),
            tuple(numbers[groups : 2 * groups]),
            self.count,
            self.scale,
            self.differenced,
            self.unit,
        )
        return reading, numbers[end:]

    def _with(self, extras: Sequence[Tensor]) -> Tensor:
        numbers = self.combination.wait()
        more = [extra.detach().to(numbers).view(1) for extra in extras]
        return torch.cat([numbers, *more]) if more else numbers


def _check_averaged(witnesses: list[float]) -> None:
    largest, smallest = max(witnesses), min(witnesses)
    if not math.isfinite(largest + smallest):
        return  # a non-finite gradient is the estimate's business
    if largest - smallest > WITNESS_TOLERANCE * abs(largest):
        lengths = [math.sqrt(max(value, 0.0)) for value in witnesses]
        raise RuntimeError(
            f"after the step's last backward() the workers' gradients still differ (norms of the "
            f"compared ones: {_by_rank(lengths)}). Was that pass inside no_sync()? Only the "
            "passes before it may be. Is the model averaged in another process group? Pass it: "
            "process_group=... Without DistributedDataParallel around the model, gradients must "
            "be averaged before backward() returns, or each worker be left on its own with "
            "world_size=1."
        )


def _by_rank(values: Sequence[float]) -> str:
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
