"""Keep the files that a script writes to, and put them back after each run.

All runs have to find the same files, and no file of the user may change. Before a process opens a
file for writing, removes it or renames it, the file is copied into a folder that all processes of
the run share. Caches stay as the script leaves them.

    kept/<hash of the path>/path    where the file was
    kept/<hash of the path>/copy    what it was; missing if there was none
"""

import hashlib
import os
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from manyhands.tools.check._machine import wrap

LARGEST = 2**32  # bytes of a file that is kept
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def keep_files(folder: Path) -> None:
    """Keep each file that this process, or one that it forks, is about to change."""
    inside = threading.local()  # keeping a file opens files

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            changed = [(args[0], -1, True)] if args[2] & WRITES else []
        elif event in ("os.remove", "os.mkdir", "os.truncate"):
            changed = [(args[0], args[-1] if event != "os.truncate" else -1, False)]
        elif event in ("os.rename", "os.link", "os.symlink"):
            changed = [(args[0], args[2], False), (args[1], args[-1], False)]
        else:
            return
        keep(*changed)

    def keep(*changed: tuple[Any, int, bool]) -> None:
        if hasattr(inside, "now"):
            return
        inside.now = True
        try:
            for path, above, follow in changed:
                if isinstance(path, str | bytes | os.PathLike):
                    _keep(_whole(path, above, follow), folder / "kept")
        finally:
            del inside.now

    def save(write: Any, value: Any, file: Any, *args: Any, **named: Any) -> Any:
        keep((file, -1, True))
        return write(value, file, *args, **named)

    (folder / "kept").mkdir(exist_ok=True)
    sys.addaudithook(hook)
    wrap(torch, "save", save)  # in C++, as safetensors in Rust: no hook sees it
    with suppress(ImportError):
        import safetensors.torch

        wrap(safetensors.torch, "save_file", save)


def _whole(path: Any, above: int, follow: bool) -> Path:
    """Return an absolute path; `above` is an open folder that it may be relative to, or -1."""
    start = os.readlink(f"/proc/self/fd/{above}") if above >= 0 else os.getcwd()
    folder, name = os.path.split(os.path.join(start, os.fsdecode(path)))
    full = os.path.join(os.path.realpath(folder), name)
    return Path(os.path.realpath(full) if follow else full)


def _keep(path: Path, kept: Path) -> None:
    """Copy a file, unless it was copied before; or note that there is none."""
    entry = kept / hashlib.sha1(bytes(path)).hexdigest()
    there = os.path.lexists(path)
    regular = path.is_file() or path.is_symlink()
    caches = path.parts[1] in ("dev", "proc") or not {"__pycache__", ".cache"}.isdisjoint(
        path.parts
    )
    if caches or kept.parents[1] in path.parents or entry.exists() or (there and not regular):
        return
    new = Path(tempfile.mkdtemp(dir=kept.parent))
    (new / "path").write_bytes(bytes(path))
    if there:
        if path.lstat().st_size > LARGEST:
            raise OSError(f"{path} would be changed, and is too large to be put back after a check")
        shutil.copy2(path, new / "copy", follow_symlinks=False)
    with suppress(OSError):  # another process was first
        new.rename(entry)


def put_back(folder: Path) -> None:
    """Make all files what they were; call it when the processes have ended."""
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
    for path in sorted(made, reverse=True):  # what is in a folder, before it
        with suppress(OSError):  # somebody else has put something in
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
