"""The layers of an optimizer: a scaling rule, blocks, and the optimizer that has the state.

Rule and blocks go around each other in either order, and a trainer's wrapper may be outermost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from manyhands._core.wrapper import unwrap
from manyhands.blocks._optimizer import Blocks
from manyhands.scaling._optimizer import ScalingRuleBase


@dataclass(frozen=True)
class OptimizerLayers:
    """The rule and the blocks around an optimizer, if there are any, and the optimizer."""

    rule: ScalingRuleBase | None
    blocks: Blocks | None
    inner: Optimizer

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerLayers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. Save "
                "any other object that has a state_dict under a name of yours: mh.save(path, "
                "scaler=scaler)."
            )
        rule, blocks = None, None
        chain = unwrap(optimizer)  # outermost first
        for each in chain:
            if isinstance(each, Blocks):
                blocks = each
            if isinstance(each, ScalingRuleBase):
                rule = each
            else:
                # AdaptiveDataParallel does not wrap the optimizer; it patches its `step`, and
                # leaves a weak reference to the rule. In `vars`, because wrappers forward getattr.
                rule = vars(each).get("_manyhands_rule", lambda: None)() or rule
        return cls(rule, blocks, chain[-1])

    @property
    def class_name(self) -> str:
        """The class of the optimizer that the user asked for, whether OSS shards it or not."""
        return type(getattr(self.inner, "optim", self.inner)).__name__
