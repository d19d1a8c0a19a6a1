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


def encoded(value: Any, path: str, put: Put) -> Any:
    """A value as JSON; `put` takes its tensors. `path` is what the value is called in errors."""
    if isinstance(value, Tensor):
        return {"$": "tensor", "key": put(path, value)}
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": str(value)}
    if kind is list:
        return [encoded(each, f"{path}.{i}", put) for i, each in enumerate(value)]
    if kind is dict and all(type(key) is str and key != "$" for key in value):
        return {key: encoded(each, f"{path}.{key}", put) for key, each in value.items()}
    for name, sequence in SEQUENCES.items():
        if kind is sequence:
            items = [encoded(each, f"{path}.{i}", put) for i, each in enumerate(value)]
            return {"$": name, "items": items}
    for name, mapping in MAPPINGS.items():
        if kind is mapping or (name == "dict" and kind is defaultdict):
            pairs = enumerate(value.items())
            items = [[encoded(k, path, put), encoded(v, f"{path}.{i}", put)] for i, (k, v) in pairs]
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
        return {"$": "state", "of": kind.__name__, "value": state_of(value, path, put)}
    for plain in (bool, int, float, str):  # such as numpy's numbers
        if isinstance(value, plain):
            return encoded(plain(value), path, put)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return encoded(value.item(), path, put)
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, and only tensors, numbers, strings, "
        "lists, tuples, sets, dicts, and what has state_dict() and load_state_dict() can be saved. "
        "Save what it is made of."
    )


def state_of(value: Any, path: str, put: Put) -> Any:
    state = value.state_dict()
    return encoded(dict(state) if isinstance(state, OrderedDict) else state, path, put)


def has_state(value: Any) -> bool:
    """Whether it is something whose state is saved, and loaded in place."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def decoded(told: Any, get: Get) -> Any:
    """The value of such JSON; what had a state_dict comes as that."""
    if isinstance(told, list):
        return [decoded(each, get) for each in told]
    if not isinstance(told, Mapping):
        return told
    if "$" not in told:
        return {key: decoded(each, get) for key, each in told.items()}
    name = told["$"]
    if name == "tensor":
        return get(told["key"])
    if name in SEQUENCES:
        return SEQUENCES[name](decoded(each, get) for each in told["items"])
    if name in MAPPINGS:
        return MAPPINGS[name]({decoded(k, get): decoded(v, get) for k, v in told["items"]})
    value = told["value"]
    if name == "state":
        return decoded(value, get)
    if name == "float":
        return float(value)
    if name == "complex":
        return complex(float(value[0]), float(value[1]))
    if name == "bytes":
        return bytes.fromhex(value)
    if name == "dtype" and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    if name == "device":
        return torch.device(value)
    raise ValueError(f"a value of unknown kind {name!r}: written by a newer release?")


def keys_in(told: Any) -> list[str]:
    """Of all tensors in such JSON."""
    if isinstance(told, list):
        return [key for each in told for key in keys_in(each)]
    if not isinstance(told, Mapping):
        return []
    if told.get("$") == "tensor":
        return [told["key"]]
    return [key for each in told.values() for key in keys_in(each)]
