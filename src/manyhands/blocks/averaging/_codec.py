"""Encode flat values: as they are, or with fewer bits for each.

    float32, bfloat16    the values; with "float32", float64 stays float64: nothing is rounded
    int8, int4           a group of neighbours shares a scale: the largest absolute value over the
                         largest integer. Two integers of 4 bits share a byte: one of the first
                         half of the values, one of the second
    ternary              -1, 0 or 1, times the mean absolute value of those of a group of neighbours
                         that are not 0. Five share a byte: one of each fifth

One flat tensor becomes one tensor of bytes: the values and the scales of their groups. What is not
sent is kept in a residual, and added to the next values (`encode_with_residual`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


class Codec:
    """Flat values to bytes and back. Equal bytes give equal values on all workers."""

    rounds = True  # whether decode(encode(values)) may differ from the values
    cosine = 0.92  # between equal workers' values, part of them rounded: at least, in practice

    def size(self, elements: int, dtype: torch.dtype) -> int:
        """Return how many bytes this many values become."""
        raise NotImplementedError

    def encode(self, values: Tensor) -> Tensor:
        """Return finite values as bytes (a uint8 tensor)."""
        raise NotImplementedError

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the values again, rounded."""
        raise NotImplementedError


@dataclass(frozen=True)
class Uncompressed(Codec):
    """The values in their own type."""

    rounds = False
    cosine = 0.999

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return values.view(torch.uint8)

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return data.view(dtype)


@dataclass(frozen=True)
class HalfPrecision(Codec):
    """The values in a type of 16 bits."""

    dtype: torch.dtype

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return elements * self.dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).view(torch.uint8)

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return data.view(self.dtype).to(dtype)


class Grouped(Codec):
    """Few bits for each value, and a scale (a bfloat16) for each group of neighbours."""

    group: int

    def _groups(self, elements: int) -> int:
        return -(-elements // self.group)

    def _padded(self, values: Tensor) -> Tensor:
        """Return the values in rows of a group each; zeros fill the last group."""
        missing = -values.numel() % self.group
        if missing:
            values = F.pad(values, (0, missing))
        return values.view(-1, self.group)


@dataclass(frozen=True)
class Integers(Grouped):
    """Integers of `bits` bits, with a scale for each group."""

    bits: int
    group: int

    @property
    def largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return self._groups(elements) * (2 + self.group * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        """Return the values as scales, one per group, and signed integers of `bits` bits."""
        padded = self._padded(values)
        # Two reads: values.abs() would write a second tensor and read it again.
        largest = torch.maximum(padded.amax(dim=1, keepdim=True), -padded.amin(dim=1, keepdim=True))
        scales = (largest / self.largest).to(torch.bfloat16)
        # A group of zeros has scale 0: divide by the smallest normal number instead.
        steps = padded / scales.to(padded.dtype).clamp(min=torch.finfo(torch.bfloat16).tiny)
        codes = steps.round_().clamp_(-self.largest, self.largest).to(torch.int8)
        if self.bits == 4:
            low, high = codes.view(2, -1)
            codes = (low & 15) | (high << 4)
        return torch.cat([scales.flatten().view(torch.uint8), codes.flatten().view(torch.uint8)])

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the values from scales and integers, as `encode` has laid them out."""
        groups = self._groups(elements)
        scales = data[: 2 * groups].view(torch.bfloat16).to(dtype)
        codes = data[2 * groups :].view(torch.int8)
        if self.bits == 4:
            codes = torch.cat([(codes << 4) >> 4, codes >> 4])  # an arithmetic shift keeps the sign
        values = codes.view(-1, self.group).to(dtype).mul_(scales.unsqueeze(1))
        return values.flatten()[:elements]


TRITS = 5  # 3 ** 5 = 243 values fit in a byte


@dataclass(frozen=True)
class Ternary(Grouped):
    """-1, 0 or 1, with a scale for each group: 1.66 bits a value.

    A value becomes 0 if it is less than three quarters of the mean absolute value of its group. The
    scale is the mean absolute value of the others. For normal values that is nearly the smallest
    error that three values can have (0.19 of their square), and if few of a group are not 0, or if
    all are of one size, they arrive as they are.

    The five digits d_k of a byte make the number b = sum of (d_k + 1) 3^k, and ceil(256 b / 243) is
    sent. Times 3, its upper byte is the highest digit, and its lower byte is the same code of the
    digits that are left.
    """

    group: int

    cosine = 0.8  # of normal values on two workers 0.89

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * self._groups(elements) + -(-self._groups(elements) * self.group // TRITS)

    def encode(self, values: Tensor) -> Tensor:
        """Return the values as scales, one per group, and five of -1, 0, 1 in each byte."""
        padded = self._padded(values)
        # Divided by their number before they are added up, because the sum may overflow. Memory is
        # written again and again, because new pages cost more than all that is computed here.
        sizes = padded.abs()
        means = sizes.mul_(1 / self.group).sum(dim=1, keepdim=True)
        digits = padded / means.mul_(0.75).clamp_(min=torch.finfo(values.dtype).tiny)
        trits = digits.clamp_(-1, 1).to(torch.int8)
        digits.copy_(trits)  # `trunc_` would take several times as long
        sums = torch.mul(padded, digits, out=sizes).mul_(1 / self.group).sum(dim=1)
        shares = digits.abs_().mul_(1 / self.group).sum(dim=1)
        scales = sums.div_(shares.clamp_(min=1 / self.group))
        scales.clamp_(max=torch.finfo(torch.bfloat16).max)
        first, *others = F.pad(trits.flatten(), (0, -trits.numel() % TRITS)).view(TRITS, -1)
        for place, row in enumerate(others, 1):
            first.add_(row, alpha=3**place)
        codes = first.to(torch.float32).add_(121).mul_(256 / 243).ceil_().to(torch.uint8)
        return torch.cat([scales.to(torch.bfloat16).view(torch.uint8), codes])

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the values from scales and digits, as `encode` has laid them out."""
        groups = self._groups(elements)
        scales = data[: 2 * groups].view(torch.bfloat16).to(dtype).unsqueeze(1)
        codes = data[2 * groups :]
        trits = torch.empty(TRITS, codes.numel(), dtype=torch.int8, device=data.device)
        wide = codes.to(torch.int16)
        for row in reversed(trits.unbind()):
            wide.mul_(3)
            row.copy_(wide >> 8).sub_(1)
            wide.bitwise_and_(255)
        values = trits.flatten()[: groups * self.group].view(groups, self.group).to(dtype)
        return values.mul_(scales).flatten()[:elements]


CODECS: dict[str, Codec] = {
    "float32": Uncompressed(),
    "bfloat16": HalfPrecision(torch.bfloat16),
    "int8": Integers(8, 256),
    "int4": Integers(4, 64),
    "ternary": Ternary(256),
}


def encode_with_residual(
    codec: Codec, values: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Encode values plus residual; return the bytes, and the values that will be decoded from them.

    `residual` is set to what is not sent now (None: it is lost). `values` may be overwritten.
    """
    if residual is not None:
        values.add_(residual)
    data = codec.encode(values)
    arriving = codec.decode(data, values.numel(), values.dtype)
    if residual is not None:
        torch.sub(values, arriving, out=residual)
    return data, arriving
