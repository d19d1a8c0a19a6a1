"""Hold the records of a check for the hypotheses about a difference."""

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.tools.check._compare import Difference, unequal
from manyhands.tools.check._records import Recording, SeenStep, Tensors
from manyhands.tools.check._report import Finding

# Where to look for each cause.
LOOK = {
    "different start": "the seed before the model is made, and who sends rank 0's parameters",
    "not averaged": "DDP around what is called; no_sync() on the last pass; gradients made later",
    "some not averaged": "parameters outside the module that DDP wraps, or left out of the average",
    "drift": "optimizer state and settings of each rank; parameters changed outside step()",
    "state differs": "code that only some ranks run; update it on every rank, or broadcast it",
    "not sharded": "a DistributedSampler, or a seed or an offset that depends on the rank",
    "same order": "sampler.set_epoch(epoch)",
    "clipping norm": "the order (average, then clip), and that the norm is of the whole gradient",
    "constant factor": "what the loss is divided by, and DDP's mean",
    "factor of some": "parameters that are averaged twice, summed, left out, or scaled by hand",
    "token weights": "dividing the summed loss by the tokens of all ranks and all passes",
    "passes weighted": "averaging again on every pass, and what each pass is divided by",
    "other update": "weight decay, momentum and other settings; parameters changed outside step()",
}


@dataclass
class Case:
    """The records that hypotheses look at."""

    ranks: list[Recording]
    gradient_of: Callable[[int, int, int], Tensors]  # of a step's single pass on a single rank
    one: Recording | None = None  # of one process with the ranks' batches
    difference: Difference | None = None  # between rank 0 and the one process

    @property
    def steps(self) -> list[SeenStep]:
        return self.ranks[0].steps

    def unequal(self, kind: str, number: int) -> list[str]:
        """Return the "before", "grads" or "params" of a step that differ between ranks."""
        return unequal([getattr(record.steps[number], kind) for record in self.ranks])

    def pair(self) -> tuple[SeenStep, SeenStep, Difference]:
        """Return the step that differs, of rank 0 and of one process, and the difference."""
        assert self.one is not None and self.difference is not None
        number = self.difference.step
        return self.steps[number], self.one.steps[number], self.difference


Hypothesis = Callable[[Case], Finding | None]


def finding(cause: str, text: str, place: str = "") -> Finding:
    return Finding(cause, text, place, LOOK.get(cause, ""))


def describe(names: list[str], total: int) -> str:
    """Describe some of `total` parameters."""
    if len(names) == total > 1:
        return "all parameters"
    if len(names) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return "".join(names)
