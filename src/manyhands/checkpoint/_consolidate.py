"""A checkpoint as one file for the model and one for the optimizer, without the workers.

    model.safetensors   every parameter and buffer by its plain name
    optimizer.pt        the plain optimizer's state dict, for torch.load(weights_only=True)

One process does it, tensor by tensor: what is large is put together in files of its own, which the
memory shows, so that the model never has to fit.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint import _folder, _index, _safetensors
from manyhands.checkpoint._safetensors import Entry
from manyhands.checkpoint._shares import EXACT
from manyhands.checkpoint._storage import Reader
from manyhands.checkpoint._values import decoded

LARGE = 2**20  # bytes, from which on a tensor is put together in a file

Tell = Callable[[str, int], None]  # a tensor's name and bytes, when it is done


def consolidate(source: Path, target: Path, tell: Tell = lambda name, nbytes: None) -> list[Path]:
    """Write the two files (the model's only, if there is no optimizer); returns their paths."""
    checkpoint = _folder.newest(source)
    with ExitStack() as stack:
        stack.enter_context(_folder.reading(checkpoint))
        index, _ = _index.read(checkpoint)
        reader = stack.enter_context(Reader(checkpoint, index))
        target.mkdir(parents=True, exist_ok=True)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".partial-", dir=target))
        made = []
        if index.model is not None:
            made.append(_model(reader, index.model, Path(scratch), tell))
        for number, told in enumerate(index.optimizers):
            name = "optimizer.pt" if len(index.optimizers) == 1 else f"optimizer.{number}.pt"
            made.append(_optimizer(reader, told, Path(scratch) / name, tell))
        results = []
        for path in made:
            os.replace(path, target / path.name)
            results.append(target / path.name)
        _folder.sync(target)
        return results


def _model(reader: Reader, told: Mapping[str, Any], scratch: Path, tell: Tell) -> Path:
    keys = {name: f"model/{name}" for name in (*told["params"], *told["buffers"])}
    keys |= {other: keys[first] for other, first in told["aliases"].items()}
    entries = [_entry(name, reader.index.tensors[key]) for name, key in keys.items()]
    entries.sort(key=lambda entry: -entry.dtype.itemsize)

    def tensor(number: int) -> Tensor:
        entry = entries[number]
        found = _tensor(reader, keys[entry.name], scratch)
        tell(entry.name, entry.nbytes)
        return found

    path = scratch / "model.safetensors"
    _safetensors.write(path, entries, tensor, {"format": "pt"})
    return path


def _entry(name: str, told: _index.Tensor) -> Entry:
    return Entry(name, told.torch_dtype, told.shape)


def _tensor(reader: Reader, key: str, scratch: Path) -> Tensor:
    """A tensor, compared with its checksums; if it is large, in a file without a name."""
    told = reader.index.tensors[key]
    if told.nbytes < LARGE:
        return reader.whole(key)
    for chunk in told.chunks:
        reader.check(chunk, told.torch_dtype)
    descriptor, name = tempfile.mkstemp(dir=scratch)
    try:
        os.ftruncate(descriptor, told.nbytes)
        elements = math.prod(told.shape)
        flat = torch.from_file(name, shared=True, size=elements, dtype=told.torch_dtype)
    finally:
        os.close(descriptor)
        os.unlink(name)
    result = flat.view(told.shape)
    reader.read_into(key, result)
    return result


def _optimizer(reader: Reader, told: Mapping[str, Any], path: Path, tell: Tell) -> Path:
    """The state dict, as the plain optimizer would have saved it."""

    def get(key: str) -> Tensor:
        tell(key, reader.index.tensors[key].nbytes)
        return _tensor(reader, key, path.parent)

    groups: list[dict[str, Any]] = []
    names: list[str] = []
    for group in told["groups"]:
        numbers = range(len(names), len(names) + len(group["names"]))
        names += group["names"]
        options = decoded(group["options"], get)
        groups.append({**options, "params": list(numbers), "param_names": group["names"]})
    state = {
        number: {
            entry: decoded(value, get)
            for entry, value in told["state"][name].items()
            if entry != EXACT
        }
        for number, name in enumerate(names)
        if told["state"].get(name)
    }
    packed = {**decoded(told["other"], get), "state": state, "param_groups": groups}
    rule = told["rule"]
    if rule is not None:
        scaling = decoded(rule["state"], get)
        previous = scaling["previous"]
        scaling["previous"] = [previous.get(name) for name in names] if previous else []
        packed["manyhands"] = scaling
    with path.open("xb") as file:
        torch.save(packed, file)
        file.flush()
        os.fsync(file.fileno())
    return path


def verify(
    checkpoint: Path, index: _index.Index, tell: Callable[[int], None] = lambda nbytes: None
) -> list[str]:
    """Compare every byte with its checksum; returns what is wrong."""
    problems: dict[str, None] = {}
    with Reader(checkpoint, index) as reader:
        for told in index.tensors.values():
            for chunk in told.chunks:
                try:
                    reader.check(chunk, told.torch_dtype)
                except (ValueError, OSError) as error:
                    problems[str(error)] = None
                tell(math.prod(chunk.sizes) * told.torch_dtype.itemsize)
    return list(problems)
