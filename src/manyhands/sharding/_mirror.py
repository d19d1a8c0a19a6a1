"""Optimizer state on all workers at once, for those who divide gradients by it.

AdamScale measures each worker's own gradient, before any averaging, in units of the second moments
of all parameters. Of these a worker has 1/N. The mirror collects them after each step: one more
tensor of the model's size on every worker, and as many bytes as the parameters' own gathering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands.sharding._oss import OSS


class StateMirror:
    """The named tensors of an OSS's state, and its step counts, for every parameter."""

    def __init__(self, optimizer: OSS, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self._names = list(names)
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self.state: dict[Tensor, dict[str, Any]] = {}

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
        for name in self._names:
            for index, value in shards.collect(name, state, self._buffers).items():
                if shards.params[index] in self.state:
                    self.state[shards.params[index]][name] = value
