"""Collect the records of a check for hypotheses about a difference."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from manyhands.tools.check._compare import Difference, unequal
from manyhands.tools.check._records import Recording, SeenStep, Tensors
from manyhands.tools.check._report import Finding

START_LIMIT = 1e-9  # relative distance of equal initial parameters


@dataclass
class Case:
    ranks: list[Recording]
    gradient_of: Callable[[int, int, int], Tensors]  # by step, rank and pass
    one: Recording | None = None  # of the replay
    difference: Difference | None = None  # between rank 0 and the replay

    @property
    def steps(self) -> list[SeenStep]:
        return self.ranks[0].steps

    @cached_property
    def unequal_start(self) -> list[str]:
        return unequal([record.start for record in self.ranks], START_LIMIT)

    @cached_property
    def untrained_copies(self) -> set[str]:
        """The names in `unequal_start` that no optimizer has and no backward pass reaches.

        The first update may overwrite an unequal weight average.
        """
        trained: set[str] = set()
        for record in self.ranks:
            for step in record.steps:
                trained.update(step.own, step.before, step.grads)
        return set(self.unequal_start) - trained

    def unequal(self, kind: str, number: int) -> list[str]:
        """Return the "before", "grads" or "params" of a step that differ between ranks."""
        names = unequal([getattr(record.steps[number], kind) for record in self.ranks])
        return [name for name in names if name not in self.untrained_copies]

    def pair(self) -> tuple[SeenStep, SeenStep, Difference]:
        """Return the first different step of rank 0 and of the replay, with the difference."""
        assert self.one is not None and self.difference is not None
        number = self.difference.step
        return self.steps[number], self.one.steps[number], self.difference


Hypothesis = Callable[[Case], Finding | None]
