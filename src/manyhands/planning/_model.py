"""From a module and its optimizers to sizes (`_costs.Job`). Nothing of the module is changed."""

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

from manyhands._core.ranks import LARGE
from manyhands._core.wrapper import unwrap
from manyhands.planning._costs import Job, Part, Unit, Weight
from manyhands.planning._state import States
from manyhands.sharding.wrapping._pick import picked
from manyhands.sharding.wrapping._policies import default_auto_wrap_policy
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._elementwise import chosen_layout
from manyhands.sharding.zero._oss import OSS


@dataclass(frozen=True)
class Chosen:
    """An optimizer: its class, its arguments, and groups of parameters with their options."""

    kind: type[Optimizer]
    given: dict[str, Any]
    groups: list[tuple[dict[str, Any], list[Tensor]]]
    made: bool = False  # by the user, with parameters

    @cached_property
    def even(self) -> bool:
        options = [{**self.given, **options} for options, _ in self.groups] or [self.given]
        return chosen_layout(self.kind, None, options) == "even"


def built(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The module that is to be wrapped.

    A function is called for a module on the meta device; or, where it reads values out of tensors,
    which have none there, for a real one.
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


def chosen(optimizer: Any, options: Mapping[str, Any], model: nn.Module) -> list[Chosen]:
    """The optimizers, given as a name, a class, a partial, an optimizer or several of these."""
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if given and all(isinstance(one, Optimizer) for one in given):
        if options:
            raise TypeError(
                f"an optimizer that is made already has its options: leave out {sorted(options)}."
            )
        existing = [_existing(one) for one in given]
        _check_parameters(existing, model)
        return existing
    options = dict(options)
    if isinstance(optimizer, partial):
        if optimizer.args:
            raise TypeError("give the partial's arguments by name, and no parameters.")
        options = {**optimizer.keywords, **options}
        optimizer = optimizer.func
    if isinstance(optimizer, str):
        optimizer = _named(optimizer)
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise TypeError(
            'optimizer must be a name such as "adamw", a class, a functools.partial of one, an '
            f"optimizer, or a list of optimizers, got {optimizer!r}."
        )
    _check_options(optimizer, options)
    return [Chosen(optimizer, options, [({}, list(model.parameters()))])]


def _named(name: str) -> type[Optimizer]:
    known = {
        key.lower(): kind
        for key, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name.lower() not in known:
        near = get_close_matches(name.lower(), known, n=1) or ["adamw"]
        raise ValueError(
            f"torch.optim has no optimizer called {name!r}. Did you mean {near[0]!r}? "
            "Of any other optimizer give the class."
        )
    return known[name.lower()]


def _check_options(kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    taken = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    if unknown := [name for name in options if name not in taken]:
        raise TypeError(
            f"{kind.__name__} has no option {', '.join(unknown)}; it has "
            f"{', '.join(list(taken)[1:])}."
        )


def _existing(optimizer: Any) -> Chosen:
    """One that was made already, perhaps as an OSS or inside of a scaling rule or blocks."""
    groups = [({k: v for k, v in g.items() if k not in ("params", "param_names")}, g["params"])
              for g in optimizer.param_groups]  # fmt: skip
    optimizer = unwrap(optimizer)[-1]
    if isinstance(optimizer, OSS):
        return Chosen(optimizer._kind, dict(optimizer._given), groups, made=True)
    taken = inspect.signature(type(optimizer)).parameters
    given = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return Chosen(type(optimizer), given, groups, made=True)


def _check_parameters(existing: list[Chosen], model: nn.Module) -> None:
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


def described(model: nn.Module, optimizers: list[Chosen], unit_size: int) -> Job:
    """The sizes of everything that a worker holds."""
    weights: dict[int, Weight] = {}
    parts = []
    for one in optimizers:
        states, even = States(one.kind, one.given), one.even
        own = []
        for options, params in one.groups:
            for param in params:
                weights[id(param)] = _weight(param, states, options, even)
                own.append(weights[id(param)])
        parts.append(Part(tuple(own), even))
    others = []
    for param in model.parameters():
        if id(param) not in weights:
            weights[id(param)] = _weight(param)
            others.append(weights[id(param)])
    buffers = list(model.buffers())
    small = {(b.dtype, b.device) for b in buffers if b.numel() <= LARGE}
    return Job(
        tuple(parts),
        tuple(others),
        tuple(
            Unit(tuple(weights[id(param)] for param in params), inside)
            for params, inside in units(model, unit_size)
        ),
        sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        len(small) + sum(buffer.numel() > LARGE for buffer in buffers),
    )


def _weight(
    param: Tensor,
    states: States | None = None,
    options: Mapping[str, Any] | None = None,
    even: bool = True,
) -> Weight:
    fixed, each = 0, 0
    if states is not None and param.requires_grad and param.numel():
        if even:
            fixed, each = states.by_element(param.dtype, options or {})
        else:
            fixed = states.bytes(param.shape, param.dtype, options or {})
    kind = (str(param.dtype), str(param.device))
    rows = param.shape[0] if param.dim() else 1
    return Weight(param.numel(), param.element_size(), kind, param.requires_grad, fixed, each, rows)


def units(model: nn.Module, least: int) -> list[tuple[list[Tensor], int | None]]:
    """What the plan's FSDP wraps, the innermost first, the model itself last.

    Of each the parameters that no wrap inside has, and the number of the wrap around it.
    """
    wraps = [module for module in picked_by_size(model, least) if module is not model] + [model]
    numbers = {module: number for number, module in enumerate(wraps)}
    around: dict[int, int] = {}
    params: list[list[Tensor]] = [[] for _ in wraps]
    seen: set[int] = set()

    def visit(module: nn.Module, outer: int) -> None:
        number = numbers.get(module, outer)
        if number != outer:
            around.setdefault(number, outer)
        for param in module.parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                params[number].append(param)
        for child in module.children():
            visit(child, number)

    visit(model, len(wraps) - 1)
    return [(held, around.get(number)) for number, held in enumerate(params)]


def picked_by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """What `auto_wrap` wraps by size in a model that has more than `least` parameters."""
    policy = partial(
        default_auto_wrap_policy, min_num_params=least, skip_params_check_for_root=True
    )
    return picked(model, policy, ())
