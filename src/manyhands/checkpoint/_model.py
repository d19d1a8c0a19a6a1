"""A model's tensors under their plain names: out of one wrapping, and into any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._core.dtensor import is_dtensor
from manyhands.checkpoint import _index
from manyhands.checkpoint._names import Names, listed, put_new
from manyhands.checkpoint._shares import part_to_save
from manyhands.checkpoint._undo import Other
from manyhands.checkpoint._values import decoded, encoded


def saved_model(names: Names, prefix: str, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What there is (as JSON), and this worker's tensors by key.

    Every worker gives its parameters, of which those that all have are written once. Buffers are
    rank 0's, as under DistributedDataParallel.
    """
    tensors: dict[str, Any] = {}

    def put(path: str, tensor: Tensor) -> str:
        put_new(tensors, path, part_to_save(tensor))
        return path

    for name, tensor in names.params.items():
        put(f"{prefix}/{name}", tensor)
    for name, tensor in names.buffers.items():
        if rank == 0 or is_dtensor(tensor):
            put(f"{prefix}/{name}", tensor)
    extras = {name: module.get_extra_state() for name, module in names.extras.items()}
    told = {
        "params": list(names.params),
        "buffers": list(names.buffers),
        "aliases": names.aliases,
        "extras": {
            name: encoded(state, f"{prefix}/{name}", put if rank == 0 else lambda path, _: path)
            for name, state in extras.items()
        },
    }
    return told, tensors


class ModelLoading:
    """A saved model on its way into one here; making it checks that it fits, changing nothing."""

    def __init__(
        self,
        names: Names,
        told: Mapping[str, Any],
        prefix: str,
        tensors: Mapping[str, _index.Tensor],
        get: Callable[[str], Tensor],
        what: str = "model",
    ) -> None:
        self.targets: dict[str, Any] = {}
        saved = {name: name for name in (*told["params"], *told["buffers"])} | told["aliases"]
        missing, wrong = [], []
        first: dict[str, Tensor] = {}
        self._twins: list[tuple[Tensor, Tensor]] = []
        for name, tensor in names.tensors.items():
            known = [other for other in names.all_of(name) if other in saved]
            if not known:
                missing.append(name)
                continue
            key = f"{prefix}/{saved[known[0]]}"
            there = tensors[key]
            if tuple(tensor.shape) != there.shape:
                wrong.append(f"{name!r} is {there.shape} there and {tuple(tensor.shape)} here")
            elif not _converts(there.torch_dtype, tensor.dtype):
                wrong.append(f"{name!r} is {there.dtype} there and {tensor.dtype} here")
            elif key in self.targets:  # tied there, and not here
                self._twins.append((tensor, first[key]))
            else:
                self.targets[key] = part_to_save(tensor)
                first[key] = tensor
        here = {*names.tensors, *names.aliases}
        unexpected = sorted(set(saved) - here)
        missing += sorted(set(names.extras) - set(told["extras"]))
        unexpected += sorted(set(told["extras"]) - set(names.extras))
        problems = [
            *([f"only the {what} here has {listed(sorted(missing))}"] if missing else []),
            *([f"only the checkpoint has {listed(unexpected)}"] if unexpected else []),
            *wrong[:8],
        ]
        if problems:
            raise ValueError(
                f"the checkpoint's {what} is another one: {'; '.join(problems)}. Build the model "
                "that was saved."
            )
        self.others = [
            Other(name, module.get_extra_state, module.set_extra_state, decoded(state, get))
            for name, state in told["extras"].items()
            for module in [names.extras[name]]
        ]

    def finish(self) -> None:
        """The targets are filled, which are the model's own tensors; those tied there follow."""
        with torch.no_grad():
            for tensor, first in self._twins:
                tensor.copy_(first)


def _converts(there: torch.dtype, here: torch.dtype) -> bool:
    """Whether numbers of one type may be loaded as the other."""
    return there == here or (there.is_floating_point and here.is_floating_point)


def returned(
    told: Mapping[str, Any], prefix: str, get: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """A saved module that nobody gave a module for: its tensors by name."""
    return {name: get(f"{prefix}/{name}") for name in (*told["params"], *told["buffers"])}


def is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)
