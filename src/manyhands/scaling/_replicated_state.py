"""Sharded optimizer state, replicated on all ranks, for AdamScale.

AdamScale measures each rank's own gradient, before any averaging, divided by the second moments of
all parameters. Of sharded second moments a rank holds only its shard. A replica collects all of
them after each step. Its price is one more tensor of the model's size on every rank, and as many
bytes sent as in gathering the parameters, and the step counts, which are read on the host.

A `ShardedOptimizer` makes its own replica. `ReplicatedDTensorState` is that of a plain optimizer of
`fully_shard`'s parameters. Shards of several parameters travel together in messages of at most
`MESSAGE` elements from each rank:

    section   what one rank sends in a message: its shard of each of several parameters, one after
              the other. All sections are as long as the longest rank's.
    table     all ranks' sections, in rank order
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.ranks import RankGroup
from manyhands._core.sharded import DTensorShards, is_dtensor, local_shard

MESSAGE = 4 * 2**20  # elements


class ReplicatedDTensorState:
    """The named tensors of an optimizer's state, and its step counts, for every parameter."""

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        self._memory: dict[tuple[Tensor, str], Tensor] = {}
        self._ranks: dict[Any, RankGroup] = {}  # by mesh and its dimension
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Collect the state as it is now. Call it on every rank."""
        sharded_state = self._optimizer.state
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        self.state = {}
        # only shards of one type, cut among the same ranks, can travel in one message
        messages: dict[Any, list[tuple[Tensor, DTensorShards]]] = defaultdict(list)
        for param in params:
            if "step" not in sharded_state.get(param, {}):
                continue
            if not is_dtensor(param):
                self.state[param] = sharded_state[param]
                continue
            # every rank has made a step with it, even if its shard is empty
            self.state[param] = {"step": local_shard(sharded_state[param]["step"])}
            share = DTensorShards.of(param)
            for name in self._names:
                shard = local_shard(sharded_state[param][name])
                messages[name, share.mesh, share.mesh_dim, shard.dtype].append((param, share))
        for (name, *_), shares in messages.items():
            for message in _split_into_messages(shares):
                self._collect(name, message)

    def _collect(self, name: str, shares: Sequence[tuple[Tensor, DTensorShards]]) -> None:
        """Gather one entry of the state for some parameters."""
        share = shares[0][1]
        own = [local_shard(self._optimizer.state[param][name]) for param, _ in shares]
        ranks = self._ranks_of(share)
        # rank 0's shards are the longest, as in torch.chunk
        section = sum(_numel(param, share, 0) for param, share in shares)
        table = own[0].new_zeros(ranks.size * section)
        start = ranks.rank * section
        for shard in own:
            table[start : start + shard.numel()].copy_(shard.reshape(-1))
            start += shard.numel()
        for work in ranks.all_gather_slices(table, range(0, ranks.size * section + 1, section)):
            work.wait()
        for rank in range(ranks.size):
            start = rank * section
            for param, its_share in shares:
                size = _numel(param, its_share, rank)
                # a view of the whole tensor: the shard may be cut in any dimension
                target = its_share.ranges[rank].narrow(self._whole(param, name, table.dtype))
                target.copy_(table[start : start + size].view(target.shape))
                start += size

    def _whole(self, param: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """Return the memory for one entry of a whole parameter; it is kept between steps."""
        whole = self._memory.get((param, name))
        if whole is None or (whole.device, whole.dtype) != (param.device, dtype):
            whole = torch.empty(param.shape, dtype=dtype, device=param.device)
            self._memory[param, name] = whole
        self.state[param][name] = whole
        return whole

    def _ranks_of(self, share: DTensorShards) -> RankGroup:
        """Return the ranks that a parameter is cut among."""
        if share.mesh_dim is None:
            return RankGroup()
        key = share.mesh, share.mesh_dim
        if key not in self._ranks:
            self._ranks[key] = RankGroup.of(share.mesh.get_group(share.mesh_dim))
        return self._ranks[key]


def _numel(param: Tensor, share: DTensorShards, rank: int) -> int:
    """Return the number of elements of a rank's shard."""
    part = share.ranges[rank]
    return param.numel() // max(param.size(part.dim), 1) * part.length


def _split_into_messages(
    shares: Sequence[tuple[Tensor, DTensorShards]],
) -> list[list[tuple[Tensor, DTensorShards]]]:
    """Return the shares in groups of at most `MESSAGE` elements, or of one larger share."""
    messages: list[list[tuple[Tensor, DTensorShards]]] = [[]]
    size = 0
    for param, share in shares:
        size += _numel(param, share, 0)
        if messages[-1] and size > MESSAGE:
            messages.append([])
            size = _numel(param, share, 0)
        messages[-1].append((param, share))
    return messages
