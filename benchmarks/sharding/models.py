"""The model of the sharding benchmarks: a decoder transformer, and batches of random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """The size of a decoder, and of a rank's batch."""

    name: str
    width: int
    depth: int
    vocabulary: int
    batch: int
    context: int = 64


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 128, 2, 512, batch=2, context=16),  # 0.5 M parameters
        Size("10M", 384, 4, 3840, batch=2),
        Size("25M", 512, 6, 6144, batch=2),
        Size("100M", 768, 12, 10_240, batch=2),
    )
}


class Block(nn.Module):
    """Causal attention of 64-wide heads, and a layer of four times the width.

    Without `bias` the keys have none: it would have no gradient.
    """

    def __init__(self, width: int, heads: int = 0, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads or width // 64
        self.norm1 = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width, bias=bias)
        self.joined = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.mixed(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Decoder(nn.Module):
    """Tokens to the cross-entropy of each next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Parameter(torch.randn(size.context, size.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.logits = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places
        logits = self.logits(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def decoder(size: Size) -> Decoder:
    """The same weights on every rank and for every contender."""
    torch.manual_seed(0)
    return Decoder(size)


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, which Muon trains, and the rest."""
    inside = {id(p) for name, p in model.named_parameters() if "blocks." in name and p.dim() == 2}
    params = list(model.parameters())
    return [p for p in params if id(p) in inside], [p for p in params if id(p) not in inside]


def batches(size: Size, rank: int, count: int = 4) -> list[Tensor]:
    """Random tokens, on each rank others."""
    random = torch.Generator().manual_seed(rank + 1)
    shape = (size.batch, size.context + 1)
    return [torch.randint(0, size.vocabulary, shape, generator=random) for _ in range(count)]
