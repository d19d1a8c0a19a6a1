"""Keep checkpoints in a bucket: `s3://`, `gs://`, or any URL that fsspec opens.

A bucket has no folders, renames, links or locks. The commit is a single atomic request. A conflict
is noticed when two jobs write the same checkpoint, and each job removes only its own checkpoints.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.checkpoint._folder import COMMIT, Folder


class Bucket(Folder):
    """A folder of checkpoints in a bucket."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(
                f'{path} needs fsspec: pip install "manyhands[cloud]", and the package for this '
                "kind of URL, such as s3fs or gcsfs."
            ) from error
        # No cache: files of other ranks and jobs must be visible.
        self._fs, root = url_to_fs(str(path), use_listings_cache=False)
        self._root = root.rstrip("/")

    def _url(self, *names: str) -> str:
        return "/".join([self._root, *filter(None, names)])

    def sizes(self, name: str) -> dict[str, int]:
        # Not `exists` or `isfile`, which return False after a network failure.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = self._fs.ls(self._url(name), detail=True)
            return {each["name"].rstrip("/").rpartition("/")[2]: each["size"] for each in found}
        return {}

    def names(self) -> list[str]:
        return list(self.sizes(""))

    def has_commit(self, name: str) -> bool:
        return COMMIT in self.sizes(name)

    def is_link(self, name: str) -> bool:
        return False

    def check_is_folder(self) -> None:
        if not self.names():
            raise FileNotFoundError(f"{self.path} is empty. Pass the path that mh.save received.")

    def age(self, name: str) -> float:
        now = time.time()
        urls = [self._url(name, file) for file in self.sizes(name)]
        return now - max([self._fs.modified(url).timestamp() for url in urls], default=now)

    def lock(self, run: str | None = None) -> bool:
        return False

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[Any]:
        new = self._fs.open(self._url(name, file), "wb")
        try:
            yield new
        except BaseException:
            new.discard()
            with contextlib.suppress(AttributeError):  # fsspec's memory files have no buffer
                new.closed = True  # or garbage collection would upload the incomplete file
            raise

    def open(self, name: str, file: str) -> Ranges:  # type: ignore[override]
        return Ranges(self._fs, self._url(name, file))

    def remove(self, name: str) -> None:
        for file in (COMMIT, *self.sizes(name)):
            self.drop(name, file)

    def drop(self, name: str, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._url(name, file))

    def publish(self, name: str, token: str, commit: bytes) -> None:
        self.check_ours(name, token)
        try:
            self._fs.pipe_file(self._url(name, COMMIT), commit, mode="create")
        except FileExistsError:
            self.check_ours(name, token)  # raises an error that explains the conflict
            raise


class Ranges:
    """A file in a bucket, read in ranges."""

    def __init__(self, fs: Any, url: str) -> None:
        self._fs = fs
        self._url = url
        self.size = int(fs.info(url)["size"])
        self._fetched: dict[int, bytes] = {}  # by the first byte

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Request these ranges together, and discard the ranges of the previous call."""
        from fsspec.utils import merge_offset_ranges

        self._fetched.clear()
        starts = [start for start, _ in ranges]
        ends = [end for _, end in ranges]
        urls, starts, ends = merge_offset_ranges([self._url] * len(ranges), starts, ends)
        found = self._fs.cat_ranges(urls, starts, ends, on_error="raise")
        self._fetched.update(zip(starts, found, strict=True))

    def read_into(self, start: int, view: memoryview) -> int:
        end = start + len(view)
        for begin, data in self._fetched.items():
            if begin <= start and end <= begin + len(data):
                view[:] = memoryview(data)[start - begin : end - begin]
                return len(view)
        data = self._fs.cat_file(self._url, start=start, end=end) if len(view) else b""
        view[: len(data)] = data
        return len(data)

    def try_lock(self, *, shared: bool) -> bool:
        return True

    def close(self) -> None:
        self._fetched.clear()
