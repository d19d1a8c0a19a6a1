"""Read a record as a run.

Records may come from untrusted sources, so each line is validated.
"""

from __future__ import annotations

import json
import math
import os
import platform
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands._arguments import file_path

if TYPE_CHECKING:
    import pandas

FORMAT_VERSION = 1
HEADER = "manyhands"

Line = dict[str, Any]  # plain JSON
Header = dict[str, Any]  # requires "version", "name", "keys" and "step"


_PROC = Path("/proc")
_LARGEST = 2**53  # limit for steps and seconds: floats represent all smaller integers exactly
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Run:
    """A record as read from a file: the last header, and a line per step.

    >>> import manyhands as mh
    >>> with mh.Record("runs/a.jsonl") as record:
    ...     for step in range(3):
    ...         record.step(loss=1.0 / (step + 1))
    >>> run = mh.read_record("runs/a.jsonl")
    >>> run.column("loss")[:2]
    [1.0, 0.5]
    """

    path: Path
    name: str
    header: Header = field(repr=False)
    lines: list[Line] = field(repr=False)

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns. Lists (a value per parameter group) become "lr/0", "lr/1"."""
        columns: dict[str, object] = {}
        for line in self.lines:
            columns.update(to_columns(line))
        return list(columns)

    @cached_property
    def own(self) -> list[str]:
        """The columns of the user's values."""
        keys: Line = {}
        for line in self.lines:
            keys.update(line)
        for ours in ("step", "time", *self.header["keys"]):
            keys.pop(ours, None)
        return list(keys)

    def column(self, key: str) -> list[Any]:
        """Return a value per line; None for lines without the key.

        `column("lr")` contains lists, and `column("lr/0")` the numbers of the first group.
        """
        if any(key in line for line in self.lines):
            return [line.get(key) for line in self.lines]
        if key not in self.columns:
            known = ", ".join(map(repr, self.columns))
            raise KeyError(f"{self.path} has no column {key!r}. It has: {known}.")
        name, _, number = key.rpartition("/")
        index = int(number)
        values = []
        for line in self.lines:
            group = line.get(name)
            if isinstance(group, list) and index < len(group):
                values.append(group[index])
            else:
                values.append(None)
        return values

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `pandas.DataFrame` with a row per line and the columns of `columns`."""
        import pandas

        return pandas.DataFrame([dict(to_columns(row)) for row in self.lines], columns=self.columns)


def read_record(path: str | os.PathLike[str]) -> Run:
    """Read a record as a single run with a line per step, however often it was resumed.

    An incomplete last line is ignored. Other damage raises a `ValueError` with the line number.

    After a resume, "time" continues from the last line that remains valid. Lines that the resumed
    run repeats do not count.

    >>> import manyhands as mh
    >>> with mh.Record("runs/b.jsonl") as record:
    ...     record.step(loss=0.5)
    >>> len(mh.read_record("runs/b.jsonl").lines)
    1
    """
    path = Path(file_path("path", path))
    header: Header | None = None
    lines: list[Line] = []
    earlier = 0.0  # seconds of all previous starts
    resumed = False
    with open(open_file(path), "rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):  # only the last line can be incomplete
                break
            line = parse_line(raw, path, number)
            if HEADER in line:
                header = line[HEADER]
                resumed = True
                continue
            # The run resumed from a checkpoint and repeats these lines.
            while lines and lines[-1]["step"] >= line["step"]:
                lines.pop()
            if resumed:
                earlier = 0.0
                if lines:
                    earlier = lines[-1]["time"]
                resumed = False
            line["time"] += earlier
            lines.append(line)
    if header is None:
        raise ValueError(not_a_record(path))
    return Run(path, header["name"], header, lines)


# -- one file, one line ----------------------------------------------------------------------------


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, and raise for other files."""
    # Opening a pipe could block, and a device might have no end. Links are followed.
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise ValueError(f"{path} is not a regular file, as a record must be.")


def parse_line(raw: bytes, path: Path, number: int) -> Line:
    """Read and validate a line of a record."""
    try:
        line: Line = json.loads(raw)
        shallow = _is_shallow(line)
        if HEADER in line:
            version = line[HEADER]["version"]
            # Headers of later formats may have different fields. Report the version, not damage.
            complete = version != FORMAT_VERSION or _is_header(line[HEADER])
        else:
            version = FORMAT_VERSION
            line = {key: _restore_nonfinite(value) for key, value in line.items()}
            seconds = line["time"]
            is_time = isinstance(seconds, float) and 0 <= seconds <= _LARGEST
            complete = _is_count(line["step"]) and (is_time or _is_count(seconds))
        complete = complete and shallow
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        complete = False
    if not complete or (number == 1 and HEADER not in line):
        if number == 1:
            raise ValueError(not_a_record(path))
        raise ValueError(f"{path}, line {number} is damaged. Delete it and all lines after it.")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}, line {number}: format version {version!r:.40}; this manyhands reads version "
            f"{FORMAT_VERSION}."
        )
    return line


def _is_header(header: Line) -> bool:
    keys = header["keys"]
    named = isinstance(header["name"], str) and isinstance(keys, list)
    return named and all(isinstance(key, str) for key in keys) and _is_count(header["step"])


def _is_shallow(value: object, levels: int = 32) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return True
    return levels > 0 and all(_is_shallow(entry, levels - 1) for entry in value)


def _is_count(value: object) -> bool:
    # isinstance would accept True
    return type(value) is int and 0 <= value <= _LARGEST


def _restore_nonfinite(value: object) -> object:
    if isinstance(value, list):
        return [_restore_nonfinite(entry) for entry in value]
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    return value


def to_columns(line: Line) -> Iterator[tuple[str, object]]:
    """Yield ("lr", [1, 2]) as ("lr/0", 1) and ("lr/1", 2), and other values unchanged."""
    for key, value in line.items():
        if isinstance(value, list):
            for index, entry in enumerate(value):
                yield f"{key}/{index}", entry
        else:
            yield key, value


def not_a_record(path: Path) -> str:
    return f"{path} is not a record of manyhands: the header is missing."


def to_positive(value: object) -> float | None:
    if type(value) in (int, float) and 0 < value < _LARGEST:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    return None


def count_small_batches(header: Mapping[str, object], line: Mapping[str, object]) -> float:
    """Return the small batches in a line's step: the scale, or the number of workers."""
    workers = to_positive(header.get("workers")) or 1.0
    scale = to_positive(line.get("scale", line.get("batch_scale")))
    if scale is None:
        return workers
    if workers > 1 and "rounds" in line:  # in blocks, the scale describes a single worker
        return scale * (to_positive(line.get("workers")) or 1.0)
    return scale


# -- the process that writes -----------------------------------------------------------------------

# Process numbers are reused, and are unique only within a machine and container. An identity
# therefore consists of the boot of the kernel, the namespace of process numbers, the number, and
# the start of the process in clock ticks. Linux provides these in /proc. On other systems, and from
# other machines, the state of a process is unknown.


def this_process() -> dict[str, object]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        **_pid_space(),
        "started": _start_of_process(os.getpid()),
    }


def is_alive(process: object) -> bool | None:
    """Return whether a process of `this_process` is running; None if unknown."""
    if not isinstance(process, dict):
        return None
    pid = process.get("pid")
    started = process.get("started")
    here = _pid_space()
    if type(pid) is not int or type(started) is not int or None in here.values():
        return None
    if here != {key: process.get(key) for key in here}:
        return None  # on another machine, in another container, or before a reboot
    return _start_of_process(pid) == started


def _pid_space() -> dict[str, str | None]:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "namespace": os.readlink(_PROC / "self/ns/pid")}
    except OSError:
        return {"boot": None, "namespace": None}


def _start_of_process(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if the process has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # "1234 (name) S ...": the name may contain spaces and brackets
    state, *fields = stat.rpartition(")")[2].split()
    if state in "ZX":  # a zombie has ended
        return None
    return int(fields[18])
