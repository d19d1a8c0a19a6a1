"""Where torch's planners write to and read from: safetensors files beside an index of JSON.

Each worker writes one file, `worker-00003.safetensors`. Reading goes over the files twice: first
all that is going to be read is compared with its checksums, then it is read.
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from manyhands.checkpoint import _files, _index, _safetensors
from manyhands.checkpoint._safetensors import Entry

SUFFIX = ".safetensors"


def file_name(rank: int) -> str:
    return f"worker-{rank:05d}{SUFFIX}"


class Writer(StorageWriter):
    """Writes a worker's part into a folder."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.rank = rank
        self.file: _index.File | None = None  # once it is written

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan says, to the disk."""
        # Wide types first: every tensor then begins where its type may.
        items = sorted(plan.items, key=lambda each: -_data(each).properties.dtype.itemsize)
        entries = []
        for each in items:
            data = _data(each)
            name = chunk_name(each.index.fqn, data.chunk, data.size)
            entries.append(Entry(name, data.properties.dtype, tuple(data.chunk.sizes)))

        def tensor(number: int) -> torch.Tensor:
            found = planner.resolve_data(items[number])
            assert isinstance(found, torch.Tensor)
            return found

        name = file_name(self.rank)
        written = _safetensors.write(self.folder / name, entries, tensor)
        self.file = _index.File(name, written.nbytes, written.header)
        results = [
            WriteResult(each.index, entry.nbytes, (entry.name, total))
            for each, entry, total in zip(items, entries, written.tensors, strict=True)
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Left to `write_index`, which has more to tell than the tensors."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)


def _data(each: Any) -> Any:
    assert each.tensor_data is not None
    return each.tensor_data


def bytes_of(plan: SavePlan) -> int:
    """How many bytes of tensors a worker writes: of its chunks, not of the tensors they are of."""
    return sum(
        math.prod(_data(each).chunk.sizes) * _data(each).properties.dtype.itemsize
        for each in plan.items
    )


def chunk_name(key: str, chunk: ChunkStorageMetadata, shape: Sequence[int]) -> str:
    """What a part is called in its file: the tensor's name, and where it begins if it is cut.

    An @ of the tensor's own name is doubled, so that none is taken for such a place.
    """
    key = key.replace("@", "@@")
    if list(chunk.sizes) == list(shape):
        return key
    return f"{key}@{','.join(map(str, chunk.offsets))}"


def tensors_of(
    metadata: Metadata, results: Iterable[tuple[int, str, Sequence[int], str, int]]
) -> dict[str, _index.Tensor]:
    """The index's table, from torch's metadata and what each worker has written.

    `results`: of each part the worker, the tensor, the offsets, the name in the file, the sum.
    """
    where = {(key, tuple(at)): (rank, name, crc) for rank, key, at, name, crc in results}
    table = {}
    for key, told in metadata.state_dict_metadata.items():
        assert isinstance(told, TensorStorageMetadata)
        chunks = [
            _index.Chunk(tuple(c.offsets), tuple(c.sizes), *where[key, tuple(c.offsets)])
            for c in told.chunks
        ]
        dtype = str(told.properties.dtype).removeprefix("torch.")
        table[key] = _index.Tensor(tuple(told.size), dtype, chunks)
    return table


def write_index(folder: Path, index: _index.Index) -> None:
    """The last file of a checkpoint, to the disk."""
    with _files.writer(folder / _index.NAME) as file:
        _safetensors.write_all(file, memoryview(index.text().encode()))
        os.fsync(file.fileno())


class Reader(StorageReader):
    """Reads parts of a checkpoint; the files it needs stay open until `close`."""

    def __init__(self, folder: Path, index: _index.Index) -> None:
        self.folder = folder
        self.index = index
        self._files: dict[int, _safetensors.File] = {}
        self._stack = ExitStack()

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index in torch's words."""
        return metadata_of(self.index.tensors)

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

    def verify(self, plan: LoadPlan, rank: int, workers: int, *, all_of_it: bool) -> None:
        """Compare all that the plan reads with its checksums.

        With `all_of_it`, what nobody needs to read as well: each worker takes its share of it.
        """
        tensors = self.index.tensors
        needed = {
            self._chunk(item.storage_index): tensors[item.storage_index.fqn] for item in plan.items
        }
        if all_of_it:
            everything = [(chunk, told) for told in tensors.values() for chunk in told.chunks]
            needed |= dict(everything[rank::workers])
        for chunk, told in needed.items():
            self.check(chunk, told.torch_dtype)

    def check(self, chunk: _index.Chunk, dtype: torch.dtype) -> None:
        """Compare a part with its checksum."""
        file = self._opened(chunk.file)
        entry = file.entries.get(chunk.name)
        if entry is None or (entry.shape, entry.dtype) != (chunk.sizes, dtype):
            raise ValueError(
                f"{file.path} has no {chunk.name!r} of shape {chunk.sizes} and type {dtype}: it is "
                "not the file that belongs to this checkpoint. Load another one."
            )
        if file.checksum(chunk.name) != chunk.crc32:
            raise ValueError(
                f"{file.path} is damaged: the checksum of {chunk.name!r} is not the one that was "
                "saved. Restore the file, or load another checkpoint."
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            self.read(chunk, item.storage_offsets, item.lengths, planner.resolve_tensor(item))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(
        self,
        chunk: _index.Chunk,
        offsets: Sequence[int],
        sizes: Sequence[int],
        to: torch.Tensor,
    ) -> None:
        """Copy a box of a part into a tensor of its size."""
        self._opened(chunk.file).read_box(chunk.name, offsets, sizes, to.detach())

    def whole(self, key: str) -> torch.Tensor:
        """A small tensor, compared with its checksums, in new memory."""
        told = self.index.tensors[key]
        for chunk in told.chunks:
            self.check(chunk, told.torch_dtype)
        result = torch.empty(told.shape, dtype=told.torch_dtype)
        self.read_into(key, result)
        return result

    def read_into(self, key: str, result: torch.Tensor) -> None:
        """Copy a whole tensor, part by part."""
        for chunk in self.index.tensors[key].chunks:
            part = result
            for dim, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, at, size)
            self.read(chunk, (0,) * len(chunk.sizes), chunk.sizes, part)

    def _chunk(self, index: MetadataIndex) -> _index.Chunk:
        chunks = self.index.tensors[index.fqn].chunks
        hint = index.index
        if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
            return chunks[hint]
        return next(c for c in chunks if c.offsets == tuple(index.offset or ()))

    def _opened(self, number: int) -> _safetensors.File:
        file = self._files.get(number)
        if file is None:
            told = self.index.files[number]
            path = self.folder / told.name
            try:
                file = _safetensors.File(path)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{path} is missing: the checkpoint needs each of its {len(self.index.files)} "
                    "files of tensors. Copy the whole folder, or load another checkpoint."
                ) from error
            self._stack.callback(file.close)
            if file.nbytes != told.nbytes or file.header_sum != told.crc32:
                raise ValueError(
                    f"{path} is damaged, or is another checkpoint's: its header is not the one "
                    "that was saved. Restore the file, or load another checkpoint."
                )
            self._files[number] = file
        return file


def metadata_of(tensors: Mapping[str, _index.Tensor]) -> Metadata:
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(told.torch_dtype),
                torch.Size(told.shape),
                [
                    ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                    for c in told.chunks
                ],
            )
            for key, told in tensors.items()
        }
    )
