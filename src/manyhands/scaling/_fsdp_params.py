"""Where `fully_shard` computes: from a sharded parameter to the one that gets gradients.

The optimizer holds DTensors, on which no hook of autograd ever fires. Around forward and backward
`fully_shard` puts *unsharded* parameters into the modules in their place: always the same object
for each, though its memory comes and goes. Their gradients are those of one micro-batch on one
worker.

They are found by what is public. While a module is sharded, its parameters *are* the
optimizer's, by identity, so that names are certain; `unshard()` puts the others in under the same
names, and `reshard()` takes them out. That is an all-gather of the parameters, one module at a
time, when the rule is made, and nothing is left behind in the modules: no forward hooks whose
order, repetition in checkpoints or effect on torch.compile would matter.

An optimizer does not know its modules. Unless the model is given, Python's garbage collector is
asked for the instances of the classes that `fully_shard` makes, which are few. (A global
forward hook would see the modules too, but only those that are called, and when their
parameters may have been exchanged already.)
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from manyhands._core.dtensor import DTensorShards, is_dtensor

Place = tuple[nn.Module, str]  # a module and a name of a parameter in it


def unsharded_parameters(
    params: Sequence[Tensor], model: nn.Module | None = None
) -> dict[int, Tensor]:
    """Index in `params` -> what stands in for it while a model computes. On every worker."""
    index_of = {id(p): i for i, p in enumerate(params) if is_dtensor(p)}
    for i in index_of.values():
        DTensorShards.of(params[i])  # raises where we cannot measure it
    if not index_of:
        return {}
    found_by = sharders(model)
    owned = _owned(found_by, index_of)
    if _missing(owned, index_of):  # some may be unsharded at present
        for module in found_by:
            module.reshard()
        owned = _owned(found_by, index_of)
    _check_found(params, _missing(owned, index_of), len(index_of))
    found: dict[int, Tensor] = {}
    # in an order that is the same on every worker, as each is a collective
    for module, places in sorted(owned.items(), key=lambda item: min(item[1])):
        if found.keys() >= places.keys():  # (several modules may be one group)
            continue
        module.unshard()
        for i, (holder, name) in places.items():
            found[i] = _unsharded(params[i], holder._parameters[name])
        module.reshard()
    return found


def sharders(model: nn.Module | None) -> list[Any]:
    """The modules that `fully_shard` was called on: inside the model, or anywhere."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # nobody has called it
        return []
    if model is not None:
        return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    kinds = _kinds(fsdp.FSDPModule)
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]


def _kinds(kind: type) -> set[type]:
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def _owned(found_by: Sequence[Any], index_of: dict[int, int]) -> dict[Any, dict[int, Place]]:
    """By module that shards: the places of our parameters in it and not in one further inside."""
    stops = set(map(id, found_by))
    owned: dict[Any, dict[int, Place]] = {}
    for sharder in found_by:
        places = {
            index_of[id(param)]: (module, name)
            for module in _inside(sharder, stops)
            for name, param in module._parameters.items()
            if id(param) in index_of
        }
        if places:
            owned[sharder] = places
    return owned


def _inside(module: nn.Module, stops: set[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in stops:
            yield from _inside(child, stops)


def _missing(owned: dict[Any, dict[int, Place]], index_of: dict[int, int]) -> list[int]:
    found = {i for places in owned.values() for i in places}
    return [i for i in index_of.values() if i not in found]


def _check_found(params: Sequence[Tensor], missing: Sequence[int], number: int) -> None:
    if missing:
        raise ValueError(
            f"{len(missing)} of {number} sharded parameters (the first has shape "
            f"{tuple(params[missing[0]].shape)}) are in no module that fully_shard was called on. "
            "Make the optimizer after fully_shard, and the rule before gc.freeze(), or give the "
            "rule the model: model=... Other DTensors (tensor parallelism) are not measured."
        )


def _unsharded(param: Tensor, stand_in: Tensor | None) -> Tensor:
    if stand_in is None or stand_in is param or is_dtensor(stand_in):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} stays a DTensor while the model computes. "
            "Scaling works over fully_shard, not over tensor parallelism."
        )
    return stand_in
