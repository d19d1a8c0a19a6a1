"""Find a wrap's parameters (modules, and the names of parameters in them), and check them.

A place is a (module, name) pair. Hooks and state dicts hold places, not parameters, because the
engine replaces a module's parameter by its sharded or its full form as it goes.

With one rank there is no engine, and mixed precision is a cast around each forward. Every module of
a wrap gets hooks. The module that runs first hides the parameters inside it behind casts, and
removes the casts when it is done. Autograd carries the gradients back to the parameters in their
own type. Because each module has the hooks, a checkpointed module that is recomputed long after the
wrap's forward sees the casts again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from manyhands._optimizers.modules import check_not_averaged_inside, plain_name
from manyhands._ranks.agreement import agree
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import is_dtensor
from manyhands._tensors.trees import as_type

Place: TypeAlias = tuple[nn.Module, str]
Places: TypeAlias = Mapping[str, Place]

REPLACED = "_manyhands_replaced"  # marks a plain parameter that was replaced by a sharded one


def find_places(module: nn.Module, wrapper: type[nn.Module]) -> dict[str, Place]:
    """Return the places of parameters outside inner wraps, by name; a tied one has several."""
    if isinstance(module, wrapper):
        return {}
    places = {name: (module, name) for name, p in module._parameters.items() if p is not None}
    for name, child in children(module):
        places.update({f"{name}.{n}": place for n, place in find_places(child, wrapper).items()})
    return places


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return each child under each of its names; named_children() leaves out second names."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def named_params(places: Places) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters now at these places, by the plain model's names."""
    for name, (module, attribute) in places.items():
        param = module._parameters[attribute]
        if param is not None:
            yield plain_name(name), param


def distinct_params(places: Places) -> list[nn.Parameter]:
    """Return the parameters now at these places, a tied one once."""
    return list({id(param): param for _, param in named_params(places)}.values())


def cast_buffers(
    module: nn.Module, wrapper: type[nn.Module], dtype: torch.dtype | None, prefix: str = ""
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers outside inner wraps; return their former types by name."""
    former: dict[str, torch.dtype] = {}
    if dtype is None or isinstance(module, wrapper):
        return former
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            former[plain_name(prefix + name)] = buffer.dtype
            buffer.data = buffer.data.to(dtype)  # the same tensor object: others may refer to it
    for name, child in children(module):
        former.update(cast_buffers(child, wrapper, dtype, f"{prefix}{name}."))
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


# -- what is refused before anything is sharded or sent -------------------------------------------


def check_module(
    module: nn.Module, wrapper: type[nn.Module], wrapped: Container[nn.Module] = ()
) -> None:
    """Raise a TypeError if a module is in a wrap already. `wrapped` are modules in wraps."""
    check_not_averaged_inside(module)
    if isinstance(module, wrapper) or module in wrapped:
        raise TypeError(
            f"this {type(module).__name__} is in a FullyShardedDataParallel already, and a second "
            "wrap would not shard it again. Use the first one, or wrap a larger module around it."
        )


def check_precision(mixed_precision: bool, fp32_reduce_scatter: bool) -> None:
    """Raise a ValueError if gradients have one type only, and are to be reduced in another."""
    if fp32_reduce_scatter and not mixed_precision:
        raise ValueError(
            "fp32_reduce_scatter=True requires mixed_precision=True: without it gradients are "
            "reduced in the type of the parameters."
        )


def check_parameters(places: Places, ranks: RankGroup, device: torch.device) -> None:
    """Raise a ValueError if the parameters at these places cannot be sharded together."""
    if ranks.mesh is not None and ranks.mesh.device_type != device.type:
        raise ValueError(
            f"the mesh is for {ranks.mesh.device_type}, and the module computes on {device.type}. "
            f'Make it with init_device_mesh("{device.type}", ...), or move the module.'
        )
    for name, param in named_params(places):
        if is_dtensor(param):
            raise ValueError(f"parameter {name} is sharded already. Wrap the plain module.")
        # An inner wrap has marked the plain parameter that it replaced by a sharded one.
        if getattr(param, REPLACED, False):
            raise ValueError(
                f"parameter {name} is tied to one that a wrap inside has sharded already, and the "
                "two would be trained apart. Put one wrap around all modules that share it."
            )
        if ranks.size > 1 and not param.numel():
            raise ValueError(f"parameter {name} is empty, and cannot be divided among ranks.")
        if ranks.size > 1 and not param.dim():
            raise ValueError(
                f"parameter {name} is a scalar, which cannot be divided among ranks. Make it a "
                "tensor of one element."
            )


def check_inner_groups(ranks: RankGroup, inside: Sequence[RankGroup]) -> None:
    """Raise a ValueError if an inner wrap has other ranks, unless each rank is in its own group."""
    # A group of one, or a stand-in for it, has no rank numbers to compare.
    own = (ranks.ranks, ranks.mesh) if ranks.size > 1 else None
    if any(inner.size > 1 and (inner.ranks, inner.mesh) != own for inner in inside):
        raise ValueError(
            "a wrap inside has other ranks than the one around it. Give all wraps of a model the "
            "same process_group; only a group of one may be inside another, for parameters that "
            "each rank trains by itself."
        )


def check_same_model(
    ranks: RankGroup,
    wraps: Sequence[tuple[Places, Mapping[str, object]]],
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
) -> None:
    """Raise a ValueError on every rank if ranks have different models or options."""
    # `wraps` are the places and options of each wrap. The buffers of `modules` are compared, too.
    buffers = {
        plain_name(f"{path}.{name}" if path else name): buffer
        for path, module in modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    facts: dict[str, object] = {"numbers of wraps": len(wraps)}
    for number, (places, options) in enumerate(wraps):
        facts[f"parameters in wrap {number}"] = {
            name: f"{tuple(t.shape)} {t.dtype}{_kind_of(t)}"
            for name, t in [*named_params(places), *buffers.items()]
        }
        facts[f"options in wrap {number}"] = {
            # Each rank may have its own GPU, so only the kind of device is compared.
            name: value.type if isinstance(value, torch.device) else str(value)
            for name, value in options.items()
        }
    advice = "Build the same model with the same options on every rank."
    agree(ranks, facts, advice)


def _kind_of(tensor: Tensor) -> str:
    meta = " without memory" if tensor.is_meta else ""
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return meta + frozen


# -- mixed precision on one rank ------------------------------------------------------------------


def cast_in_forward(module: nn.Module, places: list[Place], dtype: torch.dtype) -> None:
    """Let `module` compute with casts of the parameters at these places, and of its inputs."""
    swapped: set[Place] = set()  # places whose parameter is hidden by a cast now
    module.register_forward_pre_hook(_hook_casting_inputs(dtype), with_kwargs=True)
    names: dict[nn.Module, list[str]] = {}
    for holder, name in places:
        names.setdefault(holder, []).append(name)
    for each in module.modules():
        inside = [(m, name) for m in each.modules() for name in names.get(m, ())]
        if inside:
            own: list[Place] = []  # places that this module has swapped, and so must restore
            each.register_forward_pre_hook(_hook_casting_params(inside, swapped, own, dtype))
            # always_call: an error in forward must not leave the casts behind.
            each.register_forward_hook(_hook_restoring_params(swapped, own), always_call=True)


def _hook_casting_inputs(dtype: torch.dtype) -> Callable[..., tuple[object, object]]:
    """Return a pre-hook of a module that casts its inputs."""

    def cast(_: nn.Module, args: object, kwargs: object) -> tuple[object, object]:
        return as_type(dtype, args), as_type(dtype, kwargs)

    return cast


def _hook_casting_params(
    places: list[Place], swapped: set[Place], own: list[Place], dtype: torch.dtype
) -> Callable[..., None]:
    """Return a pre-hook that hides the parameters at `places` behind casts, as forward begins."""

    def swap(_: nn.Module, __: object) -> None:
        """Set casts of the parameters in the modules, unless an outer module has."""
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


def _hook_restoring_params(swapped: set[Place], own: list[Place]) -> Callable[..., None]:
    """Return a hook that removes the casts of `_hook_casting_params`, as forward ends."""

    def restore(*_: object) -> None:
        """Take the casts out again, as the module that set them is done."""
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
