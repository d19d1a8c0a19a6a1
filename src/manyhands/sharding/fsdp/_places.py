"""Where a wrap's parameters are: modules, and the names of parameters in them.

A place is a (module, name) pair. Hooks and state dicts hold places, not parameters, because the
engine replaces a module's parameter by its sharded or its full form as it goes.

With one rank there is no engine, and mixed precision is a cast around each forward. Every module of
a wrap gets hooks. The module that runs first hides the parameters inside it behind casts, and
removes the casts when it is done. Autograd carries the gradients back to the parameters in their
own type. Because each module has the hooks, a checkpointed module that is recomputed long after the
wrap's forward sees the casts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from manyhands._core.modules import plain_name
from manyhands._core.ranks import RankGroup
from manyhands._core.sharded import is_dtensor
from manyhands._core.trees import as_type

Place: TypeAlias = tuple[nn.Module, str]
Places: TypeAlias = Mapping[str, Place]


def find_places(module: nn.Module, wrapper: type[nn.Module]) -> dict[str, Place]:
    """Return the places of parameters outside inner wraps, by name; a tied one has several."""
    if isinstance(module, wrapper):
        return {}
    places = {
        name: (module, name) for name, param in module._parameters.items() if param is not None
    }
    for name, child in _children(module):
        places.update({f"{name}.{n}": place for n, place in find_places(child, wrapper).items()})
    return places


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each child under each of its names, as a state dict does."""
    # named_children() would leave out the second name of a child that has two.
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


def named_params(places: Places) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters now at these places, by the plain model's names."""
    for name, (module, attribute) in places.items():
        param = module._parameters[attribute]
        if param is not None:
            yield plain_name(name), param


def distinct_params(places: Places) -> list[nn.Parameter]:
    """Return the parameters now at these places, a tied one once."""
    return list({id(param): param for _, param in named_params(places)}.values())


def own_buffers(
    module: nn.Module, wrapper: type[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers outside inner wraps, by name."""
    if isinstance(module, wrapper):
        return
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield prefix + name, buffer
    for name, child in _children(module):
        yield from own_buffers(child, wrapper, f"{prefix}{name}.")


def cast_buffers(
    module: nn.Module, wrapper: type[nn.Module], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers, and return their former types by name."""
    former = {}
    for name, buffer in own_buffers(module, wrapper):
        if dtype is not None and buffer.is_floating_point():
            former[plain_name(name)] = buffer.dtype
            buffer.data = buffer.data.to(dtype)  # the same tensor object: others may refer to it
    return former


def make_contiguous(places: Places) -> None:
    """Lay parameters out in the order of their elements, as the engine requires."""
    for _, param in named_params(places):
        if not param.is_contiguous():
            param.data = param.data.contiguous()


def copy_from_rank_0(modules: Iterable[nn.Module], ranks: RankGroup, device: torch.device) -> None:
    """Copy rank 0's parameters and buffers of these modules, except those sharded already."""
    found = [t for m in modules for t in [*m._parameters.values(), *m._buffers.values()]]
    # By id: a tied parameter must be sent once.
    tensors = list({id(t): t for t in found if t is not None}.values())
    # Tensors on meta have no values yet; the user initialises them after to_empty().
    if any(tensor.is_meta for tensor in tensors):
        return
    # A group may not be able to send CPU tensors (NCCL), so copies travel on the device.
    sent = [(t, t.detach().to(device)) for t in tensors if not is_dtensor(t)]
    ranks.broadcast_from_first([on_device for _, on_device in sent])
    with torch.no_grad():
        for tensor, on_device in sent:
            if on_device.device != tensor.device:
                tensor.copy_(on_device)


# -- mixed precision on one rank ------------------------------------------------------------------


def cast_in_forward(module: nn.Module, places: list[Place], dtype: torch.dtype) -> None:
    """Let `module` compute with casts of the parameters at these places, and of its inputs."""
    swapped: set[Place] = set()  # places whose parameter is hidden by a cast now
    module.register_forward_pre_hook(_cast_inputs(dtype), with_kwargs=True)
    names: dict[nn.Module, list[str]] = {}
    for holder, name in places:
        names.setdefault(holder, []).append(name)
    for each in module.modules():
        inside = [(m, name) for m in each.modules() for name in names.get(m, ())]
        if inside:
            own: list[Place] = []  # places that this module has swapped, and so must restore
            each.register_forward_pre_hook(_swap(inside, swapped, own, dtype))
            # always_call: an error in forward must not leave the casts behind.
            each.register_forward_hook(_restore(swapped, own), always_call=True)


def _cast_inputs(dtype: torch.dtype) -> Callable[..., tuple[object, object]]:
    def cast(_: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
        return as_type(dtype, args), as_type(dtype, kwargs)

    return cast


def _swap(
    places: list[Place], swapped: set[Place], own: list[Place], dtype: torch.dtype
) -> Callable[..., None]:
    def swap(_: nn.Module, __: object) -> None:
        casts: dict[int, Tensor] = {}  # a tied parameter is cast once
        for module, name in places:
            param = module._parameters.get(name)
            if param is None or (module, name) in swapped:
                continue
            if id(param) not in casts:
                casts[id(param)] = param.to(dtype)
            # Python looks in the instance's dict before it calls Module.__getattr__, which would
            # find the parameter.
            object.__setattr__(module, name, casts[id(param)])
            swapped.add((module, name))
            own.append((module, name))
        _refresh_rnns(own)

    return swap


def _restore(swapped: set[Place], own: list[Place]) -> Callable[..., None]:
    def restore(*_: object) -> None:
        for module, name in own:
            object.__delattr__(module, name)
            swapped.discard((module, name))
        _refresh_rnns(own)
        own.clear()

    return restore


def _refresh_rnns(places: list[Place]) -> None:
    """Renew the list of parameters that recurrent modules keep."""
    for module in {id(m): m for m, _ in places}.values():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
