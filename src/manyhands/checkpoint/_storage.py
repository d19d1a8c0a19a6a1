"""Read the slices of a checkpoint out of its files, and compare them with their checksums.

Each rank has written one file, `worker-00003.safetensors`. A load goes over the files twice: first
it compares all that it is going to read with the checksums, then it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from manyhands.checkpoint import _index, _safetensors


class Reader:
    """Reads slices of a checkpoint. It keeps the files that it needs open until `close`."""

    def __init__(self, folder: Path, index: _index.Index) -> None:
        self.folder = folder
        self.index = index
        # Open files stay readable even if another job prunes the checkpoint between the two passes.
        self._files: dict[int, _safetensors.SafetensorsFile] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        self._stack.close()
        self._files.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, stored: _index.StoredSlice, dtype: torch.dtype) -> None:
        """Raise ValueError if a slice's shape, type or checksum is not what the index says."""
        file = self._open(stored.file)
        entry = file.entries.get(stored.name)
        if entry is None or (entry.shape, entry.dtype) != (stored.sizes, dtype):
            raise ValueError(
                f"{file.path} has no {stored.name!r} of shape {stored.sizes} and type {dtype}: the "
                "file does not belong to this checkpoint. Load another one."
            )
        if file.checksum(stored.name) != stored.crc32:
            raise ValueError(
                f"{file.path} is damaged: the checksum of {stored.name!r} is not the one that was "
                "saved. Restore the file, or load another checkpoint."
            )

    def read(
        self,
        stored: _index.StoredSlice,
        offsets: Sequence[int],
        sizes: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Copy a slice of a stored slice into `target`, which has the shape `sizes`."""
        self._open(stored.file).read_slice(stored.name, offsets, sizes, target.detach())

    def read_whole(self, key: str) -> torch.Tensor:
        """Return a whole (small) tensor in new memory, compared with its checksums."""
        tensor = self.index.tensors[key]
        for stored in tensor.slices:
            self.check(stored, tensor.torch_dtype)
        result = torch.empty(tensor.shape, dtype=tensor.torch_dtype)
        self.read_into(key, result)
        return result

    def read_into(self, key: str, result: torch.Tensor) -> None:
        """Copy a whole tensor, slice by slice."""
        for stored in self.index.tensors[key].slices:
            target = result
            for dim, (offset, size) in enumerate(zip(stored.offsets, stored.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            self.read(stored, (0,) * len(stored.sizes), stored.sizes, target)

    def _open(self, number: int) -> _safetensors.SafetensorsFile:
        """Return an open file. Raise ValueError if its header is not the one that was saved."""
        file = self._files.get(number)
        if file is None:
            indexed = self.index.files[number]
            path = self.folder / indexed.name
            try:
                file = _safetensors.SafetensorsFile(path)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{path} is missing: the checkpoint needs each of its {len(self.index.files)} "
                    "files of tensors. Copy the whole folder, or load another checkpoint."
                ) from error
            self._stack.callback(file.close)
            # The header's checksum also tells this file from one of another checkpoint.
            if file.nbytes != indexed.nbytes or file.header_crc32 != indexed.crc32:
                raise ValueError(
                    f"{path} is damaged, or belongs to another checkpoint: its header is not the "
                    "one that was saved. Restore the file, or load another checkpoint."
                )
            self._files[number] = file
        return file
