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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint._keys import below

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
