"""Codecs: encode flat values as bytes, with few bits per value.

    float32, bfloat16    the values; "float32" never rounds, and preserves float64
    int8, int4           groups of adjacent values share a scale: the maximum absolute value divided
                         by the largest integer. Two 4-bit integers share a byte: one from each half
                         of the values
    ternary              -1, 0 or 1, times a scale: the mean absolute value of the group's values
                         that are not rounded to 0. Five share a byte: one from each fifth

A flat tensor becomes a tensor of bytes with scales and values. The rounding error is stored in a
residual and added to the next values (`encode_with_residual`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


class Codec:
    """Base class of codecs. Equal bytes decode to equal values on all workers."""

    rounds = True  # whether decode(encode(values)) may differ from the values
    cosine = 0.92  # measured lower bound between equal workers' values, partly rounded

    def size(self, elements: int, dtype: torch.dtype) -> int:
        raise NotImplementedError

    def encode(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


class Uncompressed(Codec):
    """Values in their original type."""

    rounds = False
    cosine = 0.999

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return values.view(torch.uint8)

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return data.view(dtype)


class Bfloat16(Codec):
    def size(self, elements: int, dtype: torch.dtype) -> int:
        return elements * 2

    def encode(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return data.view(torch.bfloat16).to(dtype)


class Grouped(Codec):
    """Base class of codecs with a bfloat16 scale for each group of adjacent values."""

    group: int

    def _groups(self, elements: int) -> int:
        return -(-elements // self.group)

    def _padded(self, values: Tensor) -> Tensor:
        missing = -values.numel() % self.group
        if missing:
            values = F.pad(values, (0, missing))
        return values.view(-1, self.group)


@dataclass(frozen=True)
class Integers(Grouped):
    """Integers of `bits` bits with a scale per group."""

    bits: int
    group: int

    @property
    def largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return self._groups(elements) * (2 + self.group * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        padded = self._padded(values)
        # Two reads: values.abs() would write and read a second tensor.
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
        groups = self._groups(elements)
        scales = data[: 2 * groups].view(torch.bfloat16).to(dtype)
        codes = data[2 * groups :].view(torch.int8)
        if self.bits == 4:
            codes = torch.cat(
                [(codes << 4) >> 4, codes >> 4]
            )  # arithmetic shifts preserve the sign
        values = codes.view(-1, self.group).to(dtype).mul_(scales.unsqueeze(1))
        return values.flatten()[:elements]


TRITS = 5  # per byte: 3 ** 5 = 243


@dataclass(frozen=True)
class Ternary(Grouped):
    """-1, 0 or 1 with a scale per group: 1.66 bits per value.

    A value becomes 0 if it is below three quarters of the group's mean absolute value. The scale is
    the mean absolute value of the remaining values. For normally distributed values this is close
    to the smallest possible error of three values (0.19 of their square). Groups with few nonzero
    values, or with values of equal size, are exact.

    The five digits d_k of a byte form the number b = sum of (d_k + 1) 3^k, sent as
    ceil(256 b / 243). Multiplied by 3, the upper byte is the highest digit; the lower byte is
    the code of the remaining digits.
    """

    group: int

    cosine = 0.8  # 0.89 for normally distributed values on two workers

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * self._groups(elements) + -(-self._groups(elements) * self.group // TRITS)

    def encode(self, values: Tensor) -> Tensor:
        padded = self._padded(values)
        # Divide before the sum, which may overflow. Reuse memory, because new pages cost more than
        # the computation.
        sizes = padded.abs()
        means = sizes.mul_(1 / self.group).sum(dim=1, keepdim=True)
        digits = padded / means.mul_(0.75).clamp_(min=torch.finfo(values.dtype).tiny)
        trits = digits.clamp_(-1, 1).to(torch.int8)
        digits.copy_(trits)  # several times faster than `trunc_`
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
    "bfloat16": Bfloat16(),
    "int8": Integers(8, 256),
    "int4": Integers(4, 64),
    "ternary": Ternary(256),
}


def encode_with_residual(
    codec: Codec, values: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Encode values plus residual; return bytes and decoded values.

    The rounding error is written to `residual`, or lost if None. `values` may be overwritten.
    """
    if residual is not None:
        values.add_(residual)
    data = codec.encode(values)
    arriving = codec.decode(data, values.numel(), values.dtype)
    if residual is not None:
        torch.sub(values, arriving, out=residual)
    return data, arriving
