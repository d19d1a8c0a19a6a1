"""Convert a checkpoint of `mh.save` to plain files.

    model.safetensors   all parameters and buffers, under their plain names
    optimizer.pt        the plain optimizer's state dict, for torch.load(weights_only=True)

or, for transformers, a folder as written by `mh.save_weights`.

A single process converts tensor by tensor. A temporary file mapped into memory holds a large
tensor, so models and tensors may exceed the memory.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from manyhands.checkpoint import folder_at
from manyhands.checkpoint._folder import sync
from manyhands.checkpoint._format import ModelMeta, OptimizerMeta, TensorEntry
from manyhands.checkpoint._optimizer import decode_dict, saved_options, saved_rule, saved_state
from manyhands.checkpoint._reader import Reader
from manyhands.checkpoint._values import decode
from manyhands.checkpoint.weights._saving import publish, split_into_files, write_file

IN_A_FILE = 2**20  # bytes from which a tensor is assembled in a mapped file

OnTensor = Callable[[float], None]  # receives the bytes of each written tensor


def open_newest(source: str | os.PathLike[str]) -> Reader:
    folder = folder_at(source)
    return Reader(folder, folder.find_newest())


def write_plain_files(
    source: str | os.PathLike[str], target: Path, on_tensor: OnTensor = lambda nbytes: None
) -> list[Path]:
    """Write files of the model and optimizers; return the paths."""
    with _open_with_scratch(source, target) as (reader, scratch):
        commit = reader.commit
        written = []
        if commit.model is not None:
            keys = _keys_of(commit.model)
            # `load_state_dict` requires a tied tensor under each of its names.
            keys |= {other: keys[first] for other, first in commit.model["aliases"].items()}
            for name in _write_model(reader, keys, sys.maxsize, scratch, on_tensor):
                written.append(scratch / name)
        for number, meta in enumerate(commit.optimizers):
            path = scratch / f"optimizer.{number}.pt"
            if len(commit.optimizers) == 1:
                path = scratch / "optimizer.pt"
            _write_optimizer(reader, number, meta, path, on_tensor)
            written.append(path)
        results = []
        # Errors do not change earlier files.
        for path in written:
            results.append(path.replace(target / path.name))
        sync(target)
        return results


def write_hf_files(
    source: str | os.PathLike[str], target: Path, max_size: int, on_tensor: OnTensor
) -> list[Path]:
    """Write the model like `mh.save_weights`; return the paths."""
    with _open_with_scratch(source, target) as (reader, scratch):
        if reader.commit.model is None:
            raise ValueError(f"{reader.path} was saved without model=.")
        keys = _keys_of(reader.commit.model)
        files = _write_model(reader, keys, max_size, scratch, on_tensor)
        publish(scratch, target, files, reader.commit.model.get("config", ""))
        return [target / name for name in files]


@contextmanager
def _open_with_scratch(
    source: str | os.PathLike[str], target: Path
) -> Iterator[tuple[Reader, Path]]:
    """Open the newest checkpoint; create a folder for incomplete files."""
    with open_newest(source) as reader, reader.explain():
        target.mkdir(parents=True, exist_ok=True)
        # Files can be renamed only within a file system.
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target) as scratch:
            yield reader, Path(scratch)


def _keys_of(meta: ModelMeta) -> dict[str, str]:
    return {name: f"model/{name}" for name in (*meta["params"], *meta["buffers"])}


def _write_model(
    reader: Reader, keys: dict[str, str], max_size: int, scratch: Path, on_tensor: OnTensor
) -> dict[str, list[TensorEntry]]:
    entries = []
    for name, key in keys.items():
        tensor = reader.tensors[key]
        entries.append(TensorEntry(name, tensor.torch_dtype, tensor.shape))

    def get_tensor(name: str) -> Tensor:
        found = _read_tensor(reader, keys[name], scratch)
        on_tensor(found.nbytes)
        return found

    files = split_into_files(entries, max_size)
    for name, part in files.items():
        write_file(scratch / name, part, get_tensor)
    return files


def _read_tensor(reader: Reader, key: str, scratch: Path) -> Tensor:
    """Read and verify a tensor, in an unnamed mapped file if large."""
    tensor = reader.tensors[key]
    if tensor.nbytes < IN_A_FILE:
        return reader.read_whole(key)
    reader.check_claim(key)
    descriptor, name = tempfile.mkstemp(dir=scratch)
    try:
        os.ftruncate(descriptor, tensor.nbytes)
        elements = math.prod(tensor.shape)
        flat = torch.from_file(name, shared=True, size=elements, dtype=tensor.torch_dtype)
    finally:
        os.close(descriptor)
        os.unlink(name)  # the space is freed with the tensor
    return reader.read_whole(key, flat.view(tensor.shape))


def _write_optimizer(
    reader: Reader, number: int, meta: OptimizerMeta, path: Path, on_tensor: OnTensor
) -> None:
    """Write the state dict of the plain optimizer."""

    def get_tensor(key: str) -> Tensor:
        reader.take(key)
        on_tensor(reader.tensors[key].nbytes)
        return _read_tensor(reader, key, path.parent)

    groups: list[dict[str, object]] = []
    names: list[str] = []
    options_by_group = saved_options(meta["groups"], get_tensor)
    for group, options in zip(meta["groups"], options_by_group, strict=True):
        # torch numbers the parameters across all groups.
        numbers = range(len(names), len(names) + len(group["names"]))
        names += group["names"]
        groups.append({**options, "params": list(numbers), "param_names": group["names"]})
    saved = saved_state(reader.tensors, f"optimizer.{number}", meta["groups"], get_tensor)
    state: dict[int, dict[str, object]] = {}
    for index, name in enumerate(names):
        if saved.get(name):
            entries = saved[name].items()
            state[index] = {entry: decode(value, get_tensor) for entry, value in entries}
    other = decode_dict("rest of an optimizer", meta["other"], get_tensor)
    packed = {**other, "state": state, "param_groups": groups}
    if meta["rule"] is not None:
        scaling = saved_rule(meta["rule"], get_tensor)
        # Checkpoints use names; a rule's state dict uses the order of parameters.
        previous = scaling["previous"]
        scaling["previous"] = []
        if previous:
            scaling["previous"] = [previous.get(name) for name in names]
        packed["manyhands"] = scaling
    with path.open("xb") as file:
        torch.save(packed, file)
        file.flush()
        os.fsync(file.fileno())
