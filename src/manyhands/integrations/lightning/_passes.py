"""Which batches make a step? An int for `Trainer.accumulate_grad_batches` that counts from there.

Lightning steps whenever `batches % accumulate_grad_batches == 0`, counted from the beginning of the
epoch. If a 2 is replaced by a 3 after the first step, the next step has the batches 3 only, and the
one after it 4 to 6.

`StepPasses(p, start=s)` answers that modulo for a step of p passes that begins after s batches.
Lightning then clears the gradients, divides the losses and steps as it would with a plain number.
"""

from __future__ import annotations

from lightning.pytorch import Trainer


class StepPasses(int):
    """The number of passes of the step under way.

    >>> passes = StepPasses(3, start=2)
    >>> [batches % passes == 0 for batches in (2, 3, 4, 5)]
    [True, False, False, True]
    """

    start: int

    def __new__(cls, passes: int, *, start: int) -> StepPasses:
        made = super().__new__(cls, passes)
        made.start = start
        return made

    # Python asks the right operand first, if its class is derived from the left one's.
    def __rmod__(self, batches: int) -> int:
        return (batches - self.start) % int(self)


class LightningAccumulation:
    """Says how many passes a step has in a Trainer: see `scaling/_accumulation.py`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @property
    def sync_gradients(self) -> bool:
        return not self._trainer.fit_loop._should_accumulate()
