"""How flat values are encoded: as they are, with fewer bits for each, or few of the values.

    float32, bfloat16    the values; with "float32", float64 stays float64: nothing is rounded
    int8, int4           a group of neighbours shares a scale: the largest absolute value over the
                         largest integer. Two integers of 4 bits share a byte: one of the first
                         half of the values, one of the second
    fp4                  signs and powers of two: the largest power of a group of neighbours, or
                         one of the six below it, or 0. Four share two bytes: one of each quarter
    ternary              -1, 0 or 1, times the mean absolute value of those of a group of neighbours
                         that are not 0. Five share a byte: one of each fifth
    topk                 the largest of a group, one in 128: their places, their signs, and the mean
                         of their absolute values
    patch                the values that are not 0, in 16 bits, and their places

One flat tensor becomes one tensor of bytes: the values and the scales of their groups. What is not
sent is kept in a residual, and added to the next values (`encode_with_residual`). Blocks send
differences in this way, and `encoded_slices.py` gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST = (246 << 7) + 0x3F  # rounds to 2 ** 119, the largest power of `PowersOfTwo`


class Codec:
    """Flat values to bytes and back. Equal bytes give equal values on all workers."""

    rounds = True  # whether decode(encode(values)) may differ from the values
    sparse = False  # whether most values decode to 0: a mean has more values, and is never encoded
    delays = False  # whether most of what is not 0 stays behind, in the residual
    varies = False  # whether the size depends on the values; `size` is the most, then
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


@dataclass(frozen=True)
class PowersOfTwo(Codec):
    """Four bits: a sign, and 3 bits for a power of two, counted from the largest of the group.

    This is E3M0, "FP4", with an exponent (a byte) for each group of neighbours. The powers of a
    group are steps: 7 is its largest one, 1 the sixth below it, and 0 stands for zero.

    Shifts and masks are all it takes. A bfloat16 is the upper half of a float32: a sign, 8 bits of
    exponent, 7 of mantissa. From there a step is read. A float16 has 5 bits of exponent and 10 of
    mantissa. There a step becomes 2 ** (step - 15), and 0 stays 0; the exponent of the group, as a
    bfloat16, is what multiplies it.
    """

    group: int

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return -(-elements // self.group) * (1 + self.group // 2)

    def encode(self, values: Tensor) -> Tensor:
        groups = -(-values.numel() // self.group)
        missing = groups * self.group - values.numel()
        padded = F.pad(values, (0, missing)) if missing else values
        bits = padded.to(torch.bfloat16).view(torch.int16).view(groups, self.group)
        steps = bits & 0x7FFF
        # The largest power, and 8 more: 15 of the float16, less the largest step. Half of the
        # mantissa is added (0x40), so that from 1.5 on it is the next power.
        exponents = steps.amax(dim=1, keepdim=True).clamp_(7 << 7, LARGEST)
        exponents.add_((8 << 7) + 0x40).bitwise_right_shift_(7)
        steps.sub_((exponents << 7) - (15 << 7) - 0x40).clamp_(0, (8 << 7) - 1)
        codes = steps.bitwise_right_shift_(7).sub_(bits.bitwise_right_shift_(15), alpha=8)
        words, *others = codes.view(4, -1)
        for place, code in enumerate(others, 1):
            words.add_(code, alpha=16**place)
        return torch.cat([words.view(torch.uint8), exponents.flatten().to(torch.uint8)])

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        groups = -(-elements // self.group)
        words = data[:-groups].view(torch.int16)
        lefts = torch.arange(12, -1, -4, dtype=torch.int16, device=data.device).unsqueeze(1)
        # The sign is at its place now, and the step has to go to the end of the exponent. The mask
        # clears copies of the sign, and the codes that were behind.
        bits = (words << lefts).bitwise_right_shift_(2).bitwise_and_(-0x6400)
        values = bits.view(torch.float16).view(groups, self.group).to(dtype)
        scales = data[-groups:].to(torch.int16).bitwise_left_shift_(7).view(torch.bfloat16)
        return values.mul_(scales.to(dtype).unsqueeze(1)).flatten()[:elements]


TRITS = 5  # 3 ** 5 = 243 values fit in a byte


@dataclass(frozen=True)
class Ternary(Codec):
    """-1, 0 or 1, with a scale (a bfloat16) for each group of neighbours: 1.66 bits a value.

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

    def _groups(self, elements: int) -> int:
        return -(-elements // self.group)

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * self._groups(elements) + -(-self._groups(elements) * self.group // TRITS)

    def encode(self, values: Tensor) -> Tensor:
        groups = self._groups(values.numel())
        missing = groups * self.group - values.numel()
        padded = (F.pad(values, (0, missing)) if missing else values).view(groups, self.group)
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
        rows = -(-groups * self.group // TRITS)
        first, *others = F.pad(trits.flatten(), (0, TRITS * rows - trits.numel())).view(TRITS, rows)
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


SPACING = 128  # one value in so many is sent by `LargestValues`


@dataclass(frozen=True)
class LargestValues(Codec):
    """The largest values of a group, one in 128: signs, and the mean of their absolute values.

    The places are in rising order, in 9 bits each, as Elias and Fano coded them. The lower 7 bits
    share a byte with the sign. The upper bits are a row of marks: the value of number i with the
    upper bits u sets mark u + i. There are as many values as upper bits can be, so that about half
    of the marks are set.

    If a group has fewer values that are not 0, the rest have the place behind the last one.
    """

    group: int

    sparse = True
    delays = True

    @property
    def kept(self) -> int:
        return self.group // SPACING

    @property
    def _mark_bytes(self) -> int:
        return 2 * self.kept // 8 + 1  # one more for the place behind the last one

    def _groups(self, elements: int) -> int:
        return -(-elements // self.group)

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return self._groups(elements) * (2 + self.kept + self._mark_bytes)

    def encode(self, values: Tensor) -> Tensor:
        groups = self._groups(values.numel())
        missing = groups * self.group - values.numel()
        padded = (F.pad(values, (0, missing)) if missing else values).view(groups, self.group)
        sizes, places = padded.abs().topk(self.kept, dim=1, sorted=False)
        present = (sizes > 0).sum(dim=1, keepdim=True).clamp_(min=1)
        # Divided first, because the sum may overflow.
        scales = (sizes / present).sum(dim=1).clamp_(max=torch.finfo(torch.bfloat16).max)
        places = places.masked_fill_(sizes == 0, self.group).sort(dim=1).values
        negative = padded.gather(1, places.clamp(max=self.group - 1)) < 0
        low = (places % SPACING).add_(negative, alpha=SPACING).to(torch.uint8)
        numbers = torch.arange(self.kept, device=values.device)
        marks = low.new_zeros(groups, 8 * self._mark_bytes)
        marks.scatter_(1, (places // SPACING).add_(numbers), 1)
        parts = scales.to(torch.bfloat16).view(torch.uint8), low.flatten(), pack_marks(marks)
        return torch.cat(parts)

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        groups = self._groups(elements)
        parts = [2 * groups, self.kept * groups, self._mark_bytes * groups]
        first, low, marks = data.split(parts)
        scales, low = first.view(torch.bfloat16).to(dtype).unsqueeze(1), low.view(groups, self.kept)
        marks = unpack_marks(marks).view(groups, 8 * self._mark_bytes)
        numbers = torch.arange(self.kept, device=data.device)
        upper = marks.nonzero()[:, 1].view(groups, self.kept) - numbers
        places = upper.mul_(SPACING).add_(low % SPACING)
        values = torch.where(low < SPACING, scales, -scales)
        values.masked_fill_(places == self.group, 0)  # added to the next group, or to one too many
        places.add_(torch.arange(groups, device=data.device).unsqueeze(1), alpha=self.group)
        decoded = torch.zeros(groups * self.group + 1, dtype=dtype, device=data.device)
        return decoded.index_add_(0, places.flatten(), values.flatten())[:elements]


NEAR = 256  # a place has 8 lower bits, in a byte of their own
DENSE = 9  # with one value in so many, or more, a mark for each element is shorter


@dataclass(frozen=True)
class NonZeros(Codec):
    """The values that are not 0, as bfloat16, and their places.

    Of parameters in bfloat16, a block of fine-tuning changes few: most steps are less than half of
    a parameter's last bit. What has changed is exact in bfloat16, if it has not changed by a lot.

    [ how many: int64 | values | places ], with the places as in `LargestValues`: a byte each for
    the lower bits, then a row of marks. If there are many, a mark for each element.
    """

    sparse = True
    varies = True

    def size(self, elements: int, dtype: torch.dtype) -> int:
        return -(-(8 + 2 * elements + -(-elements // 8)) // 8) * 8

    def encode(self, values: Tensor) -> Tensor:
        elements, sent = values.numel(), values.to(torch.bfloat16)
        places = sent.nonzero().flatten()
        count = places.numel()
        head = torch.tensor([count], device=values.device)
        if count * DENSE >= elements:
            marks = torch.zeros(-(-elements // 8) * 8, dtype=torch.uint8, device=values.device)
            marks[places] = 1
            parts = [pack_marks(marks)]
        else:
            numbers = torch.arange(count, device=values.device)
            length = -(-(elements // NEAR + 1 + count) // 8) * 8
            marks = torch.zeros(length, dtype=torch.uint8, device=values.device)
            marks[(places // NEAR).add_(numbers)] = 1
            parts = [(places % NEAR).to(torch.uint8), pack_marks(marks)]
        data = torch.cat([head.view(torch.uint8), sent[places].view(torch.uint8), *parts])
        return F.pad(data, (0, -data.numel() % 8))  # it may be followed by another one

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        count = int(data[:8].view(torch.int64))
        values, rest = data[8 : 8 + 2 * count].view(torch.bfloat16), data[8 + 2 * count :]
        if count * DENSE >= elements:
            places = unpack_marks(rest).nonzero().flatten()
        else:
            numbers = torch.arange(count, device=data.device)
            upper = unpack_marks(rest[count:]).nonzero().flatten() - numbers
            places = upper.mul_(NEAR).add_(rest[:count])
        decoded = torch.zeros(elements, dtype=dtype, device=data.device)
        decoded[places] = values.to(dtype)
        return decoded


def pack_marks(marks: Tensor) -> Tensor:
    """Return zeros and ones, a multiple of 8 of them, as bits."""
    bits = marks.view(-1, 8).bitwise_left_shift(_bits(marks.device))
    return bits.sum(dim=1, dtype=torch.uint8)


def unpack_marks(data: Tensor) -> Tensor:
    """Return bits as zeros and ones."""
    return (data.unsqueeze(1) >> _bits(data.device)).bitwise_and_(1).flatten()


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


CODECS: dict[str, Codec] = {
    "float32": Uncompressed(),
    "bfloat16": HalfPrecision(torch.bfloat16),
    "int8": Integers(8, 256),
    "int4": Integers(4, 64),
    "fp4": PowersOfTwo(256),
    "ternary": Ternary(256),
    "topk": LargestValues(1 << 16),
    "patch": NonZeros(),
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

    `residual` is set to what is not sent now (None: it is lost). `values` may be overwritten.
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
