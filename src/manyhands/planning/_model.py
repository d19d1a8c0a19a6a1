"""From a module and its optimizers to sizes (`_sizes.ModelSizes`). The module is not changed.

A model's function is called on torch's meta device, where tensors have shapes and no memory, so a
model of any size can be planned.

Activations are what a forward pass keeps for the backward pass. torch's FakeTensorMode runs the
forward with shapes alone, and a hook sees each tensor that autograd saves. Every storage counts
once. Parameters and buffers do not count here, as they are counted anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from manyhands._core.ranks import SENT_ALONE
from manyhands._core.state_parts import ShardedOptimizer
from manyhands._core.wrappers import unwrap
from manyhands.planning._sizes import ModelSizes, OptimizerParams, ParamSize, WrapParams
from manyhands.planning._state import OptimizerStateSizes
from manyhands.sharding.wrapping._pick import pick_modules
from manyhands.sharding.wrapping._policies import default_auto_wrap_policy
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._slice_optimizer import choose_layout


@dataclass(frozen=True)
class PlannedOptimizer:
    """An optimizer: its class, its arguments, and groups of parameters with their options."""

    kind: type[Optimizer]
    arguments: dict[str, Any]
    groups: list[tuple[dict[str, Any], list[Tensor]]]
    exists: bool = False  # the user has made it, with parameters

    @cached_property
    def elementwise(self) -> bool:
        options = [{**self.arguments, **options} for options, _ in self.groups]
        options = options or [self.arguments]
        return choose_layout(self.kind, None, options) == "even"


def build_module(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the bare module, without a wrapper of DDP's or of ours around it.

    A function is called on the meta device. If it fails there, because it reads values out of
    tensors, it is called again for a real module.
    """
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise TypeError(
                "model must be a torch.nn.Module or a function that builds one, "
                f"got {type(model).__name__}."
            )
        try:
            with torch.device("meta"):
                made = model()
        except (RuntimeError, NotImplementedError):
            made = model()
        if not isinstance(made, nn.Module):
            name = getattr(model, "__name__", "the function")
            raise TypeError(f"{name}() must return a torch.nn.Module, got {type(made).__name__}.")
        model = made
    while isinstance(model, DistributedDataParallel | ShardedDataParallel):
        model = model.module
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(f"{name} has no shape yet. Run the model once, then plan.")
    if not any(param.requires_grad and param.numel() for param in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient: nothing to plan.")
    return model


# -- optimizers --------------------------------------------------------------------------------


def parse_optimizers(
    optimizer: Any, options: Mapping[str, Any], model: nn.Module
) -> list[PlannedOptimizer]:
    """Accept a name, a class, a partial, an optimizer, or a list of optimizers."""
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if several and all(isinstance(one, Optimizer) for one in several):
        if options:
            raise TypeError(
                f"an existing optimizer already has its options: leave out {sorted(options)}."
            )
        existing = [_describe_optimizer(one) for one in several]
        _check_parameters(existing, model)
        return existing
    options = dict(options)
    if isinstance(optimizer, partial):
        if optimizer.args:
            raise TypeError("give the partial's arguments by name, and leave out the parameters.")
        options = {**optimizer.keywords, **options}
        optimizer = optimizer.func
    if isinstance(optimizer, str):
        optimizer = _find_class(optimizer)
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(
            'optimizer must be a name such as "adamw", a class, a functools.partial of one, an '
            f"optimizer, or a list of optimizers, got {optimizer!r}."
        )
    _check_arguments(optimizer, options)
    return [PlannedOptimizer(optimizer, options, [({}, list(model.parameters()))])]


def _find_class(name: str) -> type[Optimizer]:
    known = {
        key.lower(): kind
        for key, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name.lower() not in known:
        near = get_close_matches(name.lower(), known, n=1) or ["adamw"]
        raise ValueError(
            f"torch.optim has no optimizer called {name!r}. Did you mean {near[0]!r}? "
            "For an optimizer from elsewhere, give the class."
        )
    return known[name.lower()]


def _check_arguments(kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    accepted = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return  # any name may be right
    if unknown := [name for name in options if name not in accepted]:
        raise TypeError(
            f"{kind.__name__} has no option {', '.join(unknown)}; it has "
            f"{', '.join(list(accepted)[1:])}."
        )


def _describe_optimizer(optimizer: Any) -> PlannedOptimizer:
    """Read an existing optimizer: a plain one, an OSS, or one inside a scaling rule or blocks."""
    groups = [({k: v for k, v in g.items() if k not in ("params", "param_names")}, g["params"])
              for g in optimizer.param_groups]  # fmt: skip
    optimizer = unwrap(optimizer)[-1]
    if isinstance(optimizer, ShardedOptimizer):  # the class that it shards is what has state
        arguments = dict(optimizer.optimizer_arguments)
        return PlannedOptimizer(optimizer.optimizer_class, arguments, groups, exists=True)
    # Defaults also hold options that a class sets for itself and its constructor refuses.
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return PlannedOptimizer(type(optimizer), arguments, groups, exists=True)


def _check_parameters(existing: list[PlannedOptimizer], model: nn.Module) -> None:
    held = {id(param) for one in existing for _, params in one.groups for param in params}
    named = dict(model.named_parameters())
    if foreign := len(held - {id(param) for param in named.values()}):
        raise ValueError(
            f"the optimizer holds {foreign} parameter(s) that are not in the model. Make it from "
            "the parameters of the model that is planned."
        )
    left_out = [n for n, p in named.items() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ValueError(
            f"{len(left_out)} parameter(s) of the model are in no optimizer: "
            f"{', '.join(left_out[:4])}{', ...' if len(left_out) > 4 else ''}. Give plan() a list "
            "of all optimizers, or freeze them with requires_grad_(False)."
        )


# -- sizes -------------------------------------------------------------------------------------


def measure(model: nn.Module, optimizers: list[PlannedOptimizer], wrap_size: int) -> ModelSizes:
    """Return the sizes of everything that a worker holds."""
    sizes: dict[int, ParamSize] = {}  # by id: tied parameters are one
    by_optimizer = []
    for one in optimizers:
        states, elementwise = OptimizerStateSizes(one.kind, one.arguments), one.elementwise
        own = []
        for options, params in one.groups:
            for param in params:
                sizes[id(param)] = _param_size(param, states, options, elementwise)
                own.append(sizes[id(param)])
        by_optimizer.append(OptimizerParams(tuple(own), elementwise))
    others = []
    for param in model.parameters():
        if id(param) not in sizes:
            sizes[id(param)] = _param_size(param)
            others.append(sizes[id(param)])
    buffers = list(model.buffers())
    # Small buffers of one kind travel in one message, large ones each in their own.
    small = {(b.dtype, b.device) for b in buffers if b.numel() <= SENT_ALONE}
    return ModelSizes(
        tuple(by_optimizer),
        tuple(others),
        tuple(
            WrapParams(tuple(sizes[id(param)] for param in params), outer)
            for params, outer in wrap_params(model, wrap_size)
        ),
        sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        len(small) + sum(buffer.numel() > SENT_ALONE for buffer in buffers),
    )


def _param_size(
    param: Tensor,
    states: OptimizerStateSizes | None = None,
    options: Mapping[str, Any] | None = None,
    elementwise: bool = True,
) -> ParamSize:
    fixed, per_element = 0, 0
    if states is not None and param.requires_grad and param.numel():
        if elementwise:
            fixed, per_element = states.by_element(param.dtype, options or {})
        else:
            fixed = states.bytes(param.shape, param.dtype, options or {})
    return ParamSize(
        elements=param.numel(),
        itemsize=param.element_size(),
        kind=(str(param.dtype), str(param.device)),
        trained=param.requires_grad,
        state_fixed=fixed,
        state_per_element=per_element,
        rows=param.shape[0] if param.dim() else 1,
    )


def wrap_params(model: nn.Module, least: int) -> list[tuple[list[Tensor], int | None]]:
    """Return the wraps of the plan's FSDP, the innermost first, the model itself last.

    Each has the parameters that no wrap inside it has, and the number of the wrap around it.
    """
    wraps = [module for module in pick_by_size(model, least) if module is not model] + [model]
    numbers = {module: number for number, module in enumerate(wraps)}
    outers: dict[int, int] = {}
    params: list[list[Tensor]] = [[] for _ in wraps]
    seen: set[int] = set()

    def visit(module: nn.Module, outer: int) -> None:
        number = numbers.get(module, outer)
        if number != outer:
            outers.setdefault(number, outer)  # a shared module is in its first place
        for param in module.parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                params[number].append(param)
        for child in module.children():
            visit(child, number)

    visit(model, len(wraps) - 1)
    return [(held, outers.get(number)) for number, held in enumerate(params)]


def pick_by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return the modules that `auto_wrap` wraps by size, from `least` parameters on."""
    policy = partial(
        default_auto_wrap_policy, min_num_params=least, skip_params_check_for_root=True
    )
    return pick_modules(model, policy, ())


# -- activations -------------------------------------------------------------------------------


def saved_bytes(model: nn.Module, input: Any) -> int:
    """Return the bytes that live between forward and backward, for one worker's `input`."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    args, kwargs = _forward_arguments(input)
    # The storages themselves are kept, or a freed one's address could be counted for another.
    storages: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), torch.enable_grad():
        state = {
            name: _fake_tensor(tensor)
            for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
        }
        of_model = {tensor.untyped_storage()._cdata for tensor in state.values()}
        try:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                torch.func.functional_call(
                    model,
                    state,
                    tuple(map(_fake_tensor, args)),
                    {name: _fake_tensor(value) for name, value in kwargs.items()},
                )
        except Exception as error:  # a model's forward may raise anything
            raise ValueError(
                f"the forward pass could not be run on tensors without memory: {error}\n"
                "The forward must not read values out of tensors, and the model's tensors must be "
                "parameters or buffers. Without an input, activations are not counted."
            ) from error
    return sum(storage.nbytes() for key, storage in storages.items() if key not in of_model)


def _forward_arguments(input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(input) if isinstance(input, list | tuple) else ()
    kwargs = dict(input) if isinstance(input, Mapping) else {}
    if isinstance(input, Tensor):
        args = (input,)
    if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise TypeError(
            "input must be a tensor, a tuple of the forward's arguments or a dict of them by "
            f"name, got {input!r}. Only shapes matter: torch.empty(8, 128, device='meta')."
        )
    return args, kwargs


def _fake_tensor(value: Any) -> Any:
    """Return a tensor of the same kind without memory. Call this inside FakeTensorMode."""
    if not isinstance(value, Tensor):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor.requires_grad_(value.requires_grad)
