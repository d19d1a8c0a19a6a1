"""Checks of arguments, of combinations of options, and of agreement between workers.

Averaged gradients: inside `DistributedDataParallel` or `ShardedDataParallel`, all workers take
equal steps, so sync rounds have no effect, but DDP's traffic remains. A warning follows the first
block if all workers moved identically (`RoundStats.record`). The constructor raises an error if the
optimizer shards its updates over the workers.

Saved runs: options are saved under the engine's names ("every", "outer.momentum"), so that a run
can continue under a different class with the same method. `names` maps these names to the class's
names for messages, such as `block_momentum` for `BMUF`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from manyhands._optimizers.foreign import advice, find_prepared
from manyhands._optimizers.several import SeveralOptimizers
from manyhands._optimizers.state_parts import ShardedOptimizer
from manyhands._optimizers.wrappers import OptimizerWrapper, params_of, unwrap
from manyhands._ranks.agreement import agree, describe_tensors, names_in
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import is_dtensor
from manyhands._warn import warn
from manyhands.blocks._anchor import Outer
from manyhands.blocks.averaging._round import ElasticMembers, FixedMembers, Members
from manyhands.blocks.crew._crew import Crew

Names = Mapping[str, str]
Value = bool | int | float | str | None  # of a saved option
Options = Mapping[str, Value]


# -- options -------------------------------------------------------------------------------------


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


# -- the other workers -----------------------------------------------------------------------------


def check_agreement(
    class_name: str,
    workers: RankGroup,
    inner: RankGroup,
    options: Mapping[str, object],
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    modules: Sequence[nn.Module],
) -> None:
    """Raise on every worker if options or models differ, before the first tensor is sent."""
    facts = {
        "options": {name: str(value) for name, value in options.items()},
        "shards (process_group= must be of ranks with the same shard)": _describe_shards(params),
        "size of inner_group": inner.size,
        "rank in inner_group (process_group= must be of ranks with the same)": inner.rank,
        "parameters": describe_tensors(params, frozen=True),
        "buffers": describe_tensors(buffers),
    }
    names = {"parameters": names_in(modules, params), "buffers": names_in(modules, buffers)}
    advice = f"Build the same model, and the same {class_name}, on every rank."
    agree(workers, facts, advice, names=names)


def _describe_shards(params: Sequence[Tensor]) -> list[str]:
    shards = []
    for param in params:
        if is_dtensor(param):
            coordinate = param.device_mesh.get_coordinate()
            shards.append(f"{tuple(param.placements)} at {coordinate}")
    return shards


# -- averaged gradients ----------------------------------------------------------------------------


def check_not_averaged(class_name: str, workers: RankGroup, optimizer: Optimizer) -> None:
    inner = unwrap(optimizer)[-1]
    if workers.size == 1 or not isinstance(inner, ShardedOptimizer):
        return
    ranks = dist.get_process_group_ranks(inner.group or dist.group.WORLD)
    if len(set(ranks) & set(workers.ranks)) > 1:
        raise ValueError(
            f"{type(inner).__name__} shards its updates over these workers, and {class_name} needs "
            "a separate optimizer on each worker. Pass the ranks of a single worker as "
            f"inner_group=, and one rank of each worker as process_group=.{advice('no DDP')}"
        )


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
