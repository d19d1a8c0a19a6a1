"""Bind a rule to an optimizer, and replace methods of the optimizer.

A bound rule is an optimizer around another one (`_optimizers/wrappers.py`). It calls the
optimizer's own methods, which are kept here: `patch` replaces them on the instance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.wrappers import params_of, supports_amp, unwrap
from manyhands._ranks.agreement import agree, describe_tensors
from manyhands._ranks.ranks import RankGroup
from manyhands.scaling._settings import Options
from manyhands.scaling._step import Batch

KEY = "manyhands"  # of the rule's entry in the optimizer's state dict
MARK = "_manyhands_rule"  # the optimizer's attribute that refers to the rule
AMP = "_step_supports_amp_scaling"
PATCHED = ("step", "zero_grad", "state_dict", "load_state_dict", AMP)


def claimed_by(optimizer: Optimizer) -> Optimizer | None:
    """Return the rule that `Binding.claim` marked the optimizer with, while the rule exists."""
    mark = optimizer.__dict__.get(MARK)  # not that of an optimizer inside
    if mark is None:
        return None
    rule: Optimizer | None = mark()
    return rule


class Binding:
    """A rule's hold on an optimizer: its own methods, and what was changed on it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.step = optimizer.step
        self.zero_grad = optimizer.zero_grad
        self.state_dict = optimizer.state_dict
        self.load_state_dict = optimizer.load_state_dict
        self.supports_amp = supports_amp(optimizer)
        self.patched = False
        self._before: dict[str, object] = {}  # attributes of the instance that `patch` has replaced

    def claim(self, rule: Optimizer) -> None:
        """Mark the optimizer as this rule's: `rule_of` finds it, and a second rule is refused."""
        setattr(self.optimizer, MARK, weakref.ref(rule))  # weak: no cycle

    def patch(self, rule: Optimizer) -> None:
        """Make the optimizer's own methods the rule's, as adaptdl does, until `release`.

        `optimizer.step()` and `.zero_grad()` become the rule's. So do `state_dict` and
        `load_state_dict`: a loop that steps the optimizer also saves it, and statistics and
        progress belong to what is saved.
        """

        def forward(name: str) -> Callable[..., Any]:
            def call(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
                return getattr(rule, name)(*args, **kwargs)

            return call

        def load_state_dict(_: Optimizer, state_dict: StateDict) -> None:
            # Without our entry (of a bare run, or from torch.distributed.checkpoint) it is the
            # optimizer's alone: statistics and progress stay as they are.
            if KEY in state_dict:
                rule.load_state_dict(dict(state_dict))
            else:
                self.load_state_dict(dict(state_dict))

        functions = {name: forward(name) for name in ("step", "zero_grad", "state_dict")}
        functions["load_state_dict"] = load_state_dict
        self.patched = True
        attributes = self.optimizer.__dict__
        # a scheduler may have put another `step` on the optimizer before
        self._before = {name: attributes[name] for name in PATCHED if name in attributes}
        for name, function in functions.items():
            # bound methods: schedulers wrap `optimizer.step.__func__`
            setattr(self.optimizer, name, MethodType(function, self.optimizer))
        setattr(self.optimizer, AMP, True)

    def release(self) -> None:
        """Give the optimizer its own methods back, and remove the mark: the rule was unhooked."""
        attributes = self.optimizer.__dict__
        attributes.pop(MARK, None)
        if self.patched:
            for name in PATCHED:
                attributes.pop(name, None)
            attributes.update(self._before)
        self.patched = False

    def is_initializing_state(self) -> bool:
        """Return whether torch.distributed.checkpoint is making the optimizer create its state.

        It does so with a step at learning rate 0 along gradients that it has set to zero, without
        a backward pass.
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
    """Raise if this is no optimizer, or one that another rule wraps already.

    `rule` is the name of the rule's class, and `rules` the base of all of them.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{rule} wraps a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    for each in unwrap(optimizer):
        if isinstance(each, rules):
            raise TypeError(f"{type(each).__name__} wraps already: wrap the bare optimizer once.")
    other = claimed_by(optimizer)
    if other is not None:
        name = type(other).__name__
        raise RuntimeError(f"the optimizer is wrapped by a {name} already: unhook() that first.")


def check_ranks_agree(
    optimizer: Optimizer, ranks: RankGroup, batch: Batch, options: Options
) -> None:
    """Raise on every rank if they have other options or other parameters."""
    groups = optimizer.param_groups
    params = params_of(groups)
    scale = batch.scale_for(batch.passes)
    passes = 0.0 if batch.loop.counts else float(batch.passes)
    claims = {
        "num_gradients_to_accumulate": passes,
        "scale": scale,
        "smoothing": batch.smoothing_for(scale),
    }
    for name, option in options.items():
        claims[name] = -1.0 if option.value is None else float(option.value)
    claims |= {
        "number of parameter groups": float(len(groups)),
        "number of parameters": float(len(params)),
        "number of elements": float(sum(param.numel() for param in params)),
    }
    if not params:
        raise ValueError("the optimizer has no parameters: every group is empty.")
    facts = {**claims, "parameters": describe_tensors(params), "short_step": batch.short_step}
    agree(ranks, facts, "Build the same model, optimizer and rule on every rank.")
