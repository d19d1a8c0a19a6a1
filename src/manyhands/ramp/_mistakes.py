"""Warnings of what a growing batch does to the rest of a training script."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

STEPS_IN_A_ROW = 20  # a rate that changes in so many follows a schedule that counts steps


@dataclass
class ScheduleWatch:
    """Warns once if the learning rate follows a schedule that counts optimizer steps."""

    rates: tuple[float, ...] = ()
    in_a_row: int = 0
    warned: bool = False

    def see(self, rates: Sequence[float], growth: float) -> None:
        """Take note of a step's rates; the batch is now `growth` times that of the first step."""
        changed = self.rates != () and tuple(rates) != self.rates
        self.rates, self.in_a_row = tuple(rates), self.in_a_row + 1 if changed else 0
        if self.in_a_row < STEPS_IN_A_ROW or growth <= 1.0 or self.warned:
            return
        self.warned = True
        warnings.warn(
            f"the learning rate has changed in each of the last {self.in_a_row} steps, and a step "
            f"has grown to {growth:g} times its first batch. A schedule that counts optimizer "
            "steps ends after the same number of them, and so after more data. Let it count "
            "progress: mh.ProgressScheduler(scheduler, optimizer, end=...).",
            stacklevel=2,
        )


def warn_of_batch_norm(model: nn.Module, smallest: int, largest: int) -> None:
    """Warn if a model's normalisation would see micro-batches of several sizes."""
    names = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if names and largest > smallest:
        warnings.warn(
            f"the statistics of {names[0] or type(model).__name__} "
            f"({len(names)} layer(s) of batch normalisation) are those of a micro-batch, which may "
            f"grow from {smallest} to {largest} samples on each rank. Leave max_local_batch_size "
            "out to keep micro-batches as they are: then only their number grows.",
            stacklevel=2,
        )
