"""A checkpoint's index: its tensors, where their slices are stored, and all other values.

    {"manyhands checkpoint": 1, "crc32": "....",
     "content": {...}}

The checksum covers the text of the content. It shows that a file is as it was written, but not who
wrote it. So the whole content is checked before any of it is used: each number is an integer of a
sensible size, each name belongs to a tensor of the checkpoint, each value can be decoded, and

    the slices of a tensor cover each of its elements exactly once.

The check imports, allocates and opens nothing.

The keys of all tensors in a checkpoint, such that no two tensors have one key:

    model/NAME                     a parameter or buffer
    optimizer.0/ENTRY/NAME         an entry of a parameter's state
    optimizer.0/options.1.lr       an option of its second parameter group
    optimizer.0/rule.x.y           the scaling rule's state; likewise `other`
    optimizer.0/blocks.anchor/NAME, optimizer.0/replica.1/...   see `_blocks.py`
    scheduler.0.x                  a scheduler's state
    value/NAME.x.0.y               in the user's value of that name: value["x"][0]["y"]
    value/NAME/PARAMETER           in a module among the user's values
    random/RANK/GENERATOR          a random generator of each rank
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import torch

from manyhands.checkpoint import _folder
from manyhands.checkpoint._safetensors import DTYPE_NAMES
from manyhands.checkpoint._values import Json, decode, escape, tensor_key

VERSION = 1
MAX_BYTES = 2**30  # of an index that is read: a forged one must not fill the memory
HEAD = '{{"manyhands checkpoint": {}, "crc32": "{:08x}",\n"content": '
PATTERN = re.compile(rb'\{"manyhands checkpoint": (\d+), "crc32": "([0-9a-f]{8})",\n"content": ')
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
        # Safe with a name from a file: `_check_tensors` allows the names of dtypes only.
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


def state_key(prefix: str, entry: str, name: str) -> str:
    """Return the key of one entry of a parameter's state."""
    return f"{prefix}/{escape(entry)}/{name}"


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
        _check_content(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has invalid content: {error}. {advice}") from error
    return _from_content(content)


def _from_content(content: Mapping[str, Any]) -> Index:
    """Build the index from content that `_check_content` has accepted."""
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


# -- check -----------------------------------------------------------------------------------------

FIELDS = {
    "step", "workers", "versions", "time", "files", "tensors", "model", "optimizers", "schedulers",
    "values",
}  # fmt: skip
# Letters, digits, - and _ only: no name can lead out of the checkpoint's folder.
FILE_NAME = re.compile(r"[\w-]+\.safetensors", re.ASCII)
LATEST_TIME = 253_402_300_799  # the end of the year 9999; Python's calendar prints nothing later
MAX_NUMBER = 2**63 - 1
PRIME = 2**61 - 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


def _check_content(content: object) -> None:
    """Raise ValueError that says what is wrong first."""
    fields = _check_mapping(content, "the content", FIELDS)
    if set(fields) != FIELDS:
        raise ValueError(f"it has {sorted(set(fields) - FIELDS)!r} as well")
    if fields["step"] is not None:
        _check_integer(fields["step"], "the step")
    _check_integer(fields["workers"], "the number of workers", least=1)
    versions = _check_mapping(fields["versions"], "versions", {"manyhands", "torch"})
    for name, version in versions.items():
        _check_printable(version, f"the version of {name!r}")
    time = fields["time"]
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= LATEST_TIME:
        raise ValueError(f"the time is {time!r:.40}")
    # Files before tensors, and tensors before the rest: each refers to the one before.
    files = _check_files(fields["files"])
    tensors = _check_tensors(fields["tensors"], files)
    if fields["model"] is not None:
        _check_model(fields["model"], "model", tensors)
    for number, meta in enumerate(_check_list(fields["optimizers"], "optimizers")):
        first = _check_optimizer(meta, f"optimizer.{number}", tensors)
        others = _check_list(first.get("replicas", []), f"the replicas of optimizer.{number}")
        for replica, other in enumerate(others, start=1):
            where = f"optimizer.{number}/replica.{replica}"
            # A replica overrides parts of the first one: see `Replica.meta_to_load`.
            _check_optimizer({**first, **_check_mapping(other, where)}, where, tensors)
    for number, meta in enumerate(_check_list(fields["schedulers"], "schedulers")):
        _check_of_class(meta, f"scheduler {number}", tensors)
    for name, meta in _check_mapping(fields["values"], "values").items():
        if name == "step":  # `load` returns the step under this name
            raise ValueError("a value is called 'step'")
        if isinstance(meta, dict) and meta.get("$") == "module":
            module = _check_mapping(meta, f"the value {name!r}", {"value"})
            _check_model(module["value"], f"value/{escape(name)}", tensors)
        else:
            _check_value(meta, f"the value {name!r}", tensors)


# -- tensors ---------------------------------------------------------------------------------------


def _check_files(files: object) -> int:
    """Return the number of files."""
    several = _check_list(files, "files")
    names = set()
    for number, meta in enumerate(several):
        where = f"file {number}"
        needed = {"name", "nbytes", "crc32"}
        file = _check_mapping(meta, where, needed)
        if set(file) != needed:
            raise ValueError(f"{where} has other entries than name, nbytes and crc32")
        name = file["name"]
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80} is not the name of a file of tensors")
        _check_integer(file["nbytes"], f"the size of {where}", most=MAX_NUMBER)
        _check_integer(file["crc32"], f"the checksum of {where}", most=2**32 - 1)
        names.add(name)
    if len(names) != len(several):
        raise ValueError("two files have one name")
    return len(several)


def _check_tensors(tensors: object, files: int) -> Collection[str]:
    """Return the tensors' keys. `files` is the number of files that they may be in."""
    by_key = _check_mapping(tensors, "tensors")
    used = set()  # (file, name) of every slice: no two slices may have the same bytes
    for key, meta in by_key.items():
        where = f"tensor {key!r}"
        shape_here, dtype, slices = _check_list(meta, where, 3)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{where} has the type {dtype!r:.40}, which is no type of a tensor")
        shape = _check_sizes(shape_here, f"the shape of {where}")
        if math.prod(shape) * DTYPES[dtype].itemsize > MAX_NUMBER:
            raise ValueError(f"{where} has more bytes than a tensor can have")
        bounds = []
        for stored in _check_list(slices, f"the slices of {where}"):
            start, size, file, name, crc32 = _check_list(stored, f"a slice of {where}", 5)
            offsets = _check_sizes(start, f"the offsets of a slice of {where}", len(shape))
            sizes = _check_sizes(size, f"the sizes of a slice of {where}", len(shape))
            _check_integer(file, f"the file of a slice of {where}", most=files - 1)
            _check_integer(crc32, f"the checksum of a slice of {where}", most=2**32 - 1)
            if not isinstance(name, str) or (file, name) in used:
                raise ValueError(f"a slice of {where} is called {name!r:.80}, as another is")
            used.add((file, name))
            bounds.append((offsets, sizes))
        if not covers_once(shape, bounds):
            raise ValueError(f"the slices of {where} do not cover each element exactly once")
    return by_key.keys()


def covers_once(
    shape: Sequence[int], slices: Collection[tuple[Sequence[int], Sequence[int]]]
) -> bool:
    """Return whether slices (offsets and sizes) fill a shape without gap or overlap.

    Take a slice's indicator function (1 inside, 0 outside). Its mixed difference over all
    dimensions is +1 or -1 at each corner, and the difference of a sum is the sum of differences.
    Two sums of indicators are equal exactly if their differences are. So

        sum over slices of  prod_i (f_i[start] - f_i[stop])  =  prod_i (f_i[0] - f_i[size])

    as polynomials in the unknowns f_i[x], one for each dimension and coordinate. Both sides are
    compared at random values modulo a prime of 61 bits. That takes one step for each slice and
    dimension; comparing slices in pairs takes the square. Sides that differ agree with probability
    below dimensions / 2^61, and a forger cannot choose them so, because the values are secret.
    """
    # The identity says nothing of slices beyond the shape, so check the bounds first.
    for offsets, sizes in slices:
        ends = zip(offsets, sizes, shape, strict=True)
        if any(start + size > whole for start, size, whole in ends):
            return False
    # SystemRandom: the program's own generators are saved and restored, and must not advance.
    draw = random.SystemRandom().randrange
    values: dict[tuple[int, int], int] = {}

    def product(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        result = 1
        for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
            for x in (start, start + size):
                if (dim, x) not in values:
                    values[dim, x] = draw(PRIME)
            result = result * (values[dim, start] - values[dim, start + size]) % PRIME
        return result

    total = sum(product(offsets, sizes) for offsets, sizes in slices)
    return total % PRIME == product([0] * len(shape), shape)


# -- model, optimizers, values ---------------------------------------------------------------------


def _check_model(meta: object, prefix: str, tensors: Collection[str]) -> None:
    model = _check_mapping(meta, prefix, {"params", "buffers", "aliases", "extras"})
    names = [*_check_list(model["params"], "params"), *_check_list(model["buffers"], "buffers")]
    for name in names:
        if not isinstance(name, str) or f"{prefix}/{name}" not in tensors:
            raise ValueError(f"{prefix} has {name!r:.80}, but the checkpoint has no such tensor")
    known = set(names)
    for other, first in _check_mapping(model["aliases"], f"the aliases of {prefix}").items():
        if not isinstance(first, str) or first not in known or other in known:
            raise ValueError(f"{other!r} of {prefix} is tied to {first!r:.80}, which is missing")
    if len(known) != len(names):
        raise ValueError(f"{prefix} has a name twice")
    for name, state in _check_mapping(model["extras"], f"the extra states of {prefix}").items():
        _check_value(state, f"the extra state {name!r}", tensors)


def _check_optimizer(meta: object, prefix: str, tensors: Collection[str]) -> Mapping[str, object]:
    """Return the record, in which `blocks` and `replicas` may be missing."""
    optimizer = _check_mapping(meta, prefix, {"class", "groups", "state", "other", "rule"})
    _check_printable(optimizer["class"], f"the class of {prefix}")
    names: list[str] = []
    for number, each in enumerate(_check_list(optimizer["groups"], f"the groups of {prefix}")):
        where = f"group {number} of {prefix}"
        group = _check_mapping(each, where, {"names", "options"})
        for name in _check_list(group["names"], where):
            names.append(_check_text(name, f"a name in {where}"))
        _check_dict(group["options"], f"the options of {where}", tensors)
    if len(set(names)) != len(names):
        raise ValueError(f"{prefix} has a parameter twice")
    for name, entries in _check_mapping(optimizer["state"], f"the state of {prefix}").items():
        if name not in names:
            raise ValueError(f"{prefix} has the state of {name!r}, which is in no group")
        for entry, value in _check_mapping(entries, f"the state of {name!r}").items():
            where = f"{entry!r} of {name!r}"
            _check_value(value, where, tensors)
            # Another entry's tensor would be filled into two places, and have the wrong shape.
            if tensor_key(value) not in (None, state_key(prefix, entry, name)):
                raise ValueError(f"{where} is the tensor {tensor_key(value)!r}")
    _check_dict(optimizer["other"], f"the other state of {prefix}", tensors)
    if optimizer["rule"] is not None:
        _check_of_class(optimizer["rule"], f"the rule of {prefix}", tensors)
    _check_value(optimizer.get("blocks"), f"the blocks of {prefix}", tensors)
    return optimizer


def _check_of_class(meta: object, where: str, tensors: Collection[str]) -> None:
    """Check the state of an object, and the name of its class."""
    saved = _check_mapping(meta, where, {"class", "state"})
    _check_printable(saved["class"], f"the class of {where}")
    _check_dict(saved["state"], f"the state of {where}", tensors)


def _check_dict(meta: object, where: str, tensors: Collection[str]) -> None:
    value = _check_value(meta, where, tensors)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where} is not a dict with names for keys")


def _check_value(meta: object, where: str, tensors: Collection[str]) -> object:
    """Decode the value, with a placeholder for each tensor, to see whether that works."""

    def get_placeholder(key: object) -> torch.Tensor:
        if not isinstance(key, str) or key not in tensors:
            raise ValueError(f"there is no tensor {key!r:.80}")
        return PLACEHOLDER

    try:
        return decode(meta, get_placeholder)
    except DECODING_ERRORS as error:
        raise ValueError(f"{where} cannot be decoded: {error!r:.200}") from error


PLACEHOLDER = torch.zeros(())
# `decode` calls constructors with whatever the file says: any of these may come out.
DECODING_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


# -- JSON ------------------------------------------------------------------------------------------
# Messages show the first characters of a wrong value (`!r:.40`): it may be very long.


def _check_mapping(meta: object, where: str, needed: Collection[str] = ()) -> dict[str, object]:
    if not isinstance(meta, dict):
        raise ValueError(f"{where} is {meta!r:.40} and should be an object")
    missing = [name for name in needed if name not in meta]
    if missing:
        raise ValueError(f"{where} has no {sorted(missing)[0]!r}")
    return meta


def _check_list(meta: object, where: str, length: int | None = None) -> list[object]:
    if not isinstance(meta, list) or (length is not None and len(meta) != length):
        raise ValueError(f"{where} is {meta!r:.40} and should be a list")
    return meta


def _check_integer(meta: object, where: str, least: int = 0, most: int = MAX_NUMBER) -> int:
    # Not isinstance: True is an int to Python.
    if type(meta) is not int or not least <= meta <= most:
        raise ValueError(f"{where} is {meta!r:.40}")
    return meta


def _check_sizes(meta: object, where: str, length: int | None = None) -> list[int]:
    return [_check_integer(size, where) for size in _check_list(meta, where, length)]


def _check_text(meta: object, where: str) -> str:
    if not isinstance(meta, str):
        raise ValueError(f"{where} is {meta!r:.40} and should be text")
    return meta


def _check_printable(meta: object, where: str) -> None:
    """Check text that is printed to a terminal: it must not hold commands to the terminal."""
    if not _check_text(meta, where).isprintable():
        raise ValueError(f"{where} is {meta!r:.80}, which cannot be printed")
