"""Fill a model with weights: compare names and shapes on every rank, then read slices.

A parameter on the meta device receives memory in place, so optimizers and wrappers keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._optimizers.modules import WRAPPER_NAMES, plain_modules, plain_name
from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.received import received_tensors
from manyhands._tensors.flat import is_dtensor
from manyhands.checkpoint._handover import ForeignState, ForeignStates
from manyhands.checkpoint._model import ModelNames, can_convert, find_names, list_names
from manyhands.checkpoint._tensor_parts import to_parts
from manyhands.checkpoint.weights._files import Source, Weight, Weights

DATA_PARALLEL = "module."  # prefix of names in DistributedDataParallel


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
