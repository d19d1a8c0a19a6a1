"""Checks of a wrap before anything is sharded or sent: modules, parameters, groups, agreement."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from manyhands._core.agreement import agree
from manyhands._core.modules import check_not_averaged_inside, plain_name
from manyhands._core.ranks import RankGroup
from manyhands._core.sharded import is_dtensor
from manyhands.sharding.fsdp._optimizer_guard import REPLACED
from manyhands.sharding.fsdp._places import Places, named_params


def check_module(module: Any, wrapper: type[nn.Module], wrapped: Container[nn.Module] = ()) -> None:
    """Raise a TypeError if a module cannot be wrapped. `wrapped` are modules in a wrap already."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"FullyShardedDataParallel needs a torch.nn.Module, got {type(module).__name__}."
        )
    check_not_averaged_inside(module)
    if isinstance(module, wrapper):
        raise TypeError("the module is wrapped already; wrap it once, or a larger one around it.")
    if module in wrapped:
        raise TypeError(
            f"this {type(module).__name__} is in a FullyShardedDataParallel already, and is "
            "sharded in place: a second wrap around it would not shard it again. Use the first "
            "wrap, wrap a larger module around that, or build the module again."
        )
    # The engine gathers in a hook of forward, and a container such as ModuleList has none.
    if type(module).forward is nn.Module.forward:
        raise TypeError(
            f"a {type(module).__name__} has no forward in which its parameters could be gathered. "
            "Wrap its members, or the module that runs them."
        )


def check_parameters(places: Places, ranks: RankGroup) -> None:
    """Raise a ValueError if the parameters at these places cannot be sharded together."""
    trained: dict[torch.dtype, str] = {}  # the first trained parameter of each type
    for name, param in named_params(places):
        if is_dtensor(param):
            raise ValueError(
                f"parameter {name} is sharded already (a DTensor, as fully_shard or tensor "
                "parallelism makes them). Wrap the plain module."
            )
        # An inner wrap has marked the plain parameter that it replaced by a sharded one.
        if getattr(param, REPLACED, False):
            raise ValueError(
                f"parameter {name} is tied to one that a wrap inside has sharded already, and the "
                "two would be trained apart. Put one wrap around all modules that share the "
                "parameter, instead of wrapping each."
            )
        if ranks.size > 1 and (param.dim() == 0 or param.numel() == 0):
            raise ValueError(
                f"parameter {name} has the shape {tuple(param.shape)}, which cannot be divided "
                "among ranks. Make a scalar a vector of one element "
                "(torch.nn.Parameter(p.view(1))), and remove empty parameters."
            )
        if param.requires_grad:
            trained.setdefault(param.dtype, name)
    # The engine reduces a wrap's gradients in one buffer, which has one type.
    if len(trained) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in trained.items())
        raise ValueError(
            f"the parameters of one wrap must be of one type, and {listed}. Wrap the modules of "
            "one type separately, or convert the module; mixed_precision=True computes in a "
            "smaller type and keeps the parameters."
        )


def check_inner_groups(ranks: RankGroup, inside: Sequence[RankGroup]) -> None:
    """Raise a ValueError if an inner wrap has other ranks, unless each rank is in its own group."""
    own = _members(ranks)
    for inner in inside:
        if inner.size > 1 and _members(inner) != own:
            raise ValueError(
                f"a wrap inside has {_describe_ranks(inner)}, and the one around it "
                f"{_describe_ranks(ranks)}. Give all wraps of a model the same process_group; only "
                "a group of one may be inside another, for parameters that each rank trains by "
                "itself."
            )


def _members(ranks: RankGroup) -> list[int] | None:
    # A group of one, or a stand-in for it, has no rank numbers to compare.
    return None if ranks.size == 1 else ranks.ranks


def _describe_ranks(ranks: RankGroup) -> str:
    members = _members(ranks)
    return "one rank" if members is None else f"the ranks {members}"


def check_root(ranks: RankGroup, were_roots: Sequence[bool | None]) -> None:
    """Raise a RuntimeError if a wrap inside has run as a root before."""
    # The engine fixes its root in the first forward, and has no way to change it.
    if any(were_roots) and ranks.size > 1:
        raise RuntimeError(
            "a wrap inside this one has run by itself before, as the outermost. Run the outermost "
            "wrap's forward first; afterwards inner wraps may run by themselves, too."
        )


def check_same_model(
    ranks: RankGroup,
    wraps: Sequence[tuple[Places, Mapping[str, Any]]],
    device: torch.device,
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
) -> None:
    """Raise a ValueError on every rank if ranks have different models or options.

    `wraps` are the places and options of each wrap. The buffers of `modules` are compared, too.
    """
    buffers = {
        plain_name(f"{path}.{name}" if path else name): buffer
        for path, module in modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    facts: dict[str, Any] = {"numbers of wraps": len(wraps)}
    for number, (places, options) in enumerate(wraps):
        facts[f"parameters in wrap {number}"] = {
            name: f"{tuple(t.shape)} {t.dtype}{_describe_kind(t)}"
            for name, t in [*named_params(places), *buffers.items()]
        }
        facts[f"options in wrap {number}"] = {
            # Each rank may have its own GPU, so only the kind of device is compared.
            name: value.type if isinstance(value, torch.device) else str(value)
            for name, value in options.items()
        }
    advice = "Build the same model with the same options on every rank."
    agree(ranks, facts, advice, device=device)


def _describe_kind(tensor: Tensor) -> str:
    meta = " without memory" if tensor.is_meta else ""
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return meta + frozen
