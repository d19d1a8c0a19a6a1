"""Where `fully_shard` computes: from a sharded parameter to the tensor that gets gradients.

The optimizer holds DTensors, on which no hook of autograd ever fires. Around forward and backward,
`fully_shard` puts *unsharded* parameters into the modules in their place. Each of these is always
the same object, although its memory is allocated and freed. Its gradient is that of one
micro-batch on one rank.

Only public interfaces are used to find them. While a module is sharded, its parameters *are* the
optimizer's, by identity, so that names are certain. `unshard()` puts the unsharded ones in under
the same names, and `reshard()` takes them out. That is an all-gather of the parameters, one module
at a time, when the rule is made. Nothing stays behind in the modules: no forward hooks whose order,
repetition in checkpoints or effect on torch.compile would matter.

An optimizer does not know its modules. Unless the model is an argument, Python's garbage collector
is asked for the instances of the classes that `fully_shard` makes, which are few. (A global forward
hook would see the modules too, but only those that are called, and perhaps only after their
parameters have been replaced.)
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from manyhands._core.sharded import DTensorShards, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

ParameterName = tuple[nn.Module, str]  # a module, and the name of a parameter in it


def unsharded_parameters(
    params: Sequence[Tensor], model: nn.Module | None = None
) -> dict[int, Tensor]:
    """Return index in `params` -> the unsharded parameter that the model computes with.

    Call it on every rank: it gathers the parameters.
    """
    index_of: dict[int, int] = {}
    for i, param in enumerate(params):
        if is_dtensor(param):
            DTensorShards.of(param)  # raises before any collective if it cannot be measured
            index_of[id(param)] = i
    if not index_of:
        return {}
    modules = fsdp_modules(model)
    owned = _names_by_module(modules, index_of)
    if _missing(owned, index_of):
        # After a forward without backward the outermost module is still unsharded.
        for module in modules:
            module.reshard()
        owned = _names_by_module(modules, index_of)
    _check_found(params, _missing(owned, index_of), len(index_of))
    found: dict[int, Tensor] = {}
    # Each unshard() is a collective, so the order must be the same on every rank. The garbage
    # collector's is not; the parameters' is.
    for module, names in sorted(owned.items(), key=lambda item: min(item[1])):
        if found.keys() >= names.keys():  # several modules may form one group of fully_shard
            continue
        module.unshard()
        for i, (holder, name) in names.items():
            found[i] = _unsharded(params[i], holder._parameters[name])
        module.reshard()
    return found


def find_unaveraged_gradients(
    params: Sequence[Tensor], unsharded: dict[int, Tensor], measured: Collection[int]
) -> str | None:
    """Return an error message if `fully_shard` has not averaged all gradients of the last pass.

    `measured` are the indices of the parameters that had a gradient in that pass.
    """
    if any(i in unsharded and params[i].grad is None for i in measured):
        return (
            "after the step's last backward() there are gradients that fully_shard has not "
            "averaged. Was that pass inside no_sync(), or after "
            "set_requires_gradient_sync(False)? Only the passes before it may be."
        )
    if any(param.grad is not None for param in unsharded.values()):
        return (
            "the step's last backward() has left gradients that fully_shard has not averaged: "
            "a module that it was called on ran several times under reentrant checkpoints, "
            "which torch's fully_shard does not support. Pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint, or wrap the module with mh.FSDP."
        )
    return None


def fsdp_modules(model: nn.Module | None) -> list[FSDPModule]:
    """Return the modules that `fully_shard` was called on: in the model, or, without one, all."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # never imported, and so never called
        return []
    if model is not None:
        return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    # `fully_shard` gives each module a class of its own that derives from FSDPModule. An instance
    # refers to its class, so the class's referrers are a short list to search.
    classes = _with_subclasses(fsdp.FSDPModule)
    return [thing for thing in gc.get_referrers(*classes) if type(thing) in classes]


def _with_subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


def _names_by_module(
    modules: Sequence[FSDPModule], index_of: dict[int, int]
) -> dict[FSDPModule, dict[int, ParameterName]]:
    """Return, for each module that `fully_shard` was called on, the parameters that it shards.

    These are our parameters in the module itself, and not in a sharded module further inside.
    """
    stops = set(map(id, modules))
    owned: dict[FSDPModule, dict[int, ParameterName]] = {}
    for fsdp_module in modules:
        names = {
            index_of[id(param)]: (module, name)
            for module in _walk(cast(nn.Module, fsdp_module), stops)
            for name, param in module._parameters.items()
            if id(param) in index_of
        }
        if names:
            owned[fsdp_module] = names
    return owned


def _walk(module: nn.Module, stops: set[int]) -> Iterator[nn.Module]:
    """Yield the module and those inside it, without descending into `stops`."""
    yield module
    for child in module.children():
        if id(child) not in stops:
            yield from _walk(child, stops)


def _missing(
    owned: dict[FSDPModule, dict[int, ParameterName]], index_of: dict[int, int]
) -> list[int]:
    found = {i for names in owned.values() for i in names}
    return [i for i in index_of.values() if i not in found]


def _check_found(params: Sequence[Tensor], missing: Sequence[int], number: int) -> None:
    if missing:
        raise ValueError(
            f"{len(missing)} of {number} sharded parameters (the first has shape "
            f"{tuple(params[missing[0]].shape)}) are in no module that fully_shard was called on. "
            "Make the optimizer after fully_shard, and the rule before gc.freeze(), or pass the "
            "model to the rule: model=... Other DTensors (tensor parallelism) are not measured."
        )


def _unsharded(param: Tensor, replacement: Tensor | None) -> Tensor:
    """Return the parameter that `unshard()` has put in; raise if it is still a DTensor."""
    if replacement is None or replacement is param or is_dtensor(replacement):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} stays a DTensor while the model computes. "
            "Scaling works over fully_shard, not over tensor parallelism."
        )
    return replacement
