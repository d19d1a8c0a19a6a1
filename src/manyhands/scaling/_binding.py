"""Bind a rule to an optimizer, and replace methods of the optimizer.

A bound rule wraps the optimizer (`_optimizers/wrappers.py`) and calls the methods that `Binding`
stores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.wrappers import supports_amp, unwrap
from manyhands._ranks.agreement import agree, describe_tensors
from manyhands._ranks.ranks import RankGroup

KEY = "manyhands"  # the rule's entry in the optimizer's state dict
MARK = "_manyhands_rule"  # the optimizer's attribute with a reference to the rule
AMP = "_step_supports_amp_scaling"
PATCHED = ("step", "zero_grad", "state_dict", "load_state_dict", AMP)


def claimed_by(optimizer: Optimizer) -> Optimizer | None:
    mark = optimizer.__dict__.get(MARK)  # excludes attributes of an inner optimizer
    if mark is None:
        return None
    rule: Optimizer | None = mark()
    return rule


class Binding:
    """An optimizer's original methods, with a rule's changes to the instance."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.step = optimizer.step
        self.zero_grad = optimizer.zero_grad
        self.state_dict = optimizer.state_dict
        self.load_state_dict = optimizer.load_state_dict
        self.supports_amp = supports_amp(optimizer)
        self.patched = False
        self._before: dict[str, object] = {}  # instance attributes replaced by `patch`

    def claim(self, rule: Optimizer) -> None:
        """Store a reference to the rule, for `rule_of` and to prevent a second rule."""
        setattr(self.optimizer, MARK, weakref.ref(rule))  # weak: no cycle

    def patch(self, rule: Optimizer) -> None:
        """Replace the optimizer's methods by the rule's, as adaptdl does, until `release`.

        The replaced `state_dict` and `load_state_dict` include the rule's state.
        """

        def forward(name: str) -> Callable[..., Any]:
            def call(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
                return getattr(rule, name)(*args, **kwargs)

            return call

        def load_state_dict(_: Optimizer, state_dict: StateDict) -> None:
            # A bare run and torch.distributed.checkpoint save only the optimizer's state.
            if KEY in state_dict:
                rule.load_state_dict(dict(state_dict))
            else:
                self.load_state_dict(dict(state_dict))

        functions = {name: forward(name) for name in ("step", "zero_grad", "state_dict")}
        functions["load_state_dict"] = load_state_dict
        self.patched = True
        attributes = self.optimizer.__dict__
        # A scheduler may have replaced `step` on the instance.
        self._before = {name: attributes[name] for name in PATCHED if name in attributes}
        for name, function in functions.items():
            # Bound methods, because schedulers wrap `optimizer.step.__func__`.
            setattr(self.optimizer, name, MethodType(function, self.optimizer))
        setattr(self.optimizer, AMP, True)

    def release(self) -> None:
        attributes = self.optimizer.__dict__
        attributes.pop(MARK, None)
        if self.patched:
            for name in PATCHED:
                attributes.pop(name, None)
            attributes.update(self._before)
        self.patched = False

    def is_initializing_state(self) -> bool:
        """Return whether torch.distributed.checkpoint lets the optimizer create state.

        It calls `step` at learning rate 0 with zero gradients, after no backward pass.
        """
        if self.optimizer.state:
            return False
        for group in self.optimizer.param_groups:
            if float(group["lr"]) != 0.0:
                return False
            for param in group["params"]:
                if param.requires_grad and param.grad is None:
                    return False
        return True


def check_bindable(optimizer: Optimizer, rule: str, rules: type[Optimizer]) -> None:
    """Raise if this is not an optimizer, or if a rule wraps it already."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{rule} wraps a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    for each in unwrap(optimizer):
        if isinstance(each, rules):
            raise TypeError(f"{type(each).__name__} wraps already: wrap the bare optimizer once.")
    other = claimed_by(optimizer)
    if other is not None:
        name = type(other).__name__
        raise RuntimeError(f"the optimizer is wrapped by a {name} already: call its unhook().")


def check_ranks_agree(
    ranks: RankGroup, params: Sequence[Tensor], options: Mapping[str, float], kind: str
) -> None:
    """Raise on every rank if ranks have different parameters or options."""
    if not params:
        raise ValueError("the optimizer has no parameters: every group is empty.")
    facts = {**options, "number of parameters": len(params), "parameters": describe_tensors(params)}
    agree(ranks, facts, f"Build the same model, optimizer and {kind} on every rank.")
