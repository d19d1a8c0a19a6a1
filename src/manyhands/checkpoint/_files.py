"""Open a file of a checkpoint: a regular file of that folder, and nothing else.

Somebody else may be able to write to the folder of checkpoints, or may have packed a folder that
was downloaded. So a link is never followed, neither as a file nor as the folder that holds it, and
nothing that is opened can be a pipe (which would hang), a device or a socket. The path that the
user gives is different: `/data/run` may be a link, or lie below one. (`_folder.py` resolves it.)
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

# O_NOFOLLOW refuses a link, and O_NONBLOCK returns at once from a pipe that has no other end.
# Windows lacks some of the flags; a missing flag counts as 0 there.
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
ALWAYS = NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
ALWAYS |= getattr(os, "O_BINARY", 0)  # without it, Windows translates line endings
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def open_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file.

    Raise FileNotFoundError if there is no such file, and ValueError if it is something else.
    """
    with open_folder(path.parent) as folder:
        try:
            # Relative to the folder's descriptor: nobody can swap the folder for a link meanwhile.
            name = path if folder is None else path.name
            file = os.open(name, flags | ALWAYS, 0o666, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:  # a link gives ELOOP, a socket ENXIO, a folder EISDIR
            # A regular file that cannot be opened has another reason, such as its permissions.
            if is_regular_file(path) or not os.path.lexists(path):
                raise
            raise ValueError(_not_a_file(path)) from error
    # Ask the descriptor, not the path: the path may mean another file by now.
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise ValueError(_not_a_file(path))


# Unbuffered: tensors are read into, and written from, their own memory in large blocks.
def open_to_read(path: Path) -> FileIO:
    """Open a regular file for reading, without a buffer."""
    return open(open_descriptor(path), "rb", buffering=0)


def open_to_write(path: Path) -> FileIO:
    """Create a file for writing, without a buffer. Raise FileExistsError if it exists."""
    return open(open_descriptor(path, NEW), "wb", buffering=0)


@contextmanager
def open_folder(path: Path) -> Iterator[int | None]:
    """Yield a descriptor of a folder that is not a link; None on Windows, which has none."""
    if os.open not in os.supports_dir_fd:
        if path.is_symlink():
            raise ValueError(_not_a_folder(path))
        yield None
        return
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(_not_a_folder(path)) from error
        raise
    try:
        yield folder
    finally:
        os.close(folder)


def is_regular_file(path: Path) -> bool:
    """Return whether there is a regular file; a link to one does not count."""
    return _has_mode(path, stat.S_ISREG)


def is_folder(path: Path) -> bool:
    """Return whether there is a folder; a link to one does not count."""
    return _has_mode(path, stat.S_ISDIR)


def _has_mode(path: Path, test: Callable[[int], bool]) -> bool:
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


def _not_a_file(path: Path) -> str:
    kind = "a link" if path.is_symlink() else "not a regular file"
    return (
        f"{path} is {kind}, and links out of a checkpoint are never followed. Copy the file itself "
        "there, or load another checkpoint."
    )


def _not_a_folder(path: Path) -> str:
    return (
        f"{path} is a link, and links to checkpoints are not followed. Give the path of the "
        "checkpoint that it points to."
    )
