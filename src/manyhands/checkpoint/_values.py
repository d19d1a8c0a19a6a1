"""Encode values as JSON and decode them; check that saved values fit the object they load into.

What JSON has is encoded as itself: None, True, numbers, strings, lists, and dicts with strings for
keys. Anything else becomes a dict whose "$" says what it is:

    {"$": "tensor", "key": ...}   a tensor of the checkpoint, stored under that key
    {"$": "tuple", "items": [...]}, {"$": "dict", "items": [[key, value], ...]}, ...

Nothing is ever turned into code: a value that has none of these forms cannot be saved.

The second half checks kinds. torch's optimizers and schedulers accept any state, and fail at the
next step if a learning rate is a word. So saved numbers, names and lists must be of the kind that
the object has now. An object that is not torch's may change its kinds on purpose: not checked.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.checkpoint._names import child_path

PutTensor = Callable[[str, Tensor], str]  # stores a tensor under a path, and returns its key
GetTensor = Callable[[str], Tensor]  # returns the tensor of a key

SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "torch.Size": torch.Size,
}
MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
NOT_FINITE = ("nan", "inf", "-inf")
MAX_DEPTH = 100  # containers inside each other; so many always fit on Python's stack


def encode(value: Any, path: str, put: PutTensor, depth: int = MAX_DEPTH) -> Any:
    """Return a value as JSON; `put` stores its tensors. Errors call the value by its `path`."""
    if depth < 0:
        raise ValueError(
            f"{path:.80}... is nested in more than {MAX_DEPTH} containers, or contains itself. "
            "Save its content instead."
        )

    def encode_child(child: Any, key: object) -> Any:
        return encode(child, child_path(path, key), put, depth - 1)

    if isinstance(value, Tensor):
        return {"$": "tensor", "key": put(path, value)}
    # The exact type: a subclass, such as a named tuple, would come back as its base class.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": str(value)}
    if kind is list:
        return [encode_child(each, i) for i, each in enumerate(value)]
    # JSON would turn other keys into strings, and a key "$" has a meaning of ours.
    if kind is dict and all(type(key) is str and key != "$" for key in value):
        return {key: encode_child(each, key) for key, each in value.items()}
    for name, sequence in SEQUENCES.items():
        if kind is sequence:
            return {"$": name, "items": [encode_child(each, i) for i, each in enumerate(value)]}
    for name, mapping in MAPPINGS.items():
        # A defaultdict comes back as a dict: its factory is code.
        if kind is mapping or (name == "dict" and kind is defaultdict):
            pairs = enumerate(value.items())
            items = [[encode_child(k, f"{i}, the key"), encode_child(v, i)] for i, (k, v) in pairs]
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
        return {"$": "state", "of": kind.__name__, "value": _encode_state(value, path, put, depth)}
    # Subclasses of numbers and text, such as numpy's numbers, become Python's own.
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return encode(plain(value), path, put, depth)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return encode(value.item(), path, put, depth)
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}. Only tensors, numbers, strings, "
        "lists, tuples, sets, dicts, and objects with state_dict() and load_state_dict() can be "
        "saved. Save its content instead."
    )


def _encode_state(value: Any, path: str, put: PutTensor, depth: int) -> Any:
    state = value.state_dict()
    state = dict(state) if isinstance(state, OrderedDict) else state
    return encode(state, path, put, depth - 1)


def has_state(value: Any) -> bool:
    """Return whether the value is an object whose state is saved, and loaded in place."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def decode(meta: Any, get: GetTensor, depth: int = MAX_DEPTH) -> Any:
    """Return the value that `encode` turned into JSON; an object comes back as its state dict.

    JSON that `encode` never writes raises an error of some kind. `_index.py` decodes every value
    of an index once, before anything else looks at it.
    """
    if depth < 0:
        raise ValueError(f"nested in more than {MAX_DEPTH} containers")

    def decode_child(child: Any) -> Any:
        return decode(child, get, depth - 1)

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
        return SEQUENCES[name](decode_child(each) for each in _expect_list(meta["items"]))
    if name in MAPPINGS:
        pairs = (_expect_list(pair) for pair in _expect_list(meta["items"]))
        return MAPPINGS[name]({decode_child(k): decode_child(v) for k, v in pairs})
    value = meta["value"]
    if name == "state":
        return decode_child(value)
    if name == "float" and value in NOT_FINITE:
        return float(value)
    if name == "complex":
        return complex(float(value[0]), float(value[1]))
    if name == "bytes":
        return bytes.fromhex(value)
    # Only what is a dtype: the file must not reach any other attribute of torch.
    if name == "dtype" and isinstance(getattr(torch, value, None), torch.dtype):
        return getattr(torch, value)
    if name == "device":
        return torch.device(value)
    raise ValueError(f"a value of unknown kind {name!r:.40}: was it written by a newer release?")


def _expect_list(meta: Any) -> list[Any]:
    if not isinstance(meta, list):  # text would be taken letter by letter
        raise ValueError(f"{meta!r:.40} should be a list")
    return meta


# -- kinds -----------------------------------------------------------------------------------------

NEVER_NONE = ("lr",)  # options that may not be None, even if that is their default
#: Options that say how a step is computed, not what it computes. They keep the value that the
#: optimizer was made with: a run saved on a GPU may continue on a CPU, without fused kernels.
KEPT_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
ENTRY_KINDS = ("tensor", "number", "None")  # of an entry in a parameter's state
ALL_IN_FIRST = ("LBFGS",)  # optimizers that keep their whole state in the first parameter's


def check_kinds(here: Any, saved: Any, what: str, or_none: bool = False) -> None:
    """Raise ValueError if `saved` cannot replace `here`; `what` names it in the message."""
    saved_kind, kind = _kind(saved), _kind(here)
    if kind == "None" or (or_none and saved_kind == "None"):
        return
    if saved_kind != kind:
        raise ValueError(
            f"{what} is {_shown(saved)} in the checkpoint, and {_shown(here)} here. Is it damaged? "
            "Build what was saved, or load another checkpoint."
        )
    if kind == "mapping":
        for name in here.keys() & saved.keys():
            check_kinds(here[name], saved[name], f"{what}[{name!r}]", or_none)
    elif kind == "list":
        # A tuple such as Adam's betas has a fixed length; a list may grow.
        if isinstance(here, tuple) and len(here) != len(saved):
            raise ValueError(
                f"{what} has {len(saved)} entries in the checkpoint, and {len(here)} here. Build "
                "what was saved, or load another checkpoint."
            )
        for one, other in zip(here, saved, strict=False):
            check_kinds(one, other, what, or_none)


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:60]  # a tensor's repr has several lines


def _kind(value: Any) -> str:
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
    optimizer: Optimizer, here: Mapping[str, Any], saved: Mapping[str, Any]
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
    options: Iterable[Mapping[str, Any]],
    state: Mapping[str, Mapping[str, Any]],
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
    options: Mapping[str, Any],
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


def _kind_of_entry(meta: Any) -> str:
    return str(meta.get("$", "mapping")) if isinstance(meta, Mapping) else _kind(meta)


def _differ(one: str, other: str) -> bool:
    # None for one parameter and a tensor for the next: SGD's buffer before the first gradient.
    return one != other and "None" not in (one, other)


def check_attributes(target: Any, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
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


def check_state_dict(target: Any, here: Mapping[str, Any], saved: Any, what: str) -> None:
    """Check the state of another object of torch's."""
    check_kinds(here, saved, what)
    # A GradScaler reads each of its numbers, and saves none of them while it is disabled.
    if isinstance(target, torch.amp.GradScaler) and (missing := here.keys() - saved.keys()):
        raise ValueError(
            f"{what} has no {sorted(missing)[0]!r} in the checkpoint. Was the saved scaler made "
            "with enabled=False? Then make this one so, or leave it out."
        )


def is_from_torch(target: Any) -> bool:
    return type(target).__module__.startswith("torch.")
