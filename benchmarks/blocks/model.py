"""10 M parameters in about 150 tensors: a deep and narrow decoder, whose computing is pretended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from sharding.models import Size, decoder
from torch import Tensor, nn

SIZE = Size("10M, deep", 256, 13, 256, batch=2)
QUICK = Size("0.2M, deep", 64, 4, 64, batch=2)
PARTS = 8  # pieces of the pretended forward and backward pass
FORWARD = 1 / 3  # of the time is spent in the forward pass


def parameters(size: Size) -> list[Tensor]:
    return list(decoder(size).parameters())


def gradients(params: Sequence[Tensor], rank: int) -> list[Tensor]:
    """On each rank others, as large as the parameters move in a block of a few steps."""
    random = torch.Generator().manual_seed(rank + 1)
    return [0.01 * torch.randn(p.shape, generator=random) for p in params]


class Pretended(nn.Module):
    """A model that sleeps instead of computing, and whose gradients are ready.

    It sleeps in pieces, in the forward and in the backward pass, so that gradients come one after
    the other and DDP may send the first while others are "computed".
    """

    def __init__(self, size: Size, rank: int) -> None:
        super().__init__()
        params = parameters(size)
        self.params = nn.ParameterList(params)
        self.ready = gradients(params, rank)
        self.seconds = 0.0  # that a step's computing takes

    def forward(self) -> Tensor:
        x = torch.zeros((), requires_grad=True)
        length = -(-len(self.ready) // PARTS)
        for at in range(0, len(self.ready), length):
            part = slice(at, at + length)
            x = _Part.apply(x, self.seconds / PARTS, self.ready[part], *list(self.params)[part])
        return x


class _Part(torch.autograd.Function):
    """A few layers: sleeps, and hands out gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, ready: list[Tensor], *_: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.ready = ready
        time.sleep(FORWARD * seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep((1 - FORWARD) * ctx.seconds)
        return grads[0], None, None, *ctx.ready
