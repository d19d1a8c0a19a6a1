"""Step a learning-rate schedule by progress.

Progress is the equivalent number of small-batch steps so far.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands._arguments import explained, real
from manyhands._optimizers.state_parts import SavedEntries, SavedState
from manyhands.scaling._rule_base import ScalingRuleBase, rule_of


class ProgressScheduler(LRScheduler):
    """Step a torch scheduler once per small-batch step (or epoch) of progress.

    A schedule written for the small batch then ends at the same progress at every scale, after
    fewer optimizer steps. `ProgressScheduler` is a torch scheduler, so trainers accept it.
    Additional calls of `step`, which some trainers make once per process, have no effect.

    >>> import torch, manyhands as mh
    >>> from torch.optim.lr_scheduler import CosineAnnealingLR
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mh.AdaScale(optimizer, num_gradients_to_accumulate=4)
    >>> schedule = mh.ProgressScheduler(CosineAnnealingLR(optimizer, T_max=50), optimizer, end=50)
    >>> while not schedule.done:
    ...     optimizer.zero_grad()
    ...     for x in torch.randn(4, 8, 4):
    ...         (model(x).square().mean() / 4).backward()
    ...     optimizer.step()
    ...     schedule.step()
    >>> optimizer.param_groups[0]["lr"]
    0.0

    Args:
        scheduler: a torch scheduler for `optimizer`.
        optimizer: the scaling rule that provides the progress.
        every: progress per step of the scheduler: 1 for schedules in steps, the number of small
            batches per epoch for schedules in epochs.
        end: progress at which training ends and `done` becomes true. The scheduler does not step
            beyond `end`, because some schedulers (such as OneCycleLR) would raise an error.
    """

    @explained
    def __init__(
        self,
        scheduler: LRScheduler,
        optimizer: Optimizer,
        *,
        every: float = 1.0,
        end: float | None = None,
    ) -> None:
        every = real("every", every, above=0.0)
        end = None if end is None else real("end", end, above=0.0)
        rule = rule_of(optimizer) if isinstance(optimizer, Optimizer) else None
        if not isinstance(rule, ScalingRuleBase):
            name = type(optimizer).__name__
            raise TypeError(
                f"ProgressScheduler requires an optimizer with a scaling rule, got {name}. Write "
                "ProgressScheduler(scheduler, optimizer) with optimizer = mh.AdaScale(optimizer)."
            )
        if isinstance(scheduler, Optimizer) or not hasattr(scheduler, "step"):
            raise TypeError(f"scheduler must be a torch scheduler, got {type(scheduler).__name__}.")
        # `LRScheduler.__init__` is not called: `scheduler` has set the initial learning rates.
        self.scheduler = scheduler
        self.optimizer = optimizer
        self._rule = rule
        self._every = every
        self._end = end
        # Skip progress from before this object was created.
        self._steps = int(rule.progress / every)
        self._step_count = 1  # torch's attribute; trainers increment it during accumulation

    @property
    def done(self) -> bool:
        """Whether the progress has reached `end`."""
        return self._end is not None and self._rule.progress >= self._end

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """Number of steps of the inner scheduler."""
        return self.scheduler.last_epoch

    @property
    def base_lrs(self) -> list[float | Tensor]:  # type: ignore[override]
        """The initial learning rates, by parameter group."""
        return self.scheduler.base_lrs

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the current learning rates by parameter group, without the rule's factors."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float | Tensor]:
        """Return the inner scheduler's `get_lr()`."""
        return self.scheduler.get_lr()

    def step(self, *args: Any) -> None:
        """Step the scheduler up to the current progress.

        `args` are passed on, for example ReduceLROnPlateau's metric.
        """
        progress = self._rule.progress
        if self._end is not None:
            progress = min(progress, self._end)
        # The tolerance absorbs rounding errors in the sum of gains.
        while self._steps + 1 <= progress / self._every + 1e-9:
            self.scheduler.step(*args)
            self._steps += 1

    def state_dict(self) -> dict[str, object]:
        """Return the inner scheduler's state with the number of steps."""
        return {"scheduler": self.scheduler.state_dict(), "steps": self._steps}

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore the state of a `ProgressScheduler` or a plain scheduler, at any scale."""
        if is_by_progress(state_dict):
            saved = SavedEntries(state_dict, type(self).__name__)
            steps = saved.whole("steps")
            _ = saved.part("scheduler")
            self.scheduler.load_state_dict(state_dict["scheduler"])
            self._steps = steps
        else:
            self.scheduler.load_state_dict(dict(state_dict))
            self._steps = self.scheduler.last_epoch


def is_by_progress(state_dict: SavedState) -> bool:
    return "last_epoch" not in state_dict  # all states of torch's schedulers have this entry
