"""Read a commit: checksum, format, and locations of tensors.

A checksum detects damage, not forgery. `check_form` therefore compares the JSON with the types in
`_format.py`, and each element of a tensor must occur exactly once in the table
(`_tensor_parts.py`). Code that looks up names in the commit runs under `Reader.explain`.
"""

from __future__ import annotations

import re
import types
import zlib
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from manyhands.checkpoint import _format
from manyhands.checkpoint._format import Commit
from manyhands.checkpoint._json import parse_json
from manyhands.checkpoint._tensor_parts import StoredTensor, find_tensors

PATTERN = re.compile(rb'\{"manyhands checkpoint": (\d+), "crc32": "([0-9a-f]{8})",\n"content": ')
TOKEN = re.compile(r"[\w-]+", re.ASCII)  # names cannot leave the checkpoint's folder
LATEST = 2.0**36  # seconds: the year 4147
ADVICE = "Load another checkpoint."


def parse(raw: bytes, path: object) -> tuple[Commit, dict[str, StoredTensor]]:
    """Return the commit in a file, with all tensors. Raise ValueError if not valid."""
    found = PATTERN.match(raw)
    if found is None:
        raise ValueError(f"{path} is not an index of a manyhands checkpoint. {ADVICE}")
    version = int(found[1])
    text = memoryview(raw)[found.end() : -2]
    # The checksum is first: a damaged version number must not look like a new format.
    if raw[-2:] != b"}\n" or zlib.crc32(text) != int(found[2], 16):
        raise ValueError(f"{path} is damaged: its checksum does not match its content. {ADVICE}")
    if version != _format.VERSION:
        raise ValueError(
            f"{path} has format version {version}, but this release reads version "
            f"{_format.VERSION}. Load it with the release of manyhands that wrote it."
        )
    try:
        content = parse_json(text)
        check_form(content, Commit)
        commit = Commit(**content)
        if not TOKEN.fullmatch(commit.token):
            raise ValueError(f"{commit.token!r:.80} is not a valid token")
        if not 0.0 <= commit.time < LATEST:
            raise ValueError(f"{commit.time!r:.20} is not a valid time of a save")
        if any(len(file) != 3 for file in commit.files):
            raise ValueError("a file must have two sizes and a checksum")
        return commit, find_tensors(commit.table, commit.workers)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has invalid content: {error!r:.200}. {ADVICE}") from error


def check_form(value: object, kind: Any) -> None:
    """Raise ValueError unless JSON matches a type: TypedDict, dataclass, list, dict, plain type."""
    origin = get_origin(kind)
    if kind in (Any, object) or (origin in (types.UnionType, Union) and value is None):
        return
    if is_typeddict(kind) or is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ValueError(f"{value!r:.80} must have the entries {', '.join(hints)}")
        for name, each in value.items():
            check_form(each, hints[name])
    elif origin is list and isinstance(value, list):
        for each in value:
            check_form(each, get_args(kind)[0])
    elif origin is dict and isinstance(value, dict):
        for each in value.values():
            check_form(each, get_args(kind)[1])
    elif origin in (types.UnionType, Union):
        check_form(value, get_args(kind)[0])
    # The exact type: in Python, True is an int. JSON may write a float without a fraction.
    elif type(value) is not kind and (kind is not float or type(value) is not int):
        raise ValueError(f"{value!r:.80} is not a {kind!s:.80}")
