"""Optimizer state on all workers at once, for those who divide gradients by it.

AdamScale measures each worker's own gradient, before any averaging, in units of the second moments
of all parameters. Of these a worker has 1/N. The mirror collects them after each step: one more
tensor of the model's size on every worker, as many bytes as the parameters' own gathering, and
the step counts, which are read on the host.
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


class StateMirror:
    """The named tensors of an OSS's state, and its step counts, for every parameter."""

    def __init__(self, optimizer: OSS, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        self._memory: dict[tuple[int, str], Tensor] = {}  # of a segment and an entry
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Collect it as it is now; on every worker."""
        shards, state = self._optimizer._shards, self._optimizer.optim.state
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
        works = [
            work
            for number, segment in enumerate(shards.buffers)
            for name in self._names
            for work in self._collect(number, segment, name)
        ]
        for work in works:
            work.wait()

    def _collect(self, number: int, segment: FlatBuffer, name: str) -> list[Any]:
        """Begin to put an entry of the state together, for the parameters of a segment."""
        shards, state = self._optimizer._shards, self._optimizer.optim.state
        rank, like, works = shards.workers.rank, segment.data, list[Any]()
        data = self._memory.get((number, name))
        if data is None or (data.device, data.dtype) != (like.device, like.dtype):
            data = self._memory[number, name] = torch.zeros_like(like)
        for bucket in segment.buckets:
            cuts, start = bucket.layout.cuts, bucket.layout.start
            part = data[start : start + bucket.layout.size]
            own = part[cuts[rank] : cuts[rank + 1]]
            for piece, run in bucket.slices:
                if piece.data in state:
                    value = flatten(state[piece.data][name], piece.data)
                    own[run.offset : run.offset + run.size].copy_(value)
            works += shards.workers.all_gather_slices(part, cuts)
        for index, place in segment.layout.starts.items():
            param = shards.params[index]
            if param in self.state:
                self.state[param][name] = unflatten(data[place : place + param.numel()], param)
        return works


MESSAGE = 4 * 2**20  # elements


class DTensorMirror:
    """The named tensors of an optimizer's state, and its step counts, for every parameter."""

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        self._memory: dict[tuple[Tensor, str], Tensor] = {}
        self._workers: dict[Any, RankGroup] = {}
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Collect it as it is now; on every worker."""
        held = self._optimizer.state
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        self.state = {}
        messages: dict[Any, list[tuple[Tensor, DTensorShards]]] = defaultdict(list)
        for param in params:
            if "step" not in held.get(param, {}):
                continue
            if not is_dtensor(param):
                self.state[param] = held[param]
                continue
            # every worker has taken a step with it, be its part of it empty
            self.state[param] = {"step": local(held[param]["step"])}
            share = DTensorShards.of(param)
            for name in self._names:
                part = local(held[param][name])
                messages[name, share.mesh, share.mesh_dim, part.dtype].append((param, share))
        for (name, *_), parts in messages.items():
            for some in _in_messages(parts):
                self._collect(name, some)

    def _collect(self, name: str, parts: Sequence[tuple[Tensor, DTensorShards]]) -> None:
        """Put one entry of the state together for some parameters."""
        share = parts[0][1]
        mine = [local(self._optimizer.state[param][name]) for param, _ in parts]
        workers = self._of(share)
        slot = sum(_numel(param, share, 0) for param, share in parts)  # the first part is longest
        table = mine[0].new_zeros(workers.size * slot)
        start = workers.rank * slot
        for part in mine:
            table[start : start + part.numel()].copy_(part.reshape(-1))
            start += part.numel()
        for work in workers.all_gather_slices(table, range(0, workers.size * slot + 1, slot)):
            work.wait()
        for rank in range(workers.size):
            start = rank * slot
            for param, its in parts:
                size = _numel(param, its, rank)
                part = its.ranges[rank].narrow(self._whole(param, name, table.dtype))
                part.copy_(table[start : start + size].view(part.shape))
                start += size

    def _whole(self, param: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        whole = self._memory.get((param, name))
        if whole is None or (whole.device, whole.dtype) != (param.device, dtype):
            whole = torch.empty(param.shape, dtype=dtype, device=param.device)
            self._memory[param, name] = whole
        self.state[param][name] = whole
        return whole

    def _of(self, share: DTensorShards) -> RankGroup:
        """The workers that a parameter is cut among."""
        if share.mesh_dim is None:
            return RankGroup()
        key = share.mesh, share.mesh_dim
        if key not in self._workers:
            self._workers[key] = RankGroup.of(share.mesh.get_group(share.mesh_dim))
        return self._workers[key]


def _numel(param: Tensor, share: DTensorShards, rank: int) -> int:
    part = share.ranges[rank]
    return param.numel() // max(param.size(part.dim), 1) * part.length


def _in_messages(
    parts: Sequence[tuple[Tensor, DTensorShards]],
) -> list[list[tuple[Tensor, DTensorShards]]]:
    messages: list[list[tuple[Tensor, DTensorShards]]] = [[]]
    size = 0
    for param, share in parts:
        size += _numel(param, share, 0)
        if messages[-1] and size > MESSAGE:
            messages.append([])
            size = _numel(param, share, 0)
        messages[-1].append((param, share))
    return messages
