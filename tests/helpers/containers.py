"""Containers that models take and return, each holding two tensors, and how to get these back."""

import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree


@dataclass
class Plain:
    first: Tensor
    other: Tensor
    note: str = "kept"


@dataclass(frozen=True)
class Frozen:
    first: Tensor
    other: Tensor
    size: torch.Size = torch.Size([2, 3])


@dataclass(frozen=True, slots=True)
class Slotted:
    first: Tensor
    other: Tensor


@dataclass
class Picky:
    """Whose constructor cannot be called with what its fields hold."""

    first: Tensor = field(init=False)
    other: Tensor = field(init=False)

    def __post_init__(self):
        self.calls = getattr(self, "calls", 0) + 1


@dataclass
class ModelOutput(OrderedDict):
    """As that of transformers: keys and attributes are one, and a dict's own ways are forbidden."""

    first: Tensor | None = None
    other: Tensor | None = None

    def __post_init__(self):
        for each in fields(self):
            if (value := getattr(self, each.name)) is not None:
                self[each.name] = value

    def update(self, *args, **kwargs):
        raise Exception(f"You cannot use ``update`` on a {type(self).__name__} instance.")

    setdefault = pop = update

    def __setattr__(self, name, value):
        if name in {each.name for each in fields(self)} and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        reduced = super().__reduce__()
        assert not isinstance(reduced, str)
        kind, _, *rest = reduced
        return kind, tuple(getattr(self, each.name) for each in fields(self)), *rest


class Described(dict):
    """A dict with an argument of its own, and with an attribute."""

    def __init__(self, note, items):
        super().__init__(items)
        self.note = note


class Typed(TypedDict):
    first: Tensor
    other: Tensor


class Batch(UserDict):
    """As transformers' BatchEncoding."""


class Named(NamedTuple):
    first: Tensor
    other: Tensor


class Checked(namedtuple("Checked", "first other")):
    """Whose constructor takes something else."""

    def __new__(cls, *, both):
        return super().__new__(cls, *both)


class Row(tuple):
    note = "a class's"


class Rows(list):
    pass


class Registered:
    """Known to torch's trees only."""

    def __init__(self, both):
        self.both = both


_pytree.register_pytree_node(
    Registered, lambda box: (list(box.both), None), lambda both, _: Registered(tuple(both))
)


def picky(first, other):
    box = Picky()
    box.first, box.other = first, other
    return box


def described(first, other):
    return Described("kept", {"first": first, "other": [other, torch.Size([3]), None, "text"]})


def by_default(first, other):
    box = defaultdict(list, first=first)
    box["other"].append(other)
    return box


def row(first, other):
    box = Row([first, other])
    box.note = "kept"
    return box


MAKE = {
    "tuple": lambda first, other: (first, other),
    "list": lambda first, other: [first, {"deep": (other,)}],
    "dict": lambda first, other: {"first": first, 2: other},
    "OrderedDict": lambda first, other: OrderedDict(first=first, other=other),
    "defaultdict": by_default,
    "UserDict": lambda first, other: Batch(first=first, other=other),
    "deque": lambda first, other: deque([first, other], maxlen=2),
    "TypedDict": lambda first, other: Typed(first=first, other=other),
    "a dict of its own": described,
    "ModelOutput": lambda first, other: ModelOutput(first=first, other=other),
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slotted,
    "dataclass without arguments": picky,
    "named tuple": Named,
    "named tuple of its own": lambda first, other: Checked(both=(first, other)),
    "PackedSequence": lambda first, other: PackedSequence(
        first, torch.tensor([first.shape[0]]), None, None
    ),
    "a tuple of its own": row,
    "a list of its own": lambda first, other: Rows([first, other]),
    "torch.return_types": lambda first, other: torch.return_types.max((first, other)),
    "registered": lambda first, other: Registered((first, other)),
    "namespace in a tuple": lambda first, other: (first, other, types.SimpleNamespace(note="kept")),
}


def tensors_of(box):
    """The floating-point tensors in such a container, in order."""
    if isinstance(box, Tensor):
        return [box] if box.is_floating_point() else []
    if isinstance(box, Registered):
        parts = box.both
    elif isinstance(box, dict | UserDict):
        parts = box.values()
    elif isinstance(box, Plain | Frozen | Slotted | Picky):
        parts = [box.first, box.other]
    elif isinstance(box, tuple | list | deque):
        parts = box
    else:
        parts = []
    return [tensor for part in parts for tensor in tensors_of(part)]
