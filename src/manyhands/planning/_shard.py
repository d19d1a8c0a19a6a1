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

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from manyhands._core.agreement import agree
from manyhands._core.modules import ModuleWrapper
from manyhands._core.ranks import RankGroup
from manyhands._core.state_parts import ShardedOptimizer
from manyhands._core.wrappers import OptimizerWrapper
from manyhands.planning._arguments import PlannedOptimizer, check_covers, describe_optimizer
from manyhands.planning._model import wrap_size_of
from manyhands.planning._plan import plan, wrapping_obstacle
from manyhands.sharding._agreement import ADVICE, GroupLike
from manyhands.sharding.fsdp._checks import NEED_WHOLE
from manyhands.sharding.fsdp._whole_tensors import WholeTensorOptimizer
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.wrapping._policies import Classes, Policy, default_auto_wrap_policy
from manyhands.sharding.wrapping._wrap import auto_wrap, enable_wrap, wrap
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS

Level: TypeAlias = Literal["auto", 0, 1, 2, 3]
Given = TypeVar("Given", Optimizer, list[Optimizer])
LEVELS = ("auto", 0, 1, 2, 3)
CGROUP = Path("/sys/fs/cgroup")
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

    The training loop, its losses and the checkpoints of `save` are the same at every level. Call
    it on every rank, with the plain model on its device and before the first step. Put scaling
    rules and schedulers around the optimizer that it returns.

    Args:
        model: the plain model, with the same parameters on every rank.
        optimizer: the plain optimizer of the model's parameters, or a list of several. (A list is
            returned then.) Levels 1 to 3 make it anew, with its groups and options.
        level: 0, 1, 2 or 3; "auto" takes the way that `plan` finds the cheapest of those that fit
            each rank's memory.
        memory: for "auto": the memory of a rank, such as "24GiB". By default 85 % of what is free
            on the model's device (on a CPU: of the host's, divided by its ranks).
        input: for "auto": one rank's input, so that the plan counts activations.
        autocast: for "auto": the type to which `torch.autocast` casts in the forward pass.
        auto_wrap_policy: for level 3: the classes of the layers to wrap, or a policy, as for
            `auto_wrap`. By default by size: a 50th of the model's parameters and more.
        find_unused_parameters: for levels 0 and 1: that of `DistributedDataParallel`. Levels 2 and
            3 need no such option.
        process_group: the ranks; all, by default. Levels 0 and 1 need a process group.
    """
    optimizers = _check_plain(model, optimizer)
    if level not in LEVELS or isinstance(level, bool):
        raise ValueError(f'level must be 0, 1, 2, 3 or "auto", got {level!r}.')
    planned = [describe_optimizer(one) for one in optimizers]
    check_covers(planned, model, "shard()")
    ranks = RankGroup.of(process_group)
    agree(ranks, {"values of level": level}, ADVICE)
    chosen: int = (
        _cheapest_level(model, optimizers, ranks, memory, input, autocast)
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
        wrap_size = None if auto_wrap_policy is not None else wrap_size_of(model)
        if ranks.size > 1 and (obstacle := wrapping_obstacle(model, wrap_size)):
            raise ValueError(f"level 3 cannot shard this: {obstacle} Level 2 can.")
        sharded, made = _fully_sharded(model, planned, auto_wrap_policy, process_group)
    else:
        made = optimizers if chosen == 0 else [_as_oss(one, process_group) for one in planned]
        if chosen == 2:
            sharded = ShardedDataParallel(model, made, process_group)
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


def _check_plain(model: object, optimizer: object) -> list[Optimizer]:
    """Return the optimizers in a list. Raise if one is sharded, wrapped or in use already."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    wrappers = (DistributedDataParallel, ModuleWrapper, FullyShardedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            where = f"model.{name}" if name else "the model"
            raise TypeError(
                f"{where} is a {type(module).__name__} already. Give shard() the plain model: it "
                "does the wrapping."
            )
    optimizers: list[Any] = [optimizer]
    if isinstance(optimizer, list | tuple):
        optimizers = list(optimizer)
    if not optimizers:
        raise ValueError("shard() needs the model's optimizer, and got an empty list.")
    for one in optimizers:
        _check_plain_optimizer(one)
    return optimizers


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
    if optimizer.state:
        raise ValueError(
            f"this {kind} has taken steps already. Call shard() before the first step, and load a "
            "checkpoint afterwards: mh.load() reads it at every level."
        )


def _as_oss(one: PlannedOptimizer, process_group: GroupLike | None) -> Optimizer:
    groups = [{**options, "params": params} for options, params in one.groups]
    return OSS(groups, one.kind, process_group, **one.arguments)


# -- level 3 ---------------------------------------------------------------------------------------


def _fully_sharded(
    model: nn.Module,
    planned: Sequence[PlannedOptimizer],
    policy: Policy | Classes | None,
    process_group: GroupLike | None,
) -> tuple[nn.Module, list[Optimizer]]:
    """Wrap the model. Its parameters are others then, so the optimizers are made anew."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    options: dict[str, Any] = {} if process_group is None else {"process_group": process_group}
    if policy is None:
        size = wrap_size_of(model)
        policy = partial(
            default_auto_wrap_policy, min_num_params=size, skip_params_check_for_root=True
        )
    with enable_wrap(policy, **options):
        wrapped = auto_wrap(model)
        if not isinstance(wrapped, FullyShardedDataParallel):  # the policy leaves the model out
            wrapped = wrap(wrapped)
    params = dict(wrapped.named_parameters())
    made: list[Optimizer] = []
    for one in planned:
        groups = [
            {**options, "params": [params[names[param]] for param in held]}
            for options, held in one.groups
        ]
        if one.elementwise and not issubclass(one.kind, NEED_WHOLE):
            made.append(one.kind(groups, **one.arguments))
        else:
            made.append(WholeTensorOptimizer(groups, one.kind, process_group, **one.arguments))
    return wrapped, made


# -- "auto" ----------------------------------------------------------------------------------------


def _cheapest_level(
    model: nn.Module,
    optimizers: list[Optimizer],
    ranks: RankGroup,
    memory: int | str | None,
    input: Any,
    autocast: torch.dtype | None,
) -> int:
    """Return the level of the cheapest way that fits on every rank."""
    device = next(model.parameters()).device
    found = plan(
        model,
        optimizers,
        workers=ranks.size,
        memory=memory if memory is not None else _free_memory(model, device),
        input=input,
        autocast=autocast,
        backend="nccl" if device.type == "cuda" else "gloo",
    )
    best = found.cheapest
    levels = len(found.rows)
    own = levels if best is None else found.rows.index(best)
    chosen = max(int(row[0]) for row in ranks.all_gather([float(own)], ranks.any_device))
    if chosen == levels:
        lacking = "on this rank" if best is None else "on another rank"
        raise MemoryError(f"no level fits the memory {lacking}.\n\n{found}")
    return chosen


def _free_memory(model: nn.Module, device: torch.device) -> int:
    """Return the bytes that this rank may use, including those of its model."""
    if device.type == "cuda":
        free, sharers = torch.cuda.mem_get_info(device)[0], 1
    else:
        free, sharers = _free_host_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    held = sum(param.numel() * param.element_size() for param in model.parameters())
    return held + int(MARGIN * free / sharers)


def _free_host_memory() -> int:
    """Return the bytes that Linux can give to processes here: the host's, within a container's."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
        free = 1024 * int(meminfo.split("MemAvailable:")[1].split()[0])
    except (OSError, IndexError):
        raise RuntimeError(
            'level="auto" cannot find out how much memory this host has free. Say how much a rank '
            'may use: memory="16GiB".'
        ) from None
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, max(limit - used, 0))
    return free
