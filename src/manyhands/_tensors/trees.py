"""Tensors in nested containers: what modules take and give, and what optimizers keep.

A container is a list, tuple, set, dict or dataclass, one of a class derived from these, any other
mutable mapping, or an instance of a class that is registered with torch.utils._pytree.

A container without a changed tensor is returned itself; any other as a shallow copy of its class,
with all its other attributes. Constructors of a user's classes are not called, because their
arguments are unknown: a `defaultdict` takes a factory first, a `ModelOutput` of a model library
forbids `update`, a frozen dataclass may check its arguments. A tensor that is at several places is
changed once, and is one tensor afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

T = TypeVar("T")


def tree_map_tensors(fn: Callable[[Tensor], object], tree: object) -> Any:
    """Apply `fn` to every tensor in a nested structure; what is not a container stays as it is."""
    return _Map(fn, lambda other: None)(tree)


def tensors_in(tree: object, others: Callable[[object], None] = lambda other: None) -> list[Tensor]:
    """Return the tensors in a nested structure, each once; call `others` with all other leaves."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _Map(note, others)(tree)
    return found


def as_type(dtype: torch.dtype, tree: T) -> T:
    """Convert the floating-point tensors in a nested structure."""
    result: T = tree_map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
    return result


class _Map:
    """One walk over a tree."""

    def __init__(self, fn: Callable[[Tensor], object], others: Callable[[object], None]) -> None:
        self._fn = fn
        self._others = others
        # What was met already, by its id, with the object itself so that its id stays its own.
        self._done: dict[int, tuple[object, object]] = {}

    def __call__(self, value: object) -> Any:
        """Return a value with its tensors replaced by `fn`; itself, if none is another."""
        if value is None or isinstance(value, str | bytes | int | float | nn.Module):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        result: object
        if isinstance(value, Tensor):
            result = self._fn(value)
        else:
            self._done[id(value)] = value, value  # for one that contains itself
            result = self._container(value)
        self._done[id(value)] = value, result
        # Where a container has the tensor as an item and as an attribute, setting one set both.
        self._done.setdefault(id(result), (result, result))
        return result

    def _container(self, value: object) -> object:
        """Return a container of any known kind with the tensors in it replaced."""
        if isinstance(value, tuple):
            return self._rebuilt(value, value, _tuple_like)
        if isinstance(value, set | frozenset):
            return self._rebuilt(value, value, lambda old, items: type(old)(items))
        if isinstance(value, list | deque | UserList):
            return self._with_items(value, enumerate(value))
        is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
        if isinstance(value, dict | UserDict):
            result = self._with_items(value, value.items())
            return self._with_fields(result) if is_dataclass else result
        if is_dataclass:
            return self._with_fields(value)
        node = _pytree.SUPPORTED_NODES.get(type(value))
        if node is not None:
            children, context = node.flatten_fn(value)
            return self._rebuilt(value, children, lambda _, new: node.unflatten_fn(new, context))
        if isinstance(value, MutableMapping):
            return self._with_items(value, value.items())
        self._others(value)
        return value

    def _rebuilt(
        self, value: T, items: Iterable[object], build: Callable[[T, list[object]], object]
    ) -> object:
        """Build a container anew, if one of its items was replaced."""
        before = list(items)
        after = [self(item) for item in before]
        same = all(new is old for old, new in zip(before, after, strict=True))
        return value if same else build(value, after)

    def _with_items(self, value: Any, items: Iterable[tuple[object, object]]) -> Any:
        """Return a copy of a list or dict with the replaced items set in it."""
        changed = [(key, new) for key, old in list(items) if (new := self(old)) is not old]
        if changed:
            value = copy.copy(value)
            for key, new in changed:
                value[key] = new
        return value

    def _with_fields(self, value: Any) -> object:
        """Return a copy of a dataclass with the replaced fields set in it."""
        changed = []
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            if (new := self(old)) is not old:
                changed.append((field.name, new))
        if changed:
            value = copy.copy(value)
            for name, new in changed:
                object.__setattr__(value, name, new)  # of a frozen one, too
        return value


def _tuple_like(old: tuple[object, ...], items: list[object]) -> object:
    """Return a tuple of the old one's class: plain, named, or torch's (such as `max` returns)."""
    if hasattr(type(old), "n_sequence_fields"):
        return type(old)(items)
    new = tuple.__new__(type(old), items)
    if hasattr(old, "__dict__"):
        new.__dict__.update(old.__dict__)
    return new
