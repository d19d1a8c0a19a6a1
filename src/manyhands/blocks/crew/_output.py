"""Forward what processes print, line by line, with each process's name in front."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterable
from typing import IO, Any, TextIO

LONGEST_LINE = 1 << 20  # bytes: a longer line is forwarded in several
READ_SIZE = 1 << 16  # bytes: what a pipe holds on Linux


class OutputForwarder:
    """The pipes of running processes, read without blocking on any of them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[IO[bytes], bytes] = {}  # the beginning of each pipe's present line

    def add(self, pipe: IO[bytes], name: str, target: TextIO) -> None:
        """Forward a pipe's lines to `target`, as "[name] line"."""
        os.set_blocking(pipe.fileno(), False)
        self._unfinished[pipe] = b""
        self._selector.register(pipe, selectors.EVENT_READ, (name, target))

    def forward(self, seconds: float) -> None:
        """Wait up to this long for output, and forward it."""
        if not self._selector.get_map():
            time.sleep(seconds)  # select() returns at once if it has nothing to watch
        for key, _ in self._selector.select(seconds):
            self._read(key.fileobj)

    def finish(self, pipes: Iterable[IO[bytes]]) -> None:
        """Forward all that is left in the pipes of a process that has ended, and close them."""
        for pipe in pipes:
            if pipe in self._unfinished:  # else it has reached its end before
                self._read(pipe, last=True)

    def _read(self, pipe: Any, last: bool = False) -> None:
        name, target = self._selector.get_key(pipe).data
        data = self._unfinished[pipe]
        while True:
            try:
                chunk = os.read(pipe.fileno(), READ_SIZE)
            except BlockingIOError:  # empty for now
                break
            last = last or not chunk  # an empty read is the end of the pipe
            data += chunk
            # A process that prints without end must not hold up the others.
            if not chunk or (len(data) > LONGEST_LINE and not last):
                break
        *lines, rest = data.split(b"\n")
        if rest and (last or len(rest) > LONGEST_LINE):
            lines, rest = [*lines, rest], b""
        self._unfinished[pipe] = rest
        if lines:
            prefix = f"[{name}] ".encode()
            # As bytes, in one write: a line need not be valid text, and lines do not mix.
            target.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
            target.flush()
        if last:
            self._selector.unregister(pipe)
            del self._unfinished[pipe]
            pipe.close()
