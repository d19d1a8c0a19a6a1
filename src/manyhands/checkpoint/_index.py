"""A checkpoint's index: its tensors, where their slices are stored, and all other values.

    {"manyhands checkpoint": 1, "crc32": "....",
     "content": {...}}

The checksum covers the text of the content. The index is the last file that is written; a folder
without an index is not a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import torch

from manyhands.checkpoint import _folder, _schema

VERSION = 1
MAX_BYTES = 2**30  # of an index that is read: a forged one must not fill the memory
HEAD = '{{"manyhands checkpoint": {}, "crc32": "{:08x}",\n"content": '
PATTERN = re.compile(rb'\{"manyhands checkpoint": (\d+), "crc32": "([0-9a-f]{8})",\n"content": ')


@dataclass(frozen=True)
class StoredSlice:
    """A rectangular slice of a tensor, stored as the entry `name` of file number `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    name: str
    crc32: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint: its whole shape, and the slices that make it up."""

    shape: tuple[int, ...]
    dtype: str
    slices: list[StoredSlice]

    @property
    def torch_dtype(self) -> torch.dtype:
        # Safe with a name from a file: `_schema.py` allows the names of dtypes only.
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class IndexedFile:
    """A file of tensors as the index knows it: its size, and the checksum of its header."""

    name: str
    nbytes: int
    crc32: int


class ModelMeta(TypedDict):
    """A model in the index. Its tensors are stored under their names."""

    params: list[str]
    buffers: list[str]
    aliases: dict[str, str]  # another name of a tied tensor -> the name it is stored under
    extras: dict[str, Any]  # what `get_extra_state` returned, as JSON


# In the functional form, because `class` cannot be a field's name in a class statement.
SchedulerMeta = TypedDict("SchedulerMeta", {"class": str, "state": Any})


@dataclass(frozen=True)
class Index:
    """Everything in a checkpoint except the elements of its tensors."""

    step: int | None
    workers: int
    versions: dict[str, str]
    time: float
    files: list[IndexedFile]
    tensors: dict[str, StoredTensor]
    model: ModelMeta | None
    optimizers: list[dict[str, Any]]  # described in `_optimizer.py`
    schedulers: list[SchedulerMeta]
    values: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def to_text(self) -> str:
        """Return the text of the index file, with its checksum."""
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content["files"] = [asdict(file) for file in self.files]
        # Lists instead of objects: a large model has many slices, and the keys would repeat.
        content["tensors"] = {
            key: [
                tensor.shape,
                tensor.dtype,
                [[s.offsets, s.sizes, s.file, s.name, s.crc32] for s in tensor.slices],
            ]
            for key, tensor in self.tensors.items()
        }
        # NaN is not JSON; `_values.py` has turned such numbers into text.
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
        return HEAD.format(VERSION, zlib.crc32(text.encode())) + text + "}\n"


def read(folder: Path) -> tuple[Index, int]:
    """Return a checkpoint's index, and the checksum of the whole index file."""
    path = folder / _folder.INDEX
    with _folder.open_to_read(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            raise ValueError(
                f"{path} is larger than any index: {MAX_BYTES:,} bytes. Load another checkpoint."
            )
        raw = file.readall()
    return parse(raw, path), zlib.crc32(raw)


def parse(raw: bytes, path: Path) -> Index:
    """Return the index that a file contains. Raise ValueError if the file is not a valid index."""
    found = PATTERN.match(raw)
    advice = "Load another checkpoint."
    if found is None:
        raise ValueError(
            f"{path} is not an index of a manyhands checkpoint, or its beginning is damaged. "
            f"{advice}"
        )
    version = int(found[1])
    text = raw[found.end() : -2]
    # The checksum before the version: a damaged version number must not look like a new format.
    if raw[-2:] != b"}\n" or zlib.crc32(text) != int(found[2], 16):
        raise ValueError(f"{path} is damaged: its checksum does not match its content. {advice}")
    if version != VERSION:
        raise ValueError(
            f"{path} has format version {version}, and this release reads {VERSION}. Load it with "
            "the release of manyhands that wrote it."
        )
    try:
        content = json.loads(text)
        _schema.check(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has invalid content: {error}. {advice}") from error
    return _from_content(content)


def _from_content(content: Mapping[str, Any]) -> Index:
    """Build the index from content that `_schema.check` has accepted."""
    tensors = {
        key: StoredTensor(
            tuple(shape),
            dtype,
            [
                StoredSlice(tuple(offsets), tuple(sizes), file, name, crc)
                for offsets, sizes, file, name, crc in slices
                # A rank that owns no rows of a tensor saves an empty slice: nothing to read.
                if 0 not in sizes or 0 in shape
            ],
        )
        for key, (shape, dtype, slices) in content["tensors"].items()
    }
    files = [IndexedFile(**file) for file in content["files"]]
    return Index(**{**content, "tensors": tensors, "files": files})
