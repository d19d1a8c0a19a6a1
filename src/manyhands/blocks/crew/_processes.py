"""Forward the output of a launcher's processes, and end all processes with the launcher.

OutputForwarder   forwards output line by line, prefixed with the name of the process
die_with_parent   lets the system kill workers when the launcher dies (Linux)
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterable
from functools import cache, partial
from typing import IO, Any, TextIO

LONGEST_LINE = 1 << 20  # bytes: longer lines are split
READ_SIZE = 1 << 16  # bytes: the capacity of a pipe on Linux
CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGSYS", "SIGTRAP"}


class OutputForwarder:
    """Forwards the output of running processes, without blocking on a single pipe."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[IO[bytes], bytes] = {}  # the incomplete last line of each pipe
        self._told = False  # whether a message has reported lost output

    def add(self, pipe: IO[bytes], name: str, target: TextIO) -> None:
        """Forward a pipe's lines to `target`, as "[name] line"."""
        os.set_blocking(pipe.fileno(), False)
        self._unfinished[pipe] = b""
        self._selector.register(pipe, selectors.EVENT_READ, (pipe, name, target))

    def forward(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(seconds)  # without pipes, select() returns immediately
        for key, _ in self._selector.select(seconds):
            self._read(key.data[0])

    def finish(self, pipes: Iterable[IO[bytes]]) -> None:
        for pipe in pipes:
            if pipe in self._unfinished:  # else closed already
                self._read(pipe, last=True)

    def _read(self, pipe: IO[bytes], last: bool = False) -> None:
        _, name, target = self._selector.get_key(pipe).data
        data = self._unfinished[pipe]
        while True:
            try:
                chunk = os.read(pipe.fileno(), READ_SIZE)
            except BlockingIOError:  # empty for now
                break
            last = last or not chunk  # an empty read is the end of the pipe
            data += chunk
            # A process that prints continuously must not delay other processes.
            if not chunk or (len(data) > LONGEST_LINE and not last):
                break
        lines, newline, rest = data.rpartition(b"\n")
        if rest and (last or len(rest) > LONGEST_LINE):
            lines = data
            rest = b""
        self._unfinished[pipe] = rest
        if lines or newline:
            # A single write of bytes: lines do not mix and need not be valid text.
            prefix = f"[{name}] ".encode()
            error = write_or_drop(target, prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")
            if error is not None and not self._told:
                told = f"output is lost ({error.strerror}). The workers continue."
                self._told = say(told) is None
        if last:
            self._selector.unregister(pipe)
            del self._unfinished[pipe]
            pipe.close()


def write_or_drop(target: TextIO | None, data: bytes) -> OSError | None:
    """Write to the terminal; return the error on failure, which must not end the workers."""
    # Bypass Python's buffer, which would retain the text and fail again when Python exits.
    try:
        while data:
            data = data[os.write(-1 if target is None else target.fileno(), data) :]
    except OSError as error:
        return error
    return None


def say(message: str) -> OSError | None:
    return write_or_drop(sys.stderr, f"manyhands run: {message}\n".encode())


def how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def killed_from_outside(code: int) -> bool:
    return code < 0 and how_it_ended(code) not in CRASHES


@cache
def lifeline() -> tuple[int, int]:
    """Return the ends of a pipe that closes when this process ends."""
    return os.pipe()


def die_with_parent() -> dict[str, Any]:
    """Return `Popen` options that kill the new process group when this process dies (Linux).

    Linux can send a signal to a group when the other end of a pipe closes. `PR_SET_PDEATHSIG` would
    not reach children.
    """
    if not sys.platform.startswith("linux"):
        return {}
    end, _ = lifeline()
    return {"preexec_fn": partial(tie_group_to, end), "pass_fds": (end,)}


def tie_group_to(end: int) -> None:
    import fcntl  # not available on Windows

    with contextlib.suppress(OSError):  # unsupported by this system
        own = os.open(f"/proc/self/fd/{end}", os.O_RDONLY)  # with a separate owner
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
        os.dup2(own, end)
        os.close(own)
