"""Adapt rules to loops that decide during a step which pass is the last."""

from __future__ import annotations

from typing import SupportsIndex

from manyhands._arguments import whole
from manyhands._optimizers.foreign import PreparedOptimizer
from manyhands.scaling._settings import PASSES, PER_STEP, Accumulation, Averager
from manyhands.scaling._step import Loop


class CountingLoop(Loop):
    """Count passes until the module averages. `Measurement` divides their sum."""

    counts = True

    def __init__(self, module: Averager) -> None:
        if not hasattr(module, "require_backward_grad_sync"):
            why = "has no require_backward_grad_sync: use AdaptiveDataParallel."
            raise TypeError(f"{type(module).__name__} {why}")
        self.module: Averager = module

    def is_last(self) -> bool:
        return self.module.require_backward_grad_sync


class FollowingLoop(Loop):
    """Follow an `Accumulation`. With `in_every_pass`, its loop calls `step()` after every pass."""

    decides = True

    def __init__(self, accumulation: Accumulation, *, in_every_pass: bool = False) -> None:
        self._accumulation = accumulation
        self._in_every_pass = in_every_pass

    def passes(self) -> int:
        return self._accumulation.gradient_accumulation_steps

    def is_last(self) -> bool:
        return self._accumulation.sync_gradients

    @property
    def in_mid_step(self) -> bool:
        return super().in_mid_step or (self._in_every_pass and not self.is_last())


def prepared_loop(prepared: PreparedOptimizer, declared: int) -> FollowingLoop | None:
    """Return a prepared optimizer's loop; None if the declared number of passes applies."""
    passes = prepared.loop.gradient_accumulation_steps
    if declared not in (1, passes):
        if passes == 1:
            return None
        raise ValueError(
            f"{PASSES}={declared}, but the trainer's loop accumulates {passes} passes. "
            "Omit the argument."
        )
    return FollowingLoop(prepared.loop, in_every_pass=True)


def passes_and_loop(passes: SupportsIndex | Accumulation) -> tuple[int, Loop]:
    if isinstance(passes, Accumulation):
        return passes.gradient_accumulation_steps, FollowingLoop(passes)
    return whole(PASSES, passes, least=1, why=PER_STEP), Loop()
