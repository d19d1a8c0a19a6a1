"""Gather and load the state of an optimizer under FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._optimizers.state_parts import OptimizerLayers
from manyhands.scaling._binding import KEY
from manyhands.sharding.fsdp._wrapper import FullyShardedDataParallel


def full_state(root: FullyShardedDataParallel, optimizer: Optimizer) -> StateDict:
    """Return the plain optimizer's state with the rule's state on rank 0. Call it on every rank."""
    layers = OptimizerLayers.of(optimizer)
    state = root.gather_full_optim_state_dict(layers.inner) or {}
    if layers.rule is not None:
        state[KEY] = layers.rule.scaling_state_dict()
    return state


def load_full_state(
    root: FullyShardedDataParallel, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Load this rank's shards of a `full_state`."""
    plain = dict(state)
    of_rule = plain.pop(KEY, None)
    shard = root.get_shard_from_optim_state_dict(plain)
    if of_rule is not None:
        shard = {**shard, KEY: of_rule}
    optimizer.load_state_dict(shard)
