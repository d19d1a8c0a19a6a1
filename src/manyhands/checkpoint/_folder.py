"""A folder of checkpoints: which are complete, which is the newest, and how a new one appears.

    000007-step-1200/        the seventh that was saved, complete
    .partial-000008-0f3a/    being written, or left behind by a run that was killed
    .pruned-000005/          being removed
    .lock                    held by the process that saves here, until it ends (`_lock.py`)

A name that begins with a dot is never a checkpoint. So a checkpoint appears, and disappears, by one
rename, which either happens or does not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from manyhands.checkpoint import _files, _index, _lock

try:
    import fcntl
except ImportError:  # Windows: a checkpoint may be pruned while it is read
    fcntl = None  # type: ignore[assignment]

PATTERN = re.compile(r"(\d{6,})(?:-step-(\d+))?")
PARTIAL, PRUNED = ".partial-", ".pruned-"
TOKEN = "token"  # a file by which other ranks recognise rank 0's folder
VISIBLE_AFTER = 3.0  # seconds within which a network file system must show a new file


# -- find ------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    # `lexists`: a link in the place of the index must give its own error, not "no checkpoint".
    return os.path.lexists(path / _index.NAME)


def list_complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first, without links to checkpoints."""
    return [path for path in _list_named(folder) if _files.is_folder(path)]


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
    if found and not _files.is_folder(found[-1]):
        raise ValueError(
            f"the newest checkpoint in {path}, {found[-1].name}, is a link, and links are followed "
            "only if you name them. Give its own path."
        )
    if found:
        return found[-1]
    # The rest finds out why there is none.
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}. Give the path that mh.save was given.")
    if not path.is_dir():
        raise ValueError(f"{path} is a file, and a checkpoint of manyhands is a folder.")
    partial = [name for name in os.listdir(path) if name.startswith(PARTIAL)]
    raise FileNotFoundError(
        f"{path} has no complete checkpoint"
        + (", only a part of one that was not finished." if partial else ".")
        + f" Give the folder that mh.save was given; a checkpoint in it has a file {_index.NAME}."
    )


# -- write -----------------------------------------------------------------------------------------


def begin(folder: Path, step: int | None, token: str) -> tuple[str, str]:
    """Make the hidden folder for the next checkpoint; return its name now, and its final name.

    Remove what killed runs have left behind.
    """
    if is_checkpoint(folder):
        raise ValueError(
            f"{folder} is one checkpoint. Give the folder that it is in, {folder.parent}; each "
            "save makes a new one there."
        )
    folder.mkdir(parents=True, exist_ok=True)
    _lock.take_lock(folder, time.time())
    last = 0
    for name in os.listdir(folder):
        # Safe under the lock: no live process is writing them.
        if name.startswith((PARTIAL, PRUNED)):
            _files.remove(folder / name)
        elif found := PATTERN.fullmatch(name):
            last = max(last, int(found[1]))
    name = f"{last + 1:06d}" + ("" if step is None else f"-step-{step}")
    # The token makes the name unique: a process that was stopped may still write to an older one.
    partial = folder / f"{PARTIAL}{last + 1:06d}-{token[:8]}"
    try:
        partial.mkdir()
        with _files.open_to_write(partial / TOKEN) as file:
            file.write(token.encode())
    except BaseException:
        _files.remove(partial)
        raise
    return partial.name, name


def check_shared(partial: Path, token: str) -> None:
    """Raise ValueError if this rank does not see the folder that rank 0 has made."""
    deadline = time.monotonic() + VISIBLE_AFTER
    while True:
        try:
            with _files.open_to_read(partial / TOKEN) as file:
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
        "Give a path on a file system that all ranks share."
    )


def publish(partial: Path, name: str) -> Path:
    """Turn the hidden folder into a checkpoint, in one rename."""
    final = partial.parent / name
    _lock.check_lock(partial.parent)
    (partial / TOKEN).unlink(missing_ok=True)
    # The content must be on the disk before the name is, in case the machine loses power.
    sync(partial)
    if os.path.lexists(final):
        raise OSError(
            f"{final} has been made meanwhile: another job saves to {final.parent}, too. Give "
            "each job a path of its own."
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
            _files.remove(hidden)


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
    with _files.open_to_read(checkpoint / _index.NAME) as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _hold_for_removal(checkpoint: Path) -> Iterator[None]:
    """Raise OSError if somebody is reading the checkpoint."""
    with _files.open_to_read(checkpoint / _index.NAME) as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise  # any other error: the file system has no locks
        yield
