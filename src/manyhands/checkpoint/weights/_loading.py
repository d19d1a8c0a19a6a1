"""Load weights: read a source, compare names and shapes on every rank, then read slices.

`Weights` reads safetensors files, state dict files and mappings of tensors, slice by slice. Folders
have the layout of transformers. Files may be links, as in Hugging Face's cache. State dicts are
read with `weights_only=True` and memory-mapped, so no code is unpickled.

A parameter on the meta device receives memory in place, so optimizers and wrappers keep it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from manyhands._arguments import file_path
from manyhands._optimizers.modules import WRAPPER_NAMES, plain_modules, plain_name
from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.received import received_tensors
from manyhands._tensors.flat import is_dtensor
from manyhands.checkpoint._commit import parse_json, read_text
from manyhands.checkpoint._folder import OpenFile
from manyhands.checkpoint._handover import ForeignState, ForeignStates
from manyhands.checkpoint._model import ModelNames, can_convert, find_names, list_names
from manyhands.checkpoint._reader import SafetensorsFile
from manyhands.checkpoint._tensor_parts import to_parts

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMES = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor]
DATA_PARALLEL = "module."  # prefix of names in DistributedDataParallel


# -- sources ---------------------------------------------------------------------------------------


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


# -- filling a model -------------------------------------------------------------------------------


def fill_model(
    model: nn.Module,
    source: Source,
    strict: bool,
    name_in_source: Callable[[str], str] | None,
    ranks: RankGroup,
) -> tuple[list[str], list[str]]:
    """Load the source into the model. Return missing and unexpected names."""
    with run_on_all(ranks, lambda: Weights(source)) as weights:
        listed = sorted(f"{name} {w.shape} {w.dtype}" for name, w in weights.tensors.items())
        agree(ranks, {"weights": listed}, "Give each rank the same source.")
        match = run_on_all(ranks, lambda: match_weights(model, weights, strict, name_in_source))

        def fill() -> None:
            materialize(model)
            for tensor, weight in match.reads:
                for offsets, elements in to_parts(tensor).slices:
                    weight.read(offsets, elements)

        try:
            run_on_all(ranks, match.extras.apply)  # first: a module may refuse the state
            run_on_all(ranks, fill)
        except BaseException:
            match.extras.undo()
            raise
    return match.missing, match.unexpected


@dataclass
class Match:
    """The weight of each tensor in a model, and unmatched names."""

    reads: list[tuple[Tensor, Weight]] = field(default_factory=list)
    extras: ForeignStates = field(default_factory=ForeignStates)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def match_weights(
    model: nn.Module,
    weights: Weights,
    strict: bool,
    name_in_source: Callable[[str], str] | None,
) -> Match:
    """Compare a model with weights. Raise RuntimeError if they do not fit."""
    names = find_names(model, on_meta=True)
    match = Match()
    wrong = []
    empty = []
    stored = _by_plain_name({**weights.tensors, **weights.others}, names)
    rename = name_in_source or str
    received = received_tensors()  # from a crew: newer than any file
    used = {rename(name) for name in (*names.tensors, *names.aliases, *names.extras)}
    match.unexpected = sorted(set(stored) - used)
    for name, tensor in names.tensors.items():
        known = [other for other in map(rename, names.all_of(name)) if other in stored]
        if not known:
            match.missing.append(name)
            if tensor.is_meta:
                empty.append(name)
            continue
        weight = stored[known[-1]]  # as in load_state_dict, the last tied name wins
        here = tuple(tensor.shape)
        if not isinstance(weight, Weight) or weight.shape != here:
            shape = getattr(weight, "shape", type(weight).__name__)
            wrong.append(f"size mismatch for {name}: {shape} in the source and {here} here.")
        elif not can_convert(weight.dtype, tensor.dtype):
            wrong.append(f"{name} is {weight.dtype} in the source and {tensor.dtype} here.")
        elif id(tensor) not in received:
            match.reads.append((tensor, weight))
    for name, module in names.extras.items():
        if rename(name) not in stored:
            match.missing.append(name)
            continue
        where = f"{name!r} of {weights.where}"
        value = _read_value(stored[rename(name)])
        state = ForeignState(where, module.get_extra_state, module.set_extra_state, value)
        match.extras.states.append(state)
    # The error of torch's `load_state_dict`.
    if strict:
        for words, keys in (("Unexpected", match.unexpected), ("Missing", match.missing)):
            if keys:
                quoted = ", ".join(f'"{key}"' for key in keys)
                wrong.insert(0, f"{words} key(s) in state_dict: {quoted}. ")
    if wrong:
        text = "\n\t".join(wrong)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{text}")
    for prefix, module in plain_modules(model):
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                empty.append(prefix + name)
    if empty:
        raise RuntimeError(
            f"{list_names(empty)} of the model are on the meta device and not in the source. Build "
            "the model with only the source's tensors on meta, as with "
            "accelerate.init_empty_weights()."
        )
    return match


def _read_value(stored: object) -> object:
    """Return a full tensor of the source, or any other value."""
    if not isinstance(stored, Weight):
        return stored
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    stored.read((0,) * tensor.dim(), tensor)
    return tensor


def _by_plain_name(stored: dict[str, Any], names: ModelNames) -> dict[str, Any]:
    plain = {plain_name(name, WRAPPER_NAMES): weight for name, weight in stored.items()}
    ours = (*names.tensors, *names.aliases)
    if all(name.startswith(DATA_PARALLEL) for name in plain) and not any(
        name.startswith(DATA_PARALLEL) for name in ours
    ):
        plain = {name.removeprefix(DATA_PARALLEL): weight for name, weight in plain.items()}
    return plain


# -- the meta device -------------------------------------------------------------------------------


def materialize(model: nn.Module) -> None:
    """Allocate uninitialized memory for tensors on meta, keeping the tensor objects."""
    tensors = [*model.parameters(), *model.buffers()]
    default: torch.device | str = torch.get_default_device()
    for tensor in reversed(tensors):
        if not tensor.is_meta:
            default = tensor.device
    for tensor in tensors:
        if not tensor.is_meta:
            continue
        device = default
        if is_dtensor(tensor):
            device = tensor.device_mesh.device_type
        new = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, new)
