"""Write the files of a checkpoint.

**Data files** are safetensors files. Each rank writes a file block by block, so it need not fit in
memory.

    8 bytes          length of the header
    header           JSON: type, shape, and first and last byte of each tensor
    the tensors      in the order of the header, without gaps

The safetensors package writes only tensors that are all on the CPU at the same time, and does not
wait for the disk. Otherwise the files are alike. Our files end with a tensor `CHECKS`, which has a
CRC-32 for every 16 KiB of the other tensors. So a reader can verify a part of a tensor, and the
writer does not return to the header.

The name of a tensor in a file is the key of the full tensor, followed by the offsets for a slice.

    model/NAME                     a parameter or buffer
    optimizer.0/ENTRY/NAME         an entry of a parameter's state; json.ENTRY if not a tensor
    optimizer.0/options.1.lr       an option of the second parameter group
    optimizer.0/rule.x.y           the scaling rule's state; likewise `other`
    optimizer.0/blocks.anchor/NAME, optimizer.0/replica.1/...   see `_optimizer.py`
    scheduler.0.x                  a scheduler's state
    value/NAME.x.0.y               in the user's value of that name: value["x"][0]["y"]
    value/NAME/PARAMETER           in a module among the user's values
    rank/...                       of this rank only: random generators, place in blocks

**The commit** is a small file that completes the checkpoint.

    {"manyhands checkpoint": 2, "crc32": "....",
     "content": {...}}

It contains the location of each tensor. Tensors that are split evenly along a dimension, as by
`fully_shard`, are in a *grid*: a common description of all tensors with the same split, and the
file of each piece. So the size of the commit grows with tensors plus ranks, not with their product.
Other slices are listed individually.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from manyhands._tensors.flat import is_dtensor
from manyhands.checkpoint._folder import NewFile
from manyhands.checkpoint._tensor_parts import (
    ALONE,
    DTYPE_NAMES,
    Savers,
    Table,
    TensorParts,
    check_can_hold,
    to_parts,
)
from manyhands.checkpoint._values import Json

BLOCK = 2**24  # bytes per copy or read
CHECKED = 2**14  # bytes of a tensor per checksum
CHECKS = "manyhands.crc32"  # name of the tensor of checksums
OWN = "rank/"  # prefix of tensors that belong to a single rank and are in no table
RANDOM = OWN + "random/"
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
VERSION = 2
HEAD = '{{"manyhands checkpoint": {}, "crc32": "{:08x}",\n"content": '


# -- data files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def slice_name(key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Return a slice's name in a file: the tensor's key, with offsets for a partial slice."""
    # An @ in the key is doubled, which distinguishes it from the separator.
    key = key.replace("@", "@@")
    if tuple(sizes) == tuple(shape):
        return key
    return f"{key}@{','.join(map(str, offsets))}"


def write(
    sink: NewFile,
    entries: Sequence[TensorEntry],
    get_tensor: Callable[[TensorEntry], Tensor],
    *,
    checked: bool = True,
) -> list[int]:
    """Write a new file. Return when it is on disk.

    `get_tensor` is called for each entry in turn, so only a single tensor is in memory. Returns the
    sizes of the file and of its head, and the checksum of the head and of `CHECKS`.
    """
    if sys.byteorder != "little":  # tensors are written as stored in memory
        raise RuntimeError("checkpoints can only be written on little-endian machines.")
    header: dict[str, object] = {}
    described = list(entries)
    if checked:
        blocks = sum(-(-entry.nbytes // CHECKED) for entry in entries)
        described.append(TensorEntry(CHECKS, torch.uint8, (4 * blocks,)))
    else:
        header["__metadata__"] = {"format": "pt"}  # required by transformers
    end = 0
    for entry in described:
        check_can_hold(entry.name, entry.dtype)
        if entry.name in header or entry.name == "__metadata__":
            raise ValueError(f"the name {entry.name!r} is used twice, or reserved. Rename it.")
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padded with spaces as in the format: the first tensor starts at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    sums = Checksums()
    sink.write(memoryview(head))
    for entry in entries:
        for block in _blocks(get_tensor(entry)):
            view = memory_of(block)
            if checked:
                sums.add(view)
            sink.write(view)
            del view  # first: the view does not keep the block's memory alive
        sums.end()
    sink.write(memoryview(sums.found))
    sink.close()
    return [len(head) + end, len(head), zlib.crc32(sums.found, zlib.crc32(head))]


class Checksums:
    """The CRC-32 of each `CHECKED` bytes of a tensor, which is added in pieces of any length."""

    def __init__(self) -> None:
        self.found = bytearray()
        self._crc32 = 0
        self._length = 0  # bytes in the current checksum

    def add(self, view: memoryview) -> None:
        while len(view):
            part = view[: CHECKED - self._length]
            view = view[len(part) :]
            self._crc32 = zlib.crc32(part, self._crc32)
            self._length += len(part)
            if self._length == CHECKED:
                self.end()

    def end(self) -> None:
        """Complete the current checksum."""
        if self._length:
            self.found += self._crc32.to_bytes(4, "little")
            self._crc32 = 0
            self._length = 0


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor's elements in order, contiguous on the CPU, without large copies."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    blocks: Sequence[Tensor] = [tensor]
    in_memory = tensor.device.type == "cpu" and tensor.is_contiguous() and is_stored_as_is(tensor)
    if tensor.dim() > 0 and not in_memory:  # copied by rows
        row_bytes = tensor.nbytes // tensor.shape[0]
        blocks = tensor.split(max(1, BLOCK // row_bytes))
    for block in blocks:
        yield block.resolve_conj().resolve_neg().contiguous().cpu()


def is_stored_as_is(tensor: Tensor) -> bool:
    """Return whether the bytes in memory are the tensor's numbers.

    For a lazy conjugate or negative view, memory has different numbers, which torch converts when
    it reads or writes the tensor.
    """
    return not (tensor.is_conj() or tensor.is_neg())


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, which must outlive the result."""
    assert tensor.is_contiguous() and is_stored_as_is(tensor)
    # With ctypes: numpy is not a dependency, and has no bfloat16.
    memory = ctypes.c_ubyte * tensor.nbytes
    return memoryview(memory.from_address(tensor.data_ptr())).cast("B")


# -- the commit ------------------------------------------------------------------------------------


# `_commit.py` compares every commit with these types.


class ModelMeta(TypedDict):
    """A model in the commit. The tensors are stored under their names."""

    params: list[str]
    buffers: list[str]
    aliases: dict[str, str]  # alias of a tied tensor -> stored name
    extras: dict[str, Json]  # the results of `get_extra_state`, as JSON
    config: str  # text of the model's config.json, or ""
    left_out: dict[str, list[int]]  # parameters omitted by `save(frozen=False)`, with shapes


# In functional form, because `class` is a keyword.
StateMeta = TypedDict("StateMeta", {"class": str, "state": Json})  # a scheduler, or a scaling rule


class GroupMeta(TypedDict):
    """A parameter group."""

    names: list[str]
    options: Json


class ReplicaMeta(TypedDict):
    """The part of an optimizer that differs between replicas."""

    groups: list[GroupMeta]
    other: Json  # other entries of the optimizer's state dict
    rule: StateMeta | None  # averages, progress and scale of a scaling rule


# The user's optimizer class, regardless of sharding.
_ClassMeta = TypedDict("_ClassMeta", {"class": str})


class OptimizerMeta(ReplicaMeta, _ClassMeta):
    """An optimizer in the commit, including the first replica's part."""

    blocks: Json  # counters of blocks, which all replicas share
    replicas: int  # 1 without blocks


class Versions(TypedDict):
    """The versions of the libraries that wrote a checkpoint."""

    manyhands: str
    torch: str


@dataclass(frozen=True)
class Commit:
    """The content of a checkpoint, except for the elements of tensors."""

    step: int | None
    token: str  # unique to the save, and part of the file names
    versions: Versions
    time: float
    files: list[list[int]]  # for each rank: bytes of the file, bytes of its head, CRC-32
    table: Table
    model: ModelMeta | None
    optimizers: list[OptimizerMeta]
    schedulers: list[StateMeta]
    values: dict[str, object]  # JSON for `decode`, or {"$": "module", "value": ModelMeta}

    @property
    def workers(self) -> int:
        return len(self.files)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _, _ in self.files)

    def to_text(self) -> str:
        """Return the text of the commit, with a checksum."""
        # JSON has no NaN; `_values.py` encodes NaN as text.
        text = json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)
        return HEAD.format(VERSION, zlib.crc32(text.encode())) + text + "}\n"


def file_name(rank: int, token: str) -> str:
    return f"worker-{rank:05d}-{token}.safetensors"


# -- the contents of a rank ------------------------------------------------------------------------


@dataclass
class Contents:
    """The tensors of this rank: slices by key, and tensors of this rank only by name."""

    savers: Savers = ALONE
    tensors: dict[str, TensorParts] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)

    def add(self, key: str, parts: TensorParts) -> None:
        """Add a tensor. Raise ValueError if the key is in use."""
        if key in self.tensors:
            raise ValueError(
                f"two tensors of this checkpoint have the same key {key!r}. Rename one of them."
            )
        check_can_hold(key, parts.dtype)  # now, not when the file is half written
        self.tensors[key] = parts

    def put(self, key: str, tensor: Tensor) -> str:
        """Add a tensor of this rank. Return the key."""
        self.add(key, to_parts(tensor))
        return key

    def put_of_first(self, key: str, tensor: Tensor) -> str:
        """Add a tensor from rank 0, or a DTensor, of which every rank has a shard."""
        if is_dtensor(tensor):
            self.add(key, to_parts(tensor, self.savers))
        elif self.savers.rank == 0:
            self.put(key, tensor)
        return key

    def alike(self) -> dict[str, str]:
        """Return a checksum of the tensors that every rank has, for each part of the run."""
        parts: dict[str, int] = {}
        for key, tensor in self.tensors.items():
            if tensor.holders.kind == "all":
                part = key.partition("/")[0]
                described = f"{key} {tensor.shape} {tensor.dtype}"
                parts[part] = zlib.crc32(described.encode(), parts.get(part, 0))
        return {part: f"checksum {crc32:08x}" for part, crc32 in parts.items()}
