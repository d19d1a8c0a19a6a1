"""Which steps are measured, if not every one?

With `measure_every=k` a rule measures one step in k. That step stands for k steps, so that the
averages look back over as many steps as before: with theta the weight of the past in one step,

    every step      average = theta   average + (1 - theta  ) estimate
    one step in k   average = theta^k average + (1 - theta^k) estimate

In the steps between, no norm is taken and nothing is sent. They use the averages as they are.

Averages look back over about M = 1 / (1 - theta) steps. They must rest on enough measured steps, so
k is never more than M / `LEAST`. Every step is measured while the averages hold fewer than M steps,
and while gradients are not finite.

**The ranks measure the same steps.** If one of them sent its numbers and the others did not, it
would wait for them, and they for its gradients. So k is chosen in a measured step, from numbers
that all ranks have alike, and travels in that step's claims (`RankClaims.next_measured`). Steps are
then counted by last backward passes, which DDP keeps in lockstep, and not by calls of `step()`.
Nothing that a rank does by itself in between (`set_scale`, a `Ramp`, a step left out) changes the
choice. Ranks that have come to disagree notice it in the next measured step.

Loading a state is the exception, because it brings a position within the period. An object takes it
over only if it has not run a step yet. Its first step then sends claims without norms, a *check*.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands._core.modules import modules_holding
from manyhands._core.state_parts import SavedState

LEAST = 100  # measured steps that an average looks back over, if not every step is measured
LARGEST = 16  # the largest k


def parse_measure_every(measure_every: float) -> int:
    """Return k for `measure_every`, or raise."""
    whole = isinstance(measure_every, (int, float)) and not isinstance(measure_every, bool)
    k = int(measure_every) if whole and 1 <= measure_every <= LARGEST else 0
    if k != measure_every or k == 0:
        raise ValueError(
            f"measure_every must be a whole number from 1 to {LARGEST}, got {measure_every!r}. "
            "With 4, one step in four is measured once the averages are settled; 1 measures all."
        )
    return k


def steps_between(k: int, memory: float, held: float) -> int:
    """Return how many steps a measured one may stand for: at most k.

    `memory` is how many steps the averages look back over, and `held` how many they have seen.

    >>> steps_between(4, memory=500, held=500), steps_between(4, memory=500, held=499)
    (4, 1)
    >>> steps_between(4, memory=250, held=1000), steps_between(4, memory=60, held=1000)
    (2, 1)
    """
    if held < memory - 0.5:
        return 1
    return max(1, min(k, int(memory / LEAST + 1e-6)))


@dataclass
class MeasuredSteps:
    """Where a run is between two measured steps. Counted at each step's last backward pass."""

    left: int = 0  # steps until the next that is measured; 0: this one is
    passed: int = 0  # steps since the last that was measured
    checked: bool = False  # whether the ranks have compared claims since this object was made

    @property
    def due(self) -> bool:
        """Whether the step under way, or the next, is measured."""
        return self.left == 0

    @property
    def sends(self) -> bool:
        """Whether the ranks exchange claims in this step: it is measured, or a check."""
        return self.left == 0 or not self.checked

    @property
    def stands_for(self) -> int:
        """How many steps this one stands for, if it is measured."""
        return self.passed + 1

    def next_measured(self, period: int) -> int:
        """Return in how many steps the next is measured, after one that has sent its claims.

        `period` is how many steps the next measured one is to stand for.
        """
        return min(period, self.left or period)

    def count(self, next_measured: int | None = None) -> None:
        """Count a step whose last pass has ended; if it has sent its claims, with its choice."""
        self.passed = 0 if self.due else self.passed + 1
        if next_measured is None:
            self.left -= 1
        else:
            self.left, self.checked = next_measured - 1, True

    def to_state(self) -> list[int]:
        """Return what a bitwise continuation needs."""
        return [self.left, self.passed]

    @classmethod
    def parse_state(cls, state: SavedState) -> MeasuredSteps:
        """Return the position in a state dict: of an older release, the beginning."""
        left, passed = state.get("between", (0, 0))
        if not (0 <= int(left) <= LARGEST and 0 <= int(passed) <= LARGEST):
            raise ValueError(f"there are {left} and {passed} steps around a measured one")
        return cls(int(left), int(passed))


class NoSync:
    """Whether the pass under way is inside DDP's `no_sync()`: asked where no norm can tell.

    If the last pass of a step is, the gradients stay this rank's own, and from the next pass on it
    is one step ahead of the others.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._modules: list[weakref.ref[nn.Module]] | None = None  # None: not searched yet

    def __call__(self) -> bool:
        if self._modules is None:
            found = modules_holding(self._params, _is_ddp)
            self._modules = [weakref.ref(module) for module, _ in found]
        return any(
            module is not None and not module.require_backward_grad_sync
            for module in (each() for each in self._modules)
        )


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)
