"""Make an optimizer's own `step` and `zero_grad` a rule's, as adaptdl does, and undo it."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch.optim import Optimizer

NAMES = ("step", "zero_grad", "_step_supports_amp_scaling")


class OptimizerPatch:
    """`optimizer.step()` is `rule.step()` from now on, until `undo`."""

    def __init__(self, optimizer: Optimizer, rule: Optimizer) -> None:
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return rule.step(*args, **kwargs)

        def zero_grad(_: Optimizer, *args: Any, **kwargs: Any) -> None:
            rule.zero_grad(*args, **kwargs)

        self._of = vars(optimizer)
        self._before = {name: self._of[name] for name in NAMES if name in self._of}
        patched = (MethodType(step, optimizer), MethodType(zero_grad, optimizer), True)
        self._of.update(zip(NAMES, patched, strict=True))

    def undo(self) -> None:
        for name in NAMES:
            self._of.pop(name, None)
        self._of.update(self._before)
