"""Turn a checkpoint into one file for the model and one for the optimizer, in one process.

    model.safetensors   every parameter and buffer by its plain name
    optimizer.pt        the plain optimizer's state dict, for torch.load(weights_only=True)

It works tensor by tensor. A large tensor is put together in a temporary file that is mapped into
memory, so that neither the model nor a single tensor has to fit into memory.
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
from manyhands.checkpoint._safetensors import TensorEntry
from manyhands.checkpoint._slices import EXACT_ENTRY
from manyhands.checkpoint._storage import Reader
from manyhands.checkpoint._values import decode

IN_A_FILE = 2**20  # bytes of a tensor that is put together in a mapped file

OnTensor = Callable[[str, int], None]  # called with a tensor's name and bytes when it is done


def consolidate(
    source: Path, target: Path, on_tensor: OnTensor = lambda name, nbytes: None
) -> list[Path]:
    """Write the files for the model and the optimizer, if there is one, and return their paths."""
    checkpoint = _folder.find_newest(source)
    with ExitStack() as stack:
        stack.enter_context(_folder.hold_for_reading(checkpoint))
        index, _ = _index.read(checkpoint)
        reader = stack.enter_context(Reader(checkpoint, index))
        target.mkdir(parents=True, exist_ok=True)
        # In the target, so that the finished files can be renamed on the same file system.
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".partial-", dir=target))
        written = []
        if index.model is not None:
            written.append(_write_model(reader, index.model, Path(scratch), on_tensor))
        for number, meta in enumerate(index.optimizers):
            name = "optimizer.pt" if len(index.optimizers) == 1 else f"optimizer.{number}.pt"
            written.append(_write_optimizer(reader, meta, Path(scratch) / name, on_tensor))
        results = []
        # Only when all are complete: an error leaves earlier files as they were.
        for path in written:
            os.replace(path, target / path.name)
            results.append(target / path.name)
        _folder.sync(target)
        return results


def _write_model(
    reader: Reader, meta: _index.ModelMeta, scratch: Path, on_tensor: OnTensor
) -> Path:
    keys = {name: f"model/{name}" for name in (*meta["params"], *meta["buffers"])}
    # `load_state_dict` wants a tied tensor under each of its names.
    keys |= {other: keys[first] for other, first in meta["aliases"].items()}
    entries = [_entry_of(name, reader.index.tensors[key]) for name, key in keys.items()]
    entries.sort(key=lambda entry: -entry.dtype.itemsize)  # aligned, as in `Writer.write_data`

    def get_tensor(number: int) -> Tensor:
        entry = entries[number]
        found = _read_tensor(reader, keys[entry.name], scratch)
        on_tensor(entry.name, entry.nbytes)
        return found

    path = scratch / "model.safetensors"
    # transformers refuses a file without this metadata.
    _safetensors.write(path, entries, get_tensor, {"format": "pt"})
    return path


def _entry_of(name: str, tensor: _index.StoredTensor) -> TensorEntry:
    return TensorEntry(name, tensor.torch_dtype, tensor.shape)


def _read_tensor(reader: Reader, key: str, scratch: Path) -> Tensor:
    """Return a tensor, compared with its checksums; a large one lies in an unnamed mapped file."""
    tensor = reader.index.tensors[key]
    if tensor.nbytes < IN_A_FILE:
        return reader.read_whole(key)
    for stored in tensor.slices:
        reader.check(stored, tensor.torch_dtype)
    descriptor, name = tempfile.mkstemp(dir=scratch)
    try:
        os.ftruncate(descriptor, tensor.nbytes)
        elements = math.prod(tensor.shape)
        flat = torch.from_file(name, shared=True, size=elements, dtype=tensor.torch_dtype)
    finally:
        os.close(descriptor)
        os.unlink(name)  # the mapping keeps the file's space until the tensor is freed
    result = flat.view(tensor.shape)
    reader.read_into(key, result)
    return result


def _write_optimizer(
    reader: Reader, meta: Mapping[str, Any], path: Path, on_tensor: OnTensor
) -> Path:
    """Write the state dict as the plain optimizer would have saved it."""

    def get_tensor(key: str) -> Tensor:
        on_tensor(key, reader.index.tensors[key].nbytes)
        return _read_tensor(reader, key, path.parent)

    groups: list[dict[str, Any]] = []
    names: list[str] = []
    for group in meta["groups"]:
        # torch numbers the parameters through all groups.
        numbers = range(len(names), len(names) + len(group["names"]))
        names += group["names"]
        options = decode(group["options"], get_tensor)
        groups.append({**options, "params": list(numbers), "param_names": group["names"]})
    state = {
        number: {
            entry: decode(value, get_tensor)
            for entry, value in meta["state"][name].items()
            if entry != EXACT_ENTRY  # ours: the plain optimizer does not know it
        }
        for number, name in enumerate(names)
        if meta["state"].get(name)
    }
    packed = {**decode(meta["other"], get_tensor), "state": state, "param_groups": groups}
    rule = meta["rule"]
    if rule is not None:
        scaling = decode(rule["state"], get_tensor)
        # Saved by name; a rule's own state dict has them in the order of the parameters.
        previous = scaling["previous"]
        scaling["previous"] = [previous.get(name) for name in names] if previous else []
        packed["manyhands"] = scaling
    with path.open("xb") as file:
        torch.save(packed, file)
        file.flush()
        os.fsync(file.fileno())
    return path


def verify(
    checkpoint: Path, index: _index.Index, on_bytes: Callable[[int], None] = lambda nbytes: None
) -> list[str]:
    """Compare every byte with its checksum, and return a message for each problem."""
    problems: dict[str, None] = {}  # a dict keeps the order; one bad file gives one message
    with Reader(checkpoint, index) as reader:
        for tensor in index.tensors.values():
            for stored in tensor.slices:
                try:
                    reader.check(stored, tensor.torch_dtype)
                except (ValueError, OSError) as error:
                    problems[str(error)] = None
                on_bytes(math.prod(stored.sizes) * tensor.torch_dtype.itemsize)
    return list(problems)
