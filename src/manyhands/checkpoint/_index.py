"""A checkpoint's index: which tensors there are, where their parts lie, and everything else.

    {"manyhands checkpoint": 1, "crc32": "....",
     "content": {...}}

The checksum is of the content's text. The index is the last file that is written; a folder without
one is no checkpoint.
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
from typing import Any

import torch

from manyhands.checkpoint import _files, _schema

NAME = "index.json"
VERSION = 1
LARGEST = 2**30  # bytes of an index that are read
HEAD = '{{"manyhands checkpoint": {}, "crc32": "{:08x}",\n"content": '
PATTERN = re.compile(rb'\{"manyhands checkpoint": (\d+), "crc32": "([0-9a-f]{8})",\n"content": ')


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where it is: the tensor `name` in file number `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    name: str
    crc32: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint, whole."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[Chunk]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class File:
    """A file of tensors: its size, and the checksum of its header."""

    name: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Index:
    """All that a checkpoint holds."""

    step: int | None
    workers: int
    versions: dict[str, str]
    time: float
    files: list[File]
    tensors: dict[str, Tensor]
    model: dict[str, Any] | None  # names, aliases of tied ones, extra states
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    values: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def text(self) -> str:
        content = {each.name: getattr(self, each.name) for each in fields(self)}
        content["files"] = [asdict(file) for file in self.files]
        content["tensors"] = {
            key: [
                t.shape,
                t.dtype,
                [[c.offsets, c.sizes, c.file, c.name, c.crc32] for c in t.chunks],
            ]
            for key, t in self.tensors.items()
        }
        text = json.dumps(content, separators=(",", ":"), allow_nan=False)
        return HEAD.format(VERSION, zlib.crc32(text.encode())) + text + "}\n"


def read(folder: Path) -> tuple[Index, int]:
    """A checkpoint's index, and the checksum of the file."""
    path = folder / NAME
    with _files.reader(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise ValueError(
                f"{path} is larger than any index: {LARGEST:,} bytes. Load another checkpoint."
            )
        raw = file.readall()
    return parsed(raw, path), zlib.crc32(raw)


def parsed(raw: bytes, path: Path) -> Index:
    found = PATTERN.match(raw)
    advice = "Load another checkpoint."
    if found is None:
        raise ValueError(
            f"{path} is no index of a manyhands checkpoint, or its beginning is damaged. {advice}"
        )
    version = int(found[1])
    text = raw[found.end() : -2]
    if raw[-2:] != b"}\n" or zlib.crc32(text) != int(found[2], 16):
        raise ValueError(f"{path} is damaged: its checksum is not that of its content. {advice}")
    if version != VERSION:
        raise ValueError(
            f"{path} has format version {version}, and this release reads {VERSION}. Load it with "
            "the release of manyhands that wrote it."
        )
    try:
        content = json.loads(text)
        _schema.check(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} does not say what it should: {error}. {advice}") from error
    return _built(content)


def _built(content: Mapping[str, Any]) -> Index:
    """The index of a content that has been checked."""
    tensors = {
        key: Tensor(
            tuple(shape),
            dtype,
            [
                Chunk(tuple(at), tuple(sizes), file, name, crc)
                for at, sizes, file, name, crc in chunks
                if 0 not in sizes or 0 in shape  # a rank may have none of a tensor's rows
            ],
        )
        for key, (shape, dtype, chunks) in content["tensors"].items()
    }
    files = [File(**file) for file in content["files"]]
    return Index(**{**content, "tensors": tensors, "files": files})
