"""Which micro-batches make a step? An int for a trainer's setting that counts from there.

Lightning and the Hugging Face Trainer step whenever `batches % passes == 0`, counted from the
beginning of the epoch. If a 2 is replaced by a 3 after the first step, the next step has batch 3
only, and the one after it 4 to 6.

`StepPasses(p, start=s)` answers that modulo for a step of p passes that begins after s batches. The
trainer then divides the losses and steps as it would with a plain number.
"""

from __future__ import annotations


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

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Save a plain number: trainers save their settings."""
        return int, (int(self),)
