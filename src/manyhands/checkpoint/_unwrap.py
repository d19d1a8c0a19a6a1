"""What an optimizer is made of: a scaling rule, blocks, and the optimizer that has the state.

They go around each other in either order, and a trainer's wrapper may go around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from manyhands._core.wrapper import unwrap
from manyhands.blocks._optimizer import Blocks
from manyhands.scaling._optimizer import ScalingRuleBase


@dataclass(frozen=True)
class Parts:
    """The rule and the blocks around an optimizer, if there are such, and the optimizer."""

    rule: ScalingRuleBase | None
    blocks: Blocks | None
    inner: Optimizer

    @classmethod
    def of(cls, optimizer: Any) -> Parts:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}. What "
                "else has a state_dict is saved under a name of yours: mh.save(path, "
                "scaler=scaler)."
            )
        rule, blocks = None, None
        chain = unwrap(optimizer)
        for each in chain:
            if isinstance(each, Blocks):
                blocks = each
            if isinstance(each, ScalingRuleBase):
                rule = each
            else:  # a rule that has taken its step's place, as AdaptiveDataParallel lets it
                rule = vars(each).get("_manyhands_rule", lambda: None)() or rule
        return cls(rule, blocks, chain[-1])

    @property
    def class_name(self) -> str:
        """Of the optimizer that the user asked for, sharded or not."""
        return type(getattr(self.inner, "optim", self.inner)).__name__
