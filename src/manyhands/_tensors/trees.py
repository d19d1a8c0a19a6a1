"""Find and replace tensors in nested containers, such as the arguments of a module.

Containers are lists, tuples, dicts, dataclasses and their subclasses, `UserDict`s, and instances of
classes that are registered with torch.utils._pytree.

A container with a replaced tensor is copied, with all attributes. The user's constructors are not
called, because their arguments are unknown: `defaultdict` requires a factory, a model
library's `ModelOutput` has no `update`, a frozen dataclass may check arguments. A repeated
tensor is replaced by a single tensor.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

T = TypeVar("T")


def tree_map_tensors(fn: Callable[[Tensor], object], tree: object) -> Any:
    return _Map(fn)(tree)


def tensors_in(tree: object, others: Callable[[object], None] | None = None) -> list[Tensor]:
    """Return the tensors in a nested structure, each once; call `others` with the other leaves."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _Map(note, others)(tree)
    return found


def as_type(dtype: torch.dtype, tree: T) -> T:
    def convert(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    result: T = tree_map_tensors(convert, tree)
    return result


class _Map:
    def __init__(
        self, fn: Callable[[Tensor], object], others: Callable[[object], None] | None = None
    ) -> None:
        self._fn = fn
        self._others = others
        # id -> (object, result). The object is stored so that the id stays unique.
        self._done: dict[int, tuple[object, object]] = {}

    def __call__(self, value: object) -> Any:
        """Return a value with tensors replaced by `fn`; unchanged values are not copied."""
        if value is None or isinstance(value, str | bytes | int | float | nn.Module):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        result: object
        if isinstance(value, Tensor):
            result = self._fn(value)
        else:
            self._done[id(value)] = value, value  # for recursive containers
            result = self._container(value)
        self._done[id(value)] = value, result
        # Setting an item can also set an attribute, so the result may be visited later.
        self._done.setdefault(id(result), (result, result))
        return result

    def _container(self, value: object) -> object:
        if isinstance(value, tuple):
            return self._rebuilt(value, value, partial(_tuple_like, value))
        if isinstance(value, list):
            return self._with_items(value, enumerate(value), operator.setitem)
        result = value
        if isinstance(value, dict | UserDict):
            result = self._with_items(value, value.items(), operator.setitem)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            named = [(name, getattr(result, name, None)) for name in names]
            return self._with_items(result, named, object.__setattr__)  # also if frozen
        if isinstance(value, dict | UserDict):
            return result
        node = _pytree.SUPPORTED_NODES.get(type(value))
        if node is not None:
            children, context = node.flatten_fn(value)
            return self._rebuilt(value, children, lambda new: node.unflatten_fn(new, context))
        if self._others is not None:
            self._others(value)
        return value

    def _rebuilt(
        self, value: object, items: Iterable[object], build: Callable[[list[Any]], object]
    ) -> object:
        before = list(items)
        after = [self(item) for item in before]
        if all(map(operator.is_, before, after)):
            return value
        return build(after)

    def _with_items(
        self,
        value: object,
        items: Iterable[tuple[Any, object]],
        set_item: Callable[[Any, Any, object], None],
    ) -> object:
        result = value
        for key, old in list(items):
            new = self(old)
            if new is not old:
                if result is value:
                    result = copy.copy(value)
                set_item(result, key, new)
        return result


def _tuple_like(old: tuple[object, ...], items: list[object]) -> object:
    """Return a tuple of the old tuple's class: plain, named, or torch's (such as `max` returns)."""
    if hasattr(type(old), "n_sequence_fields"):
        return type(old)(items)
    new = tuple.__new__(type(old), items)
    if hasattr(old, "__dict__"):
        new.__dict__.update(old.__dict__)
    return new
