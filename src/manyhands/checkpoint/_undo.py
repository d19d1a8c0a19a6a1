"""Run foreign code in the middle of a load, and undo it if the load fails.

A `load_state_dict` of a scaler, a scheduler or a user's object, and a module's `set_extra_state`,
may refuse a state, and only calling them shows it. So they are called first, while the model and
the optimizer are unchanged. If one of them raises, on any rank, or a later step does, each gets its
own earlier state back.

An optimizer's `load_state_dict` needs its tensors filled first. torch's own cannot fail any more by
then. If it is not torch's, everything that is about to be filled is copied before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.sharded import is_dtensor
from manyhands._core.state_parts import plain_optimizer


@dataclass(frozen=True)
class ForeignState:
    """An object whose own code loads its state: how to read, how to set, and the new state."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any


class ForeignStates:
    """All of them, in the order in which they are set."""

    def __init__(self) -> None:
        self._all: list[ForeignState] = []
        self._before: list[tuple[ForeignState, Any]] = []

    def add(self, *others: ForeignState) -> None:
        self._all += others

    def apply(self) -> None:
        for each in self._all:
            # Noted before it is set: code that raises may have changed something by then.
            self._before.append((each, copy_state(each.get())))
            each.set(each.state)

    def undo(self) -> list[str]:
        """Set the earlier states, last first; return the objects that refused theirs."""
        failed = []
        while self._before:
            each, before = self._before.pop()
            try:
                each.set(before)
            except Exception as error:
                failed.append(f"{each.name} ({type(error).__name__}: {error})")
        return failed


def copy_state(state: Any) -> Any:
    """Return a copy of a state that its owner cannot change any more."""
    if isinstance(state, Tensor):
        return state.detach().clone()  # deepcopy refuses tensors with a history
    if isinstance(state, dict):
        result = copy.copy(state)  # keeps the class of the dict
        for key, value in state.items():
            result[key] = copy_state(value)
        return result
    if type(state) in (list, tuple):
        return type(state)(map(copy_state, state))
    return copy.deepcopy(state)


def has_foreign_loading(optimizer: Optimizer) -> bool:
    """Return whether code that is neither torch's nor ours runs when its state is loaded."""
    for each in (optimizer, plain_optimizer(optimizer)):  # both of them load
        if each._optimizer_load_state_dict_pre_hooks or each._optimizer_load_state_dict_post_hooks:
            return True
        for name in ("load_state_dict", "__setstate__"):
            # The instance first: a method may have been patched.
            owners = [each, *type(each).__mro__]
            owner: Any = next(owner for owner in owners if name in vars(owner))
            module = getattr(vars(owner)[name], "__module__", None) or ""
            if not module.startswith(("torch.optim.", "manyhands.")):
                return True
    return False


class OptimizerSnapshot:
    """A copy of optimizers, and of the tensors that are about to be filled."""

    def __init__(self, optimizers: Iterable[Optimizer], targets: Iterable[Any]) -> None:
        self._tensors = [
            (tensor, tensor.clone()) for target in targets for tensor in _tensors_of(target)
        ]
        self._optimizers = []
        for optimizer in optimizers:
            # By id, so that an optimizer that is not sharded comes once.
            for each in {id(o): o for o in (optimizer, plain_optimizer(optimizer))}.values():
                groups = [(group, dict(group)) for group in each.param_groups]
                state = {param: dict(entries) for param, entries in each.state.items()}
                self._optimizers.append((each, dict(vars(each)), groups, state))

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for optimizer, attributes, groups, state in self._optimizers:
            # The same dicts are refilled: schedulers and wrappers hold references to them.
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            for group, options in groups:
                group.clear()
                group.update(options)
            optimizer.state.clear()
            optimizer.state.update(state)


def _tensors_of(target: Any) -> list[Tensor]:
    """Return the memory on this rank that the planner would fill."""
    if is_dtensor(target):
        return [target.to_local().detach()]
    return [elements for _, elements in target.slices]
