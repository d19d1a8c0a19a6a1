"""Sharded optimizer state, replicated on all ranks, for AdamScale.

AdamScale measures each rank's own gradient, before any averaging, divided by the second moments of
all parameters. Of sharded second moments a rank holds only its shard. A replica collects all of
them after each step. Its price is one more tensor of the model's size on every rank, and as many
bytes sent as in gathering the parameters, and the step counts, which are read on the host.

`ReplicatedOSSState` replicates the state of an `OSS`, whose shards are slices of flat buckets.
`ReplicatedDTensorState` replicates the state of `fully_shard`'s parameters. Shards of several
parameters travel together there, in messages of at most `MESSAGE` elements from each rank:

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

from manyhands._core.dtensor import DTensorShards, is_dtensor, local
from manyhands._core.flat import flatten, unflatten
from manyhands._core.ranks import RankGroup
from manyhands.sharding.zero._flat_params import FlatBuffer
from manyhands.sharding.zero._oss import OSS


class ReplicatedOSSState:
    """The named tensors of an OSS's state, and its step counts, for every parameter."""

    def __init__(self, optimizer: OSS, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        # (segment number, entry) -> the entry for all of the segment's parameters, flat
        self._memory: dict[tuple[int, str], Tensor] = {}
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Collect the state as it is now. Call it on every rank."""
        shards, state = self._optimizer._shards, self._optimizer.optim.state
        # A parameter may be on several ranks in pieces, or on one: each rank fills in the counts
        # that it has, and the largest is the count.
        steps = torch.zeros(len(shards.params), dtype=torch.float32)
        for pieces in shards.slices:
            for piece in pieces:
                if piece.data in state:
                    steps[piece.param] = float(state[piece.data]["step"])
        device = shards.params[0].device
        steps = shards.workers.all_reduce(steps.to(device), largest=True).cpu()
        self.state = {
            param: {"step": step} for param, step in zip(shards.params, steps, strict=True) if step
        }
        if not self.state:
            return
        # all collectives are started before any is waited for
        works = [
            work
            for number, segment in enumerate(shards.buffers)
            for name in self._names
            for work in self._collect(number, segment, name)
        ]
        for work in works:
            work.wait()

    def _collect(self, number: int, segment: FlatBuffer, name: str) -> list[Any]:
        """Start to gather one entry of the state for the parameters of a segment."""
        shards, state = self._optimizer._shards, self._optimizer.optim.state
        rank, like, works = shards.workers.rank, segment.data, list[Any]()
        data = self._memory.get((number, name))
        if data is None or (data.device, data.dtype) != (like.device, like.dtype):
            data = self._memory[number, name] = torch.zeros_like(like)
        for bucket in segment.buckets:
            cuts, start = bucket.layout.cuts, bucket.layout.start
            whole = data[start : start + bucket.layout.size]
            own = whole[cuts[rank] : cuts[rank + 1]]
            for piece, run in bucket.slices:
                if piece.data in state:
                    value = flatten(state[piece.data][name], piece.data)
                    own[run.offset : run.offset + run.size].copy_(value)
            works += shards.workers.all_gather_slices(whole, cuts)
        # Views of the flat memory: they are filled when the collectives end.
        for index, offset in segment.layout.starts.items():
            param = shards.params[index]
            if param in self.state:
                self.state[param][name] = unflatten(data[offset : offset + param.numel()], param)
        return works


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
            self.state[param] = {"step": local(sharded_state[param]["step"])}
            share = DTensorShards.of(param)
            for name in self._names:
                shard = local(sharded_state[param][name])
                messages[name, share.mesh, share.mesh_dim, shard.dtype].append((param, share))
        for (name, *_), shares in messages.items():
            for message in _split_into_messages(shares):
                self._collect(name, message)

    def _collect(self, name: str, shares: Sequence[tuple[Tensor, DTensorShards]]) -> None:
        """Gather one entry of the state for some parameters."""
        share = shares[0][1]
        own = [local(self._optimizer.state[param][name]) for param, _ in shares]
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
