"""Check the content of a checkpoint's index, before any of it is used.

The checksum of an index shows that the file is as it was written, but not who wrote it. So all of
the content is checked: each number is an integer of a sensible size, each name belongs to a tensor
of the checkpoint, each value can be decoded, and

    the slices of a tensor cover each of its elements exactly once.

The check imports, allocates and opens nothing.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Mapping, Sequence

import torch

from manyhands.checkpoint._safetensors import DTYPE_NAMES
from manyhands.checkpoint._values import decode, escape, state_key, tensor_key

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


def check_content(content: object) -> None:
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
        first = _check_saved_optimizer(meta, f"optimizer.{number}", tensors)
        others = _check_list(first.get("replicas", []), f"the replicas of optimizer.{number}")
        for replica, other in enumerate(others, start=1):
            where = f"optimizer.{number}/replica.{replica}"
            # A replica overrides parts of the first one: see `Replica.meta_to_load`.
            _check_saved_optimizer({**first, **_check_mapping(other, where)}, where, tensors)
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


def _check_saved_optimizer(
    meta: object, prefix: str, tensors: Collection[str]
) -> Mapping[str, object]:
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
