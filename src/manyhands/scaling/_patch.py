"""Make an optimizer's own `step` and `zero_grad` a rule's, as adaptdl does, and undo it.

`state_dict` and `load_state_dict` become the rule's as well: who steps the optimizer also saves it,
and statistics and progress belong to what is saved.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch.optim import Optimizer

NAMES = ("step", "zero_grad", "state_dict", "load_state_dict", "_step_supports_amp_scaling")


class OptimizerPatch:
    """`optimizer.step()` is `rule.step()` from now on, until `undo`."""

    def __init__(self, optimizer: Optimizer, rule: Any) -> None:
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return rule.step(*args, **kwargs)

        def zero_grad(_: Optimizer, *args: Any, **kwargs: Any) -> None:
            rule.zero_grad(*args, **kwargs)

        def state_dict(_: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return rule.state_dict(*args, **kwargs)

        def load_state_dict(_: Optimizer, state_dict: dict[str, Any]) -> None:
            rule._load_optimizer(state_dict)

        self._of = vars(optimizer)
        self._before = {name: self._of[name] for name in NAMES if name in self._of}
        functions = (step, zero_grad, state_dict, load_state_dict)
        patched = (MethodType(function, optimizer) for function in functions)
        self._of.update(zip(NAMES, (*patched, True), strict=True))

    def undo(self) -> None:
        for name in NAMES:
            self._of.pop(name, None)
        self._of.update(self._before)
