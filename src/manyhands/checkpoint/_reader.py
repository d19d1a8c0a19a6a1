"""Read a checkpoint: its commit, and slices of the tensors in its files.

No file is read as a whole: of the commit a reader learns which files have what it needs, and reads
the heads of these, then ranges of bytes. A range is first compared with its checksums, one for
every 16 KiB, in a buffer that stays in the processor's cache. Then it is read into the memory where
it belongs, from the system's page cache: a second copy in fresh memory would take longer. From a
bucket it is fetched once, and kept in between. Checksums show damage, not who wrote the file, so
`parse` also checks what would read a wrong place: sizes, types, and that the slices of a tensor
cover each of its elements exactly once.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from manyhands.checkpoint import _format
from manyhands.checkpoint import _tensor_parts as tensor_parts
from manyhands.checkpoint._folder import COMMIT, Folder, OpenFile
from manyhands.checkpoint._format import CHECKED, CHECKS, OWN, Commit
from manyhands.checkpoint._tensor_parts import StoredSlice, StoredTensor

PATTERN = re.compile(rb'\{"manyhands checkpoint": (\d+), "crc32": "([0-9a-f]{8})",\n"content": ')
TOKEN = re.compile(r"[\w-]+", re.ASCII)  # no name can lead out of the checkpoint's folder
SCANNED = 2**18  # bytes that are compared with their checksums at a time


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
        commit = Commit(**{**content, "table": tensor_parts.Table(**content["table"])})
        numbers = [number for file in commit.files for number in file]
        if not TOKEN.fullmatch(commit.token) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{commit.token!r:.80} is in no name of a file of tensors")
        return commit, tensor_parts.find_tensors(commit.table, len(commit.files))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has invalid content: {error!r:.200}. {advice}") from error


# -- the files -------------------------------------------------------------------------------------


@dataclass(eq=False)
class SafetensorsFile:
    """A file of tensors; `expected` are its sizes and its checksum, if they are known."""

    source: OpenFile
    path: object
    expected: Sequence[int] = ()
    entries: dict[str, _format.TensorEntry] = field(default_factory=dict)
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
                dtype = _format.DTYPES[meta["dtype"]]
                entry = _format.TensorEntry(name, dtype, tuple(meta["shape"]))
                start, stop = meta["data_offsets"]
                # The exact type: JSON's true and 1.0 would pass as numbers.
                sizes = all(type(n) is int and n >= 0 for n in entry.shape)
                if not sizes or start + first != end or stop - start != entry.nbytes:
                    raise ValueError(f"{name!r} is not where it should be")
                self.entries[name] = entry
                self.starts[name] = end
                end = stop + first
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
        result = {}
        count = 0
        for name, entry in self.entries.items():
            result[name] = count
            count = count + -(-entry.nbytes // CHECKED)
        return result

    def verify(self, slices: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        """Compare rectangular slices of tensors with their checksums: the rows that they are in."""
        ranges = []
        for name, offsets, sizes in slices:
            entry = self.entries[name]
            # A number (no dimensions) is one row of one element.
            row_bytes = entry.nbytes // max(1, (*entry.shape, 1)[0])
            first = (*offsets, 0)[0]
            count = (*sizes, 1)[0]
            # All of each block in which the slice begins or ends.
            begin = first * row_bytes // CHECKED * CHECKED
            end = min(entry.nbytes, -(-(first + count) * row_bytes // CHECKED) * CHECKED)
            ranges.append((name, begin, end))
        self.source.fetch([(self.starts[name] + a, self.starts[name] + b) for name, a, b in ranges])
        for name, begin, end in ranges:
            buffer = memoryview(bytearray(min(SCANNED, end - begin)))
            for start in range(begin, end, SCANNED):
                block = buffer[: end - start]
                self._fill(self.starts[name] + start, block)
                self._compare(name, start, block)

    @torch.no_grad()
    def read(self, name: str, offsets: Sequence[int], target: Tensor) -> None:
        """Copy a rectangular slice of a tensor into `target`, which has its shape."""
        entry = self.entries[name]
        if target.numel() == 0:
            return
        shape = entry.shape or (1,)
        offsets = tuple(offsets) or (0,)
        target = target if entry.shape else target.view(1)
        row_bytes = entry.nbytes // shape[0]
        direct = target.device.type == "cpu" and target.dtype == entry.dtype
        direct = direct and _format.is_stored_as_is(target) and target.is_contiguous()
        direct = direct and target.shape[1:] == shape[1:]
        at_once = len(target) if direct else max(1, _format.BLOCK // row_bytes)
        for first, rows in enumerate(target.split(at_once)):
            start = self.starts[name] + (offsets[0] + first * at_once) * row_bytes
            if direct:  # whole rows go straight into the target's memory
                self._fill(start, _format.memory_of(rows))
                increment_version(target)  # torch has not seen the change
                continue
            # Otherwise read whole rows into a block, and copy the wanted columns out of it.
            block = torch.empty((len(rows), *shape[1:]), dtype=entry.dtype, device="cpu")
            self._fill(start, _format.memory_of(block))
            for dim in range(1, len(shape)):
                block = block.narrow(dim, offsets[dim], rows.shape[dim])
            rows.copy_(block)  # also converts the type, and copies to a GPU

    def _compare(self, name: str, begin: int, block: memoryview) -> None:
        """Compare some bytes of a tensor, from a multiple of `CHECKED` on, with their checksums."""
        place = 4 * (self._first_sums[name] + begin // CHECKED)
        for at in range(0, len(block), CHECKED):
            crc32 = zlib.crc32(block[at : at + CHECKED]).to_bytes(4, "little")
            if crc32 != self._sums[place : place + 4]:
                raise self.damaged(f"the checksum of {name!r} does not match")
            place += 4


# A tensor's key, a stored slice of it, what to read of that, and the memory for it.
SliceToRead: TypeAlias = tuple[str, StoredSlice, tuple[int, ...], Tensor]


class Reader(ExitStack):
    """Reads slices of a checkpoint. It keeps the files that it needs open until `close`."""

    def __init__(self, folder: Folder, name: str) -> None:
        super().__init__()
        self.folder, self.name = (folder, name) if name else (folder.behind_link(), name)
        self.path = self.folder.path / name
        self._files: dict[int, SafetensorsFile] = {}
        try:
            source = self.folder.open(name, COMMIT)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} cannot be found on this rank. Give a path that all ranks share."
            ) from error
        self.callback(source.close)
        source.try_lock(shared=True)  # what is read is not pruned
        raw = bytearray(source.size)
        try:
            source.read_into(0, memoryview(raw))
            self.crc32 = zlib.crc32(raw)
            self.commit, self.tensors = parse(bytes(raw), self.path / COMMIT)
        except BaseException:
            self.close()
            raise

    def verify(self, slices: Sequence[SliceToRead]) -> None:
        """Compare slices with their checksums."""
        found = defaultdict[SafetensorsFile, list[tuple[str, Sequence[int], Sequence[int]]]](list)
        for key, stored, offsets, target in slices:
            file, name = self._find(key, stored)
            found[file].append((name, offsets, target.shape))
        for file, parts in found.items():
            file.verify(parts)

    def read(self, key: str, stored: StoredSlice, offsets: Sequence[int], target: Tensor) -> None:
        """Copy a slice of a stored slice of a tensor into `target`, without comparing it."""
        file, name = self._find(key, stored)
        file.read(name, offsets, target)

    def _find(self, key: str, stored: StoredSlice) -> tuple[SafetensorsFile, str]:
        """Return the file that a stored slice is in, and its name there."""
        tensor = self.tensors[key]
        file = self._open(stored.file)
        name = _format.slice_name(key, stored.offsets, stored.sizes, tensor.shape)
        entry = file.entries.get(name)
        if entry is None or (entry.shape, entry.dtype) != (stored.sizes, tensor.torch_dtype):
            raise file.damaged(f"it has no {name!r} of {stored.sizes} {tensor.torch_dtype}")
        return file, name

    def read_whole(self, key: str, result: Tensor | None = None) -> Tensor:
        """Return a whole tensor, compared with its checksums; in `result`, if it is given."""
        tensor = self.tensors[key]
        if result is None:
            result = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="cpu")
        for stored in tensor.slices:
            target = result
            offsets = (0,) * len(stored.sizes)
            for dim, (offset, size) in enumerate(zip(stored.offsets, stored.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            self.verify([(key, stored, offsets, target)])
            self.read(key, stored, offsets, target)
        return result

    def read_own(self, rank: int) -> dict[str, Tensor]:
        """Return what a rank has saved for itself; nothing if there was no such rank."""
        result: dict[str, Tensor] = {}
        if rank >= self.commit.workers:
            return result
        file = self._open(rank)
        own = [(name, (), e.shape) for name, e in file.entries.items() if name.startswith(OWN)]
        file.verify(own)
        for name, _, shape in own:
            tensor = torch.empty(shape, dtype=file.entries[name].dtype, device="cpu")
            file.read(name, (), tensor)
            result[name.removeprefix(OWN)] = tensor
        return result

    def find_damage(self, rank: int) -> str:
        """Read all of a rank's file; return what is wrong with it."""
        try:
            file = self._open(rank)
            for name in set(file.entries) - {CHECKS}:
                file.verify([(name, (), file.entries[name].shape)])
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    def _open(self, number: int) -> SafetensorsFile:
        """Return an open file. Raise ValueError if its header is not the one that was saved."""
        file = self._files.get(number)
        if file is None:
            name = _format.file_name(number, self.commit.token)
            try:
                source = self.folder.open(self.name, name)
            except FileNotFoundError as error:
                if not self.folder.has_commit(self.name):
                    raise FileNotFoundError(
                        f"{self.path} was removed while it was read, as mh.save(keep=...) does "
                        "with old ones. Read a newer one."
                    ) from error
                raise FileNotFoundError(
                    f"{self.path / name} is missing: the checkpoint needs each of its "
                    f"{self.commit.workers} files. Copy the whole folder, or load another "
                    "checkpoint."
                ) from error
            self.callback(source.close)
            file = SafetensorsFile(source, self.path / name, self.commit.files[number])
            self._files[number] = file
        return file
