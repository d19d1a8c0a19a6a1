"""Join a run whose members may change, and leave it: `mh.start(survive=True)`.

start_alone(crew, backend)             make torch's default group, with this rank alone
run = join_run(crew, objects, ...)     in `Job.load`: join the other ranks
"""

from __future__ import annotations

import atexit
import sys
from operator import itemgetter

import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from manyhands._optimizers.modules import modules_holding
from manyhands._optimizers.wrappers import unwrap
from manyhands._ranks.ranks import let_members_change
from manyhands.blocks.crew._crew import Crew
from manyhands.blocks.crew._enrollment import MemberFacts
from manyhands.checkpoint._values import RunObjects
from manyhands.engines.survive._group import ElasticGroup, destroy
from manyhands.engines.survive._state import RunState
from manyhands.engines.survive._steps import SurvivingRun

_must_join: list[RemovableHandle] = []  # until this rank joins


def _raise_not_joined(*_: object) -> None:
    raise RuntimeError(
        "with survive=True, this rank trains alone until it joins the run. Call job.load(model=, "
        "optimizer=, cursor=, ...) with all objects of the run before the first step, also if "
        "there is no checkpoint."
    )


def start_alone(crew: Crew, backend: str) -> None:
    """Make torch's default group, in which this rank is alone until `join_run`."""
    if dist.is_initialized():
        raise RuntimeError(
            "survive=True makes the process group, but the script has made one. Remove "
            "init_process_group()."
        )
    let_members_change()
    _must_join.append(register_optimizer_step_pre_hook(_raise_not_joined))
    atexit.register(destroy)
    connection = crew.connection
    if connection is None:  # without an engine, this is the only rank
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        crew.connect = ElasticGroup(connection, backend).connect


def join_run(crew: Crew, objects: RunObjects, *, loaded: bool) -> SurvivingRun:
    """Join the other ranks, and receive the state of a run that has begun."""
    model = objects.model
    if model is None or not objects.optimizers:
        raise ValueError(
            "survive=True sends the state of the run to ranks that join. Pass job.load(model=, "
            "optimizer=, cursor=, ...) all objects with state."
        )
    modules = _find_ddp(model)
    if not modules:
        raise ValueError(
            "survive=True needs a model in DistributedDataParallel, or mh.shard(model, optimizer, "
            f"level=0), got {type(model).__name__}. Sharded state of a lost rank is lost: use "
            "checkpoints (job.save), and restart all ranks."
        )
    _check_whole(objects)
    while _must_join:
        _must_join.pop().remove()
    state = RunState(model, objects)
    run = SurvivingRun(crew, state, modules, loaded=loaded)
    run.join(_facts(model, state))
    atexit.register(_leave, run)
    return run


def _find_ddp(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the modules in the order of their parameters, which is equal on all ranks."""
    found: list[tuple[int, DistributedDataParallel]] = []
    for module, indices in modules_holding(list(model.parameters()), _is_ddp):
        assert isinstance(module, DistributedDataParallel)
        found.append((min(indices), module))
    return [module for _, module in sorted(found, key=itemgetter(0))]


def _is_ddp(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel)


def _check_whole(objects: RunObjects) -> None:
    for optimizer in objects.optimizers:
        for layer in unwrap(optimizer, every_layer=True):
            if hasattr(type(layer), "shards_state"):
                raise ValueError(
                    "survive=True needs the whole optimizer state on every rank, got "
                    f"{type(layer).__name__}, which shards it: the state of a lost rank would be "
                    "lost. Use mh.shard(level=0), or checkpoints (job.save) and restart all ranks."
                )


def _facts(model: nn.Module, state: RunState) -> MemberFacts:
    options: dict[str, object] = {"cursor": state.cursor.describe()}
    for number, optimizer in enumerate(state.optimizers):
        options[f"optimizer {number}"] = type(optimizer).__name__
    return MemberFacts.of(options, list(model.parameters()), list(model.buffers()), [model])


def _leave(run: SurvivingRun) -> None:
    if getattr(sys, "last_value", None) is None:  # set by Python after an uncaught exception
        run.finish()
    else:
        run.drop_out()
