"""A record that is being written: each line is read once.

The last line may be half written. It stays unread until it is whole. A file that became shorter,
that another file has replaced, or that begins with another header, is read from its beginning.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.record._run import Line, not_a_record, open_file, parse_line

CHUNK = 1 << 20  # bytes that are read at once
LONGEST_LINE = 1 << 24  # bytes; a record's lines have some hundreds


@dataclass
class GrowingRecord:
    """The lines of one file that were not read yet."""

    path: Path
    offset: int = 0  # everything before it has been read
    size: int = 0  # of the file, when it was last looked at
    changed: float | None = None  # when it last grew, as `time.time()`; None: there is no file
    restarts: int = 0  # how often it was read from its beginning again
    _number: int = 0  # of the last line
    _head: bytes = field(default=b"", repr=False)  # the first line, which tells files apart
    _inode: tuple[int, int] | None = None

    @property
    def behind(self) -> int:
        """Return the bytes that are still to be read."""
        return max(0, self.size - self.offset)

    def read(self, seconds: float = 0.2) -> list[Line]:
        """Return new lines; end after about so many seconds, and go on there the next time.

        Raise `ValueError` for a file that is no record, or is damaged. Raise `OSError` if it cannot
        be read. A file that does not exist has no lines.
        """
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            self._restart()
            self.size, self.changed, self._inode = 0, None, None
            return []
        self.size, self.changed = status.st_size, status.st_mtime
        inode = (status.st_dev, status.st_ino)
        if inode != self._inode or self.size < self.offset:
            self._restart()
            self._inode = inode
        if self.size == self.offset:
            return []
        until = time.monotonic() + seconds
        with open(open_file(self.path), "rb", buffering=0) as file:
            if self._head and file.read(len(self._head)) != self._head:
                self._restart()  # it was emptied and has grown again
            return self._read_lines(file.fileno(), until)

    def _read_lines(self, file: int, until: float) -> list[Line]:
        lines: list[Line] = []
        while time.monotonic() < until or not lines:
            chunk = os.pread(file, CHUNK, self.offset)
            while b"\n" not in chunk and len(chunk) < LONGEST_LINE:
                more = os.pread(file, CHUNK, self.offset + len(chunk))
                if not more:
                    return lines  # the last line is not whole yet
                chunk += more
            whole = chunk[: chunk.rfind(b"\n") + 1]
            if not whole:
                raise ValueError(not_a_record(self.path))
            for raw in whole.split(b"\n")[:-1]:
                lines.append(parse_line(raw, self.path, self._number + 1))
                self._number += 1
                self._head = self._head or raw + b"\n"
                self.offset += len(raw) + 1
        return lines

    def _restart(self) -> None:
        if self.offset:
            self.restarts += 1
        self.offset, self._number, self._head = 0, 0, b""
