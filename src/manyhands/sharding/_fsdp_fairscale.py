"""fairscale's slices of a model, put together without fairscale and without workers.

What its `local_metadata_dict()` says of each wrap, in the order of `param_metadata`, a list:

    fsdp_path                   the module that is wrapped, "" for the outermost
    params                      of each vector: the parameters laid out in it, one after the other,
                                by name, shape and number of elements, and `padding`, the
                                elements that were added to this rank's slice to make all as long
    shared_param_info           names of tied parameters, (the one that is there, the other)
    no_broadcast_optim_state    each worker has its own, and rank 0's is taken

Names are relative to the wrap's module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def from_fairscale(
    weights: Sequence[Mapping[str, Tensor]],
    metadata: Sequence[Mapping[str, Any]],
    with_buffers: bool,
    strict: bool,
) -> dict[str, Tensor]:
    """The plain model's state dict from each worker's `local_state_dict()` of fairscale."""
    result: dict[str, Tensor] = {}
    wraps = metadata[0]["param_metadata"]
    counts = [len(each["param_metadata"]) for each in metadata]
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks' metadata are of different models: {counts} wraps.")
    for number, wrap in enumerate(wraps):
        paddings = [each["param_metadata"][number]["params"] for each in metadata]
        ranks = 1 if wrap["no_broadcast_optim_state"] else len(weights)
        for vector, facts in wrap["params"].items():
            key = _joined(wrap["fsdp_path"], vector)
            if missing := [rank for rank in range(ranks) if key not in weights[rank]]:
                if strict:
                    raise ValueError(
                        f"{key} is not in the weights of rank(s) {missing}. Give all, or "
                        "strict=False to leave it out."
                    )
                continue
            slices = [
                _unpadded(weights[rank][key], paddings[rank][vector]["padding"])
                for rank in range(ranks)
            ]
            whole = torch.cat(slices)
            if whole.numel() != sum(facts["numels"]):
                raise ValueError(
                    f"the slices of {key} have {whole.numel()} elements, and its parameters "
                    f"{sum(facts['numels'])}. Give the slices of all workers, in rank order."
                )
            parts = whole.split(list(facts["numels"]))
            for name, shape, part in zip(facts["names"], facts["shapes"], parts, strict=True):
                result[_joined(wrap["fsdp_path"], name)] = part.view(shape)
    for wrap in wraps:
        for there, other in wrap["shared_param_info"]:
            tied = _joined(wrap["fsdp_path"], there)
            if tied in result:
                result[_joined(wrap["fsdp_path"], other)] = result[tied]
    _add_unlisted_ties(result, weights, metadata[0])
    if with_buffers:
        names = metadata[0]["buffer_names"]
        if strict and (missing_buffers := [name for name in names if name not in weights[0]]):
            raise ValueError(
                f"buffers {missing_buffers} are not in rank 0's weights. Give all, or strict=False "
                "or with_module_buffers=False to leave them out."
            )
        result.update({name: weights[0][name] for name in names if name in weights[0]})
    return result


def _add_unlisted_ties(
    result: dict[str, Tensor], weights: Sequence[Mapping[str, Tensor]], metadata: Mapping[str, Any]
) -> None:
    """Add tied parameters of wraps that do not flatten: their metadata do not say which they are.

    Each name of one is in the weights, with the same slices as the name that is listed.
    """
    listed = {
        _joined(wrap["fsdp_path"], vector)
        for wrap in metadata["param_metadata"]
        for vector in wrap["params"]
    }
    for other in weights[0].keys() - listed - result.keys() - set(metadata["buffer_names"]):
        for there in sorted(listed & result.keys()):
            if all(other in each and _same(each[other], each[there]) for each in weights):
                result[other] = result[there]
                break


def _same(first: Tensor, second: Tensor) -> bool:
    return first is second or (first.shape == second.shape and torch.equal(first, second))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unpadded(vector: Tensor, padding: int) -> Tensor:
    return vector.reshape(-1)[: vector.numel() - padding]
