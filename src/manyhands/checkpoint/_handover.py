"""Pass saved states to code that may refuse a state, and undo after a refusal.

The `load_state_dict` of a scaler, a scheduler or a user's object, or a module's `set_extra_state`,
may refuse a state. So these are called before model and optimizer change (`ForeignStates`), and
restored if a later step fails on any rank.

An optimizer receives the state last, after its tensors and the model are filled. `check_continues`
tries the state earlier, on a copy of a torch optimizer with a few elements. Optimizers with a
custom `load_state_dict` are not tried.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._optimizers.several import optimizers_in
from manyhands._optimizers.state_parts import (
    IMPLEMENTATION,
    OptimizerStatePart,
    options_of,
    plain_optimizer,
)
from manyhands._tensors.trees import tensors_in

TORCHS = "torch.optim."  # module prefix of torch's optimizers
OURS = (TORCHS, "manyhands.")
Sketch: TypeAlias = dict[str, tuple[list[int], torch.dtype]]


@contextmanager
def explain_refusal(name: str) -> Iterator[None]:
    """Convert errors of foreign code to a ValueError that names the owner of the state."""
    try:
        yield
    except (OSError, ValueError, MemoryError, torch.OutOfMemoryError):
        raise  # ValueErrors are clear, and other errors are not about the state
    except Exception as error:
        raise ValueError(
            f"{name} has refused its state: {type(error).__name__}: {error}."
        ) from error


# -- states that foreign code loads ----------------------------------------------------------------


@dataclass(frozen=True)
class ForeignState:
    """A state that foreign code loads, with methods to read and set the object's state."""

    name: str
    get: Callable[[], object]
    set: Callable[[Any], object]
    state: object


class ForeignStates:
    def __init__(self) -> None:
        self.states: list[ForeignState] = []
        self._before: list[tuple[ForeignState, object]] = []

    def apply(self) -> None:
        """Load all states into their objects, and store the earlier states."""
        for each in self.states:
            before = each.get()
            # deepcopy rejects tensors with an autograd history.
            tensors = {id(tensor): tensor.detach().clone() for tensor in tensors_in(before)}
            # Stored before the call: code that raises may have changed the object.
            self._before.append((each, copy.deepcopy(before, tensors)))
            with explain_refusal(each.name):
                each.set(each.state)

    def undo(self) -> None:
        """Restore the earlier states in reverse. Raise RuntimeError if an object refuses."""
        failed = []
        while self._before:
            each, before = self._before.pop()
            try:
                each.set(before)
            except Exception as error:
                failed.append(f"{each.name} ({type(error).__name__}: {error})")
        if failed:
            raise RuntimeError(f"the load failed, and {', '.join(failed)} could not be restored.")


# -- torch's optimizers ----------------------------------------------------------------------------


def check_continues(
    optimizer: Optimizer,
    options: Sequence[Mapping[str, object]],
    entries: Sequence[tuple[str, OptimizerStatePart, Mapping[str, object]]],
) -> None:
    """Raise ValueError if torch's optimizer cannot step from a state."""
    plain: Optimizer | None = plain_optimizer(optimizer)
    if plain is None or has_foreign_loading(optimizer):  # None: this rank has no parameters
        return
    owners = [each for each in optimizers_in(plain) for _ in each.param_groups]
    group_of: list[int] = []
    for number, group in enumerate(optimizer.param_groups):
        group_of += [number] * len(group["params"])
    tried = set()
    for name, part, state in entries:
        number = group_of[part.index]
        sketch = _sketch(part.like, state)
        signature = (number, repr({**state, **sketch}))
        if signature in tried:
            continue
        tried.add(signature)
        owner = owners[number]
        try:
            _try_step(owner, sketch, state, options[number])
        except Exception as error:
            here = options_of(optimizer.param_groups[number])
            try:
                _try_step(owner, _sketch(part.like, part.entries), part.entries, here)
            except Exception:
                return  # it needs a closure or sparse gradients
            raise ValueError(
                f"{type(owner).__name__} cannot continue from the state of {name!r}: {error!r:.200}"
            ) from error


def _sketch(like: Tensor, state: Mapping[str, object]) -> Sketch:
    """Return the shape and type of each tensor by entry; "" is the parameter.

    Sizes are replaced by small sizes that preserve equality.
    """
    tensors = {"": like}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value
    small = {0: 0, 1: 1}
    for size in sorted({size for tensor in tensors.values() for size in tensor.shape}):
        small.setdefault(size, len(small))
    result = {}
    for name, tensor in tensors.items():
        result[name] = ([small[size] for size in tensor.shape], tensor.dtype)
    return result


@torch.no_grad()
def _try_step(
    optimizer: Optimizer, sketch: Sketch, state: Mapping[str, object], options: Mapping[str, object]
) -> None:
    """Load a state into a copy of an optimizer with a single small parameter, and step."""
    entries = dict(state)
    for name, (shape, dtype) in sketch.items():
        entries[name] = torch.zeros(shape, dtype=dtype, device="cpu")
    param: Any = entries.pop("")
    param.grad = torch.zeros_like(param)
    kind = type(optimizer)
    trial: Any = object.__new__(kind)
    for name, value in vars(optimizer).items():
        if not hasattr(kind, name):  # skip methods that were replaced on the instance
            setattr(trial, name, value)
    group = dict(options)
    for name in IMPLEMENTATION:  # use the simplest implementation
        if name in group:
            group[name] = False
    trial.param_groups = [{**group, "params": [param]}]
    trial.state = defaultdict(dict)
    trial.load_state_dict({"state": {0: entries}, "param_groups": [{**group, "params": [0]}]})
    restore_types(trial.state[param], entries)
    if _module_of(kind.step).startswith(TORCHS):
        # Without the user's hooks.
        inspect.unwrap(kind.step)(trial)


def restore_types(held: dict[str, object], entries: Mapping[str, object]) -> None:
    """Restore the type of entries, which torch's loading converts to the parameter's type."""
    for name, value in entries.items():
        now = held.get(name)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
            held[name] = value.to(now.device)


def has_foreign_loading(optimizer: Optimizer) -> bool:
    plain = plain_optimizer(optimizer)
    for each in optimizers_in(optimizer) if plain is optimizer else [optimizer, plain]:
        if each._optimizer_load_state_dict_pre_hooks or each._optimizer_load_state_dict_post_hooks:
            return True
        for method in (each.load_state_dict, each.__setstate__):
            if not _module_of(method).startswith(OURS):
                return True
    return False


def _module_of(method: object) -> str:
    return getattr(method, "__module__", None) or ""
