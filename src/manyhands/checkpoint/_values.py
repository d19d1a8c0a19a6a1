"""Encode values as JSON and decode them.

JSON types are encoded as themselves: None, booleans, numbers, strings, lists, and dicts with string
keys. Other values become a dict with a type under "$":

    {"$": "tensor", "key": ...}   a tensor of the checkpoint, stored under that key
    {"$": "tuple", "items": [...]}, {"$": "dict", "items": [[key, value], ...]}, ...

The key of a tensor is its path: `PATH.a.b` in {"a": {"b": tensor}}. Dots, slashes and percent signs
in the keys of dicts are percent-encoded, so {"a.b": tensor} has the path `PATH.a%2Eb`.

Decoding never executes code. Values of other types cannot be saved.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Json: TypeAlias = object  # what `json` reads and writes
PutTensor = Callable[[str, Tensor], str]  # stores a tensor under a path, and returns its key
GetTensor = Callable[[str], Tensor]  # returns the tensor of a key

SEQUENCES: dict[str, Callable[[Iterable[Any]], object]] = {
    kind.__name__: kind for kind in (tuple, set, frozenset, deque, torch.Size)
}
MAPPINGS: dict[str, Callable[[dict[Any, Any]], object]] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter)
}


def _dtype_of(text: str) -> torch.dtype:
    # Restricted to dtypes: a file must not reach other attributes of torch.
    found = getattr(torch, text)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{text} is no dtype")
    return found


# Types stored as text: functions to text and back.
PLAIN: dict[type, tuple[Callable[[Any], str], Callable[[str], object]]] = {
    float: (str, float),  # NaN and infinities, which JSON does not have
    complex: (str, complex),
    bytes: (bytes.hex, bytes.fromhex),
    torch.dtype: (lambda dtype: str(dtype).removeprefix("torch."), _dtype_of),
    torch.device: (str, torch.device),
}
FROM_TEXT = {kind.__name__: from_text for kind, (_, from_text) in PLAIN.items()}
MAX_DEPTH = 100  # maximum nesting, which always fits on Python's stack


def encode(value: Any, path: str, put: PutTensor, depth: int = MAX_DEPTH) -> Json:
    """Return a value as JSON. `put` stores tensors; errors name the value by `path`."""
    if depth < 0:
        raise ValueError(f"{path:.80} is nested in {MAX_DEPTH} containers or contains itself.")

    def encode_child(child: object, key: object) -> Json:
        return encode(child, f"{path}.{escape(str(key))}", put, depth - 1)

    if isinstance(value, Tensor):
        return {"$": "tensor", "key": put(path, value)}
    # The exact type: a subclass, such as a named tuple, would be decoded as the base class.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind in PLAIN:
        to_text, _ = PLAIN[kind]
        return {"$": kind.__name__, "value": to_text(value)}
    if kind is list:
        return [encode_child(each, i) for i, each in enumerate(value)]
    # JSON converts other keys to strings, and "$" is reserved.
    if kind is dict and all(type(key) is str and key != "$" for key in value):
        return {key: encode_child(each, key) for key, each in value.items()}
    if kind in SEQUENCES.values():
        items = [encode_child(each, i) for i, each in enumerate(value)]
        return {"$": kind.__name__, "items": items}
    if kind in (*MAPPINGS.values(), defaultdict):
        pairs = []
        for i, (k, v) in enumerate(value.items()):
            pairs.append([encode_child(k, f"{i}, the key"), encode_child(v, i)])
        # A defaultdict is decoded as a dict: the factory is code.
        name = "dict" if kind is defaultdict else kind.__name__
        return {"$": name, "items": pairs}
    if has_state(value):
        state = value.state_dict()
        if isinstance(state, OrderedDict):
            state = dict(state)
        encoded = encode(state, path, put, depth - 1)
        return {"$": "state", "value": encoded}
    # Subclasses of numbers and strings, such as numpy's numbers, become Python's types.
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return encode(plain(value), path, put, depth)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return encode(value.item(), path, put, depth)
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved. Save tensors, "
        "numbers, text, containers of these, or objects with state_dict() and load_state_dict()."
    )


class HasState(Protocol):
    """An object with a state to save and to load in place."""

    def state_dict(self) -> Any:
        """Return the object's state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


@dataclass(frozen=True)
class RunObjects:
    """The objects of a run to save or to load into."""

    model: nn.Module | None
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[HasState]
    values: Mapping[str, object]  # the user's values by name


def has_state(value: object) -> TypeGuard[HasState]:
    """Return whether the value has state_dict and load_state_dict."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def check_has_state(what: str, value: object) -> HasState:
    """Return the value. Raise TypeError if no state can be loaded in place."""
    if has_state(value):
        return value
    raise TypeError(
        f"{what} must have state_dict() and load_state_dict(), got {type(value).__name__}."
    )


def check_scheduler(value: object) -> HasState:
    """Return the value. Raise TypeError if it is not a scheduler."""
    if isinstance(value, Optimizer | nn.Module):
        raise TypeError(
            f"scheduler must be a scheduler, got {type(value).__name__}. Pass a model as model= "
            "and an optimizer as optimizer=."
        )
    return check_has_state("scheduler", value)


def check_value(name: str, value: object) -> None:
    """Raise TypeError for a name or an object that belongs to a different argument."""
    if name == "step":
        raise TypeError(f"{name}= is reserved. Use a different name for this value.")
    if isinstance(value, Optimizer):
        raise TypeError(f"{name}= is an optimizer. Pass all: optimizer=[first, second].")


def decode(meta: object, get: GetTensor) -> Any:
    """Return the value that `encode` turned into JSON. Objects are returned as state dicts."""
    # Raises ValueError for JSON that `encode` does not write.
    try:
        return _decode(meta, get)
    # The constructors receive arbitrary content of the file.
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"the checkpoint has an invalid value: {error!r:.200}.") from error


def _decode(meta: object, get: GetTensor) -> Any:
    """Return a value of the JSON. `get` reads tensors."""

    def decode_child(child: object) -> object:
        return _decode(child, get)

    if isinstance(meta, list):
        return [decode_child(each) for each in meta]
    if not isinstance(meta, Mapping):
        return meta
    if "$" not in meta:
        return {key: decode_child(each) for key, each in meta.items()}
    name = meta["$"]
    if name == "tensor":
        return get(meta["key"])
    if name in SEQUENCES:
        return SEQUENCES[name](decode_child(each) for each in meta["items"])
    if name in MAPPINGS:
        return MAPPINGS[name]({decode_child(k): decode_child(v) for k, v in meta["items"]})
    if name == "state":
        return decode_child(meta["value"])
    if name in FROM_TEXT:
        return FROM_TEXT[name](meta["value"])
    raise ValueError(f"the checkpoint has a value of unknown type {name!r:.40}.")


def tensor_key(meta: object) -> str | None:
    """Return the key of an encoded tensor, or None for other values."""
    if isinstance(meta, dict) and meta.get("$") == "tensor":
        return str(meta["key"])
    return None


# -- keys ------------------------------------------------------------------------------------------

_ESCAPES = str.maketrans({"%": "%25", ".": "%2E", "/": "%2F"})


def escape(key: str) -> str:
    """Return a dict's key or an entry's name as part of a tensor's key."""
    return key.translate(_ESCAPES)


def unescape(text: str) -> str:
    """Return the key that was passed to `escape`."""
    return text.replace("%2F", "/").replace("%2E", ".").replace("%25", "%")
