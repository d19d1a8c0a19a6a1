"""What torch's planners write to and read from: safetensors files beside a JSON index.

Each rank writes one file, `worker-00003.safetensors`. A load goes over the files twice: first it
compares all that it is going to read with the checksums, then it reads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from manyhands.checkpoint import _folder, _index, _safetensors
from manyhands.checkpoint._safetensors import TensorEntry

SUFFIX = ".safetensors"


def file_name(rank: int) -> str:
    return f"worker-{rank:05d}{SUFFIX}"


class Writer(StorageWriter):
    """Writes the slices that one rank's plan names into that rank's file."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self.file: _index.IndexedFile | None = None  # set by `write_data`

    # torch declares these methods abstract. `_writing.py` calls `write_data` itself instead of
    # torch's `save`, because torch pickles what ranks tell each other and knows no checksums.
    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan says, and return once it is on the disk."""
        # Wide types first: each tensor then begins at a multiple of its element size.
        items = sorted(plan.items, key=lambda item: -_write_data_of(item).properties.dtype.itemsize)
        entries = []
        for item in items:
            data = _write_data_of(item)
            name = slice_name(item.index.fqn, data.chunk, data.size)
            entries.append(TensorEntry(name, data.properties.dtype, tuple(data.chunk.sizes)))

        def get_tensor(number: int) -> torch.Tensor:
            found = planner.resolve_data(items[number])
            assert isinstance(found, torch.Tensor)
            return found

        name = file_name(self.rank)
        written = _safetensors.write(self.folder / name, entries, get_tensor)
        self.file = _index.IndexedFile(name, written.nbytes, written.header_crc32)
        results = [
            WriteResult(item.index, entry.nbytes, (entry.name, crc32))
            for item, entry, crc32 in zip(items, entries, written.tensor_crc32s, strict=True)
        ]
        # torch's interface wants a future; the work is done when this method returns.
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: `write_index` writes the index, which holds more than the tensors."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)


def _write_data_of(item: WriteItem) -> TensorWriteData:
    # torch allows items of raw bytes, too; our planner makes none.
    assert item.tensor_data is not None
    return item.tensor_data


def bytes_to_write(plan: SavePlan) -> int:
    """Return the bytes of the slices in a plan, not of the whole tensors that they belong to."""
    return sum(
        math.prod(_write_data_of(item).chunk.sizes) * _write_data_of(item).properties.dtype.itemsize
        for item in plan.items
    )


def slice_name(key: str, chunk: ChunkStorageMetadata, shape: Sequence[int]) -> str:
    """Return a slice's name in its file: the tensor's key and, unless it is whole, its offsets.

    An @ in the key is doubled, so that no key can look like a key with offsets.
    """
    key = key.replace("@", "@@")
    if list(chunk.sizes) == list(shape):
        return key
    return f"{key}@{','.join(map(str, chunk.offsets))}"


def build_tensor_table(
    metadata: Metadata, results: Iterable[tuple[int, str, Sequence[int], str, int]]
) -> dict[str, _index.StoredTensor]:
    """Return the index's table of tensors, from torch's metadata and what each rank has written.

    `results` has for each slice: rank, tensor's key, offsets, name in the rank's file, checksum.
    """
    stored = {(key, tuple(offsets)): (rank, name, crc) for rank, key, offsets, name, crc in results}
    table = {}
    for key, meta in metadata.state_dict_metadata.items():
        assert isinstance(meta, TensorStorageMetadata)
        slices = [
            # Rank r writes file number r.
            _index.StoredSlice(tuple(c.offsets), tuple(c.sizes), *stored[key, tuple(c.offsets)])
            for c in meta.chunks
        ]
        dtype = str(meta.properties.dtype).removeprefix("torch.")
        table[key] = _index.StoredTensor(tuple(meta.size), dtype, slices)
    return table


def write_index(folder: Path, index: _index.Index) -> None:
    """Write the last file of a checkpoint, and return once it is on the disk."""
    with _folder.open_to_write(folder / _folder.INDEX) as file:
        _safetensors.write_all(file, memoryview(index.to_text().encode()))
        os.fsync(file.fileno())


class Reader(StorageReader):
    """Reads slices of a checkpoint. It keeps the files that it needs open until `close`."""

    def __init__(self, folder: Path, index: _index.Index) -> None:
        self.folder = folder
        self.index = index
        # Open files stay readable even if another job prunes the checkpoint between the two passes.
        self._files: dict[int, _safetensors.SafetensorsFile] = {}
        self._stack = ExitStack()

    # The next methods are abstract in torch, as in `Writer`.
    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index's tensors in the form that torch's planner reads."""
        return to_torch_metadata(self.index.tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def close(self) -> None:
        self._stack.close()
        self._files.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def verify(self, plan: LoadPlan, rank: int, world_size: int, *, all_of_it: bool) -> None:
        """Compare every slice that the plan reads with its checksum.

        With `all_of_it`, also verify what no rank reads, divided evenly among the ranks.
        """
        tensors = self.index.tensors
        needed = {
            self._find_slice(item.storage_index): tensors[item.storage_index.fqn]
            for item in plan.items
        }
        if all_of_it:
            everything = [(each, tensor) for tensor in tensors.values() for each in tensor.slices]
            needed |= dict(everything[rank::world_size])
        for stored, tensor in needed.items():
            self.check(stored, tensor.torch_dtype)

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan says into the tensors that the planner knows."""
        for item in plan.items:
            stored = self._find_slice(item.storage_index)
            self.read(stored, item.storage_offsets, item.lengths, planner.resolve_tensor(item))
        future: Future[None] = Future()
        future.set_result(None)
        return future

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

    def _find_slice(self, index: MetadataIndex) -> _index.StoredSlice:
        slices = self.index.tensors[index.fqn].slices
        # The planner's hint is usually right, and saves a search through all slices.
        hint = index.index
        if hint is not None and hint < len(slices) and slices[hint].offsets == index.offset:
            return slices[hint]
        return next(each for each in slices if each.offsets == tuple(index.offset or ()))

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


def to_torch_metadata(tensors: Mapping[str, _index.StoredTensor]) -> Metadata:
    """Return the index's tensors as torch's planner expects them; torch calls slices chunks."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(tensor.torch_dtype),
                torch.Size(tensor.shape),
                [
                    ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
                    for each in tensor.slices
                ],
            )
            for key, tensor in tensors.items()
        }
    )
