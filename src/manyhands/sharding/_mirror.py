"""Optimizer state on all workers at once, for those who divide gradients by it.

AdamScale measures each worker's own gradient, before any averaging, in units of the second moments
of all parameters. Of these a worker has 1/N. The mirror collects them after each step: one more
tensor of the model's size on every worker, as many bytes as the parameters' own gathering, and
the step counts, which are read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.sharding._flat import flattened, shaped
from manyhands.sharding._oss import OSS
from manyhands.sharding._shards import FlatSegment


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
        for pieces in shards.pieces:
            for piece in pieces:
                if piece.data in state:
                    steps[piece.param] = float(state[piece.data]["step"])
        device = shards.params[0].device
        steps = shards.workers.reduced(steps.to(device), largest=True).cpu()
        self.state = {
            param: {"step": step} for param, step in zip(shards.params, steps, strict=True) if step
        }
        if not self.state:
            return
        works = [
            work
            for number, segment in enumerate(shards.segments)
            for name in self._names
            for work in self._collect(number, segment, name)
        ]
        for work in works:
            work.wait()

    def _collect(self, number: int, segment: FlatSegment, name: str) -> list[Any]:
        """Begin to put an entry of the state together, for the parameters of a segment."""
        shards, state = self._optimizer._shards, self._optimizer.optim.state
        rank, like, works = shards.workers.rank, segment.data, list[Any]()
        data = self._memory.get((number, name))
        if data is None or (data.device, data.dtype) != (like.device, like.dtype):
            data = self._memory[number, name] = torch.zeros_like(like)
        for bucket in segment.buckets:
            cuts, start = bucket.plan.cuts, bucket.plan.start
            part = data[start : start + bucket.plan.size]
            own = part[cuts[rank] : cuts[rank + 1]]
            for piece, run in bucket.pieces:
                if piece.data in state:
                    value = flattened(state[piece.data][name], piece.data)
                    own[run.offset : run.offset + run.size].copy_(value)
            works += shards.workers.share(part, cuts)
        for index, place in segment.plan.places.items():
            param = shards.params[index]
            if param in self.state:
                self.state[param][name] = shaped(data[place : place + param.numel()], param)
        return works
