"""A checkpoint's index: its tensors, where their slices are stored, and all other values.

    {"manyhands checkpoint": 1, "crc32": "....",
     "content": {...}}

The checksum covers the text of the content. It shows damage, not who wrote the file, so `parse`
also checks what would read a wrong place: names of files, types, and that the slices of a tensor
cover each of its elements exactly once.

Each rank has written one file, `worker-00003.safetensors`. A `Reader` finds slices in these files
by the index. A load goes over the files twice: first it compares all that it is going to read with
the checksums, then it reads.

The keys of all tensors in a checkpoint, such that no two tensors have one key:

    model/NAME                     a parameter or buffer
    optimizer.0/ENTRY/NAME         an entry of a parameter's state
    optimizer.0/options.1.lr       an option of its second parameter group
    optimizer.0/rule.x.y           the scaling rule's state; likewise `other`
    optimizer.0/blocks.anchor/NAME, optimizer.0/replica.1/...   see `_optimizer.py`
    scheduler.0.x                  a scheduler's state
    value/NAME.x.0.y               in the user's value of that name: value["x"][0]["y"]
    value/NAME/PARAMETER           in a module among the user's values
    random/RANK/GENERATOR          a random generator of each rank
"""

from __future__ import annotations

import json
import math
import random
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import torch

from manyhands.checkpoint import _folder, _safetensors
from manyhands.checkpoint._values import Json

VERSION = 1
HEAD = '{{"manyhands checkpoint": {}, "crc32": "{:08x}",\n"content": '
PATTERN = re.compile(rb'\{"manyhands checkpoint": (\d+), "crc32": "([0-9a-f]{8})",\n"content": ')
# Letters, digits, - and _ only: no name can lead out of the checkpoint's folder.
FILE_NAME = re.compile(r"[\w-]+\.safetensors", re.ASCII)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _safetensors.DTYPE_NAMES}
PRIME = 2**61 - 1
# The entry for the exact parameters that an optimizer keeps beside the rounded ones.
EXACT_ENTRY = "manyhands.exact"


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
        return DTYPES[self.dtype]

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
    extras: dict[str, Json]  # what `get_extra_state` returned, as JSON


# In the functional form, because `class` cannot be a field's name in a class statement.
ClassMeta = TypedDict("ClassMeta", {"class": str})


class StateMeta(ClassMeta):
    """A scheduler or a scaling rule in the index."""

    state: Json


class GroupMeta(TypedDict):
    """A parameter group: the parameters' names, and the options (learning rate and so on)."""

    names: list[str]
    options: Json


class ReplicaMeta(TypedDict):
    """What each replica has of its own. Without blocks there is one replica."""

    groups: list[GroupMeta]
    state: dict[str, dict[str, Json]]  # for each parameter's name the entries
    other: Json  # what else is in the optimizer's state dict
    rule: StateMeta | None  # a scaling rule around it: its averages, progress, scale


class OptimizerMeta(ReplicaMeta, ClassMeta, total=False):
    """An optimizer in the index, with what the first replica has.

    The class is that of the optimizer which the user asked for, whether it is sharded or not.
    """

    blocks: Json  # blocks around it: the counters that all replicas share
    replicas: list[ReplicaMeta]  # in blocks, the further replicas


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
    optimizers: list[OptimizerMeta]
    schedulers: list[StateMeta]
    values: dict[str, object]  # JSON for `decode`, or {"$": "module", "value": ModelMeta}

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
        raw = file.readall()
    return parse(raw, path), zlib.crc32(raw)


def parse(raw: bytes, path: Path) -> Index:
    """Return the index that a file contains. Raise ValueError if the file is not a valid index."""
    found = PATTERN.match(raw)
    advice = "Load another checkpoint."
    if found is None:
        raise ValueError(f"{path} is not an index of a manyhands checkpoint. {advice}")
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
        return _from_content(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has invalid content: {error!r:.200}. {advice}") from error


def _from_content(content: Mapping[str, Any]) -> Index:
    """Build the index from the file's JSON, and check each entry: it may be forged."""
    files = [IndexedFile(**file) for file in content["files"]]
    for file in files:
        if not FILE_NAME.fullmatch(file.name):
            raise ValueError(f"{file.name!r:.80} is not the name of a file of tensors")
    tensors = {k: _stored_tensor(k, meta, len(files)) for k, meta in content["tensors"].items()}
    return Index(**{**content, "tensors": tensors, "files": files})


def _stored_tensor(key: str, meta: Sequence[Any], files: int) -> StoredTensor:
    """Build a tensor of the index; `files` is the number of files that it may lie in."""
    shape, dtype, several = meta
    slices = [
        StoredSlice(tuple(offsets), tuple(sizes), file, name, crc32)
        for offsets, sizes, file, name, crc32 in several
    ]
    numbers = [*shape, *(n for each in slices for n in (*each.offsets, *each.sizes, each.file))]
    # The exact type: True is an int to Python.
    if any(type(n) is not int or n < 0 for n in numbers) or dtype not in DTYPES:
        raise ValueError(f"tensor {key!r} has an impossible shape, type or place")
    bounds = [(each.offsets, each.sizes) for each in slices]
    if any(each.file >= files for each in slices) or not covers_once(shape, bounds):
        raise ValueError(f"the slices of tensor {key!r} do not cover each element exactly once")
    # A rank that owns no rows of a tensor saves an empty slice: nothing to read.
    slices = [each for each in slices if 0 not in each.sizes or 0 in shape]
    return StoredTensor(tuple(shape), dtype, slices)


def covers_once(
    shape: Sequence[int], slices: Collection[tuple[Sequence[int], Sequence[int]]]
) -> bool:
    """Return whether slices (offsets and sizes) fill a shape without gap or overlap.

    They do, inside the shape, exactly if

        sum over slices of  prod_i (f_i[start] - f_i[stop])  =  prod_i (f_i[0] - f_i[size])

    as polynomials in the unknowns f_i[x], one for each dimension and coordinate. (Each side is the
    mixed difference of an indicator function, and differences of equal functions are equal.) Both
    sides are compared at random values modulo a prime of 61 bits: one step for each slice and
    dimension, where comparing slices in pairs takes the square.
    """
    for offsets, sizes in slices:
        ends = zip(offsets, sizes, shape, strict=True)
        if any(start + size > whole for start, size, whole in ends):
            return False
    # Its own generator: the program's are saved and restored, and must not advance.
    draw = random.SystemRandom().randrange
    values: dict[tuple[int, int], int] = {}

    def product(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        """Return a slice's term of the sum, with random numbers f_i drawn as they are needed."""
        result = 1
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            for x in (start, start + size):
                if (dim, x) not in values:
                    values[dim, x] = draw(PRIME)
            result = result * (values[dim, start] - values[dim, start + size]) % PRIME
        return result

    total = sum(product(offsets, sizes) for offsets, sizes in slices)
    return total % PRIME == product([0] * len(shape), shape)


# -- read the files --------------------------------------------------------------------------------


class Reader:
    """Reads slices of a checkpoint. It keeps the files that it needs open until `close`."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        # Open files stay readable even if another job prunes the checkpoint between the two passes.
        self._files: dict[int, _safetensors.SafetensorsFile] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()
        self._files.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, stored: StoredSlice, dtype: torch.dtype) -> None:
        """Raise ValueError if a slice's shape, type or checksum is not what the index says."""
        file = self._open(stored.file)
        entry = file.entries.get(stored.name)
        if entry is None or (entry.shape, entry.dtype) != (stored.sizes, dtype):
            raise file.damaged(f"it has no {stored.name!r} of {stored.sizes} {dtype}")
        if file.checksum(stored.name) != stored.crc32:
            raise file.damaged(f"the checksum of {stored.name!r} does not match")

    def read(
        self,
        stored: StoredSlice,
        offsets: Sequence[int],
        sizes: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Copy a slice of a stored slice into `target`, which has the shape `sizes`."""
        self._open(stored.file).read_slice(stored.name, offsets, sizes, target.detach())

    def read_whole(self, key: str) -> torch.Tensor:
        """Return a whole (small) tensor in new memory, compared with its checksums."""
        tensor = self.index.tensors[key]
        for stored in tensor.slices:
            self.check(stored, tensor.torch_dtype)
        result = torch.empty(tensor.shape, dtype=tensor.torch_dtype)
        self.read_into(key, result)
        return result

    def read_into(self, key: str, result: torch.Tensor) -> None:
        """Copy a whole tensor, slice by slice."""
        for stored in self.index.tensors[key].slices:
            target = result
            for dim, (offset, size) in enumerate(zip(stored.offsets, stored.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            self.read(stored, (0,) * len(stored.sizes), stored.sizes, target)

    def _open(self, number: int) -> _safetensors.SafetensorsFile:
        """Return an open file. Raise ValueError if its header is not the one that was saved."""
        file = self._files.get(number)
        if file is None:
            indexed = self.index.files[number]
            path = self.folder / indexed.name
            try:
                file = _safetensors.SafetensorsFile(path)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{path} is missing: the checkpoint needs each of its {len(self.index.files)} "
                    "files. Copy the whole folder, or load another checkpoint."
                ) from error
            self._stack.callback(file.close)
            # The header's checksum also tells this file from one of another checkpoint.
            if file.nbytes != indexed.nbytes or file.header_crc32 != indexed.crc32:
                raise file.damaged("its header is not the one that was saved")
            self._files[number] = file
        return file
