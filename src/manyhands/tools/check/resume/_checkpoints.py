"""Detect complete checkpoints of a script, and files that a resumed run reads.

A checkpoint is a set of files of torch, safetensors, pickle, numpy or HDF5, written since the
previous step, with a total size of at least `LEAST_PART` of the trained parameters. `keep_files`
notes the paths that processes change.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from manyhands.tools.check._machine import wrap

QUIET = 0.2  # seconds of unchanged files, which are then complete
PATIENCE = 20.0  # seconds to wait for complete files
FORMS = (b"PK\x03\x04", b"\x80", b"\x93NUMPY", b"\x89HDF")  # of torch, pickle, numpy and HDF5

Signature = tuple[int, int, int]  # time of the last change, size and inode


class CheckpointWatch:
    """Detects checkpoints among the files that `keep_files` notes."""

    def __init__(self, kept: Path) -> None:
        self.kept = kept
        self.seen = self.signatures()
        self.files: set[str] = set()  # files of checkpoints since the first step
        self.latest = ""  # the file or folder of the latest checkpoint

    def written(self, least: int) -> bool:
        """Return whether a checkpoint of at least `least` bytes is new since the previous call."""
        found = self._changed()
        if found:
            found = self._wait_until_complete()
        self.seen = self.signatures()
        sizes: dict[str, int] = {}
        for path in found:
            if path in self.seen:
                sizes[str(path)] = self.seen[path][1]
        self.files.update(sizes)
        if not sizes or sum(sizes.values()) < least:
            return False
        self.latest = os.path.commonpath(sizes)
        here = os.path.realpath(os.getcwd())
        if self.latest == here:  # multiple files in the working folder
            self.latest = max(sizes, key=sizes.__getitem__)
        if self.latest.startswith(here):
            self.latest = os.path.relpath(self.latest, here)
        return True

    def signatures(self) -> dict[Path, Signature]:
        found = {}
        for path in written_files(self.kept):
            with suppress(OSError):  # the file was removed just now
                state = path.stat()
                found[path] = (state.st_mtime_ns, state.st_size, state.st_ino)
        return found

    def _changed(self) -> list[Path]:
        found = []
        for path, signature in self.signatures().items():
            if signature != self.seen.get(path) and has_a_form(path):
                found.append(path)
        return found

    def _wait_until_complete(self) -> list[Path]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            before = self.signatures()
            time.sleep(QUIET)
            changed = self._changed()
            if before == self.signatures() and not open_for_writing(changed):
                return changed
        return []


def written_files(kept: Path) -> Iterator[Path]:
    """Yield the files that the ranks have changed, also in new folders."""
    for entry in kept.glob("*/path"):
        path = Path(os.fsdecode(entry.read_bytes()))
        if not path.is_dir():
            yield path
        elif not os.path.lexists(entry.with_name("copy")):
            yield from filter(Path.is_file, path.rglob("*"))


def has_a_form(path: Path) -> bool:
    """Return whether the first bytes may be a checkpoint's."""
    with suppress(OSError), path.open("rb") as file:
        start = file.read(16)
        return start.startswith(FORMS) or start[8:9] == b"{"  # safetensors
    return False


def open_for_writing(paths: list[Path]) -> bool:
    """Return whether a process is writing one of the files."""
    wanted = set(map(str, paths))
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process or the file was closed just now
            if os.readlink(link) in wanted and link.lstat().st_mode & 0o200:
                return True
    return False


class ReadWatch:
    """Notes the files of the earlier run that this process reads."""

    def __init__(self, files: tuple[str, ...]) -> None:
        self.files = set(files)
        self.read: set[str] = set()

    def patch(self) -> None:
        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
                self._note(args[0])

        def opened(load: Any, file: Any, *args: Any, **named: Any) -> Any:
            self._note(file)
            return load(file, *args, **named)

        sys.addaudithook(hook)
        with suppress(ImportError):  # reads in Rust cause no audit event
            import safetensors.torch

            wrap(safetensors, "safe_open", opened)
            wrap(safetensors.torch, "load_file", opened)

    def _note(self, path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            full = os.path.realpath(os.fsdecode(path))
            if full in self.files:
                self.read.add(full)
