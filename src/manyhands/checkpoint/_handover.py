"""Hand a saved state to code that may refuse it, so that a refusal changes nothing.

A `load_state_dict` of a scaler, a scheduler or a user's object, and a module's `set_extra_state`,
may refuse a state, and only calling them shows it. So they are called first, while the model and
the optimizer are unchanged (`ForeignStates`). If a later step fails on any rank, each gets its
earlier state back.

An optimizer gets its state last, once its tensors are filled, and so is the model. By then torch's
optimizers must not fail, so what would fail is tried before on a copy of the optimizer that has a
few elements (`check_continues`). For other optimizers than torch's, everything that is about to be
filled is copied first (`OptimizerSnapshot`).
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._optimizers.several import optimizers_in
from manyhands._optimizers.state_parts import OptimizerStatePart, options_of, plain_optimizer
from manyhands.checkpoint._tensor_parts import TensorParts
from manyhands.checkpoint._values import HasState

# How a step is computed. The copy's is computed in the plainest way, on the CPU.
PLAINEST = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}
TORCHS = "torch.optim."  # where the code of torch's optimizers is
OURS = (TORCHS, "manyhands.")


@contextmanager
def explain_refusal(name: str) -> Iterator[None]:
    """Turn what foreign code raises for a state into a ValueError that says whose state it is."""
    try:
        yield
    except (OSError, ValueError, MemoryError, torch.OutOfMemoryError):
        raise  # a ValueError says so itself, and the others are not about the state
    except Exception as error:
        raise ValueError(
            f"{name} has refused its state: {type(error).__name__}: {error}"
        ) from error


# -- states that foreign code loads ----------------------------------------------------------------


@dataclass(frozen=True)
class ForeignState:
    """An object whose own code loads its state: how to read, how to set, and the new state."""

    name: str
    get: Callable[[], object]
    set: Callable[[Any], object]
    state: object


class ForeignStates:
    """All of them, in the order in which they are set."""

    def __init__(self) -> None:
        self._all: list[ForeignState] = []
        self._before: list[tuple[ForeignState, object]] = []

    def add(self, *others: ForeignState) -> None:
        self._all += others

    def apply(self) -> None:
        """Load all states into their objects, and remember what these had before."""
        for each in self._all:
            # Noted before it is set: code that raises may have changed something by then.
            self._before.append((each, copy_state(each.get())))
            with explain_refusal(each.name):
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


def check_kinds(name: str, holder: HasState, saved: object) -> None:
    """Raise ValueError if an object of torch's would take a state that it cannot work with.

    Its schedulers and scalers take any value, and fail at a later step.
    """
    if not type(holder).__module__.startswith("torch."):
        return
    here = holder.state_dict()
    if not isinstance(saved, dict):
        raise ValueError(f"the saved state of {name} must be a dict, got {saved!r:.80}.")
    for key in saved.keys() & here.keys():
        if not _is_of_kind(saved[key], here[key]):
            raise ValueError(
                f"the saved state of {name} does not fit: {key!r} is {saved[key]!r:.80}, and "
                f"{here[key]!r:.80} here."
            )


def _is_of_kind(saved: object, here: object) -> bool:
    """Return whether a saved value may take the place of another; None may be anything."""
    kinds = [_kind_of(each) for each in (saved, here)]
    if kinds == ["list", "list"]:
        saved_items = set(map(_kind_of, cast(list[object], saved))) - {None}
        items_here = set(map(_kind_of, cast(list[object], here))) - {None}
        return not items_here or saved_items <= items_here
    return None in kinds or kinds[0] == kinds[1]


def _kind_of(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return "list"
    return "number" if isinstance(value, int | float | Tensor) else type(value).__name__


def copy_state(state: object) -> object:
    """Return a copy of a state that its owner cannot change any more."""
    if isinstance(state, Tensor):
        return state.detach().clone()  # deepcopy refuses tensors with a history
    if isinstance(state, dict):
        result = copy.copy(state)  # keeps the class of the dict
        for key, value in state.items():
            result[key] = copy_state(value)
        return result
    if type(state) is list:
        return [copy_state(each) for each in state]
    if type(state) is tuple:
        return tuple(copy_state(each) for each in state)
    return copy.deepcopy(state)


# -- torch's optimizers ----------------------------------------------------------------------------


def check_continues(
    optimizer: Optimizer,
    options: Sequence[Mapping[str, object]],
    entries: Sequence[tuple[str, OptimizerStatePart, Mapping[str, object]]],
) -> bool:
    """Raise ValueError if torch's optimizer could not go on from a state. Return False if unknown.

    `options` are those of each group, and `entries` a parameter's name, its place, and its state.
    """
    plain: Optimizer | None = plain_optimizer(optimizer)
    if plain is None:  # this rank has no parameters
        return True
    if has_foreign_loading(optimizer):
        return False
    owners = [each for each in optimizers_in(plain) for _ in each.param_groups]
    group_of: list[int] = []
    for number, group in enumerate(optimizer.param_groups):
        group_of += [number] * len(group["params"])
    tried = set()
    for name, part, state in entries:
        number = group_of[part.index]
        trial = Trial(owners[number], part.like, state)
        if (number, trial.signature) in tried:
            continue
        tried.add((number, trial.signature))
        try:
            trial.run(options[number])
        except Exception as error:
            here = Trial(owners[number], part.like, part.entries)
            if not here.can_run(options_of(optimizer.param_groups[number])):
                return False  # it needs a closure, or sparse gradients
            raise ValueError(
                f"{type(owners[number]).__name__} cannot go on from the state of {name!r}: "
                f"{error!r:.200}"
            ) from error
    return True


class Trial:
    """A copy of an optimizer that steps one parameter of a few elements.

    Sizes are replaced by small ones, so that equal sizes stay equal, and different ones different.
    """

    def __init__(self, optimizer: Optimizer, like: Tensor, state: Mapping[str, object]) -> None:
        self._optimizer = optimizer
        self._state = state
        self._dtype = like.dtype
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        sizes = {*like.shape}.union(*(each.shape for each in tensors.values()))
        small = {0: 0, 1: 1}
        for size in sorted(sizes - {0, 1}):
            small[size] = len(small)
        self._shape = [small[size] for size in like.shape]
        self._tensors = {
            name: ([small[size] for size in each.shape], each.dtype)
            for name, each in tensors.items()
        }
        # Parameters that differ in nothing else are tried once.
        self.signature = repr((self._shape, self._dtype, {**state, **self._tensors}))

    @torch.no_grad()
    def run(self, options: Mapping[str, object]) -> None:
        """Load the state, and take a step."""
        param = torch.zeros(self._shape, dtype=self._dtype, device="cpu")
        param.grad = torch.zeros_like(param)
        kind = type(self._optimizer)
        optimizer: Any = object.__new__(kind)
        # Not the methods that were replaced on the optimizer itself.
        own = {
            name: each for name, each in vars(self._optimizer).items() if not hasattr(kind, name)
        }
        vars(optimizer).update(own)
        plainest = {name: value for name, value in PLAINEST.items() if name in options}
        optimizer.param_groups = [{**options, **plainest, "params": [param]}]
        optimizer.state = defaultdict(dict)
        entries = dict(self._state)
        for name, (shape, dtype) in self._tensors.items():
            entries[name] = torch.zeros(shape, dtype=dtype, device="cpu")
        numbered = {**options, **plainest, "params": [0]}
        packed = {"state": {0: entries} if entries else {}, "param_groups": [numbered]}
        optimizer.load_state_dict(packed)
        if entries:
            restore_types(optimizer.state[param], entries)
        if _module_of(kind.__mro__, "step").startswith(TORCHS):
            # Without the hooks, which are the user's.
            inspect.unwrap(kind.step)(optimizer)

    def can_run(self, options: Mapping[str, object]) -> bool:
        """Return whether this can be tried at all."""
        try:
            self.run(options)
        except Exception:
            return False
        return True


def restore_types(held: dict[str, object], entries: Mapping[str, object]) -> None:
    """Give entries their saved type back: torch's loading converts them to the parameter's type."""
    for name, value in entries.items():
        now = held.get(name)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
            held[name] = value.to(now.device)


# -- other optimizers ------------------------------------------------------------------------------


def has_foreign_loading(optimizer: Optimizer) -> bool:
    """Return whether code that is neither torch's nor ours runs when its state is loaded."""
    for each in _that_load(optimizer):
        if each._optimizer_load_state_dict_pre_hooks or each._optimizer_load_state_dict_post_hooks:
            return True
        for name in ("load_state_dict", "__setstate__"):
            # The instance first: a method may have been patched.
            if not _module_of([each, *type(each).__mro__], name).startswith(OURS):
                return True
    return False


def _module_of(owners: Sequence[object], name: str) -> str:
    """Return the module of the method that the first of these has."""
    owner = next(owner for owner in owners if name in vars(owner))
    return getattr(vars(owner)[name], "__module__", None) or ""


def _that_load(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that load a state: a sharded one, the one in it, or each of several."""
    plain = plain_optimizer(optimizer)
    return optimizers_in(optimizer) if plain is optimizer else [optimizer, plain]


class OptimizerSnapshot:
    """A copy of optimizers, and of the tensors that are about to be filled."""

    def __init__(self, optimizers: Iterable[Optimizer], targets: Iterable[TensorParts]) -> None:
        self._tensors = [
            (tensor, tensor.clone()) for target in targets for _, tensor in target.slices
        ]
        self._optimizers = []
        for optimizer in optimizers:
            for each in _that_load(optimizer):
                groups = [(group, dict(group)) for group in each.param_groups]
                state = {param: copy.copy(entries) for param, entries in each.state.items()}
                records = [
                    (record, dict(vars(record)))
                    for record in vars(each).values()
                    if is_dataclass(record)
                ]
                self._optimizers.append((each, dict(vars(each)), records, groups, state))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the optimizers back as they were, after a load that failed halfway."""
        for tensor, before in self._tensors:
            tensor.copy_(before)
        for optimizer, attributes, records, groups, state in self._optimizers:
            # The same dicts are refilled: schedulers and wrappers hold references to them.
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            for record, values in records:
                vars(record).update(values)
            for group, options in groups:
                group.clear()
                group.update(options)
            optimizer.state.clear()
            optimizer.state.update(state)
