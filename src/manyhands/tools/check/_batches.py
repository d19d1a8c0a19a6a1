"""Map, hash and join batches: tensors in nested dictionaries, lists and tuples."""

import copy
import hashlib
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

LABEL_PADDING = -100  # cross entropy ignores this label


def parts_of(value: Any) -> dict[Any, Any]:
    """Return the parts of a container by key or index."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, MutableMapping) else {}


def is_container(value: Any) -> bool:
    return isinstance(value, MutableMapping | list | tuple)


def rebuilt(like: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like `like` with other parts."""
    if isinstance(like, MutableMapping):
        new = copy.copy(like)
        new.update(parts)
        return new
    if hasattr(like, "_fields"):  # a named tuple
        return type(like)(*parts.values())
    return type(like)(parts.values())


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if not is_container(value):
        return value
    parts = {key: map_tensors(part, change) for key, part in parts_of(value).items()}
    return rebuilt(value, parts)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for part in parts_of(value).values():
        found += tensors_of(part)
    return found


def size_of(value: Any) -> int:
    """Return the number of samples: the first dimension of the first tensor."""
    for tensor in tensors_of(value):
        if tensor.dim():
            return len(tensor)
    return 1


def row_hashes(value: Any) -> list[str]:
    size = size_of(value)
    columns = [tensor for tensor in tensors_of(value) if tensor.dim() and len(tensor) == size]
    hashes = []
    for row in zip(*columns, strict=True):
        hashes.append(digest(torch.cat([as_bytes(part) for part in row])))
    return hashes


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    return hashlib.blake2b(as_bytes(tensor).numpy().tobytes(), digest_size=8).hexdigest()


def join(values: list[Any], padding: int | None = None) -> Any:
    """Return one batch with the samples of all batches, in order.

    If `padding` is given, rows of token numbers are padded to equal lengths.

    >>> join([{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3])}])
    {'x': tensor([1, 2, 3])}
    """
    first = values[0]
    if isinstance(first, Tensor) and first.dim():
        if padding is not None and first.dim() == 2:
            width = max(value.shape[1] for value in values)
            pad = torch.nn.functional.pad
            values = [pad(value, (0, width - value.shape[1]), value=padding) for value in values]
        return torch.cat(values)
    if not is_container(first):
        if any(value != first for value in values):
            raise ValueError(f"batches have different values of the type {type(first).__name__}")
        return first
    if isinstance(first, list | tuple) and not tensors_of(values):
        joined = []  # one value per sample, such as names
        for value in values:
            joined += value
        return type(first)(joined)
    parts = parts_of(first)
    columns: dict[Any, list[Any]] = {key: [] for key in parts}
    for value in values:
        others = parts_of(value)
        if others.keys() != parts.keys():
            raise ValueError("the ranks' batches have different parts")
        for key, part in others.items():
            columns[key].append(part)
    labels = parts.get("labels")
    for_tokens = isinstance(labels, Tensor) and all(
        isinstance(part, Tensor) and part.shape == labels.shape for part in parts.values()
    )
    for key, column in columns.items():
        padding = None
        if "attention_mask" in parts or for_tokens:
            padding = LABEL_PADDING if key == "labels" else 0
        parts[key] = join(column, padding)
    return rebuilt(first, parts)
