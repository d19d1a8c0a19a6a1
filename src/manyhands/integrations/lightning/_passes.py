"""Which batches make a step? An int for `Trainer.accumulate_grad_batches` that counts from there.

Lightning steps whenever `batches % accumulate_grad_batches == 0`, counted from the beginning of the
epoch, and after the epoch's last batch. So with 10 batches and 4 passes a step, the last step has 2
passes, whose losses were divided by 4. And if the 4 is replaced by a 3 after the first step, the
next step has the batches 5 and 6.

`StepPasses(p, start)` answers that modulo for a step of p passes that begins after `start` batches.
Lightning then clears the gradients, divides the losses and steps as it would with a plain number.
"""

from __future__ import annotations


class StepPasses(int):
    """The passes of the step under way; `usual` is how many a step has otherwise.

    >>> passes = StepPasses(3, start=4, usual=4)
    >>> [batches % passes == 0 for batches in (5, 6, 7)]
    [False, False, True]
    """

    start: int
    usual: int

    def __new__(cls, passes: int, *, start: int, usual: int) -> StepPasses:
        made = super().__new__(cls, passes)
        made.start, made.usual = start, usual
        return made

    # Python asks the right operand first, if its class is derived from the left one's.
    def __rmod__(self, batches: int) -> int:
        return (batches - self.start) % int(self)


def usual_passes(passes: int) -> int:
    """Return how many passes a whole step has."""
    return passes.usual if isinstance(passes, StepPasses) else passes


def next_passes(usual: int, batch: int, batches: float) -> int:
    """Return the passes of the step that begins with this batch of an epoch of so many batches.

    >>> next_passes(4, batch=8, batches=10)
    2
    >>> next_passes(4, batch=8, batches=float("inf"))
    4
    """
    return max(1, int(min(usual, batches - batch)))
