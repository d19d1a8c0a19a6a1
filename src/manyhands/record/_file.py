"""A record on disk: lines to JSON and back, and a file that is only ever appended to.

This file knows of a line only that it has a whole number "step" and a "time".
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
HEADER = "manyhands"

Line = dict[str, Any]

_LARGEST = 2**53  # limit for a step and its seconds: floats are exact for whole numbers up to here
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def open_record(path: Path, mode: str) -> tuple[int, Line | None]:
    """Return a descriptor to append to, and the last line of a continued record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    if mode == "new":
        try:
            return open_file(path, flags | os.O_EXCL), None
        except FileExistsError as error:
            raise FileExistsError(
                f'{path} exists, and mode="new" writes to a new file only. Choose another path, '
                'mode="continue" to go on with that run, or mode="overwrite" to drop it.'
            ) from error
    last, end = _last_line(path) if path.exists() else (None, 0)
    file = open_file(path, flags)
    os.ftruncate(file, 0 if mode == "overwrite" else end)  # also drops a line that was cut off
    return file, None if mode == "overwrite" else last


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, and refuse anything else.

    Opening a pipe could block, and reading a device might not end. Links are followed.
    """
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise ValueError(f"{path} is not a regular file, as a record must be. Choose another path.")


def _last_line(path: Path) -> tuple[Line | None, int]:
    """Return the last complete line of a record, and the offset at which it ends."""
    last, end, number = b"", 0, 0
    with open(open_file(path), "rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1 and not raw.startswith(f'{{"{HEADER}"'.encode()):
                raise ValueError(not_a_record(path) + " It was not changed: choose another path.")
            if not raw.endswith(b"\n"):
                number -= 1
                break
            last, end = raw, end + len(raw)
    line = parse_line(last, path, number) if last else None
    return line[HEADER] if line and HEADER in line else line, end


def append_line(file: int, path: Path, line: Line) -> None:
    """Write one whole line in a single call."""
    data = _to_json(line).encode() + b"\n"
    written = os.write(file, data)
    if written < len(data):  # the disk is full: take back what was written of the line
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError(errno.ENOSPC, "no space left for the next line", str(path))


def _to_json(line: Line) -> str:
    try:
        return _encode(line)
    except ValueError:  # a number is not finite; checking every line beforehand would cost more
        return _encode(_name_nonfinite(line))
    except TypeError as error:
        raise TypeError(
            f"snapshot() must give plain Python values (numbers, strings, lists, None): {error}. "
            "Convert them there, for example with float(value) or tensor.tolist()."
        ) from error


def _name_nonfinite(value: Any) -> Any:
    """Return `value` with strings in place of the numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _name_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_name_nonfinite(entry) for entry in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(float(value))


def parse_line(raw: bytes, path: Path, number: int) -> Line:
    """Read and check one line of a record. The file may come from a stranger."""
    try:
        line: Line = json.loads(raw)
        if HEADER in line:
            version = line[HEADER]["version"]
            # A later format may have other fields: say "version" then, and not "damaged".
            complete = version != FORMAT_VERSION or _is_header(line[HEADER])
        else:
            version = FORMAT_VERSION
            line = {key: _restore_nonfinite(value) for key, value in line.items()}
            complete = _is_step(line["step"]) and _is_time(line["time"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        complete = False
    if not complete or (number == 1 and HEADER not in line):
        raise ValueError(
            not_a_record(path)
            if number == 1
            else f"{path}, line {number} is damaged: it is not a line of a record. "
            "The lines before it are complete. Delete it and all lines after it to continue from "
            "there."
        )
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}, line {number}: the record has format version {version!r:.40}, and this "
            f"manyhands reads version {FORMAT_VERSION}. Read it with the version that wrote it."
        )
    return line


def _is_header(header: dict[str, Any]) -> bool:
    keys = header["keys"]
    named = isinstance(header["name"], str) and isinstance(keys, list)
    return named and all(isinstance(key, str) for key in keys) and _is_step(header["step"])


def _is_step(value: Any) -> bool:
    # type(), because isinstance would accept True.
    return type(value) is int and 0 <= value <= _LARGEST


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _LARGEST


def _restore_nonfinite(value: Any) -> Any:
    if isinstance(value, list):
        return [_restore_nonfinite(entry) for entry in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def flatten(line: Line) -> Iterator[tuple[str, Any]]:
    """Yield ("lr", [1, 2]) as ("lr/0", 1) and ("lr/1", 2), and all other values unchanged."""
    for key, value in line.items():
        if isinstance(value, list):
            yield from ((f"{key}/{index}", entry) for index, entry in enumerate(value))
        else:
            yield key, value


def not_a_record(path: Path) -> str:
    return f"{path} is not a record of manyhands: it does not begin with a record's header."
