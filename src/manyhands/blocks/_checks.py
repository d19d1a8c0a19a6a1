"""Check arguments, options that exclude each other, and workers that do not fit together.

In the order in which they are made:

options              options that exclude each other
the other workers    other options or another model on a worker. This check comes before the first
                     tensor is sent, and every worker raises
other averaging      another wrapper averages the workers' gradients already
a saved run          other options than in the saved run

Other averaging: in blocks each worker follows its own gradients. If a trainer leaves the model in
`DistributedDataParallel` or `ShardedDataParallel`, all workers have the mean gradient, take the
same steps, and a sync round has no effect. No error follows, and DDP's traffic stays. So there is
an error or a warning when the optimizer is made, if such a wrapper can be found then, and otherwise
a warning after the first block, if all workers moved exactly the same way.

A saved run: options are saved under the engine's names ("every", "outer.momentum"), which all
methods have in common, so that a run may continue under another name of the same method. Users see
the names of their class: for `BMUF` these two are `global_sync_iter` and `block_momentum`.
`names` below leads from the engine's names to the class's.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from manyhands._arguments import flag
from manyhands._optimizers.foreign import advice, find_prepared
from manyhands._optimizers.modules import modules_holding
from manyhands._optimizers.several import SeveralOptimizers
from manyhands._optimizers.state_parts import ShardedOptimizer
from manyhands._optimizers.wrappers import OptimizerWrapper, unwrap
from manyhands._ranks.agreement import agree, describe_tensors, names_in
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.slices import check_on_cpu
from manyhands._tensors.flat import is_dtensor
from manyhands._warn import warn
from manyhands.blocks._anchor import Outer
from manyhands.blocks.averaging._payload import all_params
from manyhands.blocks.averaging._round import ElasticMembers, FixedMembers, Members
from manyhands.blocks.crew._crew import Crew

Names = Mapping[str, str]
Value = bool | int | float | str | None  # of an option, as it is saved
Options = Mapping[str, Value]


# -- options -------------------------------------------------------------------------------------


def check_optimizers(class_name: str, given: object, blocks: type[Optimizer]) -> Optimizer:
    """Return the optimizer, or those of a list as one, if it can be wrapped; or raise."""
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
                    f"{class_name} takes a list of plain optimizers, and got "
                    f"{type(layer).__name__} in one. Wrap that by itself, not in a list."
                )
            if isinstance(layer, LBFGS):
                raise TypeError(
                    f"{class_name} evaluates a closure once for all optimizers of a list, and "
                    "LBFGS needs to do so several times. Wrap it by itself, not in a list."
                )
        for param in all_params(each):
            owner = owners.setdefault(id(param), number)
            if owner != number:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is in optimizers {owner} and "
                    f"{number} of the list. Give each parameter to one of them."
                )
    return SeveralOptimizers(optimizers)


def _check_optimizer(class_name: str, optimizer: object, blocks: type[Optimizer]) -> Optimizer:
    """Return the optimizer if it can be wrapped, or raise."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{class_name} wraps an optimizer, or a list of them, got {type(optimizer).__name__}."
        )
    if any(isinstance(each, blocks) for each in unwrap(optimizer)):
        raise TypeError(f"{class_name} got an optimizer that is in blocks already: wrap it once.")
    if find_prepared(optimizer) is not None:
        raise TypeError(
            "prepare the blocks, with their model: manyhands.integrations.accelerate.prepare("
            f"accelerator, model, mh.{class_name}(optimizer, ...))."
        )
    return optimizer


def make_members(
    class_name: str,
    process_group: dist.ProcessGroup | None,
    inner: RankGroup,
    crew: Crew | None,
) -> Members:
    """Return the workers; raise if `inner_group` and the workers do not fit."""
    if crew is None:
        workers = os.environ.get("MANYHANDS_WORKERS") or "1"
        if process_group is None and workers != "1":
            warn(
                f"this run has {workers} workers, but {class_name} got no crew: each worker trains "
                "a model of its own. Give crew=mh.Crew()."
            )
        return FixedMembers(RankGroup.of(process_group), inner)
    if process_group is not None:
        raise ValueError(f"{class_name} takes a process_group or a crew, and got both.")
    if inner.size > 1 and inner.size != crew.inner.size:
        raise ValueError(
            f"inner_group has {inner.size} processes, and a worker of the crew "
            f"{crew.inner.size}. Give both the same group."
        )
    return ElasticMembers(crew)


def check_shared_memory(
    wanted: bool | None, codec: str, crew: object, optimizer: Optimizer
) -> bool | None:
    """Return whether memory is to be shared; None: where it is possible."""
    if wanted is None:
        return None
    if not flag("shared_memory", wanted):
        return False
    if codec != "float32":
        raise ValueError(f"codec={codec!r} has no effect with shared_memory=True: give one of them")
    if crew is not None:
        raise ValueError("shared_memory=True is for a process group, not for a crew: leave it out.")
    for param in all_params(optimizer):
        check_on_cpu(param.device)
    return True


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
    """Raise on every worker if their options or models differ, before anything is sent."""
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
    """Describe which shards of DTensors are on this rank."""
    shards = []
    for param in params:
        if is_dtensor(param):
            coordinate = param.device_mesh.get_coordinate()
            shards.append(f"{tuple(param.placements)} at {coordinate}")
    return shards


# -- other averaging -------------------------------------------------------------------------------


def check_not_averaged(
    class_name: str, workers: RankGroup, optimizer: Optimizer, model: nn.Module | None
) -> None:
    """Raise if the workers of the blocks share their gradients; warn if it is not certain."""
    if workers.size == 1:
        return
    way_out = (
        f"{class_name} needs a model without it. Pass ranks that train as one worker as "
        f"inner_group=, and one rank of each worker as process_group=.{advice('no DDP')}"
    )
    inner = unwrap(optimizer)[-1]
    if isinstance(inner, ShardedOptimizer) and _groups_overlap(inner.group, workers):
        raise ValueError(f"{type(inner).__name__} shards its updates over these workers. {way_out}")
    if model is not None and _averages(model) and _groups_overlap(model.process_group, workers):
        raise ValueError(f"model= is in {type(model).__name__}, which averages too. {way_out}")
    if _averaging_modules(optimizer, workers):
        gc.collect()  # a wrapper without references must not cause a warning
        for kind in sorted(_averaging_modules(optimizer, workers)):
            text = f"the parameters are in a {kind} that averages gradients, too. {way_out}"
            warn(text, RuntimeWarning)


def _averaging_modules(optimizer: Optimizer, workers: RankGroup) -> set[str]:
    """Return the class names of modules that average the gradients over these workers."""
    found = set()
    for module, _ in modules_holding(all_params(optimizer), _averages):
        if _groups_overlap(module.process_group, workers):
            found.add(type(module).__name__)
    return found


def _averages(module: nn.Module) -> bool:
    # Two attributes that torch's DDP, its subclasses and ShardedDataParallel have in common.
    return "require_backward_grad_sync" in vars(module) and "process_group" in vars(module)


def _groups_overlap(group: object, workers: RankGroup) -> bool:
    """Return whether two or more of the workers are in this process group."""
    if not isinstance(group, dist.ProcessGroup | None):
        return False
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return len(set(ranks) & set(workers.ranks)) > 1


# -- a saved run ---------------------------------------------------------------------------------


def describe_outer(outer: Outer) -> dict[str, Value]:
    """Return an outer step's class and settings."""
    described: dict[str, Value] = {"outer": type(outer).__name__}
    for name, value in sorted(vars(outer).items()):
        is_plain = isinstance(value, bool | int | float | str | None)
        described[f"outer.{name}"] = value if is_plain else repr(value)
    return described


def rename_options(options: Options, names: Names) -> dict[str, Value]:
    """Return the options under the names of the class."""
    return {names.get(name, name): value for name, value in options.items()}


def check_options(saved: Options, options: Options, names: Names) -> None:
    """Raise if the saved run had other options."""
    differences = []
    for name, here in options.items():
        came = saved.get(name)
        if isinstance(came, Tensor) or came != here:  # (a tensor compares element by element)
            differences.append(f"{names.get(name, name)}: saved {came}, now {here}")
    if differences:
        raise ValueError(
            f"this state dict is of a run with other options: {'; '.join(differences)}. If the "
            'change is meant, set state["blocks"]["options"] = None before load_state_dict(state).'
        )
