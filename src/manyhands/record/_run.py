"""Reading a record: the file of one start or of several, as one run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from manyhands.record._file import (
    HEADER,
    Line,
    flatten,
    not_a_record,
    open_file,
    parse_line,
)


@dataclass(frozen=True)
class Run:
    """A record that was read: its last header and its lines, one for each step.

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
    header: dict[str, Any] = field(repr=False)
    lines: list[Line] = field(repr=False)

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns; a list (one value per parameter group) gives "lr/0", "lr/1"."""
        return list(dict.fromkeys(key for line in self.lines for key, _ in flatten(line)))

    @cached_property
    def own(self) -> list[str]:
        """The columns of the user's own values."""
        ours = {"step", "time", *self.header["keys"]}
        return list(dict.fromkeys(key for line in self.lines for key in line if key not in ours))

    def column(self, key: str) -> list[Any]:
        """Return one value for each line, None for a line without the key.

        `column("lr")` gives a list per line, `column("lr/0")` the first group's number.
        """
        if any(key in line for line in self.lines):
            return [line.get(key) for line in self.lines]
        if key not in self.columns:
            known = ", ".join(map(repr, self.columns))
            raise KeyError(f"{self.path} has no column {key!r}. It has: {known}.")
        name, _, number = key.rpartition("/")
        index = int(number)
        groups = [line.get(name) for line in self.lines]
        return [
            group[index] if isinstance(group, list) and index < len(group) else None
            for group in groups
        ]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each line and the columns of `columns`."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas() needs pandas, which is not installed: pip install pandas"
            ) from error
        return pandas.DataFrame([dict(flatten(line)) for line in self.lines], columns=self.columns)


def read_record(path: str | os.PathLike[str]) -> Run:
    """Read a record as one run, with one line for each step, however often it was resumed.

    An incomplete last line (the run was stopped while writing, or is writing now) is ignored.
    Any other damage is a `ValueError` that names the line.

    When a run is resumed, "time" continues from the last line that was kept: it is the time spent
    on the steps that count.

    >>> import manyhands as mh
    >>> with mh.Record("runs/b.jsonl") as record:
    ...     record.step(loss=0.5)
    >>> len(mh.read_record("runs/b.jsonl").lines)
    1
    """
    path = Path(path)
    header: dict[str, Any] = {}
    lines: list[Line] = []
    earlier, resumed = 0.0, False  # seconds of all starts before this one
    with open(open_file(path), "rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):  # only the last line can be incomplete
                break
            line = parse_line(raw, path, number)
            if HEADER in line:
                header, resumed = line[HEADER], True
                continue
            # The run went back to a checkpoint, so the later lines do not count any more.
            while lines and lines[-1]["step"] >= line["step"]:
                lines.pop()
            if resumed:
                earlier, resumed = lines[-1]["time"] if lines else 0.0, False
            line["time"] += earlier
            lines.append(line)
    if not header:
        raise ValueError(not_a_record(path))
    return Run(path, header["name"], header, lines)
