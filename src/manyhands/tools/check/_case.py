"""Collect the records of a check for hypotheses about a difference."""

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.tools.check._compare import Difference, unequal
from manyhands.tools.check._records import Recording, SeenStep, Tensors
from manyhands.tools.check._report import Finding


@dataclass
class Case:
    ranks: list[Recording]
    gradient_of: Callable[[int, int, int], Tensors]  # of a single pass, by step, rank and pass
    one: Recording | None = None  # of the replay
    difference: Difference | None = None  # between rank 0 and the replay

    @property
    def steps(self) -> list[SeenStep]:
        return self.ranks[0].steps

    def unequal(self, kind: str, number: int) -> list[str]:
        """Return the "before", "grads" or "params" of a step that differ between ranks."""
        return unequal([getattr(record.steps[number], kind) for record in self.ranks])

    def pair(self) -> tuple[SeenStep, SeenStep, Difference]:
        """Return the step of rank 0 and of the replay that differs, and the difference."""
        assert self.one is not None and self.difference is not None
        number = self.difference.step
        return self.steps[number], self.one.steps[number], self.difference


Hypothesis = Callable[[Case], Finding | None]
