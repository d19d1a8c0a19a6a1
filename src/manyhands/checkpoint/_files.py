"""Opening a file of a checkpoint: a regular file of that folder, and nothing else.

Somebody else may be able to write where checkpoints are, or may have packed the folder that was
downloaded. So neither a file nor the folder which it is in is ever a link that is followed, and
nothing that is opened can be a pipe (which would hang), a device or a socket. What a user names is
another thing: `/data/run` may be a link, or lie below one. (`_folder.py` resolves it.)
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
ALWAYS = NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
ALWAYS |= getattr(os, "O_BINARY", 0)  # Windows
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; FileNotFoundError if it is not there, ValueError if it is
    something else."""
    with opened_folder(path.parent) as folder:
        try:
            name = path if folder is None else path.name
            file = os.open(name, flags | ALWAYS, 0o666, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:  # a link gives ELOOP, a socket ENXIO, a folder EISDIR
            if is_regular(path) or not os.path.lexists(path):
                raise
            raise ValueError(_not_a_file(path)) from error
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise ValueError(_not_a_file(path))


def reader(path: Path) -> Any:
    """A regular file, to be read without a buffer."""
    return open(open_file(path), "rb", buffering=0)


def writer(path: Path) -> Any:
    """A new file, to be written without a buffer."""
    return open(open_file(path, NEW), "wb", buffering=0)


@contextmanager
def opened_folder(path: Path) -> Iterator[int | None]:
    """A descriptor of a folder that is no link, to open what is in it; None on Windows."""
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


def is_regular(path: Path) -> bool:
    """Whether there is a file, not a link to one."""
    return _kind(path, stat.S_ISREG)


def is_folder(path: Path) -> bool:
    """Whether there is a folder, not a link to one."""
    return _kind(path, stat.S_ISDIR)


def _kind(path: Path, test: Any) -> bool:
    try:
        return bool(test(os.lstat(path).st_mode))
    except (OSError, ValueError):
        return False


def remove(path: Path) -> None:
    """Whatever it is, as far as it can be; of a link, the link."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _not_a_file(path: Path) -> str:
    kind = "a link" if path.is_symlink() else "not a regular file"
    return (
        f"{path} is {kind}, and the files of a checkpoint are never followed elsewhere. Copy the "
        "file itself there, or load another checkpoint."
    )


def _not_a_folder(path: Path) -> str:
    return (
        f"{path} is a link, and checkpoints are not followed elsewhere. Give the path of the "
        "checkpoint that it leads to."
    )
