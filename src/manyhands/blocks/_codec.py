"""How a difference is encoded: as it is, in half precision, or as integers with shared scales.

    float32, bfloat16    the values; with "float32", float64 stays float64: nothing is rounded
    int8, int4           a group of neighbours shares a scale: the largest absolute value over the
                         largest integer. Two integers of 4 bits share a byte: one of the first
                         half of the values, one of the second

One flat tensor becomes one tensor of bytes, with the scales first. What rounding cuts off is kept
in a residual, and added to the next difference (`encode_with_residual`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


class Codec:
    """Flat values to bytes and back. Equal bytes give equal values on all workers."""

    rounds = True  # whether decode(encode(values)) may differ from the values

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


@dataclass(frozen=True)
class Integers(Codec):
    """Integers of `bits` bits, with a scale (a bfloat16) for each group of neighbours."""

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

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return self._groups(elements) * (2 + self.group * self.bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        groups = self._groups(values.numel())
        missing = groups * self.group - values.numel()
        padded = (F.pad(values, (0, missing)) if missing else values).view(groups, self.group)
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
        groups = self._groups(elements)
        scales = data[: 2 * groups].view(torch.bfloat16).to(dtype)
        codes = data[2 * groups :].view(torch.int8)
        if self.bits == 4:
            codes = torch.cat([(codes << 4) >> 4, codes >> 4])  # an arithmetic shift keeps the sign
        values = codes.view(groups, self.group).to(dtype).mul_(scales.unsqueeze(1))
        return values.flatten()[:elements]


CODECS: dict[str, Codec] = {
    "float32": Uncompressed(),
    "bfloat16": HalfPrecision(torch.bfloat16),
    "int8": Integers(8, 256),
    "int4": Integers(4, 64),
}


def find_codec(name: str) -> Codec:
    """Return the codec of this name, or raise."""
    if name not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {name!r}.")
    return CODECS[name]


def encode_with_residual(
    codec: Codec, values: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Encode values plus residual; return the bytes, and the values that will be decoded from them.

    `residual` is set to what rounding cuts off now (None: it is lost). `values` may be overwritten.
    """
    if residual is not None:
        values.add_(residual)
    data = codec.encode(values)
    if not codec.rounds:
        return data, values
    arriving = codec.decode(data, values.numel(), values.dtype)
    if residual is not None:
        torch.sub(values, arriving, out=residual)
    return data, arriving
