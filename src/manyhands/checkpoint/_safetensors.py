"""The safetensors format, piece by piece: what is written and read never has to fit in memory.

    8 bytes          length of the header
    header           JSON: for each tensor its type, its shape, and where its bytes begin and end
    the tensors      one after the other, in that order, without gaps

The format's own package writes files of it from tensors that are all on the CPU at once, keeps no
checksums, and does not wait until the disk has them; its files and ours are the same otherwise.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands.checkpoint import _files

BLOCK = 2**24  # bytes that are copied, summed or read at once
LARGEST_HEADER = 2**30
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """Checksums of a file: of its first bytes, the header with its length, and of each tensor."""

    nbytes: int
    header: int
    tensors: list[int]


def check_can_hold(name: str, dtype: torch.dtype) -> None:
    if dtype not in NAMES:
        raise TypeError(
            f"{name} is a tensor of {dtype}, which safetensors files cannot hold. Convert it, for "
            "instance with torch.view_as_real, or leave it out."
        )


def write(
    path: Path,
    entries: Sequence[Entry],
    tensor: Callable[[int], Tensor],
    about: Mapping[str, str] | None = None,
) -> Written:
    """Write a new file; `tensor(i)` is asked for one tensor after the other.

    When it returns, the disk has the file.
    """
    if sys.byteorder != "little":
        raise RuntimeError("checkpoints are written and read on little-endian machines only.")
    header: dict[str, Any] = {} if about is None else {"__metadata__": dict(about)}
    end = 0
    for entry in entries:
        check_can_hold(entry.name, entry.dtype)
        if entry.name in header or entry.name == "__metadata__":
            raise ValueError(f"a file of tensors cannot have {entry.name!r} (twice). Rename it.")
        where = [end, end := end + entry.nbytes]
        shape = list(entry.shape)
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": shape,
            "data_offsets": where,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = len(text).to_bytes(8, "little") + text
    sums = []
    with _files.writer(path) as file:
        write_all(file, memoryview(first))
        for number in range(len(entries)):
            total = 0
            for part in _blocks(tensor(number)):
                view = memory_of(part)
                total = zlib.crc32(view, total)
                write_all(file, view)
                del view
            sums.append(total)
        os.fsync(file.fileno())
    return Written(len(first) + end, zlib.crc32(first), sums)


def write_all(file: Any, view: memoryview) -> None:
    """Write to a file without a buffer, which may take less at once."""
    while len(view):
        view = view[file.write(view) :]


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's elements, contiguous and on the CPU, without a large copy."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.dim() == 0 or (
        tensor.device.type == "cpu" and tensor.is_contiguous() and as_in_memory(tensor)
    ):
        yield tensor.cpu().resolve_conj().resolve_neg()
        return
    row = tensor.itemsize * tensor.numel() // tensor.shape[0]
    for part in tensor.split(max(1, BLOCK // row)):
        yield part.resolve_conj().resolve_neg().contiguous().cpu()


def as_in_memory(tensor: Tensor) -> bool:
    """Whether its numbers are those in its memory. A view may say that they are the conjugate of
    those, or the negative, and torch reads and writes them so; whoever takes the bytes does not."""
    return not (tensor.is_conj() or tensor.is_neg())


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU; keep the tensor while you use them."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return memoryview(b"")
    assert tensor.is_contiguous() and as_in_memory(tensor)
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


class File:
    """A file that is being read. It stays readable while it is open, even if it is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _files.reader(path)
        try:
            self.nbytes = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._read(8), "little")
            if length > min(self.nbytes - 8, LARGEST_HEADER):
                raise self._damaged("its header is longer than the file")
            text = self._read(length)
            self.header_sum = zlib.crc32(text, zlib.crc32(length.to_bytes(8, "little")))
            self._start = 8 + length
            self.entries, self._places = self._parsed(text)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _damaged(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is damaged: {why}. Restore the file, or load another checkpoint."
        )

    def _read(self, length: int) -> bytes:
        buffer = bytearray(length)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self._file.readinto(view)
            if not count:
                raise self._damaged("it ends too early")
            view = view[count:]

    def _parsed(self, text: bytes) -> tuple[dict[str, Entry], dict[str, int]]:
        entries, places, end = {}, {}, 0
        try:
            header = json.loads(text)
            for name, told in header.items():
                if name == "__metadata__":
                    continue
                entry = Entry(name, DTYPES[told["dtype"]], tuple(told["shape"]))
                start, stop = told["data_offsets"]
                whole = all(type(number) is int for number in (*entry.shape, start, stop))
                if not whole or min(entry.shape, default=0) < 0:
                    raise ValueError(f"{name!r} has no sizes that it could have")
                if start != end or stop - start != entry.nbytes:
                    raise ValueError(f"{name!r} is not where it should be")
                entries[name], places[name], end = entry, start, stop
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header cannot be read ({error!r:.200})") from error
        if self._start + end != self.nbytes:
            raise self._damaged(
                f"it has {self.nbytes:,} bytes and should have {self._start + end:,}"
            )
        return entries, places

    def checksum(self, name: str) -> int:
        """Of a tensor's bytes."""
        entry, total = self.entries[name], 0
        self._file.seek(self._start + self._places[name])
        buffer = memoryview(bytearray(min(BLOCK, entry.nbytes)))
        for start in range(0, entry.nbytes, BLOCK):
            view = buffer[: min(BLOCK, entry.nbytes - start)]
            self._fill(view)
            total = zlib.crc32(view, total)
        return total

    @torch.no_grad()
    def read_box(self, name: str, offsets: Sequence[int], sizes: Sequence[int], to: Tensor) -> None:
        """Copy a box of a tensor to where it is wanted (`to` has its sizes)."""
        entry = self.entries[name]
        if 0 in sizes or entry.nbytes == 0:
            return
        shape = entry.shape or (1,)
        offsets, sizes = tuple(offsets) or (0,), tuple(sizes) or (1,)
        to = to if entry.shape else to.view(1)
        row = entry.nbytes // shape[0]
        rows = max(1, BLOCK // row)
        for first in range(0, sizes[0], rows):
            count = min(rows, sizes[0] - first)
            self._file.seek(self._start + self._places[name] + (offsets[0] + first) * row)
            target = to.narrow(0, first, count)
            direct = target.device.type == "cpu" and target.dtype == entry.dtype
            direct = direct and as_in_memory(target)
            if direct and target.is_contiguous() and sizes[1:] == shape[1:]:
                self._fill(memory_of(target))
                continue
            block = torch.empty((count, *shape[1:]), dtype=entry.dtype)
            self._fill(memory_of(block))
            for dim in range(1, len(shape)):
                block = block.narrow(dim, offsets[dim], sizes[dim])
            target.copy_(block)
