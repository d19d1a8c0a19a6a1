"""The state of `fully_shard`'s parameters on all workers at once: `_mirror.py` for DTensors.

AdamScale divides each worker's own gradient, which is whole, by second moments of which the
worker has its part. After each step the parts are collected: one more tensor of the model's size
on every worker (in the state's type), and once the state's bytes sent. Parts of several
parameters travel together, in messages of at most `MESSAGE` elements from each worker.

    slot      what one worker sends in a message: its part of each of some parameters, in order,
              as long as the longest worker's
    table     all workers' slots
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._comm import Workers
from manyhands._dtensors import Share, is_dtensor, local

MESSAGE = 4 * 2**20  # elements


class DTensorMirror:
    """The named tensors of an optimizer's state, and its step counts, for every parameter."""

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        self._memory: dict[tuple[Tensor, str], Tensor] = {}
        self._workers: dict[Any, Workers] = {}
        self.state: dict[Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Collect it as it is now; on every worker."""
        held = self._optimizer.state
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        self.state = {}
        messages: dict[Any, list[tuple[Tensor, Share]]] = defaultdict(list)
        for param in params:
            if "step" not in held.get(param, {}):
                continue
            if not is_dtensor(param):
                self.state[param] = held[param]
                continue
            # every worker has taken a step with it, be its part of it empty
            self.state[param] = {"step": local(held[param]["step"])}
            share = Share.of(param)
            for name in self._names:
                part = local(held[param][name])
                messages[name, share.mesh, share.mesh_dim, part.dtype].append((param, share))
        for (name, *_), parts in messages.items():
            for some in _in_messages(parts):
                self._collect(name, some)

    def _collect(self, name: str, parts: Sequence[tuple[Tensor, Share]]) -> None:
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
        for work in workers.share(table, range(0, workers.size * slot + 1, slot)):
            work.wait()
        for rank in range(workers.size):
            start = rank * slot
            for param, its in parts:
                size = _numel(param, its, rank)
                part = its.parts[rank].of(self._whole(param, name, table.dtype))
                part.copy_(table[start : start + size].view(part.shape))
                start += size

    def _whole(self, param: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        whole = self._memory.get((param, name))
        if whole is None or (whole.device, whole.dtype) != (param.device, dtype):
            whole = torch.empty(param.shape, dtype=dtype, device=param.device)
            self._memory[param, name] = whole
        self.state[param][name] = whole
        return whole

    def _of(self, share: Share) -> Workers:
        """The workers that a parameter is cut among."""
        if share.mesh_dim is None:
            return Workers()
        key = share.mesh, share.mesh_dim
        if key not in self._workers:
            self._workers[key] = Workers.of(share.mesh.get_group(share.mesh_dim))
        return self._workers[key]


def _numel(param: Tensor, share: Share, rank: int) -> int:
    part = share.parts[rank]
    return param.numel() // max(param.size(part.dim), 1) * part.length


def _in_messages(parts: Sequence[tuple[Tensor, Share]]) -> list[list[tuple[Tensor, Share]]]:
    messages: list[list[tuple[Tensor, Share]]] = [[]]
    size = 0
    for param, share in parts:
        size += _numel(param, share, 0)
        if messages[-1] and size > MESSAGE:
            messages.append([])
            size = _numel(param, share, 0)
        messages[-1].append((param, share))
    return messages
