"""Hand saved state to code that is not ours: check it first, and be able to undo it.

Check. torch's optimizers and schedulers accept any state, and fail at the next step if a learning
rate is a word. So saved numbers, names and lists must be of the kind that the object has now. An
object that is not torch's may change its kinds on purpose: not checked.

Undo. A `load_state_dict` of a scaler, a scheduler or a user's object, and a module's
`set_extra_state`, may refuse a state, and only calling them shows it. So they are called first,
while the model and the optimizer are unchanged. If one of them raises, on any rank, or a later step
does, each gets its own earlier state back.

An optimizer's `load_state_dict` needs its tensors filled first. torch's own cannot fail any more by
then. If it is not torch's, everything that is about to be filled is copied before.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.sharded import local_shard
from manyhands._core.state_parts import plain_optimizer
from manyhands.checkpoint._slices import Parts, TensorParts

# -- check -----------------------------------------------------------------------------------------

NEVER_NONE = ("lr",)  # options that may not be None, even if that is their default
#: Options that say how a step is computed, not what it computes. They keep the value that the
#: optimizer was made with: a run saved on a GPU may continue on a CPU, without fused kernels.
KEPT_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
ENTRY_KINDS = ("tensor", "number", "None")  # of an entry in a parameter's state
ALL_IN_FIRST = ("LBFGS",)  # optimizers that keep their whole state in the first parameter's


def check_kinds(here: object, saved: object, what: str, or_none: bool = False) -> None:
    """Raise ValueError if `saved` cannot replace `here`; `what` names it in the message."""
    saved_kind, kind = _kind(saved), _kind(here)
    if kind == "None" or (or_none and saved_kind == "None"):
        return
    if saved_kind != kind:
        raise ValueError(
            f"{what} is {_shown(saved)} in the checkpoint, and {_shown(here)} here. Is it damaged? "
            "Build what was saved, or load another checkpoint."
        )
    if isinstance(here, Mapping) and isinstance(saved, Mapping):
        for name in here.keys() & saved.keys():
            check_kinds(here[name], saved[name], f"{what}[{name!r}]", or_none)
    elif isinstance(here, list | tuple) and isinstance(saved, list | tuple):
        # A tuple such as Adam's betas has a fixed length; a list may grow.
        if isinstance(here, tuple) and len(here) != len(saved):
            raise ValueError(
                f"{what} has {len(saved)} entries in the checkpoint, and {len(here)} here. Build "
                "what was saved, or load another checkpoint."
            )
        for one, other in zip(here, saved, strict=False):
            check_kinds(one, other, what, or_none)


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:60]  # a tensor's repr has several lines


def _kind(value: object) -> str:
    if value is None:
        return "None"
    # A learning rate may be a tensor of one element in one run, and a float in another.
    if isinstance(value, Tensor):
        return "number" if value.numel() == 1 and not value.is_complex() else "tensor"
    if isinstance(value, int | float):
        return "number" if _fits_in_float(value) else "number that no float can hold"
    for name, kinds in (("mapping", Mapping), ("list", (list, tuple)), ("text", str)):
        if isinstance(value, kinds):
            return name
    return type(value).__name__


def _fits_in_float(value: float) -> bool:
    try:
        return math.isfinite(value) or True  # infinity is allowed; a huge int raises
    except OverflowError:
        return False


def check_group_options(
    optimizer: Optimizer, here: Mapping[str, object], saved: Mapping[str, object]
) -> None:
    """Check a parameter group's options. None may replace a number if it is the default."""
    defaults = optimizer.defaults
    for name in here.keys() & saved.keys():
        required = name in NEVER_NONE or defaults.get(name) is not None
        check_kinds(here[name], saved[name], f"the option {name!r}", or_none=not required)
    if is_from_torch(optimizer):
        try:  # the constructor checks ranges, which `load_state_dict` does not
            _optimizer_of_a_toy(type(optimizer), {**here, **saved}, dims=2)
        except ValueError as error:
            raise ValueError(
                f"the checkpoint has options that no {type(optimizer).__name__} takes: {error}. "
                "Load another checkpoint."
            ) from error


def check_entries(
    optimizer: Optimizer,
    groups: Iterable[Iterable[str]],
    options: Iterable[Mapping[str, object]],
    state: Mapping[str, Mapping[str, object]],
    dims: Callable[[str], int],
    skip: str,
) -> None:
    """Raise ValueError unless similar parameters have the same entries, and can be stepped.

    Parameters are similar if they are in one group and have as many dimensions: Adafactor, for
    instance, keeps rows and columns for matrices only. The entry `skip` is not looked at.
    """
    if not is_from_torch(optimizer) or type(optimizer).__name__ in ALL_IN_FIRST:
        return
    for group, group_options in zip(groups, options, strict=True):
        first: dict[int, tuple[str, dict[str, str]]] = {}  # by dimensions: a name, and its kinds
        tried: set[tuple[int, tuple[tuple[str, str], ...]]] = set()
        for name in group:
            entries = state.get(name)
            if not entries:
                continue  # frozen, or without a gradient so far
            kinds = {key: _kind_of_entry(meta) for key, meta in entries.items() if key != skip}
            other, others = first.setdefault(dims(name), (name, kinds))
            wrong = {key for key in kinds.keys() & others if _differ(kinds[key], others[key])}
            wrong |= kinds.keys() ^ others.keys()
            wrong |= {key for key, kind in kinds.items() if kind not in ENTRY_KINDS}
            if wrong:
                raise ValueError(
                    f"{sorted(wrong)[0]!r} in the checkpoint's state of {name!r} is not what it "
                    f"is for {other!r}, or is of an impossible kind. Load another checkpoint."
                )
            situation = dims(name), tuple(sorted(kinds.items()))
            if situation not in tried and not _can_step(
                type(optimizer), group_options, dims(name), kinds
            ):
                found = ", ".join(f"{key} (a {kind})" for key, kind in kinds.items())
                raise ValueError(
                    f"{type(optimizer).__name__} cannot go on with the checkpoint's state of "
                    f"{name!r}, which is {found}. Load another checkpoint."
                )
            tried.add(situation)


def _can_step(
    optimizer_class: type[Optimizer],
    options: Mapping[str, object],
    dims: int,
    kinds: Mapping[str, str],
) -> bool:
    """Try a step of a toy parameter whose state has entries of these kinds only.

    torch creates all entries at a parameter's first step, and trusts a loaded state to be whole.
    """
    try:
        optimizer = _optimizer_of_a_toy(optimizer_class, options, dims)
        optimizer.step()
    except Exception:  # such as SparseAdam, whose gradients are sparse: nothing is known
        return True
    (state,) = optimizer.state.values()
    for key, value in list(state.items()):
        if key not in kinds:
            del state[key]
        elif kinds[key] == "None":
            state[key] = None
        elif kinds[key] == "number" and isinstance(value, Tensor):
            state[key] = 1.0
    try:
        optimizer.step()
    except Exception:  # whatever torch raises where an entry is missing or no tensor
        return False
    return True


def _optimizer_of_a_toy(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], dims: int
) -> Optimizer:
    """Return an optimizer of one small parameter, which has a gradient of zeros."""
    toy = torch.nn.Parameter(torch.zeros((2,) * dims))
    toy.grad = torch.zeros_like(toy)
    known = inspect.signature(optimizer_class).parameters.keys() - set(KEPT_OPTIONS)
    return optimizer_class([toy], **{name: options[name] for name in known & options.keys()})


def _kind_of_entry(meta: object) -> str:
    return str(meta.get("$", "mapping")) if isinstance(meta, Mapping) else _kind(meta)


def _differ(one: str, other: str) -> bool:
    # None for one parameter and a tensor for the next: SGD's buffer before the first gradient.
    return one != other and "None" not in (one, other)


def check_attributes(
    target: object, here: Mapping[str, object], saved: Mapping[str, object]
) -> None:
    """Check the state of a scheduler of torch's, which turns every key into an attribute."""
    what = type(target).__name__
    for name, value in saved.items():
        if name in here:
            check_kinds(here[name], value, f"{name!r} of the {what}")
        elif hasattr(target, name):  # it would take the place of a method
            raise ValueError(
                f"the checkpoint's state of the {what} has {name!r}, which is not part of it. Load "
                "another checkpoint."
            )


def check_state_dict(target: object, here: Mapping[str, object], saved: Any, what: str) -> None:
    """Check the state of another object of torch's."""
    check_kinds(here, saved, what)
    # A GradScaler reads each of its numbers, and saves none of them while it is disabled.
    if isinstance(target, torch.amp.GradScaler) and (missing := here.keys() - saved.keys()):
        raise ValueError(
            f"{what} has no {sorted(missing)[0]!r} in the checkpoint. Was the saved scaler made "
            "with enabled=False? Then make this one so, or leave it out."
        )


def is_from_torch(target: object) -> bool:
    return type(target).__module__.startswith("torch.")


# -- undo ------------------------------------------------------------------------------------------


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


def has_foreign_loading(optimizer: Optimizer) -> bool:
    """Return whether code that is neither torch's nor ours runs when its state is loaded."""
    for each in (optimizer, plain_optimizer(optimizer)):  # both of them load
        if each._optimizer_load_state_dict_pre_hooks or each._optimizer_load_state_dict_post_hooks:
            return True
        for name in ("load_state_dict", "__setstate__"):
            # The instance first: a method may have been patched.
            owners = [each, *type(each).__mro__]
            owner: object = next(owner for owner in owners if name in vars(owner))
            module = getattr(vars(owner)[name], "__module__", None) or ""
            if not module.startswith(("torch.optim.", "manyhands.")):
                return True
    return False


class OptimizerSnapshot:
    """A copy of optimizers, and of the tensors that are about to be filled."""

    def __init__(self, optimizers: Iterable[Optimizer], targets: Iterable[Parts]) -> None:
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


def _tensors_of(target: Parts) -> list[Tensor]:
    """Return the memory on this rank that the planner would fill."""
    if isinstance(target, TensorParts):
        return [elements for _, elements in target.slices]
    return [local_shard(target).detach()]
