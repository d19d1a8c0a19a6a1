"""Compare facts between ranks. If facts differ, every rank raises and names the first difference.

A rank's *facts* must be equal on all ranks: titles with values of JSON types. Lists are compared by
element, dicts by name and order.

    {"scale": 4.0, "parameters": ["(4, 3) float32 on cpu", ...], "options": {"every": 16, ...}}

Ranks first exchange checksums in a single collective, and exchange texts only if checksums differ.
Both use a device that the group serves, because the tensors may be on different devices.

Tensors are described by properties that collectives assume to be equal: a sum of float32 and
float64, or of a matrix and its transpose, would be garbage.

    shape       for a DTensor the full shape and the placement
    dtype
    layout      strides, unless contiguous: flat views follow the order in memory
    device      type, and which tensors share a device, but not the index, which differs
    name        if a model is known: a different order of equal names means different tensors
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from manyhands._optimizers.modules import WRAPPER_NAMES, plain_name
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import is_dtensor, local_shard
from manyhands.errors import RanksDisagree

Facts: TypeAlias = Mapping[str, object]
Result = TypeVar("Result")
Names: TypeAlias = Mapping[str, Sequence[str]]
NO_NAMES: Names = MappingProxyType({})
ABSENT = "absent"
UNKNOWN = 0.0  # instead of the checksum of names
# Types in which errors are raised on other ranks; the first match counts.
ERROR_TYPES = (FileNotFoundError, TypeError, ValueError, OSError, RuntimeError)
NAMED = 8  # maximum number of ranks and values in a message


def agree(ranks: RankGroup, facts: Facts, advice: str, *, names: Names = NO_NAMES) -> None:
    """Raise `RanksDisagree`, a ValueError, on every rank if ranks have different facts.

    `advice` is the last sentence of the message and names the remedy. `names` maps titles of lists
    to known names of the elements, with equal titles on every rank.
    """
    if ranks.size == 1:
        return
    known = {title: list(each) for title, each in names.items()}
    sums = [_checksum(facts)]
    for each in known.values():
        sums.append(_checksum(each) if each else UNKNOWN)
    # Transpose from a row per rank to a tuple per checksum.
    for column in zip(*ranks.all_gather(sums, ranks.any_device), strict=True):
        # Names are not compared if unknown on a rank.
        if UNKNOWN not in column and len(set(column)) > 1:
            texts = ranks.all_gather_text(json.dumps([facts, known]))
            everyone, all_names = zip(*map(json.loads, texts), strict=True)
            raise_if_different(everyone, advice, names=all_names)
            return


def raise_if_different(
    everyone: Sequence[Facts], advice: str, *, names: Sequence[Names] = ()
) -> None:
    """Raise `RanksDisagree` for the first difference between the facts of all ranks."""
    for title in dict.fromkeys(chain.from_iterable(everyone)):
        values = [facts.get(title, ABSENT) for facts in everyone]
        called = [each.get(title, ()) for each in names]
        for problem, row in _compared_rows(title, values, called):
            if not _all_equal(row):
                text = f"ranks have {problem}: {_list_by_rank(row)}. {advice}"
                raise RanksDisagree(text, list(map(json.dumps, row)))


def run_on_all(ranks: RankGroup, action: Callable[[], Result]) -> Result:
    """Run an action on every rank. If a rank raises, raise on all ranks, with its message."""
    result = None
    problem = None
    text = ""
    try:
        result = action()
    except Exception as error:
        problem = error
        text = json.dumps(describe_error(error))
    everyone = ranks.all_gather_text(text)
    if problem is not None:
        raise problem
    failed = [rank for rank, text in enumerate(everyone) if text]
    if failed:
        name, message = json.loads(everyone[failed[0]])
        numbers = ", ".join(map(str, failed[:NAMED]))
        raise to_error(name, f"rank {numbers}: {message}")
    return result  # type: ignore[return-value]


def describe_error(error: Exception) -> list[str]:
    """Return the type name and message of an error, for `to_error` on other ranks."""
    for kind in ERROR_TYPES:
        if isinstance(error, kind):
            return [kind.__name__, str(error)]
    return ["RuntimeError", str(error)]


def to_error(name: str, message: str) -> Exception:
    kinds = {kind.__name__: kind for kind in ERROR_TYPES}
    return kinds[name](message)


def _compared_rows(
    title: str, values: Sequence[Any], names: Sequence[Sequence[str]]
) -> Iterator[tuple[str, Sequence[object]]]:
    """Yield (problem, row) for all rows that must be equal on all ranks."""
    kinds = set(map(type, values))
    different = f"different {title}. The first that differs is"
    reordered = f"the same {title} in another order. The first that differs is"
    if kinds == {dict}:
        for key in dict.fromkeys(chain.from_iterable(values)):
            yield f"{different} {key}", [value.get(key, ABSENT) for value in values]
        for number, row in enumerate(zip(*values, strict=False)):
            yield f"{reordered} number {number}", row
    elif kinds == {list}:
        thing = title.removesuffix("s") if title.isalpha() else "number"
        first = names[0] if names else ()
        for number, row in enumerate(zip(*values, strict=False)):
            name = f" ({first[number]})" if first else ""
            yield f"{different} {thing} {number}{name}", row
        yield f"different numbers of {title}", [len(value) for value in values]
        # Equal descriptions, but a collective would mix tensors of different names.
        if all(names) and _all_equal([sorted(each) for each in names]):
            for number, row in enumerate(zip(*names, strict=True)):
                yield f"{reordered} {thing} {number}", row
    else:  # including lists on some ranks only
        yield f"different {title}", values


def _all_equal(values: Sequence[object]) -> bool:
    return len({json.dumps(value) for value in values}) <= 1


def _list_by_rank(values: Sequence[object]) -> str:
    """Return a list of ranks by value, for an error message."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(_format_value(value), []).append(rank)
    parts = []
    for value, group in list(ranks.items())[:NAMED]:
        noun = "ranks" if len(group) > 1 else "rank"
        numbers = ", ".join(map(str, group[:NAMED]))
        more = ", ..." if len(group) > NAMED else ""
        parts.append(f"{noun} {numbers}{more}: {value}")
    return "; ".join(parts)


def _format_value(value: object) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def describe_tensors(tensors: Iterable[Tensor], *, frozen: bool = False) -> list[str]:
    """Describe tensors in words; `frozen` includes `requires_grad`."""
    describer = Describer()
    return [describer.describe(tensor, frozen=frozen) for tensor in tensors]


class Describer:
    """Describes the properties of a tensor that must be equal on all ranks.

    Devices of a type are numbered in the order of appearance.
    """

    def __init__(self) -> None:
        self._devices: dict[str, list[torch.device]] = {}

    def describe(self, tensor: Tensor, name: str = "", *, frozen: bool = False) -> str:
        """Return text such as "encoder.weight (4, 3) float32 on cpu"."""
        # Collectives send the shard of a DTensor, so compare the strides of the shard.
        here = local_shard(tensor)
        words = [name, str(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch.")]
        words.append(f"on {tensor.device.type}{self._describe_device(tensor.device)}")
        if is_dtensor(tensor):
            mesh = tuple(tensor.device_mesh.shape)
            words.append(f"placed {tensor.placements} on a mesh of {mesh}")
        if here.layout is not torch.strided:
            words.append(f"as {str(here.layout).removeprefix('torch.')}")
        elif not here.is_contiguous():
            words.append(f"with strides {_strides(here)}")
        if frozen and not tensor.requires_grad:
            words.append("frozen")
        return " ".join(filter(None, words))

    def _describe_device(self, device: torch.device) -> str:
        """Return the number of a device, because indices of GPUs differ between ranks."""
        met = self._devices.setdefault(device.type, [])
        if device not in met:
            met.append(device)
        number = met.index(device)
        if number == 0:
            return ""
        return f", device {number + 1}"


def names_in(modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> list[str]:
    """Return the names of parameters or buffers; an empty list if a name is unknown."""
    names: dict[int, str] = {}
    for number, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            name = plain_name(name, WRAPPER_NAMES)
            # The first name of a shared tensor counts.
            names.setdefault(id(tensor), f"{number}.{name}" if len(modules) > 1 else name)
    found = [names.get(id(tensor), "") for tensor in tensors]
    if not all(found):
        return []
    return found


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides; 1 for dimensions of a single element, whose strides are meaningless."""
    strides = list(tensor.stride())
    for dimension, length in enumerate(tensor.shape):
        if length == 1:
            strides[dimension] = 1
    return tuple(strides)


def _checksum(value: object) -> float:
    # float64 represents 32 bits exactly.
    return float(zlib.crc32(json.dumps(value).encode()))
