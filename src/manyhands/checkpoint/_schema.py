"""What an index may say, checked as a whole before anything of it is used.

A checksum shows that a file is as it was written, and nothing about who wrote it. So whatever is
read out of an index later has been looked at here: every number is a whole one of a sensible size,
every name belongs to a tensor that is there, every value can be made, and

    the chunks of a tensor cover each of its elements exactly once.

Nothing is imported, allocated or opened meanwhile.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch

from manyhands.checkpoint._names import escaped, state_key
from manyhands.checkpoint._safetensors import NAMES
from manyhands.checkpoint._values import decoded

FIELDS = {
    "step", "workers", "versions", "time", "files", "tensors", "model", "optimizers", "schedulers",
    "values",
}  # fmt: skip
FILE_NAME = re.compile(r"[\w-]+\.safetensors", re.ASCII)
LATEST = 253_402_300_799  # the end of the year 9999, beyond which no calendar prints
MOST_BYTES = 2**63 - 1
PRIME = 2**61 - 1
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}


def check(content: Any) -> None:
    """Raise ValueError with what is wrong first."""
    _mapping(content, "the content", FIELDS)
    if set(content) != FIELDS:
        raise ValueError(f"it has {sorted(set(content) - FIELDS)!r} as well")
    if content["step"] is not None:
        _whole(content["step"], "the step")
    _whole(content["workers"], "the number of workers", least=1)
    for name, version in _mapping(content["versions"], "versions", {"manyhands", "torch"}).items():
        _word(version, f"the version of {name!r}")
    time = content["time"]
    if type(time) not in (int, float) or not 0 <= time <= LATEST:
        raise ValueError(f"the time is {time!r:.40}")
    _check_files(content["files"])
    _check_tensors(content["tensors"], len(content["files"]))
    tensors = content["tensors"].keys()
    if content["model"] is not None:
        _check_model(content["model"], "model", tensors)
    for number, told in enumerate(_list(content["optimizers"], "optimizers")):
        _check_optimizer(told, f"optimizer.{number}", tensors)
        others = _list(told.get("replicas", []), f"the replicas of optimizer.{number}")
        for replica, other in enumerate(others, start=1):
            where = f"optimizer.{number}/replica.{replica}"
            _check_optimizer({**told, **_mapping(other, where)}, where, tensors)
    for number, told in enumerate(_list(content["schedulers"], "schedulers")):
        where = f"scheduler {number}"
        _word(_mapping(told, where, {"class", "state"})["class"], f"the class of {where}")
        _check_dict(told["state"], f"the state of {where}", tensors)
    for name, told in _mapping(content["values"], "values").items():
        if name == "step":
            raise ValueError("a value is called 'step'")
        if isinstance(told, dict) and told.get("$") == "module":
            _mapping(told, f"the value {name!r}", {"value"})
            _check_model(told["value"], f"value/{escaped(name)}", tensors)
        else:
            _check_value(told, f"the value {name!r}", tensors)


# -- tensors ---------------------------------------------------------------------------------------


def _check_files(files: Any) -> None:
    names = set()
    for number, told in enumerate(_list(files, "files")):
        where = f"file {number}"
        if set(_mapping(told, where, {"name", "nbytes", "crc32"})) != {"name", "nbytes", "crc32"}:
            raise ValueError(f"{where} has other entries than name, nbytes and crc32")
        if not isinstance(told["name"], str) or not FILE_NAME.fullmatch(told["name"]):
            raise ValueError(f"{told['name']!r:.80} is no name of a file of tensors")
        _whole(told["nbytes"], f"the size of {where}", most=MOST_BYTES)
        _whole(told["crc32"], f"the checksum of {where}", most=2**32 - 1)
        names.add(told["name"])
    if len(names) != len(files):
        raise ValueError("two files have one name")


def _check_tensors(tensors: Any, files: int) -> None:
    places = set()
    for key, told in _mapping(tensors, "tensors").items():
        where = f"tensor {key!r}"
        shape, dtype, chunks = _list(told, where, 3)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{where} is of type {dtype!r:.40}, which is none of a tensor's")
        _sizes(shape, f"the shape of {where}")
        if math.prod(shape) * DTYPES[dtype].itemsize > MOST_BYTES:
            raise ValueError(f"{where} has a shape of more bytes than there can be")
        boxes = []
        for chunk in _list(chunks, f"the chunks of {where}"):
            at, sizes, file, name, total = _list(chunk, f"a chunk of {where}", 5)
            _sizes(at, f"the offsets of a chunk of {where}", len(shape))
            _sizes(sizes, f"the sizes of a chunk of {where}", len(shape))
            _whole(file, f"the file of a chunk of {where}", most=files - 1)
            _whole(total, f"the checksum of a chunk of {where}", most=2**32 - 1)
            if not isinstance(name, str) or (file, name) in places:
                raise ValueError(f"a chunk of {where} is called {name!r:.80}, as another is")
            places.add((file, name))
            boxes.append((at, sizes))
        if not covered_once(shape, boxes):
            raise ValueError(f"the chunks of {where} do not cover each element exactly once")


def covered_once(
    shape: Sequence[int], boxes: Collection[tuple[Sequence[int], Sequence[int]]]
) -> bool:
    """Whether boxes (offsets and sizes) fill a shape without gap or overlap.

    The mixed difference of a box's indicator is +1 or -1 at each of its corners, and that of a sum
    of boxes is the sum of theirs; two sums are equal exactly if their differences are. So

        sum over boxes of  prod_i (f_i[start] - f_i[stop])  =  prod_i (f_i[0] - f_i[size])

    as polynomials in the unknowns f_i[x], one for each dimension and coordinate. Both sides are
    compared at random values modulo a prime of 61 bits, which takes one step for each box and
    dimension, where comparing boxes in pairs takes its square. Sides that differ agree with
    probability below dimensions / 2^61, and nobody can choose them so: the values are not known.
    """
    for at, sizes in boxes:
        ends = zip(at, sizes, shape, strict=True)
        if any(start + size > whole for start, size, whole in ends):
            return False
    draw = random.SystemRandom().randrange
    values: dict[tuple[int, int], int] = {}

    def side(at: Sequence[int], sizes: Sequence[int]) -> int:
        result = 1
        for dim, (start, size) in enumerate(zip(at, sizes, strict=True)):
            for x in (start, start + size):
                if (dim, x) not in values:
                    values[dim, x] = draw(PRIME)
            result = result * (values[dim, start] - values[dim, start + size]) % PRIME
        return result

    return sum(side(at, sizes) for at, sizes in boxes) % PRIME == side([0] * len(shape), shape)


# -- model, optimizers, values ---------------------------------------------------------------------


def _check_model(told: Any, prefix: str, tensors: Collection[str]) -> None:
    _mapping(told, prefix, {"params", "buffers", "aliases", "extras"})
    names = [*_list(told["params"], "params"), *_list(told["buffers"], "buffers")]
    for name in names:
        if not isinstance(name, str) or f"{prefix}/{name}" not in tensors:
            raise ValueError(f"{prefix} has {name!r:.80}, and there is no tensor of it")
    known = set(names)
    for other, first in _mapping(told["aliases"], f"the aliases of {prefix}").items():
        if not isinstance(first, str) or first not in known or other in known:
            raise ValueError(f"{other!r} of {prefix} is tied to {first!r:.80}, which is not there")
    if len(known) != len(names):
        raise ValueError(f"{prefix} has a name twice")
    for name, state in _mapping(told["extras"], f"the extra states of {prefix}").items():
        _check_value(state, f"the extra state {name!r}", tensors)


def _check_optimizer(told: Any, prefix: str, tensors: Collection[str]) -> None:
    _mapping(told, prefix, {"class", "groups", "state", "other", "rule"})
    _word(told["class"], f"the class of {prefix}")
    names: list[str] = []
    for number, group in enumerate(_list(told["groups"], f"the groups of {prefix}")):
        where = f"group {number} of {prefix}"
        _mapping(group, where, {"names", "options"})
        names += (_text(name, f"a name in {where}") for name in _list(group["names"], where))
        _check_dict(group["options"], f"the options of {where}", tensors)
    if len(set(names)) != len(names):
        raise ValueError(f"{prefix} has a parameter twice")
    for name, entries in _mapping(told["state"], f"the state of {prefix}").items():
        if name not in names:
            raise ValueError(f"{prefix} has the state of {name!r}, which is in no group")
        for entry, value in _mapping(entries, f"the state of {name!r}").items():
            where = f"{entry!r} of {name!r}"
            _check_value(value, where, tensors)
            is_tensor = isinstance(value, dict) and value.get("$") == "tensor"
            if is_tensor and value["key"] != state_key(prefix, entry, name):
                raise ValueError(f"{where} is the tensor {value['key']!r}")
    _check_dict(told["other"], f"what else {prefix} has", tensors)
    if told["rule"] is not None:
        where = f"the rule of {prefix}"
        _word(_mapping(told["rule"], where, {"class", "state"})["class"], f"the class of {where}")
        _check_dict(told["rule"]["state"], f"the state of {where}", tensors)
    _check_value(told.get("blocks"), f"the blocks of {prefix}", tensors)


def _check_dict(told: Any, where: str, tensors: Collection[str]) -> None:
    value = _check_value(told, where, tensors)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where} is no dict with names for keys")


def _check_value(told: Any, where: str, tensors: Collection[str]) -> Any:
    """Make the value, with a stand-in for each tensor, to see that it can be made."""

    def known(key: Any) -> torch.Tensor:
        if not isinstance(key, str) or key not in tensors:
            raise ValueError(f"there is no tensor {key!r:.80}")
        return STAND_IN

    try:
        return decoded(told, known)
    except BROKEN as error:
        raise ValueError(f"{where} cannot be made: {error!r:.200}") from error


STAND_IN = torch.zeros(())
BROKEN = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


# -- JSON ------------------------------------------------------------------------------------------


def _mapping(told: Any, where: str, needed: Collection[str] = ()) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ValueError(f"{where} is {told!r:.40} and should be an object")
    missing = [name for name in needed if name not in told]
    if missing:
        raise ValueError(f"{where} has no {sorted(missing)[0]!r}")
    return told


def _list(told: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(told, list) or (length is not None and len(told) != length):
        raise ValueError(f"{where} is {told!r:.40} and should be a list")
    return told


def _whole(told: Any, where: str, least: int = 0, most: int = MOST_BYTES) -> None:
    if type(told) is not int or not least <= told <= most:
        raise ValueError(f"{where} is {told!r:.40}")


def _sizes(told: Any, where: str, length: int | None = None) -> None:
    for size in _list(told, where, length):
        _whole(size, where)


def _text(told: Any, where: str) -> str:
    if not isinstance(told, str):
        raise ValueError(f"{where} is {told!r:.40} and should be text")
    return told


def _word(told: Any, where: str) -> None:
    """Text that goes to terminals as it is."""
    if not _text(told, where).isprintable():
        raise ValueError(f"{where} is {told!r:.80}, which cannot be printed")
