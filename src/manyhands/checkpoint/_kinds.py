"""Whether saved numbers, names and lists are of the kind that the object here has.

torch's optimizers and schedulers take any state, and fail at the next step if a learning rate is a
word. What is not torch's may change its mind about kinds, and is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NEEDED_BY_ALL = ("lr",)
ENTRIES = ("tensor", "number", "None")  # of a parameter's state
DIFFERENT_SETS = ("LBFGS",)  # optimizers that keep all in the first parameter's state


def check_kinds(here: Any, saved: Any, what: str, or_none: bool = False) -> None:
    """Raise ValueError where `saved` cannot stand for `here`, which is called `what`."""
    there, mine = _kind(saved), _kind(here)
    if mine == "None" or (or_none and there == "None"):
        return
    if there != mine:
        raise ValueError(
            f"{what} is {saved!r:.60} in the checkpoint, and {here!r:.60} here. Is it damaged? "
            "Build what was saved, or load another checkpoint."
        )
    if mine == "mapping":
        for name in here.keys() & saved.keys():
            check_kinds(here[name], saved[name], f"{what}[{name!r}]", or_none)
    elif mine == "list":
        if isinstance(here, tuple) and len(here) != len(saved):
            raise ValueError(f"{what} has {len(saved)} entries there, and {len(here)} here.")
        for one, other in zip(here, saved, strict=False):
            check_kinds(one, other, what, or_none)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return "number" if value.numel() == 1 else "tensor"
    if isinstance(value, int | float):
        return "number" if _fits(value) else "number beyond all others"
    for name, kinds in (("mapping", Mapping), ("list", (list, tuple)), ("text", str)):
        if isinstance(value, kinds):
            return name
    return type(value).__name__


def _fits(value: float) -> bool:
    try:
        return math.isfinite(value) or True
    except OverflowError:
        return False


def check_options(optimizer: Optimizer, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """The options of a parameter group. None stands for a number where it is the default."""
    defaults = optimizer.defaults
    for name in here.keys() & saved.keys():
        needed = name in NEEDED_BY_ALL or defaults.get(name) is not None
        check_kinds(here[name], saved[name], f"the option {name!r}", or_none=not needed)


def check_entries(
    optimizer: Optimizer,
    groups: Iterable[Iterable[str]],
    state: Mapping[str, Mapping[str, Any]],
    dims: Callable[[str], int],
    but: str,
) -> None:
    """Parameters of a group and of as many dimensions have the same entries, all of them known."""
    if not is_torchs(optimizer) or type(optimizer).__name__ in DIFFERENT_SETS:
        return
    for group in groups:
        first: dict[int, tuple[str, dict[str, str]]] = {}
        for name in group:
            entries = state.get(name)
            if not entries:
                continue
            kinds = {key: _kind_of_entry(told) for key, told in entries.items() if key != but}
            other, others = first.setdefault(dims(name), (name, kinds))
            unlike = {key for key in kinds.keys() & others if _unlike(kinds[key], others[key])}
            unlike |= kinds.keys() ^ others.keys()
            unlike |= {key for key, kind in kinds.items() if kind not in ENTRIES}
            if unlike:
                raise ValueError(
                    f"{sorted(unlike)[0]!r} in the checkpoint's state of {name!r} is not what it "
                    f"is for {other!r}, or cannot be. Load another checkpoint."
                )


def _kind_of_entry(told: Any) -> str:
    return str(told.get("$", "mapping")) if isinstance(told, Mapping) else _kind(told)


def _unlike(one: str, other: str) -> bool:
    return one != other and "None" not in (one, other)


def check_attributes(target: Any, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Of one of torch's, whose state becomes its attributes: no others, none of another kind."""
    what = type(target).__name__
    for name, value in saved.items():
        if name in here:
            check_kinds(here[name], value, f"{name!r} of the {what}")
        elif hasattr(target, name):
            raise ValueError(
                f"the checkpoint's state of the {what} has {name!r}, which is no part of it. Load "
                "another checkpoint."
            )


def check_state(target: Any, here: Mapping[str, Any], saved: Any, what: str) -> None:
    """Of another one of torch's. A GradScaler asks for each of its numbers."""
    check_kinds(here, saved, what)
    if isinstance(target, torch.amp.GradScaler) and (missing := here.keys() - saved.keys()):
        raise ValueError(
            f"{what} has no {sorted(missing)[0]!r} in the checkpoint. Was it a scaler with "
            "enabled=False? Then make this one so, or leave it out."
        )


def is_torchs(target: Any) -> bool:
    return type(target).__module__.startswith("torch.")
