"""Shard a model (`shard`).

    level   model                       optimizer
    0       DistributedDataParallel     unchanged
    1       DistributedDataParallel     OSS
    2       ShardedDataParallel         OSS
    3       FullyShardedDataParallel    rebuilt for the shards; a WholeTensorOptimizer for
                                        optimizers of matrices, such as Muon

Ranks check and compare their arguments before the model changes.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam

from manyhands._arguments import one_of
from manyhands._optimizers.modules import (
    TORCH_WRAPPERS,
    ModuleWrapper,
    check_has_memory,
    modules_holding,
)
from manyhands._optimizers.optimizers import constructor_arguments, fused_problem
from manyhands._optimizers.state_parts import ShardedOptimizer
from manyhands._optimizers.wrappers import OptimizerWrapper
from manyhands._ranks.agreement import agree, run_on_all
from manyhands._ranks.ranks import JOIN, RankGroup
from manyhands._tensors.flat import is_dtensor
from manyhands.sharding._agreement import ADVICE, GroupLike, facts_of_groups, facts_of_options
from manyhands.sharding.fsdp._engine import guard_state
from manyhands.sharding.fsdp._options import find_ranks
from manyhands.sharding.fsdp._whole_tensors import WholeTensorOptimizer
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel
from manyhands.sharding.fsdp._wrapping import Classes, Policy, auto_wrap, enable_wrap, wrap
from manyhands.sharding.zero._ddp import ShardedDataParallel
from manyhands.sharding.zero._oss import OSS
from manyhands.tools.plan._model import PlannedOptimizer, by_size, check_covers, wrap_size_of
from manyhands.tools.plan._plan import plan, wrapping_obstacle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Level: TypeAlias = Literal["auto", 0, 1, 2, 3]
Given = TypeVar("Given", Optimizer, list[Optimizer])
WRAPPERS = (ModuleWrapper, *TORCH_WRAPPERS)
MARGIN = 0.85  # fraction of free memory, because the plan excludes workspaces and fragmentation


def shard(
    model: nn.Module,
    optimizer: Given,
    level: Level = "auto",
    *,
    memory: int | str | None = None,
    input: Any = None,
    auto_wrap_policy: Policy | Classes | None = None,
    find_unused_parameters: bool = False,
    gather_state: bool = False,
    process_group: GroupLike | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[nn.Module, Given]:
    """Shard a model with its optimizers, for training on many ranks.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model, optimizer = mh.shard(model, optimizer, level=2)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> optimizer.step()

    With N ranks, each rank has the complete training state at level 0, and otherwise 1/N of

        1  the optimizer state,
        2  the optimizer state and gradients,
        3  the optimizer state, gradients and parameters.

    The training loop, losses and checkpoints of `save` do not depend on the level. Call `shard` on
    every rank before the first step, with the plain model on its device. Put scaling rules and
    schedulers around the returned optimizer. To scale losses in float16, use `ShardedGradScaler`.

    Args:
        model: the plain model, with equal parameters on every rank.
        optimizer: the plain optimizer, or a list of optimizers; the result has this form, too.
            Levels 1 to 3 create new optimizers with equal groups and options.
        level: 0, 1, 2 or 3; "auto" selects the cheapest row of `plan` that fits on every rank.
        memory: for "auto": the memory of a rank, such as "24GiB". The default is 85 % of the free
            memory of the GPU. On a CPU, "auto" selects level 0 by default.
        input: for "auto": the input of a rank, to include activations.
        auto_wrap_policy: for level 3: the classes of layers to wrap, or a policy for `auto_wrap`.
            The default is modules with at least 1/50 of the parameters.
        find_unused_parameters: for levels 0 and 1: the option of `DistributedDataParallel`.
        gather_state: for levels 1 and 2: the option of `OSS`, with which `state_dict()` on every
            rank collects the optimizer state. `save` does not need the option.
        process_group: the ranks; by default all ranks. Levels 0 and 1 need a process group.
        mesh: the ranks as a `DeviceMesh`, instead of `process_group`. A mesh with two dimensions
            (copies of the model, ranks per copy) is for level 3.
    """
    grid, process_group = _ranks_of_mesh(mesh, process_group, level)
    ranks = find_ranks(grid or process_group)
    check = partial(_check_optimizers, model, optimizer, level)
    optimizers = run_on_all(ranks, check)
    agree(ranks, _facts_to_share(model, optimizers, level, gather_state), ADVICE)
    chosen: int
    if level == "auto":
        chosen = _cheapest_level(model, optimizers, ranks, memory, input)
    else:
        chosen = level
    if chosen != 3:
        check_has_memory(model)
    if chosen in (0, 1) and not dist.is_initialized():
        raise ValueError(
            f"level {chosen} wraps the model in DistributedDataParallel, which needs a process "
            f"group, also on one rank. {JOIN} Levels 2 and 3 need no process group on one rank."
        )
    sharded: nn.Module
    made = optimizers
    if chosen == 3:
        if gather_state:
            raise ValueError(
                "gather_state=True is for levels 1 and 2, and this is level 3. Save with mh.save, "
                "or collect the state with model.gather_full_optim_state_dict(optimizer)."
            )
        if ranks.size > 1:
            _check_fully_shardable(model, optimizers, by_size=auto_wrap_policy is None)
        sharded, made = _fully_sharded(model, optimizers, auto_wrap_policy, process_group, grid)
    else:
        if chosen != 0:
            made = [_as_oss(one, process_group, gather_state) for one in optimizers]
        if chosen == 2:
            sharded = ShardedDataParallel(model, made, process_group)
        else:
            sharded = DistributedDataParallel(
                model,
                process_group=process_group,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )
    returned: Any = made
    if isinstance(optimizer, Optimizer):
        returned = made[0]
    return sharded, returned


def _ranks_of_mesh(
    mesh: DeviceMesh | None, process_group: GroupLike | None, level: Level
) -> tuple[DeviceMesh | None, GroupLike | None]:
    if mesh is None:
        return None, process_group
    if process_group is not None:
        raise ValueError("shard() got a mesh and a process_group: leave one out.")
    if mesh.ndim == 1:
        return None, mesh.get_group()
    if level != 3:
        raise ValueError(
            f"a mesh of {mesh.ndim} dimensions is for level 3, and this is level {level}. Levels 1 "
            "and 2 shard over all ranks: leave the mesh out."
        )
    return mesh, None


# -- checks ----------------------------------------------------------------------------------------


def _check_optimizers(model: nn.Module, optimizer: Any, level: object) -> list[Optimizer]:
    one_of("level", level, ("auto", 0, 1, 2, 3))
    if not isinstance(model, nn.Module):
        given = type(model).__name__
        raise TypeError(f"shard() takes the model, and then the optimizer; got {given} as model.")
    _check_not_in_use(model)
    optimizers = [optimizer]
    if isinstance(optimizer, list | tuple):
        optimizers = list(optimizer)
    for one in optimizers:
        _check_plain_optimizer(one)
    check_covers(list(map(PlannedOptimizer.of, optimizers)), model)
    return optimizers


def _check_not_in_use(model: nn.Module) -> None:
    names, params = zip(*model.named_parameters(), strict=True)
    for name, param in zip(names, params, strict=True):
        if is_dtensor(param):
            raise RuntimeError(_in_use(name, "sharded (a DTensor)"))

    def is_wrapper(module: nn.Module) -> bool:
        return isinstance(module, WRAPPERS)

    if any(modules_holding(params, is_wrapper)):
        gc.collect()  # an unused wrapper may be in a reference cycle
    for wrapper, indices in modules_holding(params, is_wrapper):
        raise RuntimeError(_in_use(names[min(indices)], f"in a {type(wrapper).__name__}"))


def _in_use(name: str, where: str) -> str:
    return (
        f"{name} is {where} already. Continue with that model, or pass the plain model after "
        "deleting it: its gradients would be sent twice."
    )


def _check_plain_optimizer(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    wrapper = ShardedOptimizer | OptimizerWrapper
    if isinstance(optimizer, wrapper) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"shard() needs a plain torch.optim.Optimizer or a list of them, got {kind}. Put "
            "scaling rules and blocks around the returned optimizer."
        )
    _, unknown = constructor_arguments(optimizer)
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    wrong = ""
    if hooks or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        wrong = "has a scheduler or a step hook: put it on the optimizer that shard() returns"
    # Adagrad's constructor creates state, with step 0.
    elif any(state.get("step") != 0 for state in optimizer.state.values()):
        wrong = "has taken steps: call shard() before the first step, and mh.load() after shard()"
    elif unknown:
        wrong = (
            f"does not keep {sorted(unknown)} in its defaults: create an mh.OSS of its class, or "
            "for level 3 an mh.WholeTensorOptimizer"
        )
    if wrong:
        raise ValueError(f"this {kind} {wrong}.")


def _facts_to_share(
    model: nn.Module, optimizers: Sequence[Optimizer], level: Level, gather_state: bool
) -> dict[str, object]:
    names = {id(param): name for name, param in model.named_parameters()}
    facts: dict[str, object] = {
        "values of level": level,
        "values of gather_state": gather_state,
        "optimizers": [type(one).__name__ for one in optimizers],
    }
    first = 0
    for one in optimizers:
        facts |= facts_of_groups(one.param_groups, names, first)
        facts |= facts_of_options(one.param_groups, one.defaults, first)
        first += len(one.param_groups)
    return facts


def _as_oss(optimizer: Optimizer, process_group: GroupLike | None, gather_state: bool) -> Optimizer:
    arguments = PlannedOptimizer.of(optimizer).arguments
    return OSS(
        list(map(dict, optimizer.param_groups)),
        type(optimizer),
        process_group,
        gather_state=gather_state,
        **arguments,
    )


# -- level 3 ---------------------------------------------------------------------------------------


def _check_fully_shardable(
    model: nn.Module, optimizers: Sequence[Optimizer], *, by_size: bool
) -> None:
    """Raise if FSDP cannot train the model, which all ranks detect."""
    wrap_size = None
    if by_size:
        wrap_size = wrap_size_of(model)
    obstacle = wrapping_obstacle(model, wrap_size)
    for name, param in model.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            obstacle = (
                f"{name} has hooks, but level 3 replaces the parameter. Register hooks on the new "
                "one with register_post_accumulate_grad_hook(); register_hook() is not called."
            )
    for one in optimizers:
        if isinstance(one, LBFGS | SparseAdam):
            obstacle = f"it cannot shard the state of {type(one).__name__}. Use level 0."
        obstacle = fused_problem(one) or obstacle
    if obstacle:
        raise ValueError(f"level 3 cannot shard this model: {obstacle}")


def _fully_sharded(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    policy: Policy | Classes | None,
    process_group: GroupLike | None,
    grid: DeviceMesh | None,
) -> tuple[nn.Module, list[Optimizer]]:
    names = list(model.named_parameters())
    options: dict[str, Any] = {}
    if grid is not None or process_group is not None:
        options["process_group"] = grid or process_group
    with enable_wrap(policy or by_size(wrap_size_of(model)), **options):
        wrapped = auto_wrap(model)
        if not isinstance(wrapped, FullyShardedDataParallel):  # not selected by the policy
            wrapped = wrap(wrapped)
    sharded = dict(wrapped.named_parameters())
    params: dict[Tensor, Tensor] = {param: sharded[name] for name, param in names}
    made: list[Optimizer] = []
    for optimizer in optimizers:
        one = PlannedOptimizer.of(optimizer)
        groups = []
        for group in optimizer.param_groups:
            groups.append({**group, "params": [params[param] for param in group["params"]]})
        if one.wants_whole_tensors:
            made.append(WholeTensorOptimizer(groups, one.kind, process_group, **one.arguments))
        else:
            made.append(one.kind(groups, **one.arguments))
        guard_state(made[-1])
    return wrapped, made


# -- "auto" ----------------------------------------------------------------------------------------


def _cheapest_level(
    model: nn.Module,
    optimizers: list[Optimizer],
    ranks: RankGroup,
    memory: int | str | None,
    input: Any,
) -> int:
    device = next(model.parameters()).device
    if memory is None and device.type == "cuda":
        held = sum(param.nbytes for param in model.parameters())
        memory = held + int(MARGIN * torch.cuda.mem_get_info(device)[0])
    backend = "gloo"
    if device.type == "cuda":
        backend = "nccl"
    found = plan(model, optimizers, workers=ranks.size, memory=memory, input=input, backend=backend)
    levels = len(found.rows)
    own = levels
    lacking = "on this rank"
    if found.cheapest is not None:
        own = found.rows.index(found.cheapest)
        lacking = "on another rank"
    everyone = ranks.all_gather([float(own)], ranks.any_device)
    chosen = int(max(everyone)[0])
    if chosen == levels:
        raise MemoryError(f"no level fits the memory {lacking}.\n\n{found}")
    return chosen
