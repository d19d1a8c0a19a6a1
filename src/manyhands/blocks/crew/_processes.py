"""Forward the output of a launcher's processes, and end all processes with the launcher.

OutputForwarder   forwards output line by line, prefixed with the name of the process
write_or_drop     writes output, and ignores errors such as a full disk
say               writes a message of the launcher
how_it_ended      names an exit code or a signal; killed_from_outside: a signal, but no crash
Guard             a process that kills workers if the launcher is killed
die_with_parent   lets the system kill workers when the launcher dies (Linux)

The guard process runs this file as a script, with the running process groups as arguments. From
standard input it reads `+PID` for each process group that the launcher starts and `-PID` for each
ended group, one per line. When the launcher dies, the pipe closes, and the guard kills the
remaining groups. This file imports only the standard library, so that the guard starts within
milliseconds and stays small.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
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
        """Wait up to this long for output, and forward it."""
        if not self._selector.get_map():
            time.sleep(seconds)  # without pipes, select() returns immediately
        for key, _ in self._selector.select(seconds):
            self._read(key.data[0])

    def finish(self, pipes: Iterable[IO[bytes]]) -> None:
        """Forward the remaining output of an ended process, and close the pipes."""
        for pipe in pipes:
            if pipe in self._unfinished:  # else closed already
                self._read(pipe, last=True)

    def _read(self, pipe: IO[bytes], last: bool = False) -> None:
        """Read a pipe and forward complete lines; with `last`, also the incomplete line."""
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
    """Print a message of the launcher."""
    return write_or_drop(sys.stderr, f"manyhands run: {message}\n".encode())


def how_it_ended(code: int) -> str:
    """Return "exit code 1", or the name of a signal (a negative code)."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def killed_from_outside(code: int) -> bool:
    """Return whether a process was killed by a signal that does not indicate a crash."""
    return code < 0 and how_it_ended(code) not in CRASHES


class Guard:
    """Starts a guard process that knows all running process groups, and replaces dead guards."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    def add(self, group: int) -> None:
        """Report a process group that has started."""
        self._groups.add(group)
        self._write(f"+{group}")

    def remove(self, group: int) -> None:
        """Report a process group that has ended."""
        self._groups.discard(group)
        self._write(f"-{group}")

    def watch(self) -> None:
        """Replace a killed guard, because text written to a dying guard is lost."""
        if self._groups and not self._running:
            self._start()

    def close(self) -> None:
        """End the guard."""
        if self._process is not None:
            self._process.communicate()  # closes the input, which ends the guard

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _write(self, change: str) -> None:
        """Send a change to the guard, or start a new guard if it was killed."""
        if self._running:
            assert self._process is not None and self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the guard was killed
                self._process.stdin.write(f"{change}\n".encode())
                self._process.stdin.flush()
                return
        self._start()

    def _start(self) -> None:
        # Pass all running groups, because the launcher may be killed before the next write.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, self._groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # protects the guard from signals to this process group
        )


@cache
def _lifeline() -> tuple[int, int]:
    """Return a pipe whose second end stays open, unused, until this process dies."""
    return os.pipe()


def die_with_parent() -> dict[str, Any]:
    """Return `Popen` options that kill the new process group when this process dies (Linux).

    Linux can send a signal to a group when the other end of a pipe closes. `PR_SET_PDEATHSIG` does
    not reach children, and cannot be combined with the pipe: a killed worker closes the pipe.
    """
    if not sys.platform.startswith("linux"):
        return {}
    end, _ = _lifeline()
    return {"preexec_fn": partial(tie_group_to, end), "pass_fds": (end,)}


def tie_group_to(end: int) -> None:
    """Let the system kill this process group when the other end of the pipe closes."""
    import fcntl  # not available on Windows

    with contextlib.suppress(OSError):  # unsupported: rely on the guard
        own = os.open(f"/proc/self/fd/{end}", os.O_RDONLY)  # with a separate owner
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
        os.dup2(own, end)
        os.close(own)


def kill_groups_left_behind() -> None:
    """Track process groups until the launcher dies, and kill the remaining groups."""
    groups = set(map(int, sys.argv[1:]))
    for line in sys.stdin:  # ends with the launcher
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for _ in range(3):  # repeat, because a child may fork while the first signal arrives
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.1 if groups else 0.0)


if __name__ == "__main__":
    kill_groups_left_behind()
