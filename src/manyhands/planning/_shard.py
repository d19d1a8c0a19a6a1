"""`shard`: put a row of the plan into practice, with one number for how much is sharded.

    level   model                       optimizer
    0       DistributedDataParallel     as it was given
    1       DistributedDataParallel     OSS
    2       ShardedDataParallel         OSS
    3       FullyShardedDataParallel    as it was given, made anew from the sharded parameters;
                                        WholeTensorOptimizer for Muon and others of its kind

Everything that can be a mistake is checked, and compared among the ranks, before anything is
changed.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer, SparseAdam

from manyhands._core.agreement import agree
from manyhands._core.encoded_slices import find_gradient_codec
from manyhands._core.modules import TORCH_WRAPPERS, ModuleWrapper, modules_holding
from manyhands._core.ranks import RankGroup
from manyhands._core.sharded import is_dtensor
from manyhands._core.state_parts import ShardedOptimizer
from manyhands._core.wrappers import OptimizerWrapper
from manyhands.planning._arguments import check_covers, describe_optimizer
from manyhands.planning._model import by_size, wrap_size_of
from manyhands.planning._plan import plan, wrapping_obstacle
from manyhands.sharding._agreement import (
    ADVICE,
    GroupLike,
    facts_of_groups,
    facts_of_options,
    make_on_all_ranks,
)
from manyhands.sharding.fsdp._whole_tensors import WholeTensorOptimizer
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.wrapping._policies import Classes, Policy
from manyhands.sharding.wrapping._wrap import auto_wrap, enable_wrap, wrap
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

Level: TypeAlias = Literal["auto", 0, 1, 2, 3]
Given = TypeVar("Given", Optimizer, list[Optimizer])
LEVELS = ("auto", 0, 1, 2, 3)
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
# The limit, what is used and what that consists of, in versions 2 and 1 of Linux's cgroups.
CONTAINER_MEMORY = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
WRAPPERS = (ModuleWrapper, *TORCH_WRAPPERS)
MARGIN = 0.85  # of the free memory: the plan does not count workspaces and fragments


def shard(
    model: nn.Module,
    optimizer: Given,
    level: Level = "auto",
    *,
    memory: int | str | None = None,
    input: Any = None,
    autocast: torch.dtype | None = None,
    auto_wrap_policy: Policy | Classes | None = None,
    find_unused_parameters: bool = False,
    codec: str | None = None,
    process_group: GroupLike | None = None,
) -> tuple[nn.Module, Given]:
    """Return the model and its optimizer for many ranks, sharded as far as `level` says.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model, optimizer = mh.shard(model, optimizer, level=2)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> optimizer.step()

    A rank holds all of it at level 0, and of N ranks each holds 1/N

        1  of the optimizer state,
        2  and of the gradients,
        3  and of the parameters.

    The training loop, its losses and the checkpoints of `save` are the same at every level. (Scale
    a loss in float16 with `ShardedGradScaler`, which is right at each.) Call it on every rank, with
    the plain model on its device and before the first step. Put scaling rules and schedulers around
    the optimizer that it returns.

    Args:
        model: the plain model, with the same parameters on every rank.
        optimizer: the plain optimizer of the model's parameters, or a list of several. (A list is
            returned then.) Levels 1 to 3 make it anew, with its groups and options.
        level: 0, 1, 2 or 3; "auto" takes the way that `plan` finds the cheapest of those that fit
            each rank's memory.
        memory: for "auto", like the next two: the memory of a rank, such as "24GiB". By default
            85 % of what is free on the model's device (on a CPU: of the host's, divided by its
            ranks).
        input: one rank's input, so that the plan counts activations.
        autocast: the type to which `torch.autocast` casts in the forward pass.
        auto_wrap_policy: for level 3: the classes of the layers to wrap, or a policy, as for
            `auto_wrap`. By default by size: a 50th of the model's parameters and more.
        find_unused_parameters: for levels 0 and 1: that of `DistributedDataParallel`. Levels 2 and
            3 need no such option.
        codec: for levels 2 and 3, on a slow line: send gradients as "int8", "int4" or "fp4", as
            `ShardedDataParallel` and `FullyShardedDataParallel` do. "auto" takes one of these two.
        process_group: the ranks; all, by default. Levels 0 and 1 need a process group.
    """
    ranks = RankGroup.of(process_group)
    check = partial(_check, model, optimizer, level, codec)
    optimizers = make_on_all_ranks(ranks, check, "{ranks} cannot shard the model")
    agree(ranks, _facts_to_share(model, optimizers, level, codec), ADVICE)
    chosen: int = (
        _cheapest_level(model, optimizers, ranks, memory, input, autocast, codec)
        if level == "auto"
        else level
    )
    if chosen < 2 and not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"level {chosen} is DistributedDataParallel, which needs a process group. Call "
            "mh.start() or torch.distributed.init_process_group() first. (Levels 2 and 3 need "
            "none for a single process.)"
        )
    sharded: nn.Module
    if chosen == 3:
        if ranks.size > 1:
            _check_fully_shardable(model, optimizers, by_size=auto_wrap_policy is None)
        sharded, made = _fully_sharded(model, optimizers, auto_wrap_policy, codec, process_group)
    else:
        made = optimizers if chosen == 0 else [_as_oss(one, process_group) for one in optimizers]
        if chosen == 2:
            sharded = ShardedDataParallel(model, made, process_group, codec=codec)
        else:
            sharded = DistributedDataParallel(
                model,
                process_group=process_group,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )
    returned: Any = made[0] if isinstance(optimizer, Optimizer) else made
    return sharded, returned


# -- the plain model and its plain optimizers ------------------------------------------------------


def _check(model: object, optimizer: object, level: object, codec: str | None) -> list[Optimizer]:
    """Return the optimizers in a list. Raise if one is sharded, wrapped or in use already."""
    if level not in LEVELS or not isinstance(level, int | str) or isinstance(level, bool):
        raise ValueError(f'level must be 0, 1, 2, 3 or "auto", got {level!r}.')
    if find_gradient_codec(codec) is not None and level in (0, 1):
        raise ValueError(
            f"codec={codec!r} is for gradients that are sharded, and level {level} shards none. "
            "Use level 2 or 3, or leave the codec out."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            where = f"model.{name}" if name else "the model"
            raise TypeError(
                f"{where} is a {type(module).__name__} already. Give shard() the plain model: it "
                "does the wrapping."
            )
    _check_not_in_use(model)
    optimizers: list[Any] = [optimizer]
    if isinstance(optimizer, list | tuple):
        optimizers = list(optimizer)
    if not optimizers:
        raise ValueError("shard() needs the model's optimizer, and got an empty list.")
    for one in optimizers:
        _check_plain_optimizer(one)
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(f"{name} has no shape yet. Run the model once, then shard it.")
    check_covers([describe_optimizer(one) for one in optimizers], model, "shard()")
    held = [param for one in optimizers for group in one.param_groups for param in group["params"]]
    names = {param: name for name, param in model.named_parameters()}
    for param, count in Counter(held).items():
        if count > 1:
            raise ValueError(f"{names[param]} is in {count} optimizers. Give it to one of them.")
    return optimizers


def _check_not_in_use(model: nn.Module) -> None:
    """Raise if parameters are sharded already, or in a wrapper that somebody still holds."""
    names = [name for name, _ in model.named_parameters()]
    params = list(model.parameters())
    for name, param in zip(names, params, strict=True):
        if is_dtensor(param):
            raise TypeError(
                f"{name} is sharded already (a DTensor, as fully_shard, FullyShardedDataParallel "
                "and tensor parallelism make them). Give shard() the plain model, and only once."
            )
    if _wrappers_around(params):
        gc.collect()  # what nobody holds any more may be in a cycle
    for kind, indices in _wrappers_around(params):
        raise RuntimeError(
            f"{names[min(indices)]} is in a {kind} already, which shard() has returned or you have "
            "made, and its gradients would be sent twice. Go on with that one, or delete it before "
            "you call shard()."
        )


def _wrappers_around(params: Sequence[Tensor]) -> list[tuple[str, set[int]]]:
    """Return the live wrappers with any of these parameters, and the indices of those they have."""
    found = modules_holding(params, lambda module: isinstance(module, WRAPPERS))
    return [(type(module).__name__, indices) for module, indices in found]


def _check_plain_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer or a list of them, "
            f"got {type(optimizer).__name__}."
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"Give shard() the plain optimizer instead of {kind}: it does the sharding."
        )
    if isinstance(optimizer, OptimizerWrapper):
        raise TypeError(
            f"Give shard() the plain optimizer, and put {kind} around the one that it returns."
        )
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if hooks or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"a scheduler or a step hook is on this {kind}, and would not reach the optimizer that "
            "shard() returns. Put it on that one."
        )
    # Adagrad makes its state with itself, at step 0.
    if any(state.get("step") != 0 for state in optimizer.state.values()):
        raise ValueError(
            f"this {kind} has taken steps already. Call shard() before the first step, and load a "
            "checkpoint afterwards: mh.load() reads it at every level."
        )
    unknown = [
        name
        for name, parameter in list(inspect.signature(type(optimizer)).parameters.items())[1:]
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in optimizer.defaults
    ]
    if unknown:
        raise ValueError(
            f"shard() makes the optimizer anew, and {kind} does not keep its argument(s) "
            f"{', '.join(unknown)} among its defaults. Make the parts yourself, such as "
            f"mh.OSS(model.parameters(), optim={kind}, {unknown[0]}=...)."
        )


def _facts_to_share(
    model: nn.Module, optimizers: Sequence[Optimizer], level: Level, codec: str | None
) -> dict[str, object]:
    """Return what ranks must have in common before anything is changed."""
    names = {id(param): name for name, param in model.named_parameters()}
    facts: dict[str, object] = {
        "values of level": level,
        "values of codec": codec if find_gradient_codec(codec) else None,
        "optimizers": [type(one).__name__ for one in optimizers],
    }
    first = 0
    for one in optimizers:
        facts |= facts_of_groups(one.param_groups, names, first)
        facts |= facts_of_options(one.param_groups, one.defaults, first)
        first += len(one.param_groups)
    return facts


def _groups_with(optimizer: Optimizer, params: Mapping[Tensor, Tensor]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, with other parameters."""
    return [
        {**group, "params": [params[param] for param in group["params"]]}
        for group in optimizer.param_groups
    ]


def _as_oss(optimizer: Optimizer, process_group: GroupLike | None) -> Optimizer:
    one = describe_optimizer(optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    return OSS(groups, one.kind, process_group, **one.arguments)


# -- level 3 ---------------------------------------------------------------------------------------


def _check_fully_shardable(
    model: nn.Module, optimizers: Sequence[Optimizer], *, by_size: bool
) -> None:
    """Raise if FSDP could not train it. All ranks have the same model, so that all raise."""
    obstacle = wrapping_obstacle(model, wrap_size_of(model) if by_size else None)
    for name, param in model.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            obstacle = f"{name} has hooks, and becomes another parameter; put them on that one."
    if obstacle:
        raise ValueError(f"level 3 cannot shard this model: {obstacle}")
    for one in optimizers:
        if isinstance(one, LBFGS | SparseAdam):
            raise ValueError(
                f"level 3 cannot shard the state of {type(one).__name__}. Use level 0, or another "
                "optimizer."
            )


def _fully_sharded(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    policy: Policy | Classes | None,
    codec: str | None,
    process_group: GroupLike | None,
) -> tuple[nn.Module, list[Optimizer]]:
    """Wrap the model. Its parameters are others then, so the optimizers are made anew."""
    planned = [describe_optimizer(one) for one in optimizers]
    names = list(model.named_parameters())
    options: dict[str, Any] = {"codec": codec}
    if process_group is not None:
        options["process_group"] = process_group
    with enable_wrap(policy or by_size(wrap_size_of(model)), **options):
        wrapped = auto_wrap(model)
        if not isinstance(wrapped, FullyShardedDataParallel):  # the policy leaves the model out
            wrapped = wrap(wrapped)
    sharded = dict(wrapped.named_parameters())
    params: dict[Tensor, Tensor] = {param: sharded[name] for name, param in names}
    made: list[Optimizer] = []
    for optimizer, one in zip(optimizers, planned, strict=True):
        groups = _groups_with(optimizer, params)
        if one.wants_whole_tensors:
            made.append(WholeTensorOptimizer(groups, one.kind, process_group, **one.arguments))
        else:
            made.append(one.kind(groups, **one.arguments))
    return wrapped, made


# -- "auto" ----------------------------------------------------------------------------------------


def _cheapest_level(
    model: nn.Module,
    optimizers: list[Optimizer],
    ranks: RankGroup,
    memory: int | str | None,
    input: Any,
    autocast: torch.dtype | None,
    codec: str | None,
) -> int:
    """Return the level of the cheapest way that fits on every rank."""
    device = next(model.parameters()).device
    found = plan(
        model,
        optimizers,
        workers=ranks.size,
        memory=memory if memory is not None else _free_memory(model, device, ranks.size),
        input=input,
        autocast=autocast,
        backend="nccl" if device.type == "cuda" else "gloo",
        codec=codec,
    )
    levels = len(found.rows)
    first = 0 if find_gradient_codec(codec) is None else 2  # that shards gradients
    best = replace(found, rows=found.rows[first:]).cheapest
    own = levels if best is None else found.rows.index(best)
    chosen = max(int(row[0]) for row in ranks.all_gather([float(own)], ranks.any_device))
    if chosen == levels:
        lacking = "on this rank" if best is None else "on another rank"
        what = "no level"
        if first:
            what += f" that shards gradients, with the residuals of codec={codec!r},"
        raise MemoryError(f"{what} fits the memory {lacking}.\n\n{found}")
    return chosen


def _free_memory(model: nn.Module, device: torch.device, ranks: int) -> int:
    """Return the bytes that this rank may use, including those of its model."""
    if device.type == "cuda":
        free, sharers = torch.cuda.mem_get_info(device)[0], 1
    else:
        # Without a launcher that says so, all ranks may be on this host.
        free, sharers = _free_host_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    held = sum(param.numel() * param.element_size() for param in model.parameters())
    return held + int(MARGIN * free / sharers)


def _free_host_memory() -> int:
    """Return the bytes that Linux can give to processes here: the host's, within a container's."""
    try:
        meminfo = (PROC / "meminfo").read_text()
        free = 1024 * int(meminfo.split("MemAvailable:")[1].split()[0])
    except (OSError, IndexError):
        raise RuntimeError(
            'level="auto" cannot find out how much memory this host has free. Say how much a rank '
            'may use: memory="16GiB".'
        ) from None
    for limit, used, cached in CONTAINER_MEMORY:
        with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
            room = int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
            # Files that were read are counted as used, and make room when it is needed.
            stat = dict(line.split() for line in (CGROUP / cached).read_text().splitlines())
            free = min(free, max(room + int(stat["inactive_file"]), 0))
    return free
