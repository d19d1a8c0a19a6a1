"""Load weights from plain files into a model of any sharding, and write them as plain files.

_files.py     the tensors of safetensors files, state dict files and mappings, slice by slice
_loading.py   fill a model with them: each rank reads what it holds
_saving.py    write a model as safetensors files of a stated size, with an index
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from manyhands import _arguments as arguments
from manyhands._ranks.ranks import RankGroup
from manyhands.checkpoint.weights._loading import fill_model
from manyhands.checkpoint.weights._saving import write_model
from manyhands.sharding._agreement import wait_for_all_ranks

__all__ = ["load_weights", "save_weights"]


class IncompatibleNames(NamedTuple):
    """What `load_weights(strict=False)` did without, as torch's `load_state_dict` says it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@arguments.explained
def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    strict: bool = True,
    name_in_source: Callable[[str], str] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> IncompatibleNames:
    """Load weights from plain files into a model, wrapped or not. Call it on every rank.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> torch.save(model.state_dict(), "linear.pt")
    >>> mh.load_weights(model, "linear.pt")
    IncompatibleNames(missing_keys=[], unexpected_keys=[])

    Each rank reads only the slices that it holds, straight into the model's memory, and converts
    floating-point types on the way. A model on the meta device gets its memory here: build it there
    and load it before levels 0 to 2 of `shard`, or after level 3.

    Names are the plain model's. If the source lacks some, has others or other shapes, every rank
    raises the RuntimeError of `load_state_dict`, and nothing has changed. A tied tensor may have
    any of its names.

    Args:
        model: the model to load into.
        source: a folder as Hugging Face's (`model.safetensors`, `pytorch_model.bin`, or several of
            these with their index), a safetensors file, a file of `torch.save(model.state_dict())`,
            which is read with `weights_only=True`, or a dict of tensors.
        strict: False leaves what the source lacks as it is, ignores what the model lacks, and
            returns the names of both.
        name_in_source: is given each name in the model, and returns that of the source.
        process_group: the ranks that share the run; all, by default.
    """
    ranks = RankGroup.of(process_group)
    wait_for_all_ranks(ranks, "mh.load_weights()")
    return IncompatibleNames(*fill_model(model, source, strict, name_in_source, ranks))


@arguments.explained
def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    process_group: dist.ProcessGroup | None = None,
) -> list[Path]:
    """Write a model, wrapped or not, as safetensors files. Call it on every rank.

    >>> import torch, manyhands as mh
    >>> [path.name for path in mh.save_weights(torch.nn.Linear(3, 1), "exported")]
    ['model.safetensors']

    Names are the plain model's. A larger model becomes `model-00001-of-00003.safetensors` and so
    on, with their index. A `config.json` is written if the model has a config that can write one,
    and transformers' `from_pretrained` reads the folder. Rank 0 writes the files. Sharded
    tensors are gathered one at a time. A tied tensor is written once.

    Returns the paths of the tensors' files. If a rank fails, every rank raises, and earlier files
    stay as they were.

    Args:
        model: the model to write.
        folder: a folder of rank 0; it is made, and files of an earlier call in it are replaced.
        max_shard_size: the bytes of tensors in a file, as a number or such as "2GB". A larger
            tensor has a file of its own.
        process_group: the ranks that share the run; all, by default.
    """
    size = arguments.parse_bytes(max_shard_size)
    path = Path(arguments.file_path("folder", folder, "Write save_weights(model, folder)."))
    ranks = RankGroup.of(process_group)
    wait_for_all_ranks(ranks, "mh.save_weights()")
    return write_model(model, path, size, ranks)
