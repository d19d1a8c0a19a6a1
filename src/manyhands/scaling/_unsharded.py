"""Find the unsharded parameters of `fully_shard`, and gradients that it has not averaged.

The optimizer's parameters are DTensors, for which autograd hooks never run. During forward and
backward, `fully_shard` replaces the DTensors by *unsharded* parameters, permanent objects with
temporary memory.

A sharded module contains the optimizer's parameters, which determines their names. `unshard()`
inserts the unsharded parameters under these names, at the cost of an all-gather per module when the
rule is created.

The garbage collector finds the modules. (A global forward hook may run after the replacement of
parameters.)
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from manyhands._tensors.flat import DTensorShards, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def unsharded_parameters(params: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the unsharded parameters by index in `params`. Call this on every rank."""
    index_of: dict[int, int] = {}
    for i, param in enumerate(params):
        if is_dtensor(param):
            DTensorShards.of(param)  # raises for unsupported parameters, before any collective
            index_of[id(param)] = i
    if not index_of:
        return {}
    modules = _fsdp_modules()
    owned, missing = _names_by_module(modules, index_of)
    if missing:
        # After a forward pass without backward, the outermost module is still unsharded.
        for module in modules:
            module.reshard()
        owned, missing = _names_by_module(modules, index_of)
    if missing:
        first = params[min(missing.values())]
        raise ValueError(
            f"{len(missing)} of {len(index_of)} sharded parameters (the first has shape "
            f"{tuple(first.shape)}) are in no module that fully_shard was called on. "
            "Create the optimizer after fully_shard. Modules created before gc.freeze() are not "
            "found: call gc.unfreeze() first."
        )
    found: dict[int, Tensor] = {}
    # Each unshard() is a collective. The garbage collector's order differs between ranks.
    for module, names in sorted(owned, key=lambda item: min(item[1])):
        module.unshard()
        for i, (holder, name) in names.items():
            replacement = holder._parameters[name]
            if replacement is None or is_dtensor(replacement):
                raise ValueError("scaling supports fully_shard, but not tensor parallelism.")
            found[i] = replacement
        module.reshard()
    return found


def find_unaveraged_gradients(
    params: Sequence[Tensor], unsharded: dict[int, Tensor], measured: Collection[int]
) -> str | None:
    """Return an error message if `fully_shard` has not averaged the `measured` gradients."""
    if any(i in unsharded and params[i].grad is None for i in measured):
        return (
            "after the step's last backward() there are gradients that fully_shard has not "
            "averaged. Run the last pass outside no_sync() and with "
            "set_requires_gradient_sync(True)."
        )
    if any(param.grad is not None for param in unsharded.values()):
        return (
            "the step's last backward() has left gradients that fully_shard has not averaged: "
            "a module that it was called on ran more than once under reentrant checkpoints, "
            "which torch's fully_shard does not support. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint."
        )
    return None


def _fsdp_modules() -> list[FSDPModule]:
    """Return the sharded modules in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    # Instances refer to their classes, which are subclasses of FSDPModule.
    classes = _with_subclasses(fsdp.FSDPModule)
    return [thing for thing in gc.get_referrers(*classes) if type(thing) in classes]


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


def _names_by_module(
    modules: Sequence[FSDPModule], index_of: dict[int, int]
) -> tuple[list[tuple[FSDPModule, dict[int, tuple[nn.Module, str]]]], dict[int, int]]:
    """Return each `fully_shard` module's parameters, with holder and name, and the missing."""
    missing = dict(index_of)
    owned = []
    # Innermost modules first: each shards the parameters that no inner module shards.
    for fsdp_module in sorted(modules, key=_count_modules):
        names = {}
        for module in cast(nn.Module, fsdp_module).modules():
            for name, param in module._parameters.items():
                if id(param) in missing:
                    names[missing.pop(id(param))] = module, name
        if names:
            owned.append((fsdp_module, names))
    return owned, missing


def _count_modules(module: FSDPModule) -> int:
    return len(list(cast(nn.Module, module).modules()))
