"""Read safetensors files, state dict files and mappings of tensors, slice by slice.

Folders have the layout of transformers. Files may be links, as in Hugging Face's cache. State dicts
are read with `weights_only=True` and memory-mapped, so no code is unpickled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from manyhands._arguments import file_path
from manyhands.checkpoint._commit import parse_json, read_text
from manyhands.checkpoint._folder import OpenFile
from manyhands.checkpoint._reader import SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMES = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor]


@dataclass(frozen=True)
class Weight:
    """A tensor of a source. `read` copies the slice at an offset into a tensor of equal size."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Sequence[int], Tensor], None]


class Weights(ExitStack):
    """The tensors of a source by name. Files stay open until `close`."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.tensors: dict[str, Weight] = {}
        self.others: dict[str, object] = {}  # values other than tensors, such as extra state
        self.where = "the source"
        try:
            if isinstance(source, Mapping):
                self._add_mapping(source, self.where)
            else:
                self.where = os.fspath(file_path("source", source, "Or give a dict of tensors."))
                for path in find_files(Path(self.where)):
                    if path.suffix != ".safetensors":
                        self._add_mapping(_load_state_dict(path), str(path))
                        continue
                    opened = OpenFile(Path(os.path.realpath(path)))
                    self.callback(opened.close)
                    plain = SafetensorsFile(opened, path)
                    for name, entry in plain.entries.items():
                        read = partial(plain.read, name)
                        self.tensors[name] = Weight(entry.shape, entry.dtype, read)
        except BaseException:
            self.close()
            raise

    def _add_mapping(self, tensors: Mapping[str, object], where: str) -> None:
        for name, value in tensors.items():
            if not isinstance(name, str):
                raise ValueError(f"names must be strings, and {where} has the name {name!r:.80}.")
            if isinstance(value, Tensor):
                if value.layout != torch.strided or value.is_quantized or value.is_meta:
                    kind = f"{value.dtype} {value.layout} tensor on {value.device}"
                    raise ValueError(f"{where}: {name!r} must be dense, got a {kind}.")
                shape = tuple(value.shape)
                self.tensors[name] = Weight(shape, value.dtype, partial(_copy_slice, value))
            else:
                self.others[name] = value
        nested = [repr(name) for name, value in self.others.items() if isinstance(value, Mapping)]
        if nested and not self.tensors:
            raise ValueError(
                f"{where} has no tensors, but {', '.join(nested)}. Load it with torch.load(path, "
                "mmap=True), and pass the entry with the model's state dict."
            )


def _load_state_dict(path: Path) -> Mapping[str, object]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise any error
        raise ValueError(f"{path} is not a readable file of weights: {error!s:.400}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} must contain a state dict, got a {type(state).__name__}.")
    return state


@torch.no_grad()
def _copy_slice(whole: Tensor, offsets: Sequence[int], target: Tensor) -> None:
    for dim, (start, size) in enumerate(zip(offsets, target.shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    target.copy_(whole)


def find_files(path: Path) -> list[Path]:
    """Return the weight files at a path: the file itself, or the files of a folder."""
    if path.is_file():
        found = path
    elif not path.is_dir():
        raise FileNotFoundError(
            f"{path} does not exist on this rank. Pass a file or a folder of weights. Download "
            "weights of a hub first, for example with huggingface_hub.snapshot_download."
        )
    else:
        there = [path / name for name in NAMES if (path / name).is_file()]
        if not there:
            raise FileNotFoundError(f"{path} has none of {', '.join(NAMES)}. Pass a file.")
        found = there[0]
    if not found.name.endswith(".index.json"):
        return [found]
    try:
        with contextlib.closing(OpenFile(Path(os.path.realpath(found)))) as opened:
            index = parse_json(read_text(opened, 0, opened.size))
        names = sorted(set(index["weight_map"].values()))
        if not set(names) <= set(os.listdir(found.parent)):
            raise ValueError("it lists files that are not in the folder")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{found} is not an index of weights: {error!r:.200}.") from error
    return [found.parent / name for name in names]
