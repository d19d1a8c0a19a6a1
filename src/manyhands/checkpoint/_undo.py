"""Code that is not ours in the middle of a load, and how what it did is undone.

A scaler's, a scheduler's or a user's own `load_state_dict`, and a module's `set_extra_state`, may
refuse what they are given, and nobody knows before they have been asked. So they are asked first,
while the model and the optimizer are as they were, and each is given back its own state if it, or
one after it, or one on another rank, refuses.

An optimizer's own `load_state_dict` needs its tensors filled. Where it is torch's, nothing of it
can fail any more by then; where it is not, what is about to be filled is copied first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.dtensor import is_dtensor


@dataclass(frozen=True)
class Other:
    """Something with a state: what it is called, how it gives it and takes it, and the new one."""

    what: str
    give: Callable[[], Any]
    take: Callable[[Any], Any]
    state: Any


class Others:
    """All of them, in the order in which they are asked."""

    def __init__(self) -> None:
        self._all: list[Other] = []
        self._before: list[tuple[Other, Any]] = []

    def add(self, *others: Other) -> None:
        self._all += others

    def apply(self) -> None:
        for each in self._all:
            self._before.append((each, kept(each.give())))
            each.take(each.state)

    def undo(self) -> list[str]:
        """Give back what was there, last first; returns what could not be."""
        failed = []
        while self._before:
            each, before = self._before.pop()
            try:
                each.take(before)
            except Exception as error:
                failed.append(f"{each.what} ({type(error).__name__}: {error})")
        return failed


def kept(state: Any) -> Any:
    """A copy of a state that its owner cannot change any more."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        result = copy.copy(state)  # of its own class
        for key, value in state.items():
            result[key] = kept(value)
        return result
    if type(state) in (list, tuple):
        return type(state)(map(kept, state))
    return copy.deepcopy(state)


def has_own_loading(optimizer: Optimizer) -> bool:
    """Whether code that is neither torch's nor ours takes part when its state is loaded."""
    for each in (optimizer, getattr(optimizer, "optim", optimizer)):
        if each._optimizer_load_state_dict_pre_hooks or each._optimizer_load_state_dict_post_hooks:
            return True
        for name in ("load_state_dict", "__setstate__"):
            owners = [each, *type(each).__mro__]
            owner: Any = next(owner for owner in owners if name in vars(owner))
            module = getattr(vars(owner)[name], "__module__", None) or ""
            if not module.startswith(("torch.optim.", "manyhands.")):
                return True
    return False


class Before:
    """Optimizers and tensors as they are now."""

    def __init__(self, optimizers: Iterable[Optimizer], targets: Iterable[Any]) -> None:
        self._tensors = [
            (tensor, tensor.clone()) for target in targets for tensor in _memory(target)
        ]
        self._optimizers = []
        for optimizer in optimizers:
            for each in {
                id(o): o for o in (optimizer, getattr(optimizer, "optim", optimizer))
            }.values():
                groups = [(group, dict(group)) for group in each.param_groups]
                state = {param: dict(entries) for param, entries in each.state.items()}
                self._optimizers.append((each, dict(vars(each)), groups, state))

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for optimizer, attributes, groups, state in self._optimizers:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            for group, options in groups:
                group.clear()
                group.update(options)
            optimizer.state.clear()
            optimizer.state.update(state)


def _memory(target: Any) -> list[Tensor]:
    """The tensors here that a planner's target stands for."""
    if is_dtensor(target):
        return [target.to_local().detach()]
    return [part for _, part in target.parts]
