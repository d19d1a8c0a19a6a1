"""Read a checkpoint: its commit, and slices of the tensors in its files.

No file is read as a whole: of the commit a reader learns which files have what it needs, and reads
the heads of these, then ranges of bytes. A range is first compared with its checksums, one for
every 16 KiB, in a buffer that stays in the processor's cache. Then it is read into the memory where
it belongs, from the system's page cache: a second copy in fresh memory would take longer. From a
bucket it is fetched once, and kept in between.

What a file claims may be forged, or a file sparse. So there is room for a tensor only after all of
it was found in the files, and for checksums after they were compared.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from manyhands.checkpoint import _format
from manyhands.checkpoint._commit import parse
from manyhands.checkpoint._folder import COMMIT, Folder, OpenFile
from manyhands.checkpoint._format import BLOCK, CHECKED, CHECKS, OWN
from manyhands.checkpoint._json import FIRST, parse_json, read_text
from manyhands.checkpoint._tensor_parts import StoredSlice, StoredTensor

SCANNED = 2**18  # bytes that are compared with their checksums at a time
LARGE = 2**20  # bytes of a tensor that is compared before there is room for it


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
        if self.expected and self.source.size != self.expected[0]:
            sizes = f"{self.source.size:,} bytes and should have {self.expected[0]:,}"
            raise self.damaged(f"it has {sizes}")
        raw = self._read_header()
        self._parse_header(raw[8:], len(raw))
        self._sums = self._read_sums(zlib.crc32(raw))

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

    def _read_header(self) -> bytes:
        """Return the header, and before it the 8 bytes of its length."""
        if self.expected:  # from a bucket the length and the text come together
            self.source.fetch([(0, min(self.expected[1], 8 + FIRST))])
        length = self._read(0, 8)
        head = 8 + int.from_bytes(length, "little")
        if head > self.source.size:
            raise self.damaged("its header is longer than the file")
        if self.expected and head != self.expected[1]:
            raise self.damaged("its header is not the one that was saved")
        try:
            return length + read_text(self._read, 8, head - 8)
        except ValueError as error:
            raise self.damaged(f"its header cannot be read ({error})") from error

    def _parse_header(self, text: bytes, end: int) -> None:
        """Find each tensor's entry, and where its bytes begin."""
        try:
            first = end
            for name, meta in parse_json(text).items():
                if name == "__metadata__":
                    continue
                dtype = _format.DTYPES[meta["dtype"]]
                entry = _format.TensorEntry(name, dtype, tuple(meta["shape"]))
                start, stop = meta["data_offsets"]
                # The exact type: JSON's true and 1.0 would pass as numbers.
                sizes = all(type(n) is int and n >= 0 for n in (*entry.shape, start, stop))
                if not sizes or start + first != end or stop - start != entry.nbytes:
                    raise ValueError(f"{name!r} is not where it should be")
                self.entries[name] = entry
                self.starts[name] = end
                end = stop + first
            blocks = sum(-(-e.nbytes // CHECKED) for name, e in self.entries.items())
            sums = self.entries[CHECKS].nbytes
            if sums != 4 * (blocks - -(-sums // CHECKED)):
                raise ValueError("there is not a checksum for each block")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self.damaged(f"its header cannot be read ({error!r:.200})") from error
        if end != self.source.size:
            raise self.damaged(f"it has {self.source.size:,} bytes and should have {end:,}")

    def _read_sums(self, crc32: int) -> bytes:
        """Return all checksums; `crc32` is the header's."""
        start = self.starts[CHECKS]
        length = self.entries[CHECKS].nbytes
        block = b""
        for done in range(0, length, BLOCK):
            block = self._read(start + done, min(BLOCK, length - done))
            crc32 = zlib.crc32(block, crc32)
        # The checksum also tells this file from one of another checkpoint.
        if self.expected and crc32 != self.expected[2]:
            raise self.damaged("its header is not the one that was saved")
        # Those of a sparse file that claims to be huge are compared before they are kept.
        return block if length <= BLOCK else self._read(start, length)

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


def read_file(source: OpenFile) -> bytes:
    """Return the content of a file of text; ValueError if it is none."""

    def read(start: int, length: int) -> bytes:
        buffer = bytearray(length)
        found = source.read_into(start, memoryview(buffer))
        return bytes(buffer[:found])

    return read_text(read, 0, source.size)


# A tensor's key, a stored slice of it, and where a slice of that begins, and its sizes.
SliceToVerify: TypeAlias = tuple[str, StoredSlice, Sequence[int], Sequence[int]]


def _all_slices(key: str, tensor: StoredTensor) -> Iterator[SliceToVerify]:
    """Yield all slices of a tensor, each whole."""
    for stored in tensor.slices:
        yield key, stored, (0,) * len(stored.sizes), stored.sizes


class Reader(ExitStack):
    """Reads slices of a checkpoint. It keeps the files that it needs open until `close`."""

    def __init__(self, folder: Folder, name: str) -> None:
        super().__init__()
        self.folder, self.name = (folder, name) if name else (folder.behind_link(), name)
        self.path = self.folder.path / name
        self._files: dict[int, SafetensorsFile] = {}
        self._taken: set[str] = set()  # the keys of tensors that have a place in a value
        try:
            source = self.folder.open(name, COMMIT)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{self.path} cannot be found on this rank. Give a path that all ranks share."
            ) from error
        self.callback(source.close)
        source.try_lock(shared=True)  # what is read is not pruned
        try:
            raw = self._read_commit(source)
            self.crc32 = zlib.crc32(raw)
            self.commit, self.tensors = parse(raw, self.path / COMMIT)
        except BaseException:
            self.close()
            raise

    def _read_commit(self, source: OpenFile) -> bytes:
        try:
            return read_file(source)
        except ValueError as error:
            raise ValueError(
                f"{self.path / COMMIT} is damaged: {error}. Load another checkpoint."
            ) from error

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Raise a ValueError that names the checkpoint for content that makes no sense."""
        try:
            yield
        except (LookupError, AttributeError, RecursionError) as error:  # it has another form
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

    def check_claim(self, key: str) -> None:
        """Raise ValueError unless a tensor is in the files, as large as the index claims.

        Ask this before you make room for it: an index or a sparse file may claim any size.
        """
        tensor = self.tensors[key]
        for stored in tensor.slices:
            self._find(key, stored)
        if tensor.nbytes > LARGE:
            self.verify(_all_slices(key, tensor))

    def read_whole(self, key: str, result: Tensor | None = None) -> Tensor:
        """Return a whole tensor, compared with its checksums; in `result`, if it is given."""
        tensor = self.tensors[key]
        self.verify(_all_slices(key, tensor))
        if result is None:
            result = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="cpu")
        for _, stored, offsets, sizes in _all_slices(key, tensor):
            target = result
            for dim, (start, size) in enumerate(zip(stored.offsets, sizes, strict=True)):
                target = target.narrow(dim, start, size)
            self.read(key, stored, offsets, target)
        return result

    def read_once(self, key: str) -> Tensor:
        """Return a whole tensor of a value."""
        self.take(key)
        return self.read_whole(key)

    def take(self, key: str) -> None:
        """Raise ValueError if a tensor was taken before: a save writes one for each place."""
        if key in self._taken:
            raise ValueError(f"the tensor {key!r:.80} is in two places")
        self._taken.add(key)

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
        """Read all of a rank's file; return what is wrong with it, or what the index has more."""
        try:
            file = self._open(rank)
            for key, stored in self._slices_in(rank):
                self._find(key, stored)
            for name in set(file.entries) - {CHECKS}:
                file.verify([(name, (), file.entries[name].shape)])
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    def _slices_in(self, number: int) -> Iterator[tuple[str, StoredSlice]]:
        """Yield the slices that are in a file, with the keys of their tensors."""
        for grid, piece in self.commit.table.pieces[number]:
            for key in self.commit.table.grids[grid][1]:
                stored = self.tensors[key].piece(piece)
                if 0 not in stored.sizes:
                    yield key, stored
        yield from self._listed[number]

    @cached_property
    def _listed(self) -> dict[int, list[tuple[str, StoredSlice]]]:
        """The slices that are not pieces of a grid, by the number of their file."""
        result = defaultdict[int, list[tuple[str, StoredSlice]]](list)
        for key, tensor in self.tensors.items():
            for stored in tensor.listed:
                result[stored.file].append((key, stored))
        return result

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
