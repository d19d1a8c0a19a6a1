"""Keep checkpoints in a folder, with atomic commits and locks.

    000007-step-1200/           checkpoint number 7
      worker-00000-TOKEN...     a file per rank; the token is unique to the save
      index.json                the commit, without which the folder is no checkpoint
    .lock                       locked by the processes that may save here

The commit is written under a temporary name and renamed, so a checkpoint appears by a single rename
and disappears by a single removal. A killed run leaves a folder with no commit.

Only one job at a time may save here. Rank 0 locks a byte of `.lock` (a POSIX lock) from the first
save until the process ends, and removes folders with no commit `QUIET` seconds after the last
write: another process may copy a checkpoint into the folder. In a crew any worker may save, so all
workers share the lock of their run (MANYHANDS_RUN), at a byte derived from the run's name. Readers
lock the commit (`flock`), which prevents pruning.

Without locks, a conflict is noticed when two jobs write a checkpoint with equal number. Each job
then prunes only its own checkpoints, which have the job's mark in the token, and removes folders
with no commit of other jobs `OLD` seconds after the last write.

A folder may be a download. So links inside are not followed, and only regular files are opened: no
pipes, which would hang, and no devices. The user's path may be a link.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

from manyhands._arguments import file_path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

COMMIT = "index.json"
PATTERN = re.compile(r"(\d{6,})(?:-step-\d+)?")
OLD = 2 * 3600.0  # seconds after which an incomplete checkpoint is removed without the lock
QUIET = 60.0  # the same with the lock
LOCK = ".lock"
LOCK_TIMEOUT = 3.0  # seconds to wait for a process that may be about to end
TEXT = 300  # characters that the lock's text is padded to
RUN_VARIABLE = "MANYHANDS_RUN"  # the run's name; all workers of a run share the lock
# Variables that identify a job across restarts.
JOB_VARIABLES = (RUN_VARIABLE, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")

ATTEMPTS = 10  # to create a folder that other ranks remove

_process = uuid.uuid4().hex
_pauses = random.Random()  # does not advance the script's generator


class UrlPath(PurePosixPath):
    """A path in a bucket. `str()` returns its URL."""

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest.lstrip('/')}"

    __fspath__ = __str__

    def is_absolute(self) -> bool:
        return True


def to_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of the file system, or the `UrlPath` of a URL."""
    text = file_path("path", path, "It is the folder of the checkpoints.")
    if "://" in text and not text.startswith("file://"):
        return UrlPath(text)  # type: ignore[return-value]
    return Path(text.removeprefix("file://"))


def new_token() -> str:
    return f"{job_mark()}-{uuid.uuid4().hex[:16]}"


def job_mark() -> str:
    known = []
    for name in JOB_VARIABLES:
        value = os.environ.get(name, "none")
        if value not in ("", "none"):
            known.append(value)
    return hashlib.sha256("/".join(known or [_process]).encode()).hexdigest()[:8]


def number_of(name: str) -> int:
    found = PATTERN.fullmatch(name)
    if found is None:
        return 0
    return int(found[1])


class Folder:
    """A folder of checkpoints in the file system. Names identify checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked = False  # whether this job has the lock

    def list_complete(self) -> list[str]:
        # Sorted by number, not by step: a run may return to an earlier step.
        names = [name for name in self.names() if number_of(name) and self.has_commit(name)]
        return sorted(names, key=lambda name: (number_of(name), name))

    def find_newest(self) -> str:
        """Return the newest complete checkpoint, or "" if the folder itself is a checkpoint."""
        if self.has_commit(""):
            return ""
        found = self.list_complete()
        if not found:
            self.check_is_folder()
            raise FileNotFoundError(
                f"{self.path} has no complete checkpoint. Pass the folder that mh.save received."
            )
        newest = found[-1]
        if self.is_link(newest):
            raise ValueError(
                f"{newest}, the newest checkpoint in {self.path}, is a link. Pass the path of the "
                "checkpoint itself."
            )
        return newest

    def begin(self, number: int | None, step: int | None) -> int:
        """Take the lock. Return the number of the next checkpoint, or the given number."""
        if self.has_commit(""):
            raise ValueError(
                f"{self.path} is a single checkpoint. Pass its parent folder: {self.path.parent}."
            )
        self._locked = self.lock()
        begun = ""  # other ranks may have created it already
        if number is not None:
            begun = self.name_of(number, step)
        last = 0
        for name in self.names():
            if number_of(name) and name != begun and self._may_remove(name):
                self.remove(name)
            else:
                last = max(last, number_of(name))
        return number or last + 1

    def _may_remove(self, name: str) -> bool:
        if self.has_commit(name) or self.is_link(name):
            return False
        parts = ("worker-", f".{COMMIT}-")
        if not all(file.startswith(parts) for file in self.sizes(name)):
            return False  # the name only looks like a checkpoint
        return self._is_ours(name) or self.age(name) > (QUIET if self._locked else OLD)

    def _is_ours(self, name: str) -> bool:
        return any(f"-{job_mark()}-" in file for file in self.sizes(name))

    @staticmethod
    def name_of(number: int, step: int | None) -> str:
        if step is None:
            return f"{number:06d}"
        return f"{number:06d}-step-{step}"

    def check_ours(self, name: str, token: str) -> None:
        """Raise if another save has written this checkpoint or removed our files."""
        if self.has_commit(name) or not any(f"-{token}." in file for file in self.sizes(name)):
            raise OSError(
                f"another job or worker also saves to {self.path}, and has written {name}. Use a "
                "different path for each job. This checkpoint is discarded; the other job's "
                "checkpoints are complete."
            )

    def prune(self, keep: int | None) -> None:
        """Remove all but the newest `keep` checkpoints, except checkpoints that are being read."""
        if keep is None:
            return
        found = [name for name in self.list_complete() if self._locked or self._is_ours(name)]
        for old in found[:-keep]:
            # After an error, for example because of a link, the checkpoint stays.
            with contextlib.suppress(OSError, ValueError):
                commit = self.open(old, COMMIT)
                with contextlib.closing(commit):
                    if not self.is_link(old) and commit.try_lock(shared=False):
                        self.remove(old)

    # -- replaced by `Bucket` ------------------------------------------------

    def lock(self, run: str | None = None) -> bool:
        """Lock the folder. Return False without locks. `run` is the name if no variable has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        return take_lock(self.path, os.environ.get(RUN_VARIABLE) or run)

    def names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def has_commit(self, name: str) -> bool:
        # `lexists`: a link instead of the commit must raise its own error, not "no checkpoint".
        return os.path.lexists(self.path / name / COMMIT)

    def is_link(self, name: str) -> bool:
        return (self.path / name).is_symlink()

    def behind_link(self) -> Folder:
        """Return the target if the user's path is a link."""
        if self.is_link(""):
            return Folder(Path(os.path.realpath(self.path)))
        return self

    def check_is_folder(self) -> None:
        if not self.path.exists():
            raise FileNotFoundError(
                f"{self.path} does not exist. Pass the path that mh.save received."
            )
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, but a checkpoint of manyhands is a folder.")

    def sizes(self, name: str) -> dict[str, int]:
        with contextlib.suppress(OSError), os.scandir(self.path / name) as files:
            return {each.name: each.stat(follow_symlinks=False).st_size for each in files}
        return {}

    def age(self, name: str) -> float:
        paths = [self.path / name, *(self.path / name / file for file in self.sizes(name))]
        return time.time() - max(os.lstat(path).st_mtime for path in paths)

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[NewFile]:
        """Create a file of a checkpoint, and remove it after an error."""
        new = self._new_file(name, file)
        try:
            yield new
        except BaseException:
            new.discard()
            raise

    def _new_file(self, name: str, file: str) -> NewFile:
        folder = self.path / name
        for _ in range(ATTEMPTS):
            folder.mkdir(parents=True, exist_ok=True)
            # After a failed save of this name, `drop` on another rank may remove the empty folder.
            with contextlib.suppress(FileNotFoundError):
                return NewFile(folder / file)
        raise FileNotFoundError(f"another process removes {folder}. Use a different path.")

    def open(self, name: str, file: str) -> OpenFile:
        return OpenFile(self.path / name / file)

    def remove(self, name: str) -> None:
        path = self.path / name
        (path / COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def drop(self, name: str, file: str) -> None:
        """Remove a rank's file of a failed save. Remove the folder when empty."""
        (self.path / name / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / name).rmdir()

    def publish(self, name: str, token: str, commit: bytes) -> None:
        folder = self.path / name
        with self.create(name, f".{COMMIT}-{token}") as file:
            file.write(memoryview(commit))
            file.close()
            # The files must be on disk before the commit, in case of a power failure.
            sync(folder)
            self.check_ours(name, token)
            file.path.rename(folder / COMMIT)
        sync(folder)
        sync(self.path)


class DryFolder(Folder):
    """The folder of a dry run, which writes no files."""

    fake = False  # whether the tensors have no memory

    def begin(self, number: int | None, step: int | None) -> int:
        return number or 1

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[Any]:
        with open(os.devnull, "wb") as sink:
            yield sink


def sync(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no fsync of folders
                raise
        finally:
            os.close(descriptor)


# -- the lock of the process that saves ------------------------------------------------------------

# Descriptors of lock files by process and path: a forked child has no locks of the parent.
_held: dict[tuple[int, Path], int] = {}


def take_lock(folder: Path, run: str | None) -> bool:
    """Lock a folder until all processes of this run have ended. Return False without locks."""
    if fcntl is None:
        return False
    path = folder.resolve() / LOCK
    file = _held.get((os.getpid(), path))
    if file is None or not _is_file_at(file, path):
        file = open_descriptor(path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + LOCK_TIMEOUT
        try:
            while not _lock_for(file, run):
                if time.monotonic() > deadline:
                    text = os.pread(file, TEXT, 0).decode(errors="replace")
                    os.close(file)
                    name = text.strip() or "another process"  # if not written yet
                    raise RuntimeError(
                        f"another job saves to {folder}: {name}. Use a different path for each "
                        "job, or start this job after the other job has ended."
                    )
                time.sleep(_pauses.uniform(0.05, 0.15))
        except OSError:  # the file system has no locks
            os.close(file)
            return False
        # Stays open: closing any descriptor of the file releases a POSIX lock.
        _held[os.getpid(), path] = file
        # A single padded write: other processes of a crew may write too.
        name = f"process {os.getpid()} on {socket.gethostname()}"
        os.pwrite(file, f"{name:<{TEXT}}".encode(), 0)
    return True


def _is_file_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except OSError:  # the folder was removed
        return False


def _lock_for(file: int, run: str | None) -> bool:
    """Lock this run's byte in the file. Return False if any other byte is locked."""
    # `lockf`, not `flock`: a forked child must not inherit the lock. Processes of a named run share
    # a byte; the lock of an unnamed job is exclusive.
    name = run or f"{_process} {socket.gethostname()} {os.getpid()}"
    place = 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    kind = fcntl.LOCK_SH if run else fcntl.LOCK_EX
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, 1, place)
        for length, start in ((place, 0), (0, place + 1)):  # length 0: to the end of the file
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
            fcntl.lockf(file, fcntl.LOCK_UN, length, start)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        # If two runs find each other's locks, both release and retry later.
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
        return False
    return True


# -- open files, and nothing else ------------------------------------------------------------------

# O_NOFOLLOW rejects links, O_NONBLOCK does not wait for the other end of a pipe, and O_BINARY
# disables the translation of line endings on Windows. Missing flags count as 0.
FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
ALWAYS = sum(getattr(os, flag, 0) for flag in FLAGS)
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def open_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor. Raise ValueError unless the path is a regular file."""
    try:
        file = os.open(path, flags | ALWAYS, 0o666)
        # Check the descriptor: the path may refer to a different file by now.
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    except OSError:  # a link gives ELOOP, a socket ENXIO, a folder EISDIR
        # For a regular file the error has a different reason, such as permissions.
        if not os.path.lexists(path) or stat.S_ISREG(os.lstat(path).st_mode):
            raise
    raise ValueError(f"{path} is not a regular file (links are not followed). Copy the file here.")


class OpenFile:
    """A regular file, open for reading, unbuffered."""

    def __init__(self, path: Path) -> None:
        self._file = FileIO(open_descriptor(path), "r")
        self.size = os.fstat(self._file.fileno()).st_size

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: the page cache serves the second read."""

    def read_into(self, start: int, view: memoryview) -> int:
        """Read bytes from `start` on into the view. Return the number of bytes."""
        self._file.seek(start)
        done = 0
        while done < len(view) and (count := self._file.readinto(view[done:])):
            done += count  # a single call may read fewer bytes
        return done

    def try_lock(self, *, shared: bool) -> bool:
        """Lock the file until it is closed. Return False if another lock prevents this."""
        if fcntl is not None:
            # `flock` belongs to the open file, so each reader in a process has a separate lock.
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
            except OSError as error:  # other errors: the file system has no locks
                return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def close(self) -> None:
        self._file.close()


class NewFile:
    """A new file, written sequentially, unbuffered."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = FileIO(open_descriptor(path, NEW), "w")

    def write(self, data: memoryview) -> None:
        while len(data):  # a single call may write fewer bytes
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file after the data is on disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)
