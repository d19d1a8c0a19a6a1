"""Start blocks: compare this worker with the other workers, and take the common values.

Workers of a process group take worker 0's values. A worker of a crew takes the members' state.

Averaged gradients: inside `DistributedDataParallel` or `ShardedDataParallel`, all workers take
equal steps, so sync rounds have no effect, but DDP's traffic remains. A warning follows the first
block if all workers moved identically (`RoundStats.record`). The constructor raises an error if the
optimizer shards its updates over the workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from manyhands._optimizers.foreign import advice
from manyhands._optimizers.several import SeveralOptimizers
from manyhands._optimizers.state_parts import ShardedOptimizer
from manyhands._optimizers.wrappers import params_of, unwrap
from manyhands._ranks.agreement import agree, describe_tensors, names_in
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.received import add_receiver
from manyhands._tensors.flat import is_dtensor, local_shard
from manyhands.blocks._checks import Names, Options, rename_options
from manyhands.blocks._sync import Sync
from manyhands.blocks.averaging._round import ElasticMembers
from manyhands.blocks.crew._enrollment import MemberFacts
from manyhands.blocks.crew._roster import NO_VERSION


def start_blocks(
    sync: Sync,
    optimizer: Optimizer,
    options: Options,
    names: Names,
    class_name: str,
    *,
    shared_memory: bool,
) -> None:
    """Join the other workers. Raise on every worker if options or models differ."""
    params = params_of(optimizer.param_groups)
    buffers = sync.extras.buffer_tensors()
    modules = sync.extras.modules
    if isinstance(optimizer, SeveralOptimizers):
        options = {**options, "optimizers": str(optimizer)}
    members = sync.members
    if isinstance(members, ElasticMembers):
        members.join(NO_VERSION, MemberFacts.of(options, params, buffers, modules))
        add_receiver(sync)
        sync.transfer_state()
        sync.regroup()
        return
    workers = members.workers
    inner = members.inner
    _check_not_averaged(class_name, workers, optimizer)
    compared = {**rename_options(options, names), "shared_memory": shared_memory}
    facts = {
        "options": {name: str(value) for name, value in compared.items()},
        "shards (process_group= must be of ranks with the same shard)": _describe_shards(params),
        "size of inner_group": inner.size,
        "rank in inner_group (process_group= must be of ranks with the same)": inner.rank,
        "parameters": describe_tensors(params, frozen=True),
        "buffers": describe_tensors(buffers),
    }
    named = {"parameters": names_in(modules, params), "buffers": names_in(modules, buffers)}
    remedy = f"Build the same model, and the same {class_name}, on every rank."
    agree(workers, facts, remedy, names=named)
    members.choose_transport(
        [param.device for param in params],
        background=sync.schedule.overlap > 0,
        shared_memory=shared_memory and not sync.anchor.codec.rounds,
    )
    workers.broadcast_from_first([local_shard(tensor) for tensor in [*params, *buffers]])
    sync.anchor.begin()


def _check_not_averaged(class_name: str, workers: RankGroup, optimizer: Optimizer) -> None:
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


def _describe_shards(params: Sequence[Tensor]) -> list[str]:
    shards = []
    for param in params:
        if is_dtensor(param):
            coordinate = param.device_mesh.get_coordinate()
            shards.append(f"{tuple(param.placements)} at {coordinate}")
    return shards
