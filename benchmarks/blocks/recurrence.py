"""Block momentum as fairseq has it: one all-reduce for each tensor.

fairseq itself is awkward to install beside today's torch. This is its published recurrence (Chen &
Huo, 2016), with its number of collectives: with the anchor W, the momentum s, block_momentum η and
block_lr ζ, and what N ranks have come to,

    G = W - local                       on each rank
    G = sum of all G / N                one all-reduce for each tensor
    s = η s + ζ G
    W = W - s                           nesterov:  W - ζ G - η s
    local = W

With η = 0 it is fairseq's plain average: each tensor is divided by N and summed, without an anchor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class PerTensor:
    """The anchor and the momentum, and what synchronises the parameters."""

    def __init__(
        self, params: Sequence[Tensor], lr: float, momentum: float, nesterov: bool = False
    ) -> None:
        self.params, self.lr, self.momentum, self.nesterov = params, lr, momentum, nesterov
        if momentum:
            self.anchor = [p.detach().clone() for p in params]
            self.smoothed = [torch.zeros_like(p) for p in self.anchor]

    @torch.no_grad()
    def __call__(self) -> None:
        if not self.momentum:
            for param in self.params:
                param.div_(dist.get_world_size())
                dist.all_reduce(param)
            return
        for param, anchor, smoothed in zip(self.params, self.anchor, self.smoothed, strict=True):
            grad = anchor - param
            grad.div_(dist.get_world_size())
            dist.all_reduce(grad)
            smoothed.mul_(self.momentum).add_(grad, alpha=self.lr)
            if self.nesterov:
                anchor.sub_(grad, alpha=self.lr).sub_(smoothed, alpha=self.momentum)
            else:
                anchor.sub_(smoothed)
            param.copy_(anchor)
