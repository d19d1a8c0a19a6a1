"""Forward the output of a launcher's processes, and leave none behind.

OutputForwarder   forwards their output, line by line, with the name of the process in front
write_or_drop     writes it, and goes on if no process reads it, or the disk is full
say               writes a message of the launcher
how_it_ended      names an exit code or a signal; killed_from_outside: a signal, and no crash
Guard             a process that kills them if the launcher is killed
die_with_parent   lets the system kill them when the launcher dies (Linux)

The guard process is this file, run as a script, with the process groups that run as its arguments.
It reads from its standard input, one per line, `+PID` for each process group that the launcher has
started and `-PID` for each that has ended. When the launcher dies, for whatever reason, its end of
the pipe closes, and the guard kills the groups that are left. So this file imports only the
standard library: the guard starts within milliseconds and stays small.
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

LONGEST_LINE = 1 << 20  # bytes: a longer line is forwarded in several
READ_SIZE = 1 << 16  # bytes: the capacity of a pipe on Linux
CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGSYS", "SIGTRAP"}


class OutputForwarder:
    """The pipes of running processes, read without blocking on any of them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[IO[bytes], bytes] = {}  # the beginning of each pipe's present line
        self._told = False  # that output is lost

    def add(self, pipe: IO[bytes], name: str, target: TextIO) -> None:
        """Forward a pipe's lines to `target`, as "[name] line"."""
        os.set_blocking(pipe.fileno(), False)
        self._unfinished[pipe] = b""
        self._selector.register(pipe, selectors.EVENT_READ, (pipe, name, target))

    def forward(self, seconds: float) -> None:
        """Wait up to this long for output, and forward it."""
        if not self._selector.get_map():
            time.sleep(seconds)  # select() returns at once if it has nothing to watch
        for key, _ in self._selector.select(seconds):
            self._read(key.data[0])

    def finish(self, pipes: Iterable[IO[bytes]]) -> None:
        """Forward all that is left in the pipes of a process that has ended, and close them."""
        for pipe in pipes:
            if pipe in self._unfinished:  # else it has reached its end before
                self._read(pipe, last=True)

    def _read(self, pipe: IO[bytes], last: bool = False) -> None:
        """Read a pipe, and forward complete lines; with `last`, the rest as well."""
        _, name, target = self._selector.get_key(pipe).data
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
        lines, newline, rest = data.rpartition(b"\n")
        if rest and (last or len(rest) > LONGEST_LINE):
            lines = data
            rest = b""
        self._unfinished[pipe] = rest
        if lines or newline:
            # As bytes, in one write: a line need not be valid text, and lines do not mix.
            prefix = f"[{name}] ".encode()
            error = write_or_drop(target, prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")
            if error is not None and not self._told:
                told = f"output is lost ({error.strerror}), and the workers go on."
                self._told = say(told) is None
        if last:
            self._selector.unregister(pipe)
            del self._unfinished[pipe]
            pipe.close()


def write_or_drop(target: TextIO | None, data: bytes) -> OSError | None:
    """Write to the terminal, or return why that failed: it is no reason to end the workers."""
    # Past Python's buffer, which would keep the text, and fail again when Python ends.
    try:
        while data:
            data = data[os.write(-1 if target is None else target.fileno(), data) :]
    except OSError as error:
        return error
    return None


def say(message: str) -> OSError | None:
    """Print a message of the command's own."""
    return write_or_drop(sys.stderr, f"manyhands run: {message}\n".encode())


def how_it_ended(code: int) -> str:
    """Return "exit code 1", or the name of a signal, which is a negative code."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def killed_from_outside(code: int) -> bool:
    """Return whether a process was killed, and did not fail or crash by itself."""
    return code < 0 and how_it_ended(code) not in CRASHES


class Guard:
    """The guard process, which knows all process groups that run. A killed one is replaced."""

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
        """Replace the guard if it was killed. (Text that is written to a dying one is lost.)"""
        if self._groups and not self._running:
            self._start()

    def close(self) -> None:
        """End the guard."""
        if self._process is not None:
            self._process.communicate()  # closes its input, so that it ends

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _write(self, change: str) -> None:
        """Tell the guard that a process group begins or ends; start a new one if it was killed."""
        if self._running:
            assert self._process is not None and self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the guard was killed: make another one
                self._process.stdin.write(f"{change}\n".encode())
                self._process.stdin.flush()
                return
        self._start()

    def _start(self) -> None:
        """Start the process that kills our workers' process groups when we are killed."""
        # With all groups that run: we may be killed before we write anything.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, self._groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a signal that kills our process group spares it
        )


@cache
def _lifeline() -> tuple[int, int]:
    """Return the ends of a pipe. We keep the second one open, without writing, until we die."""
    return os.pipe()


def die_with_parent() -> dict[str, Any]:
    """Return options of `Popen`: the system kills the new process group when we die (Linux).

    It can send a group any signal when the other end of a pipe closes. (`PR_SET_PDEATHSIG` reaches
    no children; nor may it come in addition: who is killed by it no longer holds the pipe.)
    """
    if not sys.platform.startswith("linux"):
        return {}
    end, _ = _lifeline()
    return {"preexec_fn": partial(tie_group_to, end), "pass_fds": (end,)}


def tie_group_to(end: int) -> None:
    """Let the system kill this process group when the other end of the pipe closes."""
    import fcntl  # not on every system

    with contextlib.suppress(OSError):  # a system that cannot: the guard is left
        own = os.open(f"/proc/self/fd/{end}", os.O_RDONLY)  # its owner is this group alone
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC)
        os.dup2(own, end)
        os.close(own)


def kill_groups_left_behind() -> None:
    """Read which process groups run until the launcher dies, and kill those that are left."""
    groups = set(map(int, sys.argv[1:]))
    for line in sys.stdin:  # ends when the launcher does
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for _ in range(3):  # again: a child may be forking while the first signal arrives
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        time.sleep(0.1 if groups else 0.0)


if __name__ == "__main__":
    kill_groups_left_behind()
