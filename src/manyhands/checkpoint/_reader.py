"""Read a checkpoint: the commit, and slices of tensors.

The commit shows which files a rank needs. The reader reads the headers of these files, then ranges
of bytes. A range is first compared with its checksums, one per 16 KiB, in a buffer that fits into
the processor's cache. Then the range is read from the page cache into its final memory, which is
faster than a copy through new memory. From a bucket, a range is fetched once and buffered.

Files may be forged or sparse. So memory for a tensor is allocated only after the tensor was found
in the files, and memory for checksums only after they were compared.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from manyhands.checkpoint._commit import parse
from manyhands.checkpoint._folder import COMMIT, Folder, OpenFile
from manyhands.checkpoint._format import (
    BLOCK,
    CHECKED,
    CHECKS,
    DTYPES,
    OWN,
    TensorEntry,
    file_name,
    is_stored_as_is,
    memory_of,
    slice_name,
)
from manyhands.checkpoint._json import FIRST, parse_json, read_text
from manyhands.checkpoint._tensor_parts import StoredSlice, TensorParts, find_reads

SCANNED = 2**18  # bytes per comparison with checksums
LARGE = 2**20  # larger tensors are compared before memory is allocated


# -- the files -------------------------------------------------------------------------------------


class SafetensorsFile:
    """A safetensors file of a checkpoint or of any other writer.

    `expected` comes from the commit: bytes of the file and of its head, and the checksum. Files of
    other writers have no checksums and are not verified.
    """

    def __init__(
        self, source: OpenFile, path: object, expected: Sequence[int] | None = None
    ) -> None:
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self._source = source
        self._starts: dict[str, int] = {}  # the first byte of each tensor
        self._first_sums: dict[str, int] = {}  # the index of each tensor's first checksum
        self._sums = b""
        if expected is None:
            self._parse_header(self._read_header())
            return
        if source.size != expected[0]:
            raise self.damaged(f"it has {source.size:,} bytes and should have {expected[0]:,}")
        # From a bucket, a single request fetches header and length.
        source.fetch([(0, min(expected[1], 8 + FIRST))])
        head = self._read_header()
        self._parse_header(head)
        if CHECKS not in self.entries:
            raise self.damaged("it has no checksums")
        self._sums = self._read_sums(zlib.crc32(head), expected[2])

    def damaged(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is damaged: {why}. Restore the file, or load another checkpoint."
        )

    def _read(self, start: int, length: int) -> bytearray:
        buffer = bytearray(length)
        self._fill(start, memoryview(buffer))
        return buffer

    def _fill(self, start: int, view: memoryview) -> None:
        if self._source.read_into(start, view) != len(view):
            raise self.damaged("it ends too early")

    def _read_header(self) -> bytes:
        """Return the header, preceded by 8 bytes of length."""
        length = self._read(0, 8)
        nbytes = int.from_bytes(length, "little")
        if 8 + nbytes > self._source.size:
            raise self.damaged("its header is longer than the file")
        try:
            return bytes(length) + read_text(self._source, 8, nbytes)
        except ValueError as error:
            raise self.damaged(f"its header cannot be read ({error})") from error

    def _parse_header(self, head: bytes) -> None:
        """Find the entry and first byte of each tensor."""
        room = self._source.size - len(head)
        count = 0
        try:
            for name, meta in parse_json(head[8:]).items():
                if name == "__metadata__":
                    continue
                if meta["dtype"] not in DTYPES:
                    raise ValueError(f"{name!r} has the unknown type {meta['dtype']!r:.20}")
                entry = TensorEntry(name, DTYPES[meta["dtype"]], tuple(meta["shape"]))
                start, stop = meta["data_offsets"]
                # The exact type: JSON's true and 1.0 would pass as integers.
                if any(type(n) is not int or n < 0 for n in (*entry.shape, start, stop)):
                    raise ValueError(f"{name!r} has an impossible shape or place")
                room -= entry.nbytes  # tensors do not overlap
                end = len(head) + stop
                if stop - start != entry.nbytes or end > self._source.size or room < 0:
                    raise ValueError(f"{name!r} has an invalid position")
                self.entries[name] = entry
                self._starts[name] = len(head) + start
                self._first_sums[name] = count
                count += -(-entry.nbytes // CHECKED)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self.damaged(f"its header cannot be read ({error!r:.200})") from error

    def _read_sums(self, crc32: int, expected: int) -> bytes:
        """Return all checksums. `crc32` is the checksum of the header, `expected` of both."""
        start = self._starts[CHECKS]
        length = self.entries[CHECKS].nbytes
        for done in range(0, length, BLOCK):
            crc32 = zlib.crc32(self._read(start + done, min(BLOCK, length - done)), crc32)
        # The checksum also detects a file of a different checkpoint.
        if crc32 != expected:
            raise self.damaged("its header is not the one that was saved")
        # Compared before allocating: a sparse file may claim any size.
        return bytes(self._read(start, length))

    def verify(self, slices: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        """Compare the rows of slices with their checksums. Empty offsets mean the full tensor."""
        ranges = []
        for name, offsets, sizes in slices:
            entry = self.entries[name]
            begin = 0
            end = entry.nbytes
            if offsets:
                row_bytes = entry.nbytes // max(1, entry.shape[0])
                # Including all of the first and last block.
                begin = offsets[0] * row_bytes // CHECKED * CHECKED
                end = min(end, -(-(offsets[0] + sizes[0]) * row_bytes // CHECKED) * CHECKED)
            ranges.append((name, begin, end))
        starts = self._starts
        self._source.fetch(
            [(starts[name] + begin, starts[name] + end) for name, begin, end in ranges]
        )
        for name, begin, end in ranges:
            buffer = memoryview(bytearray(min(SCANNED, end - begin)))
            place = 4 * (self._first_sums[name] + begin // CHECKED)
            for start in range(begin, end, SCANNED):
                block = buffer[: end - start]
                self._fill(starts[name] + start, block)
                for at in range(0, len(block), CHECKED):
                    crc32 = zlib.crc32(block[at : at + CHECKED]).to_bytes(4, "little")
                    if crc32 != self._sums[place : place + 4]:
                        raise self.damaged(f"the checksum of {name!r} does not match")
                    place += 4

    @torch.no_grad()
    def read(self, name: str, offsets: Sequence[int], target: Tensor) -> None:
        """Copy a rectangular slice of a tensor into `target`, which has the slice's shape."""
        entry = self.entries[name]
        if target.numel() == 0:
            return
        shape = entry.shape or (1,)
        offsets = tuple(offsets) or (0,)
        target = target if entry.shape else target.view(1)
        row_bytes = entry.nbytes // shape[0]
        same_numbers = target.dtype == entry.dtype and is_stored_as_is(target)
        same_rows = target.shape[1:] == shape[1:] and target.is_contiguous()
        if target.device.type == "cpu" and same_numbers and same_rows:
            # Full rows are read directly into the target's memory.
            self._fill(self._starts[name] + offsets[0] * row_bytes, memory_of(target))
            increment_version(target)  # torch does not see the change
            return
        # Otherwise read blocks of full rows into a buffer, and copy the selected columns.
        start = self._starts[name] + offsets[0] * row_bytes
        row_count = min(len(target), max(1, BLOCK // row_bytes))
        buffer = torch.empty((row_count, *shape[1:]), dtype=entry.dtype, device="cpu")
        for rows in target.split(row_count):
            block = buffer[: len(rows)]
            self._fill(start, memory_of(block))
            start += block.nbytes
            for dim in range(1, len(shape)):
                block = block.narrow(dim, offsets[dim], rows.shape[dim])
            rows.copy_(block)  # converts the type, and copies to a GPU


# A tensor's key, a stored slice, and offsets and sizes inside the slice.
SliceToVerify: TypeAlias = tuple[str, StoredSlice, Sequence[int], Sequence[int]]


class Reader(ExitStack):
    """Reads slices of a checkpoint. Files stay open until `close`."""

    def __init__(self, folder: Folder, name: str) -> None:
        super().__init__()
        self.folder = folder
        if not name:
            self.folder = folder.behind_link()
        self.name = name
        self.path = self.folder.path / name
        self._files: dict[int, SafetensorsFile] = {}
        self._taken: set[str] = set()  # keys of tensors that are used in a value
        path = self.path / COMMIT
        try:
            source = self.folder.open(name, COMMIT)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} does not exist on this rank. Pass a path that all ranks share."
            ) from error
        self.callback(source.close)
        try:
            source.try_lock(shared=True)  # against pruning
            raw = read_text(source, 0, source.size)
            self.crc32 = zlib.crc32(raw)
            self.commit, self.tensors = parse(raw, path)
        except ValueError as error:
            self.close()
            if str(path) in str(error):
                raise
            raise ValueError(f"{path} is damaged: {error}. Load another checkpoint.") from error
        except BaseException:
            self.close()
            raise

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Convert errors of invalid content to ValueErrors that name the checkpoint."""
        try:
            yield
        # The content has a different form.
        except (LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path} has invalid content: {error!r:.200}.") from error
        except ValueError as error:
            if str(self.path) in str(error):
                raise
            raise ValueError(f"{self.path} cannot be loaded: {error}") from error

    def verify(self, slices: Iterable[SliceToVerify]) -> None:
        """Compare slices with their checksums."""
        found = defaultdict[SafetensorsFile, list[tuple[str, Sequence[int], Sequence[int]]]](list)
        for key, stored, offsets, sizes in slices:
            file, name = self._find(key, stored)
            found[file].append((name, offsets, sizes))
        for file, parts in found.items():
            file.verify(parts)

    def read(self, key: str, stored: StoredSlice, offsets: Sequence[int], target: Tensor) -> None:
        """Copy a part of a stored slice into `target`, without verification."""
        file, name = self._find(key, stored)
        file.read(name, offsets, target)

    def _find(self, key: str, stored: StoredSlice) -> tuple[SafetensorsFile, str]:
        """Return the file of a stored slice, and the slice's name there."""
        tensor = self.tensors[key]
        file = self._open(stored.file)
        name = slice_name(key, stored.offsets, stored.sizes, tensor.shape)
        entry = file.entries.get(name)
        if entry is None or (entry.shape, entry.dtype) != (stored.sizes, tensor.torch_dtype):
            raise file.damaged(f"it has no {name!r} of {stored.sizes} {tensor.torch_dtype}")
        return file, name

    def check_claim(self, key: str) -> None:
        """Raise ValueError unless the files contain a tensor of the claimed size.

        Call this before allocating memory: a commit or a sparse file may claim any size.
        """
        tensor = self.tensors[key]
        for stored in tensor.slices:
            self._find(key, stored)
        if tensor.nbytes > LARGE:
            self._verify_whole(key)

    def _verify_whole(self, key: str) -> None:
        slices = self.tensors[key].slices
        self.verify((key, each, (), each.sizes) for each in slices)

    def read_whole(self, key: str, result: Tensor | None = None) -> Tensor:
        """Return a full tensor after verification, in `result` if given."""
        tensor = self.tensors[key]
        self._verify_whole(key)
        if result is None:
            result = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="cpu")
        for read in find_reads(key, TensorParts.whole(result), tensor):
            self.read(key, *read)
        return result

    def read_once(self, key: str) -> Tensor:
        """Return a full tensor of a value. Each tensor can be read once."""
        self.take(key)
        return self.read_whole(key)

    def take(self, key: str) -> None:
        """Raise ValueError if a tensor is used twice: a save writes a tensor for each place."""
        if key in self._taken:
            raise ValueError(f"the tensor {key!r:.80} is in two places")
        self._taken.add(key)

    def read_own(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors that belong to a single rank, by name."""
        result: dict[str, Tensor] = {}
        file = self._open(rank)
        own = [entry for name, entry in file.entries.items() if name.startswith(OWN)]
        file.verify([(entry.name, (), entry.shape) for entry in own])
        for entry in own:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            file.read(entry.name, (), tensor)
            result[entry.name] = tensor
        return result

    def find_damage(self, rank: int) -> str:
        """Read a rank's file. Return a description of missing or damaged parts, or ""."""
        try:
            file = self._open(rank)
            for key, stored in self._slices_by_file[rank]:
                self._find(key, stored)
            for name in set(file.entries) - {CHECKS}:
                file.verify([(name, (), file.entries[name].shape)])
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    @cached_property
    def _slices_by_file(self) -> dict[int, list[tuple[str, StoredSlice]]]:
        result = defaultdict[int, list[tuple[str, StoredSlice]]](list)
        for key, tensor in self.tensors.items():
            for stored in tensor.slices:
                result[stored.file].append((key, stored))
        return result

    def _open(self, number: int) -> SafetensorsFile:
        """Return an open file. Raise ValueError if the header differs from the saved header."""
        if number not in self._files:
            name = file_name(number, self.commit.token)
            try:
                source = self.folder.open(self.name, name)
            except FileNotFoundError as error:
                if not self.folder.has_commit(self.name):
                    raise FileNotFoundError(
                        f"{self.path} was removed while it was read, for example by "
                        "mh.save(keep=...). Read a newer checkpoint."
                    ) from error
                raise FileNotFoundError(
                    f"{self.path / name} is missing: the checkpoint needs all of its "
                    f"{self.commit.workers} files. Copy the complete folder, or load another "
                    "checkpoint."
                ) from error
            self.callback(source.close)
            expected = self.commit.files[number]
            self._files[number] = SafetensorsFile(source, self.path / name, expected)
        return self._files[number]
