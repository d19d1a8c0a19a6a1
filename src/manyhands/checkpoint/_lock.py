"""The lock on a folder of checkpoints: one process at a time may save there.

The lock is a POSIX lock on the file `.lock`, held from the first save until the process ends. The
operating system releases it with the process, so no lock is ever stale.

A crew's worker may be stopped while it holds the lock, and another worker saves in its place. So
the file names the run of its holder (MANYHANDS_RUN, which `manyhands run` sets), and a process of
the same run takes the lock over by putting another file under the same name. The former holder
notices before it publishes. What it was writing has been removed by then, so two processes never
write to one folder.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from pathlib import Path

from manyhands.checkpoint import _files

try:
    import fcntl
except ImportError:  # Windows: two jobs on one path are noticed only when their names collide
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
RUN_VARIABLE = "MANYHANDS_RUN"  # the run whose workers may take the lock from each other
TIMEOUT = 3.0  # seconds to wait for another process that may be about to end

_held: dict[Path, int] = {}  # the descriptors of the locks that this process holds


def take_lock(folder: Path, asked_at: float | None = None) -> None:
    """Make this process the only one that saves here, until it ends.

    A lock of another process of our own run is taken over, unless that process took it after
    `asked_at`: then this process was stopped meanwhile, and is the one that has been replaced.
    """
    path = folder.resolve() / LOCK
    held = _held.get(path)
    if fcntl is None or (held is not None and _still_holds(held, path)):
        return
    deadline = time.monotonic() + TIMEOUT
    while True:
        file = _open_lock(path)
        try:
            # `lockf`, not `flock`: a forked child must not inherit the lock.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                break  # the file system has no locks
            text = os.read(file, 4096)
            os.close(file)
            if (since := _held_since_in_our_run(text)) is not None:
                if asked_at is not None and since > asked_at:
                    raise RuntimeError(_replaced_message(folder)) from None
                file = _replace_lock(path)
                break
            if time.monotonic() > deadline:
                raise RuntimeError(_held_message(folder, text)) from None
            time.sleep(0.1)
            continue
        if _is_same_file(file, path):
            break
        os.close(file)  # between open and lock, another process has put a new file in its place
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    run = os.environ.get(RUN_VARIABLE)
    os.ftruncate(file, 0)
    os.write(file, json.dumps({**holder, "run": run} if run else holder).encode())
    # Stays open: closing any descriptor of the file would release a POSIX lock.
    _held[path] = file


def check_lock(folder: Path) -> None:
    """Raise if another process of our run has taken the lock over since we took it."""
    path = folder.resolve() / LOCK
    held = _held.get(path)
    if held is not None and os.path.lexists(path) and not _is_same_file(held, path):
        raise RuntimeError(_replaced_message(folder))


def release_locks() -> None:
    """Let other processes save where this one has."""
    while _held:
        os.close(_held.popitem()[1])


def _open_lock(path: Path) -> int:
    """Open the lock's file. It is written to, so it must not be another file's second name."""
    file = _files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
    if os.fstat(file).st_nlink > 1:
        os.close(file)
        raise ValueError(
            f"{path} is a hard link, perhaps to a file outside of this folder, and is not written "
            "to. Remove it."
        )
    return file


def _replace_lock(path: Path) -> int:
    """Put a new lock in the place of the present one, which another process still holds."""
    new = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
    file = _files.open_descriptor(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    # Locked before it gets the name: nobody can find it free.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(path)
    return file


def _held_since_in_our_run(text: bytes) -> float | None:
    """Return when the holder took the lock if it is of our own run, else None."""
    try:
        holder = json.loads(text)
        ours = bool(os.environ.get(RUN_VARIABLE)) and holder["run"] == os.environ[RUN_VARIABLE]
        return float(holder["since"]) if ours else None
    except (ValueError, KeyError, TypeError):  # not written yet, or not by us
        return None


def _still_holds(file: int, path: Path) -> bool:
    """Return whether this process holds a lock, and its file is still the one in the folder."""
    try:
        # Changes nothing if we hold it. A forked child has the descriptor, but not the lock.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return _is_same_file(file, path)


def _is_same_file(file: int, path: Path) -> bool:
    """Return whether the open file is the one that is at the path now."""
    try:
        at_path = os.lstat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(file)
    return (at_path.st_ino, at_path.st_dev) == (opened.st_ino, opened.st_dev)


def _replaced_message(folder: Path) -> str:
    return (
        f"another worker of this run saves to {folder} now: this worker was stopped, and the "
        "others have gone on without it. This checkpoint is dropped; theirs are complete."
    )


def _held_message(folder: Path, text: bytes) -> str:
    try:
        holder = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        name = f"process {holder['pid']} on {holder['host']} since {since}"
    except (ValueError, KeyError, TypeError):
        name = "another process"
    return (
        f"another job saves to {folder}: {name}. Give each job a path of its own, or wait until "
        "that job has ended."
    )
