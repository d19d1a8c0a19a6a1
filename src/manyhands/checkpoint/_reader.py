"""Read a checkpoint: its commit, and slices of the tensors in its files.

Nothing is read twice, and no file as a whole: of the commit a reader learns which files have what
it needs, and reads the heads of these, then ranges of bytes. Every 16 KiB are compared with their
checksum. Checksums show damage, not who wrote the file, so `parse` also checks what would read a
wrong place: sizes, types, and that the slices of a tensor cover each of its elements exactly once.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from manyhands.checkpoint import _format
from manyhands.checkpoint._folder import COMMIT, Folder, OpenFile
from manyhands.checkpoint._format import (
    CHECKED,
    CHECKS,
    DTYPES,
    OWN,
    Commit,
    StoredSlice,
    StoredTensor,
    Table,
    TensorEntry,
    file_name,
    find_tensors,
    memory_of,
    slice_name,
)

PATTERN = re.compile(rb'\{"manyhands checkpoint": (\d+), "crc32": "([0-9a-f]{8})",\n"content": ')
TOKEN = re.compile(r"[\w-]+", re.ASCII)  # no name can lead out of the checkpoint's folder


# -- the commit ------------------------------------------------------------------------------------


def parse(raw: bytes, path: object) -> tuple[Commit, dict[str, StoredTensor]]:
    """Return the commit that a file contains, and its tensors; ValueError if it is not valid."""
    found = PATTERN.match(raw)
    advice = "Load another checkpoint."
    if found is None:
        raise ValueError(f"{path} is not an index of a manyhands checkpoint. {advice}")
    version = int(found[1])
    text = raw[found.end() : -2]
    # The checksum before the version: a damaged version number must not look like a new format.
    if raw[-2:] != b"}\n" or zlib.crc32(text) != int(found[2], 16):
        raise ValueError(f"{path} is damaged: its checksum does not match its content. {advice}")
    if version != _format.VERSION:
        raise ValueError(
            f"{path} has format version {version}, and this release reads {_format.VERSION}. Load "
            "it with the release of manyhands that wrote it."
        )
    try:
        content = json.loads(text)
        commit = Commit(**{**content, "table": Table(**content["table"])})
        numbers = [number for file in commit.files for number in file]
        if not TOKEN.fullmatch(commit.token) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{commit.token!r:.80} is in no name of a file of tensors")
        return commit, find_tensors(commit.table, len(commit.files))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has invalid content: {error!r:.200}. {advice}") from error


# -- the files -------------------------------------------------------------------------------------


@dataclass
class SafetensorsFile:
    """A file of tensors; `expected` are its sizes and its checksum, if they are known."""

    source: OpenFile
    path: object
    expected: Sequence[int] = ()
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # of each tensor's bytes in the file

    def __post_init__(self) -> None:
        size = self.source.size
        head = self.expected[1] if self.expected else 0
        if self.expected and size != self.expected[0]:
            raise self.damaged(f"it has {size:,} bytes and should have {self.expected[0]:,}")
        # Before any memory is allocated for it: a damaged length may be anything.
        head = head or 8 + int.from_bytes(self._read(0, 8), "little")
        if not 8 <= head <= size:
            raise self.damaged("its header is longer than the file")
        raw = self._read(0, head)
        if int.from_bytes(raw[:8], "little") != head - 8:
            raise self.damaged("its header is not the one that was saved")
        self._parse_header(raw[8:], head)
        self._sums = self._read(self.starts[CHECKS], self.entries[CHECKS].nbytes)
        # The checksum also tells this file from one of another checkpoint.
        if self.expected and zlib.crc32(self._sums, zlib.crc32(raw)) != self.expected[2]:
            raise self.damaged("its header is not the one that was saved")

    def damaged(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is damaged: {why}. Restore the file, or load another checkpoint."
        )

    def _read(self, start: int, length: int) -> bytes:
        buffer = bytearray(length)
        self._fill(start, memoryview(buffer))
        return bytes(buffer)

    def _fill(self, start: int, view: memoryview) -> None:
        if self.source.read_into(start, view) != len(view):
            raise self.damaged("it ends too early")

    def _parse_header(self, text: bytes, end: int) -> None:
        """Find each tensor's entry, and where its bytes begin."""
        try:
            first = end
            for name, meta in json.loads(text).items():
                if name == "__metadata__":
                    continue
                entry = TensorEntry(name, DTYPES[meta["dtype"]], tuple(meta["shape"]))
                start, stop = meta["data_offsets"]
                # The exact type: JSON's true and 1.0 would pass as numbers.
                sizes = all(type(n) is int and n >= 0 for n in entry.shape)
                if not sizes or start + first != end or stop - start != entry.nbytes:
                    raise ValueError(f"{name!r} is not where it should be")
                self.entries[name], self.starts[name], end = entry, end, stop + first
            blocks = sum(-(-e.nbytes // CHECKED) for name, e in self.entries.items())
            sums = self.entries[CHECKS].nbytes
            if sums != 4 * (blocks - -(-sums // CHECKED)):
                raise ValueError("there is not a checksum for each block")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self.damaged(f"its header cannot be read ({error!r:.200})") from error
        if end != self.source.size:
            raise self.damaged(f"it has {self.source.size:,} bytes and should have {end:,}")

    @cached_property
    def _first_sums(self) -> dict[str, int]:
        """Where the checksums of each tensor begin."""
        result, count = {}, 0
        for name, entry in self.entries.items():
            result[name], count = count, count + -(-entry.nbytes // CHECKED)
        return result

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a rectangular slice of a tensor, compared with its checksums, in new memory."""
        entry = self.entries[name]
        result = torch.empty(tuple(sizes), dtype=entry.dtype)
        if result.numel() == 0:
            return result
        # A number (no dimensions) is read as one row of one element.
        shape = entry.shape or (1,)
        offsets, sizes = tuple(offsets) or (0,), tuple(sizes) or (1,)
        row_bytes = entry.nbytes // shape[0]
        whole_rows = sizes[1:] == shape[1:]
        at_once = sizes[0] if whole_rows else max(1, _format.BLOCK // row_bytes)
        target = result.view(sizes)
        for first in range(0, sizes[0], at_once):
            count = min(at_once, sizes[0] - first)
            rows = target if whole_rows else torch.empty((count, *shape[1:]), dtype=entry.dtype)
            self._read_checked(name, (offsets[0] + first) * row_bytes, memory_of(rows))
            if not whole_rows:
                for dim in range(1, len(shape)):
                    rows = rows.narrow(dim, offsets[dim], sizes[dim])
                target.narrow(0, first, count).copy_(rows)
        return result

    def _read_checked(self, name: str, start: int, view: memoryview) -> None:
        """Fill a view with bytes of a tensor, from `start` on, after comparing the checksums."""
        nbytes, stop = self.entries[name].nbytes, start + len(view)
        first, last = start - start % CHECKED, min(nbytes, stop + -stop % CHECKED)
        for begin in range(first, last, _format.BLOCK):
            end = min(begin + _format.BLOCK, last)
            inside = start <= begin and end <= stop
            # Whole blocks, in which what is wanted may begin and end: into memory of their own.
            block = (
                view[begin - start : end - start] if inside else memoryview(bytearray(end - begin))
            )
            self._fill(self.starts[name] + begin, block)
            self._compare(name, begin, block)
            if not inside:
                a, b = max(start, begin), min(stop, end)
                view[a - start : b - start] = block[a - begin : b - begin]

    def _compare(self, name: str, begin: int, block: memoryview) -> None:
        place = 4 * (self._first_sums[name] + begin // CHECKED)
        for at in range(0, len(block), CHECKED):
            crc32 = zlib.crc32(block[at : at + CHECKED]).to_bytes(4, "little")
            if crc32 != self._sums[place : place + 4]:
                raise self.damaged(f"the checksum of {name!r} does not match")
            place += 4


class Reader:
    """Reads slices of a checkpoint. It keeps the files that it needs open until `close`."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.folder, self.name = (folder, name) if name else (folder.behind_link(), name)
        self.path = self.folder.path / name
        self._stack = ExitStack()
        # Open files stay readable even if another job prunes the checkpoint meanwhile.
        self._files: dict[int, SafetensorsFile] = {}
        try:
            source = self.folder.open(name, COMMIT)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} cannot be found on this rank. Give a path that all ranks share."
            ) from error
        with closing(source):
            raw = bytearray(source.size)
            source.read_into(0, memoryview(raw))
        self.crc32 = zlib.crc32(raw)
        self.commit, self.tensors = parse(bytes(raw), self.path / COMMIT)

    def close(self) -> None:
        self._stack.close()
        self._files.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(
        self, key: str, stored: StoredSlice, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        """Return a slice of a stored slice of a tensor, compared with its checksums."""
        tensor, file = self.tensors[key], self._open(stored.file)
        name = slice_name(key, stored.offsets, stored.sizes, tensor.shape)
        entry = file.entries.get(name)
        if entry is None or (entry.shape, entry.dtype) != (stored.sizes, tensor.torch_dtype):
            raise file.damaged(f"it has no {name!r} of {stored.sizes} {tensor.torch_dtype}")
        return file.read(name, offsets, sizes)

    def read_whole(self, key: str, result: Tensor | None = None) -> Tensor:
        """Return a whole tensor, compared with its checksums; in `result`, if it is given."""
        tensor = self.tensors[key]
        if result is None:
            result = torch.empty(tensor.shape, dtype=tensor.torch_dtype)
        for stored in tensor.slices:
            target = result
            for dim, (offset, size) in enumerate(zip(stored.offsets, stored.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(self.read(key, stored, (0,) * len(stored.sizes), stored.sizes))
        return result

    def read_own(self, rank: int) -> dict[str, Tensor]:
        """Return what a rank has saved for itself; nothing if there was no such rank."""
        if rank >= self.commit.workers:
            return {}
        file = self._open(rank)
        own = [entry for name, entry in file.entries.items() if name.startswith(OWN)]
        return {
            each.name.removeprefix(OWN): file.read(each.name, (0,) * len(each.shape), each.shape)
            for each in own
        }

    def find_damage(self, rank: int) -> str:
        """Read all of a rank's file; return what is wrong with it."""
        try:
            file = self._open(rank)
            for name in set(file.entries) - {CHECKS}:
                file.read(name, (0,) * len(file.entries[name].shape), file.entries[name].shape)
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    def _open(self, number: int) -> SafetensorsFile:
        """Return an open file. Raise ValueError if its header is not the one that was saved."""
        file = self._files.get(number)
        if file is None:
            name = file_name(number, self.commit.token)
            try:
                source = self.folder.open(self.name, name)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{self.path / name} is missing: the checkpoint needs each of its "
                    f"{self.commit.workers} files. Copy the whole folder, or load another "
                    "checkpoint."
                ) from error
            self._stack.callback(source.close)
            file = SafetensorsFile(source, self.path / name, self.commit.files[number])
            self._files[number] = file
        return file
