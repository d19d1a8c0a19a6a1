"""Read a commit: its checksum, its form, and the places of tensors.

A checksum shows damage, not who wrote the file. So whatever is used without a further look has to
be right here: `check_form` compares all of the JSON with the types that `_format.py` declares, and
the tensors that a model names have to be in the table. The table itself says of each tensor where
its elements are, each exactly once (`checkpoint/_tensor_parts.py`).
"""

from __future__ import annotations

import re
import types
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, ForwardRef, Union, get_args, get_origin, get_type_hints, is_typeddict

from manyhands.checkpoint import _format
from manyhands.checkpoint import _tensor_parts as tensor_parts
from manyhands.checkpoint._format import Commit, ModelMeta
from manyhands.checkpoint._json import parse_json
from manyhands.checkpoint._tensor_parts import StoredTensor
from manyhands.checkpoint._values import RESERVED, escape

PATTERN = re.compile(rb'\{"manyhands checkpoint": (\d+), "crc32": "([0-9a-f]{8})",\n"content": ')
TOKEN = re.compile(r"[\w-]+", re.ASCII)  # no name can lead out of the checkpoint's folder
LATEST = 2.0**36  # seconds: the year 4147
ADVICE = "Load another checkpoint."


def parse(raw: bytes, path: object) -> tuple[Commit, dict[str, StoredTensor]]:
    """Return the commit that a file contains, and its tensors; ValueError if it is not valid."""
    found = PATTERN.match(raw)
    if found is None:
        raise ValueError(f"{path} is not an index of a manyhands checkpoint. {ADVICE}")
    version = int(found[1])
    text = memoryview(raw)[found.end() : -2]
    # The checksum before the version: a damaged version number must not look like a new format.
    if raw[-2:] != b"}\n" or zlib.crc32(text) != int(found[2], 16):
        raise ValueError(f"{path} is damaged: its checksum does not match its content. {ADVICE}")
    if version != _format.VERSION:
        raise ValueError(
            f"{path} has format version {version}, and this release reads {_format.VERSION}. Load "
            "it with the release of manyhands that wrote it."
        )
    try:
        content = parse_json(text)
        check_form(content, Commit)
        commit = Commit(**{**content, "table": tensor_parts.Table(**content["table"])})
        _check_facts(commit)
        tensors = tensor_parts.find_tensors(commit.table, commit.workers)
        for prefix, model in _models(commit):
            _check_model(prefix, model, tensors)
        return commit, tensors
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has invalid content: {error!r:.200}. {ADVICE}") from error


def _check_facts(commit: Commit) -> None:
    """Raise ValueError for numbers and names that no save writes."""
    if not TOKEN.fullmatch(commit.token):
        raise ValueError(f"{commit.token!r:.80} is in no name of a file of tensors")
    for file in commit.files:
        size, head, crc32 = file
        if not 8 <= head <= size < tensor_parts.MOST or not 0 <= crc32 < 2**32:
            raise ValueError(f"no file has the sizes and the checksum {file!r:.80}")
    if not 0.0 <= commit.time < LATEST:
        raise ValueError(f"it cannot have been saved at the time {commit.time!r:.20}")
    if commit.step is not None and commit.step < 0:
        raise ValueError(f"no run has saved at step {commit.step!r:.20}")
    if any(meta["replicas"] < 1 for meta in commit.optimizers):
        raise ValueError("an optimizer has no replica")
    if not {"manyhands", "torch"} <= commit.versions.keys():
        raise ValueError(f"there are the versions of {sorted(commit.versions)!r:.80} only")
    if any(name in commit.values for name in RESERVED):
        raise ValueError(f"a value is called {RESERVED!r}")


def _models(commit: Commit) -> list[tuple[str, ModelMeta]]:
    """Return the model and the modules among the values, each with the prefix of its tensors."""
    models = [] if commit.model is None else [("model", commit.model)]
    for name, value in commit.values.items():
        if isinstance(value, Mapping) and value.get("$") == "module":
            check_form(value.get("value"), ModelMeta, f"values.{name}")
            models.append((f"value/{escape(name)}", value["value"]))
    return models


def _check_model(prefix: str, model: ModelMeta, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ValueError unless all that a model names is there."""
    names = {*model["params"], *model["buffers"]}
    lacking = [name for name in names if f"{prefix}/{name}" not in tensors]
    lacking += [name for name in model["aliases"].values() if name not in names]
    if lacking:
        raise ValueError(f"there is no tensor for {min(lacking)!r:.80} of {prefix}")
    model.get("config", "").encode()  # raises for half of a pair of surrogates


# -- the form of JSON ------------------------------------------------------------------------------


def check_form(value: object, kind: Any, where: str = "") -> None:
    """Raise ValueError unless JSON is of a type: a TypedDict, list, dict, union or plain type."""
    if kind in (Any, object) or isinstance(kind, ForwardRef):  # what JSON there may be
        return
    origin = get_origin(kind)
    if is_typeddict(kind) or is_dataclass(kind):
        _check_entries(value, kind, where)
    elif origin is list and isinstance(value, list):
        (of_items,) = get_args(kind)
        for number, each in enumerate(value):
            check_form(each, of_items, f"{where}[{number}]")
    elif origin is dict and isinstance(value, dict):
        _, of_values = get_args(kind)
        for name, each in value.items():
            check_form(each, of_values, f"{where}.{name}")
    elif origin in (types.UnionType, Union):
        _check_any(value, get_args(kind), where)
    # The exact type: True is an int to Python. A number of JSON may lack its fraction.
    elif type(value) is not kind and (kind is not float or type(value) is not int):
        raise ValueError(f"{where.lstrip('.')} is {value!r:.80}, and no {kind!s:.80}")


def _check_entries(value: object, kind: Any, where: str) -> None:
    """Raise ValueError unless a dict has the entries of a TypedDict or of a dataclass."""
    hints = _type_hints(kind)
    required = getattr(kind, "__required_keys__", hints.keys())
    if not isinstance(value, dict) or not required <= value.keys() <= hints.keys():
        entries = ", ".join(sorted(required))
        raise ValueError(f"{where.lstrip('.')} is {value!r:.80}, and has no entries {entries}")
    for name, each in value.items():
        check_form(each, hints[name], f"{where}.{name}")


def _check_any(value: object, kinds: Sequence[Any], where: str) -> None:
    """Raise ValueError unless JSON is of one of several types."""
    problems = []
    for kind in kinds:
        try:
            return check_form(value, kind, where)
        except ValueError as error:
            problems.append(error)
    raise problems[0]


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
