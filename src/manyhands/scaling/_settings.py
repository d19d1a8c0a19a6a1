"""Define options of rules, and protocols of training loops."""

from __future__ import annotations

from typing import Protocol, TypedDict, runtime_checkable

import torch.distributed as dist

from manyhands._arguments import real
from manyhands._optimizers.wrappers import LossScaler

PASSES = "num_gradients_to_accumulate"
PER_STEP = "It is the number of backward() calls between two step() calls."


class RuleOptions(TypedDict, total=False):
    """Options that every rule accepts by name; see `ScalingRuleBase`."""

    world_size: int | None
    scale: float | None
    smoothing: float | None
    num_gradients_to_accumulate: int | Accumulation
    is_scaled_loss: bool
    debias_ewma: bool
    process_group: dist.ProcessGroup | None
    grad_scaler: LossScaler | None
    var_floor: float
    measure_every: int | None


@runtime_checkable
class Accumulation(Protocol):
    """A loop that chooses the number of backward passes per step, such as a trainer's.

    >>> import torch, manyhands as mh
    >>> class Loop:
    ...     gradient_accumulation_steps = 4
    ...     sync_gradients = False
    >>> loop, model = Loop(), torch.nn.Linear(2, 1)
    >>> optimizer = mh.AdaScale(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=loop
    ... )
    >>> for number in range(3):  # the data ends after three of four passes
    ...     loop.sync_gradients = number == 2
    ...     (model(torch.randn(8, 2)).mean() / 4).backward()
    >>> optimizer.step()
    >>> optimizer.scale
    3.0

    A rule reads `gradient_accumulation_steps` at the beginning of each step and `sync_gradients`
    at the end of each backward pass. All ranks must have equal values.
    """

    @property
    def gradient_accumulation_steps(self) -> int:
        """Passes of a full step. Each pass's loss is divided by this number."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current pass is the last of the step."""


class Averager(Protocol):
    """A data-parallel module."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the module averages the next pass."""


def check_smoothing(smoothing: float) -> float:
    return real("smoothing", smoothing, least=0.0, below=1.0, why="It is the weight of the past.")
