"""Find and check the parameters of a wrap, by place.

A place is a (module, name) pair. Hooks and state dicts store places, not parameters, because the
engine replaces sharded parameters by full parameters, and back.

On a single rank, without an engine, casts around each forward implement mixed precision. The module
that runs first hides all parameters inside behind casts, and removes the casts afterwards. Autograd
returns gradients in the original type. Every module of a wrap has hooks, so that a recomputed
checkpoint uses casts as well.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from manyhands._optimizers.modules import check_not_averaged_inside, plain_name
from manyhands._ranks.agreement import agree
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import is_dtensor
from manyhands._tensors.trees import as_type

Place: TypeAlias = tuple[nn.Module, str]
Places: TypeAlias = Mapping[str, Place]

REPLACED = "_manyhands_replaced"  # marks a plain parameter after sharding


def find_places(module: nn.Module, wrapper: type[nn.Module]) -> dict[str, Place]:
    """Return the places of parameters outside inner wraps, by name; tied parameters repeat."""
    places = {}
    for path, each in _modules_outside(module, wrapper):
        for name, param in each._parameters.items():
            if param is not None:
                places[path + name] = (each, name)
    return places


def _modules_outside(
    module: nn.Module, wrapper: type[nn.Module], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(module, wrapper):
        yield path, module
        for name, child in children(module):
            yield from _modules_outside(child, wrapper, f"{path}{name}.")


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all children; named_children() omits second names of a child."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def named_params(places: Places) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the current parameters, by the plain model's names."""
    for name, (module, attribute) in places.items():
        param = module._parameters[attribute]
        if param is not None:
            yield plain_name(name), param


def distinct_params(places: Places) -> list[nn.Parameter]:
    return list({id(param): param for _, param in named_params(places)}.values())


def cast_buffers(
    module: nn.Module, wrapper: type[nn.Module], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers outside inner wraps; return the former types."""
    former: dict[str, torch.dtype] = {}
    if dtype is None:
        return former
    for path, each in _modules_outside(module, wrapper):
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                former[plain_name(path + name)] = buffer.dtype
                # Preserves the tensor object.
                buffer.data = buffer.data.to(dtype)
    return former


def make_contiguous(places: Places) -> None:
    for _, param in named_params(places):
        if not param.is_contiguous():
            param.data = param.data.contiguous()


def copy_from_rank_0(modules: Iterable[nn.Module], ranks: RankGroup, device: torch.device) -> None:
    """Copy rank 0's parameters and buffers of these modules, except sharded ones."""
    tensors: dict[int, Tensor] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tensors[id(tensor)] = tensor
    if any(tensor.is_meta for tensor in tensors.values()):
        return
    # On the device, because some groups (NCCL) cannot send CPU tensors.
    sent = {}
    for tensor in tensors.values():
        if not is_dtensor(tensor):
            sent[tensor] = tensor.detach().to(device)
    ranks.broadcast_from_first(list(sent.values()))
    with torch.no_grad():
        for tensor, on_device in sent.items():
            if on_device.device != tensor.device:
                tensor.copy_(on_device)


# -- checks, before sharding or sending ------------------------------------------------------------


def check_module(
    module: nn.Module, wrapper: type[nn.Module], wrapped: Container[nn.Module] = ()
) -> None:
    check_not_averaged_inside(module)
    if isinstance(module, wrapper) or module in wrapped:
        raise TypeError(
            f"this {type(module).__name__} is already in a FullyShardedDataParallel, and a second "
            "wrap would not shard it again. Use the first wrap, or wrap a larger module around it."
        )


def check_precision(mixed_precision: bool, fp32_reduce_scatter: bool) -> None:
    if fp32_reduce_scatter and not mixed_precision:
        raise ValueError(
            "fp32_reduce_scatter=True requires mixed_precision=True: otherwise gradients are "
            "reduced in the parameters' type."
        )


def check_parameters(places: Places, ranks: RankGroup, device: torch.device) -> None:
    if ranks.mesh is not None and ranks.mesh.device_type != device.type:
        raise ValueError(
            f"the mesh is for {ranks.mesh.device_type}, but the module computes on {device.type}. "
            f'Make it with init_device_mesh("{device.type}", ...), or move the module.'
        )
    for name, param in named_params(places):
        if is_dtensor(param):
            raise ValueError(f"parameter {name} is already sharded. Wrap the plain module.")
        # Marked by an inner wrap, which has sharded a tied parameter.
        if getattr(param, REPLACED, False):
            raise ValueError(
                f"parameter {name} is tied to a parameter that an inner wrap has already sharded; "
                "each would be trained separately. Put a single wrap around all modules that share "
                "the parameter."
            )
        if ranks.size > 1 and (problem := why_indivisible(param)):
            raise ValueError(f"parameter {name} {problem}")


def why_indivisible(param: Tensor) -> str:
    if not param.dim():
        return "is a scalar, which cannot be divided among ranks. Make it a tensor of one element."
    if not param.numel():
        return "has no elements to divide among ranks. Remove it."
    return ""


def check_inner_groups(ranks: RankGroup, inside: Sequence[RankGroup]) -> None:
    """Raise a ValueError unless inner wraps have the same ranks or a single rank."""
    for inner in inside:
        if inner.size == 1:
            continue
        # A stand-in has no rank numbers to compare.
        if ranks.size == 1 or (inner.ranks, inner.mesh) != (ranks.ranks, ranks.mesh):
            raise ValueError(
                "an inner wrap has different ranks than the outer wrap. Pass all wraps of a model "
                "the same process_group. Only a single-rank group may be inside another, for "
                "parameters that each rank trains separately."
            )


def check_same_model(
    ranks: RankGroup,
    wraps: Sequence[tuple[Places, Mapping[str, object]]],
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
) -> None:
    """Raise a ValueError on every rank if ranks have different models or options."""
    buffers = {}
    for path, module in modules.items():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers[plain_name(f"{path}.{name}".removeprefix("."))] = buffer
    facts: dict[str, object] = {"numbers of wraps": len(wraps)}
    for number, (places, options) in enumerate(wraps):
        described = {}
        for name, t in (*named_params(places), *buffers.items()):
            frozen = " frozen" if isinstance(t, nn.Parameter) and not t.requires_grad else ""
            meta = " without memory" if t.is_meta else ""
            described[name] = f"{tuple(t.shape)} {t.dtype}{meta}{frozen}"
        facts[f"parameters in wrap {number}"] = described
        values = {}
        for name, value in options.items():
            # Each rank may have a different GPU.
            values[name] = value.type if isinstance(value, torch.device) else str(value)
        facts[f"options in wrap {number}"] = values
    advice = "Build the same model with the same options on every rank."
    agree(ranks, facts, advice)


# -- mixed precision on a single rank --------------------------------------------------------------


def cast_in_forward(module: nn.Module, places: list[Place], dtype: torch.dtype) -> None:
    """Cast the inputs of `module` and the parameters at these places in each forward."""
    module.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    shown: set[Place] = set()  # places with a cast at present
    for each in module.modules():
        within = set(each.modules())
        inside = [place for place in places if place[0] in within]
        if inside:
            casts = _Casts(inside, shown, dtype)
            each.register_forward_pre_hook(casts.show)
            # always_call: remove the casts after an error in forward.
            each.register_forward_hook(casts.remove, always_call=True)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: object, kwargs: object) -> Any:
    return as_type(dtype, args), as_type(dtype, kwargs)


class _Casts:
    """Casts that hide the parameters in a module during forward."""

    def __init__(self, places: Sequence[Place], shown: set[Place], dtype: torch.dtype) -> None:
        self._places = places
        self._shown = shown
        self._dtype = dtype
        self._own: list[Place] = []

    def show(self, *_: object) -> None:
        """Cast parameters that no outer module has cast."""
        casts: dict[nn.Parameter, Tensor] = {}
        for place in self._places:
            module, name = place
            param = module._parameters.get(name)
            if param is None or place in self._shown:
                continue
            if param not in casts:
                casts[param] = param.to(self._dtype)
            # Python searches the instance's dict before Module.__getattr__.
            object.__setattr__(module, name, casts[param])
            self._own.append(place)
        self._shown.update(self._own)
        _refresh_rnns(self._own)

    def remove(self, *_: object) -> None:
        for module, name in self._own:
            object.__delattr__(module, name)
        self._shown.difference_update(self._own)
        _refresh_rnns(self._own)
        self._own.clear()


def _refresh_rnns(places: list[Place]) -> None:
    for module in {module for module, _ in places}:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
