"""Keep checkpoints in a folder, where no checkpoint is half written and no link is followed.

    000007-step-1200/           the seventh that was saved
      worker-00000-TOKEN...     a file for each rank; the token is unique to the save
      index.json                the commit: a folder without it is no checkpoint
    .lock                       held by the processes that may save here, until they end

No file is renamed but the commit, which is written under another name first. So a checkpoint
appears by one rename, and disappears by one removal. What a killed run leaves behind is a folder
without a commit. A later save removes it if it is of the same job, if the process that began it has
certainly ended, or if nothing was written to it for `OLD` seconds. A token has the marks of the job
and of its rank 0, which began the save.

One job at a time may save here: its rank 0 holds a POSIX lock on a byte of `.lock` from its first
save until it ends. The system releases it with the process, so no lock is ever stale. Workers of a
crew save in each other's place, and the one that saves may die: so all of them hold the lock of
their run (MANYHANDS_RUN), a byte that follows from its name, and no other run comes in between. One
that was stopped finds its parts removed when it wakes. Where there are no such locks, two jobs are
noticed when they write the same checkpoint, and each prunes only its own. A reader has a lock
(`flock`) on the commit: what is read is not pruned.

**Which process has certainly ended?** Not every file system shows a lock to other hosts, and a
process loses a POSIX lock with any descriptor of the file that it closes. So rank 0 has a second
lock on `.lock`, a `flock`, and only with both is its mark in the file, with the kernel and the
device that it saw. If a later process has both locks on the same file, and sees the same kernel and
device, then the earlier one has none any more. It has ended, whether it was in this container or in
another on this machine. Processes on other hosts are never taken for ended.

A folder may have been downloaded. So a link in it is not followed, neither to a file nor to a
checkpoint, and nothing that is opened can be a pipe (which would hang) or a device. The path that
the user gives may be a link.

`Folder` is a folder of the file system. `Bucket` (`_cloud.py`) does the same in a bucket.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
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

COMMIT = "index.json"  # the last file that is written: a folder without it is not a checkpoint
PATTERN = re.compile(r"(\d{6,})(?:-step-\d+)?")
OLD = 2 * 3600.0  # seconds after which a checkpoint without a commit is not completed any more
MADE = 60.0  # seconds after which a new folder has a file in it
LOCK = ".lock"
LOCK_TIMEOUT = 3.0  # seconds to wait for another process that may be about to end
TEXT = 2000  # characters of the lock's text, so that a later text covers an earlier one
RUN_VARIABLE = "MANYHANDS_RUN"  # names the run: the workers of a run share the lock
# Variables that tell a job from others, also when it is started again.
JOB_VARIABLES = (RUN_VARIABLE, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")

REMEMBERED = 100  # processes that have ended: the last ones

_process = uuid.uuid4().hex
_pauses = random.Random()  # not the global generator, which belongs to the script


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
    """Return a text that makes the names of a save's files unique."""
    return f"{job_mark()}-{process_mark()}-{uuid.uuid4().hex[:8]}"


def process_mark() -> str:
    """Return the mark of this process. A fork has another one."""
    return _digest(f"{_process} {os.getpid()}")


def job_mark() -> str:
    known = []
    for name in JOB_VARIABLES:
        value = os.environ.get(name, "none")
        if value not in ("", "none"):
            known.append(value)
    return _digest("/".join(known or [_process]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def number_of(name: str) -> int:
    """Return the number of a checkpoint; 0 for a name that no checkpoint has."""
    found = PATTERN.fullmatch(name)
    if found is None:
        return 0
    return int(found[1])


class Folder:
    """A folder of checkpoints in the file system. A checkpoint is named by its place in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked = False  # whether no other job saves here

    def list_complete(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        # By the number at the beginning, not by step: a run may go back to an earlier step.
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
                f"{self.path} has no complete checkpoint. Give the folder that mh.save was given."
            )
        newest = found[-1]
        if self.is_link(newest):
            raise ValueError(f"the newest checkpoint in {self.path}, {newest}, is a link. Name it.")
        return newest

    def begin(self, number: int | None, step: int | None) -> int:
        """Take the lock. Return the number of the next checkpoint, or the one that is given."""
        # Remove the unfinished checkpoints of killed runs.
        if self.has_commit(""):
            raise ValueError(
                f"{self.path} is one checkpoint. Give the folder around it: {self.path.parent}."
            )
        self._locked = self.lock()
        begun = ""  # by other ranks, perhaps
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
        """Return whether a folder without a commit is ours, of a process that ended, or old."""
        if self.has_commit(name) or self.is_link(name):
            return False
        if self.age(name) > (OLD if self.sizes(name) else MADE):
            return True
        return self._is_ours(name) or self._has_ended(name)

    def _is_ours(self, name: str) -> bool:
        return any(f"-{job_mark()}-" in file for file in self.sizes(name))

    def _has_ended(self, name: str) -> bool:
        """Return whether the processes that began a checkpoint have certainly ended."""
        if not self._locked:
            return False
        # The last part but one of a file's name, `new_token`.
        makers = {file.rpartition("-")[0].rpartition("-")[2] for file in self.sizes(name)}
        return bool(makers) and makers <= set(_ended.get(self.path.resolve() / LOCK, ()))

    @staticmethod
    def name_of(number: int, step: int | None) -> str:
        if step is None:
            return f"{number:06d}"
        return f"{number:06d}-step-{step}"

    def check_ours(self, name: str, token: str) -> None:
        """Raise if another save has made this checkpoint, or removed our files."""
        if self.has_commit(name) or not any(f"-{token}." in file for file in self.sizes(name)):
            raise OSError(
                f"another job or worker saves to {self.path}, too, and has written {name}. Give "
                "each job a path of its own. This checkpoint is dropped; theirs are complete."
            )

    def prune(self, keep: int | None) -> None:
        """Remove all but the newest `keep` checkpoints, except those that are being read."""
        if keep is None:
            return
        found = [name for name in self.list_complete() if self._locked or self._is_ours(name)]
        for old in found[:-keep]:
            # After an error, also for a link, the checkpoint stays.
            with contextlib.suppress(OSError, ValueError):
                commit = self.open(old, COMMIT)
                with contextlib.closing(commit):
                    if not self.is_link(old) and commit.try_lock(shared=False):
                        self.remove(old)

    # -- replaced by `Bucket` ------------------------------------------------

    def lock(self, run: str | None = None) -> bool:
        """Make this run the only one that saves here. Return False if there are no locks.

        `run` is the name of the run, if no variable has it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return take_lock(self.path, os.environ.get(RUN_VARIABLE) or run)

    def names(self) -> list[str]:
        """Return the names in the folder."""
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def has_commit(self, name: str) -> bool:
        # `lexists`: a link in the place of the commit must give its own error, not "no checkpoint".
        return os.path.lexists(self.path / name / COMMIT)

    def is_link(self, name: str) -> bool:
        return (self.path / name).is_symlink()

    def behind_link(self) -> Folder:
        """Return the same folder: the user may name a link, but nothing inside may be one."""
        if self.is_link(""):
            return Folder(Path(os.path.realpath(self.path)))
        return self

    def check_is_folder(self) -> None:
        """Raise an error that says why there is no folder; nothing if there is one."""
        if not self.path.exists():
            raise FileNotFoundError(
                f"there is no {self.path}. Give the path that mh.save was given."
            )
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and a checkpoint of manyhands is a folder.")

    def sizes(self, name: str) -> dict[str, int]:
        """Return the bytes of each file of a checkpoint."""
        with contextlib.suppress(OSError), os.scandir(self.path / name) as files:
            return {each.name: each.stat(follow_symlinks=False).st_size for each in files}
        return {}

    def age(self, name: str) -> float:
        """Return the seconds since the last write to a checkpoint."""
        paths = [self.path / name, *(self.path / name / file for file in self.sizes(name))]
        return time.time() - max(os.lstat(path).st_mtime for path in paths)

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[NewFile]:
        """Create a file of a checkpoint. After an error nothing is left of it."""
        (self.path / name).mkdir(parents=True, exist_ok=True)
        new = NewFile(self.path / name / file)
        try:
            yield new
        except BaseException:
            new.discard()
            raise

    def open(self, name: str, file: str) -> OpenFile:
        return OpenFile(self.path / name / file)

    def remove(self, name: str) -> None:
        """Remove a checkpoint: first the commit, without which it is none."""
        path = self.path / name
        (path / COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def drop(self, name: str, file: str) -> None:
        """Remove a rank's file of a save that failed, and the folder if it was the last one."""
        (self.path / name / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / name).rmdir()

    def publish(self, name: str, token: str, commit: bytes) -> None:
        """Make the files of a folder a checkpoint."""
        folder = self.path / name
        with self.create(name, f".{COMMIT}-{token}") as file:
            file.write(memoryview(commit))
            file.close()
            # The files must be on the disk before the commit, in case the machine loses power.
            sync(folder)
            self.check_ours(name, token)
            file.path.rename(folder / COMMIT)
        sync(folder)
        sync(self.path)


class DryFolder(Folder):
    """The folder of a dry run: nothing is written to it."""

    def begin(self, number: int | None, step: int | None) -> int:
        return number or 1

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[Any]:
        with open(os.devnull, "wb") as sink:
            yield sink


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


# -- the lock of the process that saves ------------------------------------------------------------

# The descriptors of the locks by process and path: a forked child holds none of its parent's.
_held: dict[tuple[int, Path], int] = {}
_ended: dict[Path, Sequence[str]] = {}  # by the lock: the marks of processes that have ended


def take_lock(folder: Path, run: str | None) -> bool:
    """Make this run the only one that saves here, until the last of its processes ends."""
    # Return False if the file system has no locks. Raise RuntimeError if another job has this one.
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
                    holder = _read_holder(file)
                    os.close(file)
                    name = "another process"
                    if holder:
                        name = f"process {holder['pid']} on {holder['host']}"
                    raise RuntimeError(
                        f"another job saves to {folder}: {name}. Give each job a path of its own, "
                        "or start this one when the other has ended."
                    )
                time.sleep(_pauses.uniform(0.05, 0.15))
        except OSError:  # the file system has no locks
            os.close(file)
            return False
        # Stays open: closing any descriptor of the file would release a POSIX lock.
        _held[os.getpid(), path] = file
    _become_holder(file, path, run)  # each time: another process may have ended meanwhile
    return True


def _is_file_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except OSError:  # the folder was removed
        return False


def _lock_for(file: int, run: str | None) -> bool:
    """Lock this run's place in the file; return False if any other place is locked."""
    # `lockf`, not `flock`: a forked child must not inherit the lock. All processes of a run share
    # its place. A job without a name has one process that saves, so its place is exclusive.
    name = run or f"{_process} {socket.gethostname()} {os.getpid()}"
    place = 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    kind = fcntl.LOCK_SH if run else fcntl.LOCK_EX
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, 1, place)
        for length, start in ((place, 0), (0, place + 1)):  # 0: to the end
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
            fcntl.lockf(file, fcntl.LOCK_UN, length, start)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        # Of two runs that look at the same time, each finds the other: both try again later.
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)
        return False
    return True


def _read_holder(file: int) -> dict[str, Any]:
    """Return the text that the holder has written to the lock; {} if it is not ours."""
    try:
        holder = json.loads(os.pread(file, 2 * TEXT, 0))
    except ValueError:  # not written yet
        return {}
    if isinstance(holder, dict) and {"host", "pid"} <= holder.keys():
        return holder
    return {}


def _become_holder(file: int, path: Path, run: str | None) -> None:
    """Write this process to the lock, and find the processes that have ended."""
    before = _read_holder(file)
    seen = _kernel_and_device(file)
    ended: list[str] = []
    if seen and before.get("seen") == seen:
        marks = [*before.get("ended", []), before.get("process")]
        ended = [mark for mark in marks if mark not in (None, process_mark())]
    holder = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "run": run,
        "seen": seen,
        "process": None,
        "ended": ended[-REMEMBERED:],
    }
    _ended[path] = ()
    # The second lock. A child of the holder before may still have it, which a fork inherits. Or
    # there are none, or it is in the way of the first, as on NFS.
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder["process"] = process_mark()
        _ended[path] = ended
    # In one call, and padded: other processes of a crew may write as well.
    os.pwrite(file, f"{json.dumps(holder):<{TEXT}}\n".encode(), 0)


def _kernel_and_device(file: int) -> str:
    """Return which kernel runs here, and where it has a file; "" if that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not on Linux
        return ""
    device = os.fstat(file).st_dev
    # A disk is one kernel's. A network's file system has the number 0 on all hosts, and copies of a
    # virtual machine that was running have one boot in common.
    host = "" if os.major(device) else socket.gethostname()
    return f"{boot} {device} {host}"


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
        if not os.path.lexists(path) or stat.S_ISREG(os.lstat(path).st_mode):
            raise
    raise ValueError(f"{path} is not a regular file, and links are not followed. Copy the file.")


# Unbuffered: tensors are read into, and written from, their own memory in large blocks.


class OpenFile:
    """A regular file that is open for reading."""

    def __init__(self, path: Path) -> None:
        self._file = FileIO(open_descriptor(path), "r")
        self.size = os.fstat(self._file.fileno()).st_size

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Prepare to read these ranges twice: to compare them, and to use them."""
        # They are in the system's page cache then.

    def read_into(self, start: int, view: memoryview) -> int:
        """Fill the view with the bytes from `start` on; return the number of bytes."""
        self._file.seek(start)
        done = 0
        while done < len(view) and (count := self._file.readinto(view[done:])):
            done += count  # it may read less than the view has room for
        return done

    def try_lock(self, *, shared: bool) -> bool:
        """Lock the file until it is closed. Return False if another lock excludes that."""
        if fcntl is not None:
            # `flock`, which belongs to the open file: readers in one process have one each.
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
            except OSError as error:  # any other: the file system has no locks
                return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def close(self) -> None:
        self._file.close()


class NewFile:
    """A new file, which is written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = FileIO(open_descriptor(path, NEW), "w")

    def write(self, data: memoryview) -> None:
        while len(data):  # `write` may accept fewer bytes at a time
            data = data[self._file.write(data) :]

    def close(self) -> None:
        """Return once the file is on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        """Close and remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)
