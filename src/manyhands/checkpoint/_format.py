"""Write the files of a checkpoint.

**A data file** is a safetensors file, which each rank writes block by block: it never has to fit in
memory.

    8 bytes          length of the header
    header           JSON: each tensor's type, its shape, and where its bytes begin and end
    the tensors      one after the other, in that order, without gaps

The safetensors package writes a file from tensors that are all on the CPU at once, and does not
wait until the file is on the disk. Its files and ours are otherwise alike. The last tensor of ours,
`CHECKS`, has a CRC-32 of every 16 KiB of the others. So a reader can verify a part of a tensor
without reading all of it, and the writer need not go back to the header.

A tensor in a file is called by the key of the whole tensor and, if it is a slice, by its offsets.

    model/NAME                     a parameter or buffer
    optimizer.0/ENTRY/NAME         an entry of a parameter's state; json.ENTRY if it is no tensor
    optimizer.0/options.1.lr       an option of the second parameter group
    optimizer.0/rule.x.y           the scaling rule's state; likewise `other`
    optimizer.0/blocks.anchor/NAME, optimizer.0/replica.1/...   see `_optimizer.py`
    scheduler.0.x                  a scheduler's state
    value/NAME.x.0.y               in the user's value of that name: value["x"][0]["y"]
    value/NAME/PARAMETER           in a module among the user's values
    rank/...                       of this rank only: random generators, place in blocks

**The commit** is one small file, and makes the others a checkpoint.

    {"manyhands checkpoint": 2, "crc32": "....",
     "content": {...}}

It says where each tensor is. A tensor that is cut into equal parts along one dimension, as
`fully_shard` does, is in a *grid*: one description for all tensors that are cut alike, and the file
of each piece. So the commit grows with the tensors plus the ranks, and not
with their product. All other slices are listed one by one.
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

BLOCK = 2**24  # bytes that are copied or read at once
CHECKED = 2**14  # bytes of a tensor that have a checksum in common
CHECKS = "manyhands.crc32"  # the tensor of checksums in a file
OWN = "rank/"  # the prefix of tensors of one rank only, which are in no table
RANDOM = OWN + "random/"
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
VERSION = 2
HEAD = '{{"manyhands checkpoint": {}, "crc32": "{:08x}",\n"content": '


# -- data files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def slice_name(key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> str:
    """Return a slice's name in its file: the tensor's key and, unless it is whole, its offsets."""
    # An @ in the key is doubled, so that no key can look like a key with offsets.
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
    """Write a new file, and return once it is on the disk.

    `get_tensor` is called for one entry after the other, so that only one is in memory. Return the
    sizes of the file and of its head, and the checksum of the head and of `CHECKS`.
    """
    if sys.byteorder != "little":  # as the format is, and tensors are written as they are
        raise RuntimeError("checkpoints are written on little-endian machines only.")
    header: dict[str, object] = {}
    described = list(entries)
    if checked:
        blocks = sum(-(-entry.nbytes // CHECKED) for entry in entries)
        described.append(TensorEntry(CHECKS, torch.uint8, (4 * blocks,)))
    else:
        header["__metadata__"] = {"format": "pt"}  # transformers refuses a file without it
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
    # The format asks for spaces here: the first tensor then begins at a multiple of 8 bytes.
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
            del view  # before its block: the view does not keep the tensor's memory alive
        sums.end()
    sink.write(memoryview(sums.found))
    sink.close()
    return [len(head) + end, len(head), zlib.crc32(sums.found, zlib.crc32(head))]


class Checksums:
    """The CRC-32 of each `CHECKED` bytes of a tensor, which comes in pieces of any length."""

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
        """Complete a checksum: the next bytes have another."""
        if self._length:
            self.found += self._crc32.to_bytes(4, "little")
            self._crc32 = 0
            self._length = 0


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor's elements in order, contiguous and on the CPU, without a large copy."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    blocks: Sequence[Tensor] = [tensor]
    in_memory = tensor.device.type == "cpu" and tensor.is_contiguous() and is_stored_as_is(tensor)
    if tensor.dim() > 0 and not in_memory:  # copied some rows at a time, at least one
        row_bytes = tensor.nbytes // tensor.shape[0]
        blocks = tensor.split(max(1, BLOCK // row_bytes))
    for block in blocks:
        yield block.resolve_conj().resolve_neg().contiguous().cpu()


def is_stored_as_is(tensor: Tensor) -> bool:
    """Return whether the bytes in memory are the tensor's numbers.

    A lazy conjugate or negative view has other numbers than the memory. torch converts them when it
    reads or writes; code that takes the bytes directly does not.
    """
    return not (tensor.is_conj() or tensor.is_neg())


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. Keep the tensor alive while you use them."""
    assert tensor.is_contiguous() and is_stored_as_is(tensor)
    # Through ctypes, not numpy: `import manyhands` needs only torch, and numpy has no bfloat16.
    memory = ctypes.c_ubyte * tensor.nbytes
    return memoryview(memory.from_address(tensor.data_ptr())).cast("B")


# -- the commit ------------------------------------------------------------------------------------


# `_commit.py` compares every commit with these types.


class ModelMeta(TypedDict):
    """A model in the commit. Its tensors are stored under their names."""

    params: list[str]
    buffers: list[str]
    aliases: dict[str, str]  # another name of a tied tensor -> the name it is stored under
    extras: dict[str, Json]  # the results of `get_extra_state`, as JSON
    config: str  # the text of the model's config.json; "" if it has none
    left_out: dict[str, list[int]]  # by `save(frozen=False)`: parameters, and their shapes


# In the functional form, because `class` cannot be a field's name in a class statement.
StateMeta = TypedDict("StateMeta", {"class": str, "state": Json})  # a scheduler, or a scaling rule


class GroupMeta(TypedDict):
    """A group of an optimizer's parameters."""

    names: list[str]
    options: Json


class ReplicaMeta(TypedDict):
    """The part of an optimizer that each replica has for itself."""

    groups: list[GroupMeta]
    other: Json  # all other entries of the optimizer's state dict
    rule: StateMeta | None  # a scaling rule around the optimizer: averages, progress, scale


# The class that the user asked for, whether the optimizer is sharded or not.
_ClassMeta = TypedDict("_ClassMeta", {"class": str})


class OptimizerMeta(ReplicaMeta, _ClassMeta):
    """An optimizer in the commit, with the first replica's part."""

    blocks: Json  # blocks around the optimizer: the counters that all replicas share
    replicas: int  # without blocks there is one


class Versions(TypedDict):
    """The versions that have written a checkpoint."""

    manyhands: str
    torch: str


@dataclass(frozen=True)
class Commit:
    """Everything in a checkpoint except the elements of tensors."""

    step: int | None
    token: str  # unique to the save: it is in the names of the files
    versions: Versions
    time: float
    files: list[list[int]]  # for each rank: bytes of the file, of its head, and the CRC-32
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
        """Return the text of the commit, with its checksum."""
        # NaN is not JSON; `_values.py` has turned such numbers into text.
        text = json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)
        return HEAD.format(VERSION, zlib.crc32(text.encode())) + text + "}\n"


def file_name(rank: int, token: str) -> str:
    return f"worker-{rank:05d}-{token}.safetensors"


# -- the contents of a rank ------------------------------------------------------------------------


@dataclass
class Contents:
    """The tensors of this rank: slices by key, and tensors for no other rank by name."""

    savers: Savers = ALONE
    tensors: dict[str, TensorParts] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)

    def add(self, key: str, parts: TensorParts) -> None:
        """Add a tensor. Raise ValueError if there is one with that key."""
        if key in self.tensors:
            raise ValueError(
                f"two tensors of this checkpoint would be called {key!r}. Rename one of them."
            )
        check_can_hold(key, parts.dtype)  # now, rather than when the file is half written
        self.tensors[key] = parts

    def put(self, key: str, tensor: Tensor) -> str:
        """Add a tensor of this rank."""
        self.add(key, to_parts(tensor))
        return key

    def put_of_first(self, key: str, tensor: Tensor) -> str:
        """Add a tensor of rank 0; of a DTensor every rank has a shard."""
        if is_dtensor(tensor):
            self.add(key, to_parts(tensor, self.savers))
        elif self.savers.rank == 0:
            self.put(key, tensor)
        return key

    def alike(self) -> dict[str, str]:
        """Return a checksum of the tensors that every rank has, by part of the run."""
        parts: dict[str, int] = {}
        for key, tensor in self.tensors.items():
            if tensor.holders.kind == "all":
                part = key.partition("/")[0]
                described = f"{key} {tensor.shape} {tensor.dtype}"
                parts[part] = zlib.crc32(described.encode(), parts.get(part, 0))
        return {part: f"checksum {crc32:08x}" for part, crc32 in parts.items()}
