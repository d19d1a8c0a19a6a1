"""Shard the parameters of one wrap, once, when the wrap is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from manyhands.sharding.fsdp._checks import check_same_model
from manyhands.sharding.fsdp._engine import Engine
from manyhands.sharding.fsdp._optimizer_guard import guard_optimizers
from manyhands.sharding.fsdp._places import copy_from_rank_0, make_contiguous, named_params


def shard_wrap(wrap: Any, module: nn.Module, inner_wraps: Sequence[Any], offload: bool) -> Engine:
    """Shard the parameters of a wrap around `module`, in place, and return its engine.

    `wrap` is a FullyShardedDataParallel whose options are set and which has several ranks.
    """
    make_contiguous(wrap._places)
    # Inner wraps in a group of one hold parameters that are private to each rank: those are not
    # compared, not copied from rank 0, and not sharded.
    private = {each for inner in inner_wraps if inner.world_size == 1 for each in inner.modules()}
    # Each parameter once: the engine finds the other places of a tied one by itself.
    distinct = {id(m._parameters[name]): (m, name) for m, name in wrap._places.values()}
    plain = [param for _, param in named_params(wrap._places)]
    shared = {name: each for name, each in module.named_modules() if each not in private}
    facts = [(wrap._places, wrap._compared_options())]
    check_same_model(wrap._ranks, facts, wrap.compute_device, shared)
    # After the check, because a broadcast between different models would hang or crash.
    if wrap.sync_module_states:
        copy_from_rank_0(shared.values(), wrap._ranks, wrap.compute_device)
    # The engine's None means "free after forward, except on the root".
    root_keeps = wrap.disable_reshard_on_root and wrap.reshard_after_forward
    engine = Engine(
        module,
        list(distinct.values()),
        wrap._ranks,
        wrap.compute_device,
        wrap._precision,
        reshard_after_forward=None if root_keeps else wrap.reshard_after_forward,
        offload=offload,
        overlap=wrap.overlap,
        ignored={param for each in private for param in each.parameters(recurse=False)},
    )
    guard_optimizers(plain, engine.params)
    engine.divide = wrap._divide
    return engine
