"""Check arguments, combinations of options, and the options of saved runs.

Saved runs: options are saved under the engine's names ("every", "outer.momentum"), so that a run
can continue under a different class with the same method. `names` maps these names to the class's
names for messages, such as `block_momentum` for `BMUF`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from manyhands._optimizers.foreign import find_prepared
from manyhands._optimizers.several import SeveralOptimizers
from manyhands._optimizers.state_parts import ShardedOptimizer
from manyhands._optimizers.wrappers import OptimizerWrapper, params_of, unwrap
from manyhands._ranks.ranks import RankGroup
from manyhands._warn import warn
from manyhands.blocks._anchor import Outer
from manyhands.blocks.averaging._round import ElasticMembers, FixedMembers, Members
from manyhands.blocks.crew._crew import Crew

Names = Mapping[str, str]
Value = bool | int | float | str | None  # of a saved option
Options = Mapping[str, Value]


# -- arguments -----------------------------------------------------------------------------------


def check_optimizers(class_name: str, given: object, blocks: type[Optimizer]) -> Optimizer:
    if not isinstance(given, list | tuple):
        return _check_optimizer(class_name, given, blocks)
    if not given:
        raise ValueError(f"{class_name} got an empty list. Give it at least one optimizer.")
    optimizers = [_check_optimizer(class_name, each, blocks) for each in given]
    if len(optimizers) == 1:
        return optimizers[0]
    owners: dict[int, int] = {}
    for number, each in enumerate(optimizers):
        for layer in unwrap(each, every_layer=True):
            if isinstance(layer, OptimizerWrapper | ShardedOptimizer):
                raise TypeError(
                    f"{class_name} takes a list of plain optimizers, got "
                    f"{type(layer).__name__} in the list. Wrap that optimizer separately."
                )
            if isinstance(layer, LBFGS):
                raise TypeError(
                    f"{class_name} evaluates a closure once for all optimizers of a list, and "
                    "LBFGS needs several evaluations. Wrap LBFGS separately."
                )
        for param in params_of(each.param_groups):
            owner = owners.setdefault(id(param), number)
            if owner != number:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in optimizers {owner} and "
                    f"{number} of the list. Give each parameter to one optimizer."
                )
    return SeveralOptimizers(optimizers)


def _check_optimizer(class_name: str, optimizer: object, blocks: type[Optimizer]) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{class_name} wraps an optimizer, or a list of them, got {type(optimizer).__name__}."
        )
    if any(isinstance(each, blocks) for each in unwrap(optimizer)):
        raise TypeError(f"{class_name} got an optimizer that is in blocks already. Wrap it once.")
    if find_prepared(optimizer) is not None:
        raise TypeError(
            f"{class_name} got a prepared optimizer. Wrap the plain optimizer, then prepare blocks "
            "and model: manyhands.integrations.accelerate.prepare("
            f"accelerator, model, mh.{class_name}(optimizer, ...))."
        )
    return optimizer


def make_members(
    class_name: str,
    process_group: dist.ProcessGroup | None,
    inner: RankGroup,
    crew: Crew | None,
) -> Members:
    if crew is None:
        workers = os.environ.get("MANYHANDS_WORKERS") or "1"
        if process_group is None and workers != "1":
            warn(
                f"this run has {workers} workers, but {class_name} got no crew, so each worker "
                "trains a separate model. Pass crew=mh.Crew()."
            )
        return FixedMembers(RankGroup.of(process_group), inner)
    if process_group is not None:
        raise ValueError(f"{class_name} takes either a process_group or a crew, got both.")
    if inner.size > 1 and inner.size != crew.inner.size:
        raise ValueError(
            f"inner_group has {inner.size} processes, but a worker of the crew has "
            f"{crew.inner.size}. Pass the same group to both."
        )
    return ElasticMembers(crew)


# -- saved runs ----------------------------------------------------------------------------------


def describe_outer(outer: Outer) -> dict[str, Value]:
    described: dict[str, Value] = {"outer": type(outer).__name__}
    for name, value in sorted(vars(outer).items()):
        is_plain = isinstance(value, bool | int | float | str | None)
        described[f"outer.{name}"] = value if is_plain else repr(value)
    return described


def rename_options(options: Options, names: Names) -> dict[str, Value]:
    return {names.get(name, name): value for name, value in options.items()}


def check_options(saved: Options, options: Options, names: Names) -> None:
    differences = []
    for name, here in options.items():
        there = saved.get(name)
        if isinstance(there, Tensor) or there != here:  # (tensors compare element by element)
            differences.append(f"{names.get(name, name)}: saved {there}, now {here}")
    if differences:
        raise ValueError(
            f"this state dict is from a run with other options: {'; '.join(differences)}. To "
            'change options, set state["blocks"]["options"] = None before load_state_dict(state), '
            "or pass the inner optimizer to mh.load before wrapping it."
        )
