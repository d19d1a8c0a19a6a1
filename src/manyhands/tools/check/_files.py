"""Copy each file before a process changes it, and restore the files after the run.

All runs must find equal files. The user's files must not change. Before a process writes, removes
or renames a file, the check copies the file into a folder of the run. Caches are not restored.

    kept/<hash of the path>/path    the path of the file
    kept/<hash of the path>/copy    the content; missing if there was no file
"""

import hashlib
import os
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from manyhands.tools.check._machine import wrap

LARGEST = 2**32  # bytes of a copied file
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CACHES = {"__pycache__", ".cache"}
NO_FOLDER = -1  # the descriptor in an event if the path is relative to no open folder


def keep_files(folder: Path) -> None:
    """Copy each file before this process or a fork changes the file."""
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    inside = threading.local()  # set while `keep` opens files

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[2] & WRITES:
            keep(args[0], follow=True)
        elif event == "os.truncate":
            keep(args[0])
        elif event in ("os.remove", "os.mkdir"):
            keep(args[0], args[-1])
        elif event in ("os.rename", "os.link", "os.symlink"):
            keep(args[0], args[2])
            keep(args[1], args[-1])
            if event == "os.rename" and args[2] == NO_FOLDER and os.path.isdir(args[0]):
                for folder, folders, files in os.walk(args[0]):
                    for name in (*folders, *files):
                        below = os.path.relpath(os.path.join(folder, name), args[0])
                        keep(os.path.join(os.fsdecode(args[1]), os.fsdecode(below)))

    def keep(path: Any, parent: int = NO_FOLDER, follow: bool = False) -> None:
        if hasattr(inside, "now") or not isinstance(path, str | bytes | os.PathLike):
            return
        inside.now = True
        try:
            _keep(_absolute(path, parent, follow), kept)
        finally:
            del inside.now

    def save(write: Any, value: Any, file: Any, *args: Any, **named: Any) -> Any:
        keep(file, follow=True)
        return write(value, file, *args, **named)

    sys.addaudithook(hook)
    # Writes in C++ and Rust cause no audit event.
    wrap(torch, "save", save)
    with suppress(ImportError):
        import safetensors.torch

        # Not save_file, which other modules may have imported by name.
        wrap(safetensors.torch, "serialize_file", save)


def _absolute(path: Any, parent: int, follow: bool) -> Path:
    """Return the absolute path of a path relative to the open folder `parent`."""
    start = os.getcwd() if parent == NO_FOLDER else os.readlink(f"/proc/self/fd/{parent}")
    folder, name = os.path.split(os.path.join(start, os.fsdecode(path)))
    full = os.path.join(os.path.realpath(folder), name)
    return Path(os.path.realpath(full) if follow else full)


def _keep(path: Path, kept: Path) -> None:
    """Copy a file, or note that the file is missing."""
    if path.parts[1] in ("dev", "proc") or not CACHES.isdisjoint(path.parts):
        return
    if kept.parents[1] in path.parents:  # files of the check
        return
    entry = kept / hashlib.sha1(bytes(path)).hexdigest()
    exists = os.path.lexists(path)
    if entry.exists() or (exists and not path.is_file() and not path.is_symlink()):
        return
    # Not tempfile: its first call opens a file, and thereby calls this function, under a lock.
    new = kept.parent / f"{entry.name}-{os.getpid()}-{threading.get_ident()}"
    new.mkdir()
    (new / "path").write_bytes(bytes(path))
    if exists:
        if path.lstat().st_size > LARGEST:
            raise OSError(
                f"the script changes {path}, which is too large to restore after the check. "
                f"The limit is {LARGEST} bytes. Make the script write to another file."
            )
        shutil.copy2(path, new / "copy", follow_symlinks=False)
    with suppress(OSError):  # another process has copied the file
        new.rename(entry)


def put_back(folder: Path) -> None:
    made = []
    for entry in (folder / "kept").glob("*"):
        path = Path(os.fsdecode((entry / "path").read_bytes()))
        copy = entry / "copy"
        if not os.path.lexists(copy):
            made.append(path)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or copy.is_symlink():
            path.unlink(missing_ok=True)
        shutil.copy2(copy, path, follow_symlinks=False)
    for path in sorted(made, reverse=True):  # the content of a folder before the folder
        with suppress(OSError):  # another program has added a file
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
