"""The arguments of `plan`: the model, its optimizers, a scaling rule, a method of blocks.

An optimizer is named, or it exists already. Either way it becomes a `PlannedOptimizer`. If it
exists, its layers say which rule and which blocks are around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from manyhands._core.state_parts import ShardedOptimizer, options_of
from manyhands._core.wrappers import unwrap
from manyhands.blocks._optimizer import Blocks
from manyhands.blocks._outer import Average, BlockMomentum, SlowMomentum
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._rules import AdamScale, AdaScale, LEGWScale, LinearScale, SqrtScale
from manyhands.sharding.fsdp._checks import NEED_WHOLE
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._slice_optimizer import choose_layout

OneOptimizer: TypeAlias = str | type[Optimizer] | partial[Optimizer] | Optimizer


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

    @property
    def wants_whole_tensors(self) -> bool:
        """Whether FSDP's parameters are stepped by a `WholeTensorOptimizer`."""
        return not self.elementwise or issubclass(self.kind, NEED_WHOLE)


# -- the model and its optimizers ------------------------------------------------------------------


def build_module(
    model: nn.Module | Callable[[], nn.Module], dtype: torch.dtype | None
) -> nn.Module:
    """Return the bare module, without a wrapper of DDP's or of ours around it.

    A function is called on the meta device. If it fails there, because it reads values out of
    tensors, it is called again for a real module.
    """
    if isinstance(model, nn.Module) and dtype is not None:
        raise ValueError(
            "dtype= is for a model that plan() builds, and this one exists: convert it yourself, "
            f"model.to({dtype}), or give a function that builds it."
        )
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
        model = made if dtype is None else made.to(dtype)
    while isinstance(model, DistributedDataParallel | ShardedDataParallel):
        model = model.module
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(f"{name} has no shape yet. Run the model once, then plan.")
    if not any(param.requires_grad and param.numel() for param in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient: nothing to plan.")
    return model


def parse_optimizers(
    optimizer: object, options: Mapping[str, object], model: nn.Module
) -> list[PlannedOptimizer]:
    """Accept a name, a class, a partial, an optimizer, or a list of optimizers."""
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    made = [one for one in several if isinstance(one, Optimizer)]
    if made and len(made) == len(several):
        if options:
            raise TypeError(
                f"an existing optimizer already has its options: leave out {sorted(options)}."
            )
        existing = [describe_optimizer(one) for one in made]
        check_covers(existing, model, "plan()")
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
    _check_plan_options(optimizer, options)
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


def _check_plan_options(kind: type[Optimizer], options: Mapping[str, object]) -> None:
    accepted = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return  # any name may be right
    if unknown := [name for name in options if name not in accepted]:
        raise TypeError(
            f"{kind.__name__} has no option {', '.join(unknown)}; it has "
            f"{', '.join(list(accepted)[1:])}."
        )


def describe_optimizer(optimizer: Optimizer) -> PlannedOptimizer:
    """Read an existing optimizer: a plain one, an OSS, or one inside a scaling rule or blocks."""
    groups = [(options_of(group), group["params"]) for group in optimizer.param_groups]
    optimizer = unwrap(optimizer)[-1]
    if isinstance(optimizer, ShardedOptimizer):  # the class that it shards is what has state
        arguments = dict(optimizer.optimizer_arguments)
        return PlannedOptimizer(optimizer.optimizer_class, arguments, groups, exists=True)
    # Defaults also hold options that a class sets for itself and its constructor refuses.
    accepted = inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return PlannedOptimizer(type(optimizer), arguments, groups, exists=True)


def check_covers(existing: list[PlannedOptimizer], model: nn.Module, caller: str) -> None:
    """Raise unless the optimizers hold the model's parameters, and all that are trained."""
    held = {id(param) for one in existing for _, params in one.groups for param in params}
    named = dict(model.named_parameters())
    if foreign := len(held - {id(param) for param in named.values()}):
        raise ValueError(
            f"the optimizer holds {foreign} parameter(s) that are not in the model. Make it from "
            "the parameters of this model."
        )
    left_out = [n for n, p in named.items() if p.requires_grad and id(p) not in held]
    if left_out:
        raise ValueError(
            f"{len(left_out)} parameter(s) of the model are in no optimizer: "
            f"{', '.join(left_out[:4])}{', ...' if len(left_out) > 4 else ''}. Give {caller} a "
            "list of all optimizers, or freeze them with requires_grad_(False)."
        )


def check_dtypes(**dtypes: object) -> None:
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"{name} must be a torch.dtype of floating-point numbers, such as torch.bfloat16, "
                f"got {dtype!r}."
            )


# -- a rule, and blocks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockMethod:
    """A method of blocks: its name, the steps of a block, and the tensors of its outer step."""

    name: str
    every: int
    memories: int


RULES = {kind.__name__: kind for kind in (AdaScale, AdamScale, LinearScale, SqrtScale, LEGWScale)}
METHODS = {
    "DiLoCo": BlockMethod("DiLoCo", 100, BlockMomentum.memories),
    "SlowMo": BlockMethod("SlowMo", 16, SlowMomentum.memories),
    "LocalSGD": BlockMethod("LocalSGD", 16, Average.memories),
    "BMUF": BlockMethod("BMUF", 50, BlockMomentum.memories),
}


def _find_name(wanted: str | type | None, known: Iterable[str], what: str) -> str | None:
    """Return the name as it is written in `known`, or raise."""
    if wanted is None:
        return None
    name = wanted.__name__ if isinstance(wanted, type) else wanted
    by_lower = {each.lower(): each for each in known}
    if not isinstance(name, str) or name.lower() not in by_lower:
        raise ValueError(f"{what} must be one of {', '.join(by_lower.values())}, got {name!r}.")
    return by_lower[name.lower()]


def _layers(optimizer: object) -> list[Optimizer]:
    return unwrap(optimizer, every_layer=True) if isinstance(optimizer, Optimizer) else []


def find_rule(wanted: str | type | None, optimizer: object) -> str | None:
    """Return the name of the rule that was named, or that the existing optimizer has."""
    if (name := _find_name(wanted, RULES, "rule")) is not None:
        return name
    layers = _layers(optimizer)
    return next((type(each).__name__ for each in layers if isinstance(each, ScalingRuleBase)), None)


def find_method(wanted: str | type | None, optimizer: object) -> BlockMethod | None:
    """Return the method of blocks that was named, or that the existing optimizer has."""
    if (name := _find_name(wanted, METHODS, "blocks")) is not None:
        return METHODS[name]
    for layer in _layers(optimizer):
        if isinstance(layer, Blocks):
            every = int(layer.snapshot()["every"])
            return BlockMethod(type(layer).__name__, every, layer.outer.memories)
    return None
