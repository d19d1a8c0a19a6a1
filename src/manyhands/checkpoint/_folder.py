"""A folder of checkpoints, in which nothing is half written and no link is followed.

    000007-step-1200/        the seventh that was saved, complete
    .partial-000008-0f3a/    being written, or left behind by a run that was killed
    .pruned-000005/          being removed
    .lock                    held by the process that saves here, until it ends

A name that begins with a dot is never a checkpoint. So a checkpoint appears, and disappears, by one
rename, which either happens or does not.

One process at a time may save here. The lock is a POSIX lock on the file `.lock`, held from the
first save until the process ends. The operating system releases it with the process, so no lock is
ever stale. A crew's worker may be stopped while it holds the lock, and another worker saves in its
place. So the file names the run of its holder (MANYHANDS_RUN, which `manyhands run` sets), and a
process of the same run takes the lock over by putting another file under the same name. The former
holder notices before it publishes.

A folder may have been downloaded. So a link in it is not followed, neither to a file nor to a
checkpoint, and nothing that is opened can be a pipe (which would hang) or a device. The path that
the user gives may be a link.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two jobs on one path are noticed only when their names collide,
    fcntl = None  # type: ignore[assignment]  # and a checkpoint may be pruned while it is read

INDEX = "index.json"  # the last file that is written: a folder without it is not a checkpoint
PATTERN = re.compile(r"(\d{6,})(?:-step-(\d+))?")
PARTIAL, PRUNED = ".partial-", ".pruned-"
TOKEN = "token"  # a file by which other ranks recognise rank 0's folder
VISIBLE_AFTER = 3.0  # seconds within which a network file system must show a new file


# -- find ------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    # `lexists`: a link in the place of the index must give its own error, not "no checkpoint".
    return os.path.lexists(path / INDEX)


def list_complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first, without links to checkpoints."""
    return [path for path in _list_named(folder) if is_folder(path)]


def _list_named(folder: Path) -> list[Path]:
    """Return what has the name and the index of a complete checkpoint, oldest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # By the number at the beginning, not by step: a run may go back to an earlier step.
    numbered = [(int(found[1]), name) for name in names if (found := PATTERN.fullmatch(name))]
    return [folder / name for _, name in sorted(numbered) if is_checkpoint(folder / name)]


def resolve_link(path: Path) -> Path:
    """Return a checkpoint that the user names. It may be a link; nothing inside it may be one."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def find_newest(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest complete one in it."""
    if is_checkpoint(path):
        return resolve_link(path)
    found = _list_named(path)
    if found and not is_folder(found[-1]):
        raise ValueError(f"the newest checkpoint in {path}, {found[-1].name}, is a link. Name it.")
    if found:
        return found[-1]
    # The rest finds out why there is none.
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}. Give the path that mh.save was given.")
    if not path.is_dir():
        raise ValueError(f"{path} is a file, and a checkpoint of manyhands is a folder.")
    raise FileNotFoundError(
        f"{path} has no complete checkpoint. Give the folder that mh.save was given."
    )


# -- write -----------------------------------------------------------------------------------------


def begin(folder: Path, step: int | None, token: str) -> tuple[str, str]:
    """Make the hidden folder for the next checkpoint; return its name now, and its final name."""
    # Remove what killed runs have left behind.
    if is_checkpoint(folder):
        raise ValueError(f"{folder} is one checkpoint. Give the folder around it: {folder.parent}.")
    folder.mkdir(parents=True, exist_ok=True)
    take_lock(folder)
    last = 0
    for name in os.listdir(folder):
        # Safe under the lock: no live process is writing them.
        if name.startswith((PARTIAL, PRUNED)):
            remove(folder / name)
        elif found := PATTERN.fullmatch(name):
            last = max(last, int(found[1]))
    name = f"{last + 1:06d}" + ("" if step is None else f"-step-{step}")
    # The token makes the name unique: a process that was stopped may still write to an older one.
    partial = folder / f"{PARTIAL}{last + 1:06d}-{token[:8]}"
    try:
        partial.mkdir()
        with open_to_write(partial / TOKEN) as file:
            file.write(token.encode())
    except BaseException:
        remove(partial)
        raise
    return partial.name, name


def check_shared(partial: Path, token: str) -> None:
    """Raise ValueError if this rank does not see the folder that rank 0 has made."""
    deadline = time.monotonic() + VISIBLE_AFTER
    while True:
        try:
            with open_to_read(partial / TOKEN) as file:
                # One byte more than the token, so that a longer file is not taken for it.
                if file.read(len(token) + 1) == token.encode():
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    raise ValueError(
        f"{partial.parent} on {socket.gethostname()} is not the folder that rank 0 writes to. "
        "Give a path that all ranks share."
    )


def publish(partial: Path, name: str) -> Path:
    """Turn the hidden folder into a checkpoint, in one rename."""
    final = partial.parent / name
    check_lock(partial.parent)
    (partial / TOKEN).unlink(missing_ok=True)
    # The content must be on the disk before the name is, in case the machine loses power.
    sync(partial)
    if os.path.lexists(final):
        raise OSError(
            f"{final} exists: another job saves to {final.parent}, too. Give each its own path."
        )
    partial.rename(final)
    sync(final.parent)
    return final


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints, except those that are being read."""
    for old in list_complete(folder)[: -keep if keep else 0]:
        with contextlib.suppress(OSError, ValueError), _hold_for_removal(old):
            # Renamed first: a half-removed checkpoint must not look complete.
            hidden = folder / (PRUNED + old.name)
            old.rename(hidden)
            remove(hidden)


def sync(folder: Path) -> None:
    """Wait until the folder's entries (the names in it) are on the disk."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no fsync of folders here
                raise
        finally:
            os.close(descriptor)


# -- readers and pruning ---------------------------------------------------------------------------
# A reader holds a shared lock on the index, and `prune` needs an exclusive one. These are `flock`
# locks, which belong to the open file: several readers in one process do not end each other's.


@contextlib.contextmanager
def hold_for_reading(checkpoint: Path) -> Iterator[None]:
    """Keep `prune` from removing the checkpoint meanwhile (if the file system has locks)."""
    with open_to_read(checkpoint / INDEX) as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _hold_for_removal(checkpoint: Path) -> Iterator[None]:
    """Raise OSError if somebody is reading the checkpoint."""
    with open_to_read(checkpoint / INDEX) as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise  # any other error: the file system has no locks
        yield


# -- the lock of the process that saves ------------------------------------------------------------

LOCK = ".lock"
RUN_VARIABLE = "MANYHANDS_RUN"  # the run whose workers may take the lock from each other
LOCK_TIMEOUT = 3.0  # seconds to wait for another process that may be about to end

_held: dict[Path, int] = {}  # the descriptors of the locks that this process holds


def take_lock(folder: Path) -> None:
    """Make this process the only one that saves here, until it ends."""
    # A lock of another process of our own run is taken over.
    path = folder.resolve() / LOCK
    held = _held.get(path)
    if fcntl is None or (held is not None and _still_holds(held, path)):
        return
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        file = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        try:
            # `lockf`, not `flock`: a forked child must not inherit the lock.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                break  # the file system has no locks
            text = os.read(file, 4096)
            os.close(file)
            if _is_of_our_run(text):
                file = _replace_lock(path)
                break
            if time.monotonic() > deadline:
                raise RuntimeError(_held_message(folder, text)) from None
            time.sleep(0.1)
            continue
        if _is_same_file(file, path):
            break
        os.close(file)  # between open and lock, another process has put a new file in its place
    run = os.environ.get(RUN_VARIABLE)
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "run": run}
    os.ftruncate(file, 0)
    os.write(file, json.dumps(holder).encode())
    # Stays open: closing any descriptor of the file would release a POSIX lock.
    _held[path] = file


def check_lock(folder: Path) -> None:
    """Raise if another process of our run has taken the lock over since we took it."""
    path = folder.resolve() / LOCK
    held = _held.get(path)
    if held is not None and os.path.lexists(path) and not _is_same_file(held, path):
        raise RuntimeError(
            f"another worker of this run saves to {folder} now, as this one was stopped meanwhile. "
            "This checkpoint is dropped; theirs are complete."
        )


def _replace_lock(path: Path) -> int:
    """Put a new lock in the place of the present one, which another process still holds."""
    new = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
    file = open_descriptor(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    # Locked before it gets the name: nobody can find it free.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(path)
    return file


def _is_of_our_run(text: bytes) -> bool:
    """Return whether a lock's text is from a process of this run, which may have died."""
    run = os.environ.get(RUN_VARIABLE)
    try:
        return bool(run) and json.loads(text)["run"] == run
    except (ValueError, KeyError, TypeError):  # not written yet, or not by us
        return False


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


def _held_message(folder: Path, text: bytes) -> str:
    """Return the error's message for a folder that another job saves to."""
    try:
        holder = json.loads(text)
        name = f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        name = "another process"
    return f"another job saves to {folder}: {name}. Give each job a path of its own."


# -- open files, and nothing else ------------------------------------------------------------------

# O_NOFOLLOW refuses a link, O_NONBLOCK returns at once from a pipe without another end, and without
# O_BINARY Windows translates line endings. A flag that the system lacks counts as 0.
FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
ALWAYS = sum(getattr(os, flag, 0) for flag in FLAGS)
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def open_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file."""
    # Raise FileNotFoundError if there is no such file, and ValueError if it is something else.
    try:
        file = os.open(path, flags | ALWAYS, 0o666)
        # Ask the descriptor, not the path: the path may mean another file by now.
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    except OSError:  # a link gives ELOOP, a socket ENXIO, a folder EISDIR
        # A regular file that cannot be opened has another reason, such as its permissions.
        if is_regular_file(path) or not os.path.lexists(path):
            raise
    raise ValueError(f"{path} is not a regular file, and links are not followed. Copy the file.")


# Unbuffered: tensors are read into, and written from, their own memory in large blocks.
def open_to_read(path: Path) -> FileIO:
    """Open a regular file for reading, without a buffer."""
    return open(open_descriptor(path), "rb", buffering=0)


def open_to_write(path: Path) -> FileIO:
    """Create a file for writing, without a buffer. Raise FileExistsError if it exists."""
    return open(open_descriptor(path, NEW), "wb", buffering=0)


def is_regular_file(path: Path) -> bool:
    """Return whether there is a regular file; a link to one does not count."""
    return _has_mode(path, stat.S_ISREG)


def is_folder(path: Path) -> bool:
    """Return whether there is a folder; a link to one does not count."""
    return _has_mode(path, stat.S_ISDIR)


def _has_mode(path: Path, test: Callable[[int], bool]) -> bool:
    """Return whether there is a file of this kind, and not a link to one."""
    try:
        return bool(test(os.lstat(path).st_mode))
    except (OSError, ValueError):  # ValueError: a name with a null byte
        return False


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link (not its target), as far as possible."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
