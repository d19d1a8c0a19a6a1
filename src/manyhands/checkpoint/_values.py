"""Values to JSON and back; the tensors among them go their own way.

What JSON has is itself: None, True, numbers, strings, lists, and dicts with strings for keys.
The rest is a dict that says under "$" what it is:

    {"$": "tensor", "key": ...}   in the checkpoint under that key
    {"$": "tuple", "items": [...]}, {"$": "dict", "items": [[key, value], ...]}, ...

Nothing is ever turned into code: what is in none of these forms cannot be saved.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.checkpoint._names import below

Put = Callable[[str, Tensor], str]  # path and tensor -> its key
Get = Callable[[str], Tensor]

SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "torch.Size": torch.Size,
}
MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
NOT_FINITE = ("nan", "inf", "-inf")
DEEPEST = 100  # containers in each other: so many always fit on the stack of Python


def encoded(value: Any, path: str, put: Put, depth: int = DEEPEST) -> Any:
    """A value as JSON; `put` takes its tensors. `path` is what the value is called in errors."""
    if depth < 0:
        raise ValueError(
            f"{path:.80}... is nested in more than {DEEPEST} containers, or contains itself. Save "
            "what it is made of."
        )

    def inner(value: Any, key: object) -> Any:
        return encoded(value, below(path, key), put, depth - 1)

    if isinstance(value, Tensor):
        return {"$": "tensor", "key": put(path, value)}
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": str(value)}
    if kind is list:
        return [inner(each, i) for i, each in enumerate(value)]
    if kind is dict and all(type(key) is str and key != "$" for key in value):
        return {key: inner(each, key) for key, each in value.items()}
    for name, sequence in SEQUENCES.items():
        if kind is sequence:
            return {"$": name, "items": [inner(each, i) for i, each in enumerate(value)]}
    for name, mapping in MAPPINGS.items():
        if kind is mapping or (name == "dict" and kind is defaultdict):
            pairs = enumerate(value.items())
            items = [[inner(k, f"{i}, the key"), inner(v, i)] for i, (k, v) in pairs]
            return {"$": name, "items": items}
    if kind is complex:
        return {"$": "complex", "value": [str(value.real), str(value.imag)]}
    if kind is bytes:
        return {"$": "bytes", "value": value.hex()}
    if kind is torch.dtype:
        return {"$": "dtype", "value": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$": "device", "value": str(value)}
    if has_state(value):
        return {"$": "state", "of": kind.__name__, "value": state_of(value, path, put, depth)}
    for plain in (bool, int, float, str):  # such as numpy's numbers
        if isinstance(value, plain):
            return encoded(plain(value), path, put, depth)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return encoded(value.item(), path, put, depth)
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, and only tensors, numbers, strings, "
        "lists, tuples, sets, dicts, and what has state_dict() and load_state_dict() can be saved. "
        "Save what it is made of."
    )


def state_of(value: Any, path: str, put: Put, depth: int) -> Any:
    state = value.state_dict()
    state = dict(state) if isinstance(state, OrderedDict) else state
    return encoded(state, path, put, depth - 1)


def has_state(value: Any) -> bool:
    """Whether it is something whose state is saved, and loaded in place."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def decoded(told: Any, get: Get, depth: int = DEEPEST) -> Any:
    """The value of such JSON; what had a state_dict comes as that.

    What `encoded` never writes is an error of some kind: `_schema.py` makes every value of an index
    once, before anything else looks at it.
    """
    if depth < 0:
        raise ValueError(f"nested in more than {DEEPEST} containers")

    def inner(told: Any) -> Any:
        return decoded(told, get, depth - 1)

    if isinstance(told, list):
        return [inner(each) for each in told]
    if not isinstance(told, Mapping):
        return told
    if "$" not in told:
        return {key: inner(each) for key, each in told.items()}
    name = told["$"]
    if name == "tensor":
        return get(told["key"])
    if name in SEQUENCES:
        return SEQUENCES[name](inner(each) for each in _list(told["items"]))
    if name in MAPPINGS:
        pairs = (_list(pair) for pair in _list(told["items"]))
        return MAPPINGS[name]({inner(k): inner(v) for k, v in pairs})
    value = told["value"]
    if name == "state":
        return inner(value)
    if name == "float" and value in NOT_FINITE:
        return float(value)
    if name == "complex":
        return complex(float(value[0]), float(value[1]))
    if name == "bytes":
        return bytes.fromhex(value)
    if name == "dtype" and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    if name == "device":
        return torch.device(value)
    raise ValueError(f"a value of unknown kind {name!r:.40}: written by a newer release?")


def _list(told: Any) -> list[Any]:
    if not isinstance(told, list):
        raise ValueError(f"{told!r:.40} should be a list")
    return told


def keys_in(told: Any) -> list[str]:
    """Of all tensors in such JSON."""
    if isinstance(told, list):
        return [key for each in told for key in keys_in(each)]
    if not isinstance(told, Mapping):
        return []
    if told.get("$") == "tensor":
        return [told["key"]]
    return [key for each in told.values() for key in keys_in(each)]


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
