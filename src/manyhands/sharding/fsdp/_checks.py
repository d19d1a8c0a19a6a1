"""What a wrap is made of: where its parameters are, and what is checked before they are sharded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyhands._core.dtensor import is_dtensor
from manyhands._core.ranks import RankGroup
from manyhands.sharding.fsdp._optimizer_guard import REPLACED
from manyhands.sharding.fsdp._transparent import plain
from manyhands.sharding.fsdp._used_params import Place
from manyhands.sharding.zero._ddp import ShardedDataParallel

Places = Mapping[str, Place]


def places_of(module: nn.Module, wrapper: type[nn.Module]) -> dict[str, Place]:
    """Where parameters are that no wrap inside has, by name; a tied one has several."""
    if isinstance(module, wrapper):
        return {}
    places = {
        name: (module, name) for name, param in module._parameters.items() if param is not None
    }
    for name, child in _children(module):
        places.update({f"{name}.{n}": place for n, place in places_of(child, wrapper).items()})
    return places


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """One that has two names under both, as in a state dict."""
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


def held(places: Places) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters at these places, by the plain model's names."""
    for name, (module, attribute) in places.items():
        param = module._parameters[attribute]
        if param is not None:
            yield plain(name), param


def own_buffers(
    module: nn.Module, wrapper: type[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """The buffers that no wrap inside has, by name."""
    if isinstance(module, wrapper):
        return
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield prefix + name, buffer
    for name, child in _children(module):
        yield from own_buffers(child, wrapper, f"{prefix}{name}.")


def distinct(places: Places) -> list[nn.Parameter]:
    """The parameters at these places, a tied one once."""
    return list({id(param): param for _, param in held(places)}.values())


def check_module(module: Any, wrapper: type[nn.Module], wrapped: Container[nn.Module] = ()) -> None:
    """Raise where a module cannot be wrapped. `wrapped` are those that are in a wrap already."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"FullyShardedDataParallel needs a torch.nn.Module, got {type(module).__name__}."
        )
    for inside in module.modules():
        if isinstance(inside, DistributedDataParallel | ShardedDataParallel):
            raise TypeError(
                f"the module contains a {type(inside).__name__}, and gradients would be averaged "
                "twice. Wrap the bare module."
            )
    if isinstance(module, wrapper):
        raise TypeError("the module is wrapped already; wrap it once, or a larger one around it.")
    if module in wrapped:
        raise TypeError(
            f"this {type(module).__name__} is in a FullyShardedDataParallel already, and is "
            "sharded in place: a second wrap around it would not shard it anew. Use the first one, "
            "wrap a larger module around that, or build the module again."
        )
    if type(module).forward is nn.Module.forward:  # as a ModuleList's
        raise TypeError(
            f"a {type(module).__name__} has no forward in which its parameters could be gathered. "
            "Wrap its members, or the module that runs them."
        )


def check_parameters(places: Places, workers: RankGroup) -> None:
    """Raise where parameters cannot be sharded together."""
    trained: dict[torch.dtype, str] = {}
    for name, param in held(places):
        if is_dtensor(param):
            raise ValueError(
                f"parameter {name} is sharded already (a DTensor, as fully_shard or tensor "
                "parallelism makes them). Wrap the plain module."
            )
        if getattr(param, REPLACED, False):
            raise ValueError(
                f"parameter {name} is tied to one that a wrap inside has sharded already, and the "
                "two would go different ways. Wrap the modules that share it together: not each by "
                "itself, but one around them."
            )
        if workers.size > 1 and (param.dim() == 0 or param.numel() == 0):
            raise ValueError(
                f"parameter {name} has the shape {tuple(param.shape)}, of which there is nothing "
                "to share out. Give it one element in one dimension "
                "(torch.nn.Parameter(p.view(1))), or leave out what is empty."
            )
        if param.requires_grad:
            trained.setdefault(param.dtype, name)
    if len(trained) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in trained.items())
        raise ValueError(
            f"the parameters of one wrap must be of one type, and {listed}. Wrap the modules of "
            "one type by themselves, or convert the module; mixed_precision=True computes in a "
            "smaller type and keeps the parameters."
        )


def begin_alike(modules: Iterable[nn.Module], workers: RankGroup, device: torch.device) -> None:
    """Take rank 0's values of what these modules have and is not sharded yet."""
    found = [t for m in modules for t in [*m._parameters.values(), *m._buffers.values()]]
    tensors = list({id(t): t for t in found if t is not None}.values())
    if any(tensor.is_meta for tensor in tensors):
        return
    moved = [(t, t.detach().to(device)) for t in tensors if not is_dtensor(t)]
    workers.broadcast_from_first([there for _, there in moved])
    with torch.no_grad():
        for tensor, there in moved:
            if there.device != tensor.device:
                tensor.copy_(there)


def check_inside(workers: RankGroup, inside: Sequence[RankGroup]) -> None:
    """Raise where wraps inside another have other workers, and not only each its own."""
    mine = _ranks(workers)
    for each in inside:
        if each.size > 1 and _ranks(each) != mine:
            raise ValueError(
                f"a wrap inside has {_named(each)}, and the one around it {_named(workers)}. "
                "Give all wraps of a model the same process_group; only a group of one may be "
                "inside another, for what each worker has for itself."
            )


def _ranks(workers: RankGroup) -> list[int] | None:
    if workers.size == 1:
        return None
    return workers.ranks


def _named(workers: RankGroup) -> str:
    ranks = _ranks(workers)
    return "one worker" if ranks is None else f"the workers {ranks}"


def check_root(workers: RankGroup, have_run: Sequence[bool | None]) -> None:
    """Raise where one of the wraps inside has run as a root."""
    if any(have_run) and workers.size > 1:
        raise RuntimeError(
            "a wrap inside this one has run by itself before, as the outermost. Run the outermost "
            "wrap's forward first; afterwards those inside may run by themselves, too."
        )


def contiguous(places: Places) -> None:
    """Lay parameters out in the order of their elements, as the engine needs them."""
    for _, param in held(places):
        if not param.is_contiguous():
            param.data = param.data.contiguous()


def check_same_model(
    workers: RankGroup,
    facts: Sequence[tuple[Places, Mapping[str, Any]]],
    device: torch.device,
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
) -> None:
    """Raise on every worker where models or options are not the same; `facts` are each wrap's.

    The buffers of `modules` must be the same, too.
    """
    buffers = {
        plain(f"{path}.{name}" if path else name): buffer
        for path, module in modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    text = json.dumps(
        [
            [
                {
                    name: f"{tuple(t.shape)} {t.dtype}{_kind_of(t)}"
                    for name, t in [*held(places), *buffers.items()]
                },
                {
                    name: value.type if isinstance(value, torch.device) else str(value)
                    for name, value in options.items()
                },
            ]
            for places, options in facts
        ]
    )
    sums = workers.all_gather([float(zlib.crc32(text.encode()))], device)
    if len({total[0] for total in sums}) == 1:
        return
    texts = [json.loads(one) for one in workers.all_gather_text(text, device)]
    for number, each in enumerate(zip(*texts, strict=False)):
        for part, what in enumerate(("parameters", "options")):
            values = [facts_of_rank[part] for facts_of_rank in each]
            for name in dict.fromkeys(name for value in values for name in value):
                if any(value.get(name) != values[0].get(name) for value in values):
                    here = [value.get(name, "absent") for value in values[:8]]
                    listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(here))
                    raise ValueError(
                        f"workers have different {what} in wrap {number}: {name} is {listed}. "
                        "Build the same model with the same options on every worker."
                    )
    raise ValueError(
        "workers have different models: "
        + ", ".join(f"rank {r}: {len(t)} wraps" for r, t in enumerate(texts[:8]))
        + ". Build the same model with the same options on every worker."
    )


def _kind_of(tensor: Tensor) -> str:
    meta = " without memory" if tensor.is_meta else ""
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return meta + frozen
