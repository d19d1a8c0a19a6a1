"""How a difference travels: as it is, in half precision, or as small integers with shared scales.

    float32, bfloat16    the values, rounded
    int8, int4           a group of neighbours shares a scale, the largest of them over the largest
                         integer; then the integers, of 4 bits two in a byte

What is encoded is one flat tensor, and what travels one tensor of bytes, scales first. What is
lost in rounding is not lost for good: `Feedback` keeps it and adds it to the next difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


class Codec:
    """Flat values to bytes and back; the same bytes give the same values everywhere."""

    def size(self, elements: int) -> int:
        """Bytes of so many encoded values."""
        raise NotImplementedError

    def encode(self, values: Tensor) -> Tensor:
        """The bytes of finite values."""
        raise NotImplementedError

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """The values again, rounded."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plain(Codec):
    """The values in a floating type."""

    dtype: torch.dtype

    def size(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def encode(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).view(torch.uint8)

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return data.view(self.dtype).to(dtype)


@dataclass(frozen=True)
class Integers(Codec):
    """Integers of so many bits, with a scale (a bfloat16) for each group of neighbours."""

    bits: int
    group: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group < 2 or self.group % 2:
            raise ValueError(
                f"integers are of 4 or 8 bits, in groups of an even size; got {self.bits} bits in "
                f"groups of {self.group}."
            )

    @property
    def largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def _groups(self, elements: int) -> int:
        return -(-elements // self.group)

    def size(self, elements: int) -> int:
        return self._groups(elements) * (2 + self.group * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        groups = self._groups(values.numel())
        padded = F.pad(values, (0, groups * self.group - values.numel())).view(groups, self.group)
        scales = (padded.abs().amax(dim=1, keepdim=True) / self.largest).to(torch.bfloat16)
        steps = padded / scales.to(padded.dtype).clamp(min=torch.finfo(torch.bfloat16).tiny)
        codes = steps.round_().clamp_(-self.largest, self.largest).to(torch.int8)
        if self.bits == 4:
            low, high = codes.view(-1, 2).unbind(1)
            codes = (low & 15) | (high << 4)
        return torch.cat([scales.flatten().view(torch.uint8), codes.flatten().view(torch.uint8)])

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        groups = self._groups(elements)
        scales = data[: 2 * groups].view(torch.bfloat16).to(dtype)
        codes = data[2 * groups :].view(torch.int8)
        if self.bits == 4:
            codes = torch.stack([(codes << 4) >> 4, codes >> 4], dim=1)  # the sign is carried along
        values = codes.view(groups, self.group).to(dtype).mul_(scales.unsqueeze(1))
        return values.flatten()[:elements]


CODECS: dict[str, Codec] = {
    "float32": Plain(torch.float32),
    "bfloat16": Plain(torch.bfloat16),
    "int8": Integers(8, 256),
    "int4": Integers(4, 64),
}


def codec_of(name: str) -> Codec:
    """The codec of this name."""
    if name not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {name!r}.")
    return CODECS[name]


class Feedback:
    """Encodes differences one after the other, each with what rounding has left of the last."""

    def __init__(self, codec: Codec, like: Tensor) -> None:
        self.codec = codec
        self.residual = torch.zeros_like(like)

    def encode(self, values: Tensor) -> Tensor:
        """The bytes of `values` and what was left, which is added to them in place."""
        values.add_(self.residual)
        data = self.codec.encode(values)
        arriving = self.codec.decode(data, values.numel(), values.dtype)
        torch.sub(values, arriving, out=self.residual)
        return data
