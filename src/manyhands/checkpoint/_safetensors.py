"""Write and read the safetensors format block by block: a file never has to fit in memory.

    8 bytes          length of the header
    header           JSON: each tensor's type, its shape, and where its bytes begin and end
    the tensors      one after the other, in that order, without gaps

The safetensors package writes a file from tensors that are all on the CPU at once, keeps no
checksums, and does not wait until the file is on the disk. Its files and ours are otherwise alike.
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
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from manyhands.checkpoint import _folder

BLOCK = 2**24  # bytes that are copied, checksummed or read at once
DTYPE_NAMES = {
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
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file's header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """The size of a file, and the checksums of its header (with its length) and of each tensor."""

    nbytes: int
    header_crc32: int
    tensor_crc32s: list[int]


def check_can_hold(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError if a safetensors file has no name for this type of tensor."""
    if dtype not in DTYPE_NAMES:
        raise TypeError(
            f"{name} is a tensor of {dtype}, which safetensors files cannot hold. Convert it."
        )


def write(
    path: Path,
    entries: Sequence[TensorEntry],
    get_tensor: Callable[[int], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> WrittenFile:
    """Write a new file, and return once it is on the disk."""
    # `get_tensor(i)` is called for one tensor after the other, so that only one is in memory.
    if sys.byteorder != "little":  # as the format is, and tensors are written as they are
        raise RuntimeError("checkpoints are written on little-endian machines only.")
    header: dict[str, dict[str, object]] = (
        {} if metadata is None else {"__metadata__": dict(metadata)}
    )
    end = 0
    for entry in entries:
        check_can_hold(entry.name, entry.dtype)
        if entry.name in header or entry.name == "__metadata__":
            raise ValueError(f"the name {entry.name!r} is used twice, or reserved. Rename it.")
        data_offsets = [end, end := end + entry.nbytes]
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": data_offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format asks for spaces here: the first tensor then begins at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    tensor_crc32s = []
    with _folder.open_to_write(path) as file:
        write_all(file, memoryview(head))
        for number in range(len(entries)):
            crc32 = 0
            for block in _blocks_of_elements(get_tensor(number)):
                view = memory_of(block)
                crc32 = zlib.crc32(view, crc32)
                write_all(file, view)
                del view  # before its block: the view does not keep the tensor's memory alive
            tensor_crc32s.append(crc32)
        os.fsync(file.fileno())
    return WrittenFile(len(head) + end, zlib.crc32(head), tensor_crc32s)


def write_all(file: FileIO, view: memoryview) -> None:
    """Write all bytes to a file without a buffer, whose `write` may accept fewer at a time."""
    while len(view):
        view = view[file.write(view) :]


def _blocks_of_elements(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor's elements in order, contiguous and on the CPU, without a large copy."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.dim() == 0 or (
        tensor.device.type == "cpu" and tensor.is_contiguous() and is_stored_as_is(tensor)
    ):
        # No copy: the bytes of the tensor's own memory are written.
        yield tensor.cpu().resolve_conj().resolve_neg()
        return
    # Everything else is copied some rows at a time, at least one.
    row_bytes = tensor.itemsize * tensor.numel() // tensor.shape[0]
    for rows in tensor.split(max(1, BLOCK // row_bytes)):
        yield rows.resolve_conj().resolve_neg().contiguous().cpu()


def is_stored_as_is(tensor: Tensor) -> bool:
    """Return whether the bytes in memory are the tensor's numbers.

    A lazy conjugate or negative view holds other numbers than its memory does. torch converts them
    when it reads or writes; code that takes the bytes directly does not.
    """
    return not (tensor.is_conj() or tensor.is_neg())


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. Keep the tensor alive while you use them."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return memoryview(b"")
    assert tensor.is_contiguous() and is_stored_as_is(tensor)
    # Through ctypes, not numpy: `import manyhands` needs only torch, and numpy has no bfloat16.
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


class SafetensorsFile:
    """A file that is open for reading. It stays readable even if it is removed meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _folder.open_to_read(path)
        try:
            self.nbytes = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._read(8), "little")
            # Before any memory is allocated for it: a damaged length may be anything.
            if length > self.nbytes - 8:
                raise self.damaged("its header is longer than the file")
            text = self._read(length)
            self.header_crc32 = zlib.crc32(text, zlib.crc32(length.to_bytes(8, "little")))
            self._data_start = 8 + length
            self.entries, self._starts = self._parse_header(text)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def damaged(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is damaged: {why}. Restore the file, or load another checkpoint."
        )

    def _read(self, length: int) -> bytes:
        buffer = bytearray(length)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, view: memoryview) -> None:
        """Read from the current position until the view is full."""
        while len(view):
            count = self._file.readinto(view)  # may read less than the view has room for
            if not count:
                raise self.damaged("it ends too early")
            view = view[count:]

    def _parse_header(self, text: bytes) -> tuple[dict[str, TensorEntry], dict[str, int]]:
        """Return each tensor's entry, and where its bytes begin behind the header."""
        entries, starts, end = {}, {}, 0
        try:
            header = json.loads(text)
            for name, meta in header.items():
                if name == "__metadata__":
                    continue
                entry = TensorEntry(name, DTYPES[meta["dtype"]], tuple(meta["shape"]))
                start, stop = meta["data_offsets"]
                # The exact type: JSON's true and 1.0 would pass as numbers.
                sizes = all(type(n) is int and n >= 0 for n in entry.shape)
                if not sizes or start != end or stop - start != entry.nbytes:
                    raise ValueError(f"{name!r} is not where it should be")
                entries[name], starts[name], end = entry, start, stop
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.damaged(f"its header cannot be read ({error!r:.200})") from error
        if self._data_start + end != self.nbytes:
            raise self.damaged(
                f"it has {self.nbytes:,} bytes and should have {self._data_start + end:,}"
            )
        return entries, starts

    def checksum(self, name: str) -> int:
        """Return the CRC-32 of a tensor's bytes on the disk."""
        entry, crc32 = self.entries[name], 0
        self._file.seek(self._data_start + self._starts[name])
        buffer = memoryview(bytearray(min(BLOCK, entry.nbytes)))
        for start in range(0, entry.nbytes, BLOCK):
            view = buffer[: min(BLOCK, entry.nbytes - start)]
            self._fill(view)
            crc32 = zlib.crc32(view, crc32)
        return crc32

    @torch.no_grad()
    def read_slice(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int], target: Tensor
    ) -> None:
        """Copy a rectangular slice of a tensor into `target`, which has the shape `sizes`."""
        entry = self.entries[name]
        if 0 in sizes or entry.nbytes == 0:
            return
        # A number (no dimensions) is read as one row of one element.
        shape = entry.shape or (1,)
        offsets, sizes = tuple(offsets) or (0,), tuple(sizes) or (1,)
        target = target if entry.shape else target.view(1)
        row_bytes = entry.nbytes // shape[0]
        rows_at_once = max(1, BLOCK // row_bytes)
        for first in range(0, sizes[0], rows_at_once):
            count = min(rows_at_once, sizes[0] - first)
            start = self._starts[name] + (offsets[0] + first) * row_bytes
            self._file.seek(self._data_start + start)
            rows = target.narrow(0, first, count)
            direct = rows.device.type == "cpu" and rows.dtype == entry.dtype
            direct = direct and is_stored_as_is(rows)
            if direct and rows.is_contiguous() and sizes[1:] == shape[1:]:
                self._fill(memory_of(rows))  # whole rows go straight into the target's memory
                continue
            # Otherwise read whole rows into a block, and copy the wanted columns out of it.
            block = torch.empty((count, *shape[1:]), dtype=entry.dtype)
            self._fill(memory_of(block))
            for dim in range(1, len(shape)):
                block = block.narrow(dim, offsets[dim], sizes[dim])
            rows.copy_(block)  # also converts the type, and copies to a GPU
