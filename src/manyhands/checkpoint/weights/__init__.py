"""Load plain weight files into a model of any sharding, and save a model as plain files.

_loading.py   read sources and fill a model: each rank reads its slices
_saving.py    write a model as safetensors files of limited size, with an index
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
    """The names that do not match, in the form that torch's `load_state_dict` returns."""

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
    """Load weights from plain files into a model. Call this function on every rank.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> torch.save(model.state_dict(), "linear.pt")
    >>> mh.load_weights(model, "linear.pt")
    IncompatibleNames(missing_keys=[], unexpected_keys=[])

    Each rank reads only slices of this rank into the model's memory, and converts floating-point
    types. Parameters on the meta device receive memory: load them before levels 0 to 2 of `shard`,
    or after level 3.

    The source uses the plain model's names. If names or shapes do not match, every rank raises the
    RuntimeError of torch's `load_state_dict`, and the model does not change. For a tied tensor any
    of the names is accepted.

    Args:
        model: the model to load into, wrapped or not.
        source: a folder in Hugging Face's layout (`model.safetensors`, `pytorch_model.bin`, or
            files with an index), a safetensors file, a file of `torch.save(model.state_dict())`, or
            a dict of tensors. Pickled files are read with `weights_only=True`.
        strict: False ignores names that only the model or only the source has, and returns them.
        name_in_source: maps a name in the model to the name in the source.
        process_group: the ranks that load together. Default: all ranks.
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
    """Write a model as safetensors files. Call this function on every rank.

    >>> import torch, manyhands as mh
    >>> [path.name for path in mh.save_weights(torch.nn.Linear(3, 1), "exported")]
    ['model.safetensors']

    The files use the plain model's names. A model above `max_shard_size` is split into
    `model-00001-of-00003.safetensors` and so on, with an index. If the model has a transformers
    config, `config.json` is written, and `from_pretrained` can read the folder. Rank 0 writes the
    files. Sharded tensors are gathered one at a time. A tied tensor is written once.

    Returns the paths of the weight files. If a rank fails, every rank raises, and earlier files
    remain unchanged.

    Args:
        model: the model to write, wrapped or not.
        folder: a folder of rank 0. Files of an earlier call are replaced.
        max_shard_size: the maximum bytes of tensors per file, as a number or a text such as "2GB".
            A larger tensor is stored in a separate file.
        process_group: the ranks that share the model. Default: all ranks.
    """
    size = arguments.parse_bytes(max_shard_size)
    path = Path(arguments.file_path("folder", folder, "Write save_weights(model, folder)."))
    ranks = RankGroup.of(process_group)
    wait_for_all_ranks(ranks, "mh.save_weights()")
    return write_model(model, path, size, ranks)
