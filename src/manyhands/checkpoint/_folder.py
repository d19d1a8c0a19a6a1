"""A folder of checkpoints: which are complete, which is the newest, and who may write.

    000007-step-1200/        the seventh that was saved, complete
    .partial-000008-0f3a/    being written, or left by a run that was killed
    .pruned-000005/          being removed
    .lock                    held by the process that saves here, until it ends

A crew's worker may be stopped while it holds the lock, and another one saves in its place. So the
lock says of which run (MANYHANDS_RUN, which `manyhands run` sets) its holder is, and a process of
the same run takes it over, by another file under the same name. Whoever has lost it notices before
it publishes; what it was writing is gone then, and nobody writes to the same folder.

A name that begins with a point is no checkpoint, so all that counts changes by renaming.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from manyhands.checkpoint import _files, _index

try:
    import fcntl
except ImportError:  # Windows: two jobs on one path are noticed only where their names collide
    fcntl = None  # type: ignore[assignment]

PATTERN = re.compile(r"(\d{6,})(?:-step-(\d+))?")
PARTIAL, PRUNED, LOCK = ".partial-", ".pruned-", ".lock"
TOKEN = "token"
RUN = "MANYHANDS_RUN"  # the run whose workers save here in turn
PATIENCE = 3.0  # seconds for another process, that is ending, to let go of the lock

_held: dict[Path, int] = {}  # descriptors


def is_checkpoint(path: Path) -> bool:
    return os.path.lexists(path / _index.NAME)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first; those that are there, not links."""
    return [path for path in _named(folder) if _files.is_folder(path)]


def _named(folder: Path) -> list[Path]:
    """What is in a folder under the names of complete checkpoints, oldest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered = [(int(found[1]), name) for name in names if (found := PATTERN.fullmatch(name))]
    return [folder / name for _, name in sorted(numbered) if is_checkpoint(folder / name)]


def itself(path: Path) -> Path:
    """A checkpoint that the user names, which may be a link; what is found in it may not."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def newest(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest complete one in it."""
    if is_checkpoint(path):
        return itself(path)
    found = _named(path)
    if found and not _files.is_folder(found[-1]):
        raise ValueError(
            f"the newest checkpoint in {path}, {found[-1].name}, is a link, and a checkpoint that "
            "is not named is not followed elsewhere. Give its own path."
        )
    if found:
        return found[-1]
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}. Give the path that mh.save was given.")
    if not path.is_dir():
        raise ValueError(f"{path} is a file, and a checkpoint of manyhands is a folder.")
    partial = [name for name in os.listdir(path) if name.startswith(PARTIAL)]
    raise FileNotFoundError(
        f"{path} has no complete checkpoint"
        + (", only what was left of one that was not finished." if partial else ".")
        + f" Give the folder that mh.save was given; a checkpoint in it has a file {_index.NAME}."
    )


def begin(folder: Path, step: int | None, token: str) -> tuple[str, str]:
    """Make the folder that the next checkpoint is written to; returns its name, now and then.

    Removes what was left by runs that were killed.
    """
    if is_checkpoint(folder):
        raise ValueError(
            f"{folder} is one checkpoint. Give the folder that it is in, {folder.parent}; each "
            "save makes a new one there."
        )
    folder.mkdir(parents=True, exist_ok=True)
    take_lock(folder, time.time())
    last = 0
    for name in os.listdir(folder):
        if name.startswith((PARTIAL, PRUNED)):
            _files.remove(folder / name)
        elif found := PATTERN.fullmatch(name):
            last = max(last, int(found[1]))
    name = f"{last + 1:06d}" + ("" if step is None else f"-step-{step}")
    partial = folder / f"{PARTIAL}{last + 1:06d}-{token[:8]}"  # one that was stopped has another
    try:
        partial.mkdir()
        with _files.writer(partial / TOKEN) as file:
            file.write(token.encode())
    except BaseException:
        _files.remove(partial)
        raise
    return partial.name, name


def check_shared(partial: Path, token: str) -> None:
    """That this worker sees the folder that rank 0 has made."""
    deadline = time.monotonic() + PATIENCE  # a network file system may take a moment
    while True:
        try:
            with _files.reader(partial / TOKEN) as file:
                if file.read(len(token) + 1) == token.encode():
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    raise ValueError(
        f"{partial.parent} on {socket.gethostname()} is not the folder that rank 0 writes to. "
        "Give a path on a file system that all workers share."
    )


def publish(partial: Path, name: str) -> Path:
    """What was written becomes a checkpoint, at once."""
    final = partial.parent / name
    check_lock(partial.parent)
    (partial / TOKEN).unlink(missing_ok=True)
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
    """Remove all but the newest, except what is being read."""
    for old in complete(folder)[: -keep if keep else 0]:
        with contextlib.suppress(OSError, ValueError), _not_read(old):
            gone = folder / (PRUNED + old.name)
            old.rename(gone)
            _files.remove(gone)


def sync(folder: Path) -> None:
    """Wait until the disk has the folder's entries."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


# -- who reads, who writes -------------------------------------------------------------------------


@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """While it is open, `prune` leaves the checkpoint (where the file system has locks)."""
    with _files.reader(checkpoint / _index.NAME) as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def _not_read(checkpoint: Path) -> Iterator[None]:
    """An OSError where somebody reads it."""
    with _files.reader(checkpoint / _index.NAME) as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise
        yield


def take_lock(folder: Path, asked: float | None = None) -> None:
    """Be the only process that saves here, until this process ends.

    The system lets go of the lock of a process that is dead, so none of these is ever stale. One of
    a process of our own run is taken over, unless that took it after we `asked`: then it was we who
    were stopped meanwhile.
    """
    path = folder.resolve() / LOCK
    held = _held.get(path)
    if fcntl is None or (held is not None and _is_at(held, path)):
        return
    deadline = time.monotonic() + PATIENCE
    while True:
        file = _open_lock(path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                break  # a file system without locks
            text = os.read(file, 4096)
            os.close(file)
            if (since := _since_in_our_run(text)) is not None:
                if asked is not None and since > asked:
                    raise RuntimeError(_superseded(folder)) from None
                file = _new_lock(path)
                break
            if time.monotonic() > deadline:
                raise RuntimeError(_taken(folder, text)) from None
            time.sleep(0.1)
            continue
        if _is_same(file, path):
            break
        os.close(file)  # somebody has put another one in its place
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    run = os.environ.get(RUN)
    os.ftruncate(file, 0)
    os.write(file, json.dumps({**holder, "run": run} if run else holder).encode())
    _held[path] = file


def _open_lock(path: Path) -> int:
    """The lock's file, which is written to: so it may have no second name elsewhere, either."""
    file = _files.open_file(path, os.O_RDWR | os.O_CREAT)
    if os.fstat(file).st_nlink > 1:
        os.close(file)
        raise ValueError(
            f"{path} is also another file, outside of this folder perhaps (a hard link), and is "
            "not written to. Remove it."
        )
    return file


def check_lock(folder: Path) -> None:
    """Raise if another process of our run has taken the lock over since we took it."""
    path = folder.resolve() / LOCK
    held = _held.get(path)
    if held is not None and os.path.lexists(path) and not _is_same(held, path):
        raise RuntimeError(_superseded(folder))


def _new_lock(path: Path) -> int:
    """A lock in the place of the present one, whoever holds that."""
    beside = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
    file = _files.open_file(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    beside.rename(path)
    return file


def _since_in_our_run(text: bytes) -> float | None:
    """Since when its holder has a lock, if that is a process of our own run."""
    try:
        holder = json.loads(text)
        ours = bool(os.environ.get(RUN)) and holder["run"] == os.environ[RUN]
        return float(holder["since"]) if ours else None
    except (ValueError, KeyError, TypeError):
        return None


def release_locks() -> None:
    """Let other processes save where this one has."""
    while _held:
        os.close(_held.popitem()[1])


def _is_at(file: int, path: Path) -> bool:
    """Whether a lock's file is still the one in the folder, and this process (no fork) has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # does nothing where we have it
    except OSError:
        return False
    return _is_same(file, path)


def _is_same(file: int, path: Path) -> bool:
    """Whether a lock's file is still the one in the folder."""
    try:
        here = os.lstat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(file)
    return (here.st_ino, here.st_dev) == (mine.st_ino, mine.st_dev)


def _superseded(folder: Path) -> str:
    return (
        f"another worker of this run saves to {folder} now: this one was stopped, and the others "
        "have gone on without it. This checkpoint is dropped; theirs are complete."
    )


def _taken(folder: Path, text: bytes) -> str:
    try:
        holder = json.loads(text)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        who = f"process {holder['pid']} on {holder['host']} since {since}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return (
        f"another job saves to {folder}: {who}. Give each job a path of its own, or wait until "
        "that one has ended."
    )
