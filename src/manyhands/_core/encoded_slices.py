"""A reduce_scatter of few bytes: slices are encoded for their owners, who decode and sum them.

For the slice of each other rank, a rank computes

    values    = gradient + residual
    message   = header | encode(values)
    residual  = values - decode(encode(values))

so that what rounding left out goes with the next gradient (error feedback). A residual that is
longer than the whole next gradient is of an outlier, which training clips or drops: the residual is
dropped, too. The owner computes

    mean      = (own slice + decode(each message)) / N

in float32, or in the gradients' type if that is wider. Its own slice is not rounded.

The header is zero, or NaN if a value is not finite. It is added to N, so that the whole mean is NaN
then: a gradient scaler skips the step, whatever the codec makes of such values. The residual of
that slice starts again at zero.

A slice that a codec would make no smaller (a few elements, padded to a whole group) travels as it
is.

Tensors held: a residual for each slice that is sent, in total (N - 1)/N of the bucket in float32;
while a bucket is in flight, the messages that are sent and those that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional as F

from manyhands._core.codec import CODECS, Codec
from manyhands._core.flat import accumulation_dtype
from manyhands._core.ranks import RankGroup
from manyhands._core.slices import TAG, check_backend

NAMES = ("int8", "int4", "fp4")  # the codecs for gradients
HEADER = 8  # bytes; a message is a multiple of it, so that views of any type are aligned


def find_gradient_codec(name: str | None) -> Codec | None:
    """Return the codec of this name, None for gradients as they are, or raise a ValueError."""
    if name is None or name == "float32":
        return None
    if name not in NAMES:
        raise ValueError(
            f"codec must be one of {', '.join(NAMES)}, or None to send gradients as they are; got "
            f"{name!r}."
        )
    return CODECS[name]


class EncodedSlices:
    """Sends the slices of one bucket as codes, pass after pass, and holds their residuals."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._residuals: dict[int, Tensor] = {}  # by the rank of the slice's owner

    def clear(self) -> None:
        """Forget the residuals, because the bucket holds other parameters now."""
        self._residuals.clear()

    @torch.no_grad()
    def reduce_scatter(
        self,
        ranks: RankGroup,
        bucket: Tensor,
        cuts: Sequence[int],
        absent: Sequence[tuple[int, int]] = (),
    ) -> PendingEncodedReduceScatter:
        """Begin to send every slice of `bucket` to its owner. The bucket is not changed.

        `absent` are ranges without a gradient, which hold zeros: their residuals stay as they are.
        """
        check_backend(ranks, bucket.device)
        nothing = bucket.new_empty(0, dtype=torch.uint8)
        outgoing = [
            nothing
            if owner == ranks.rank or start == stop
            else self._encode(owner, bucket[start:stop], _within(absent, start, stop))
            for owner, (start, stop) in enumerate(pairwise(cuts))
        ]
        own = bucket[cuts[ranks.rank] : cuts[ranks.rank + 1]]
        codec = _codec_for(self._codec, own.numel(), accumulation_dtype(own.dtype))
        arriving = message_size(codec, own.numel(), accumulation_dtype(own.dtype))
        sizes = [0 if rank == ranks.rank else arriving for rank in range(ranks.size)]
        incoming, works = ranks.all_to_all(outgoing, sizes, TAG)
        rows = [row for row in incoming if row.numel()]
        return PendingEncodedReduceScatter(codec, own, rows, works, bucket, outgoing)

    def _encode(self, owner: int, gradient: Tensor, absent: Sequence[tuple[int, int]]) -> Tensor:
        """Return the message of one slice, and keep in the residual what it leaves out."""
        dtype = accumulation_dtype(gradient.dtype)
        codec = _codec_for(self._codec, gradient.numel(), dtype)
        if not codec.rounds:
            return _message(codec, gradient.to(dtype))[0]
        residual = self._residual(owner, gradient)
        kept = [(residual[start:stop], residual[start:stop].clone()) for start, stop in absent]
        for part, _ in kept:
            part.zero_()
        _drop_if_longer(residual, gradient)
        values = residual.add_(gradient)  # in its memory
        message, header = _message(codec, values)
        residual.sub_(_decode(codec, message, values))
        if residual.device.type != "cpu":  # reading the header would make the host wait
            residual.sub_(header.sum()).nan_to_num_(0.0, 0.0, 0.0)
        elif header.isnan().any():
            residual.zero_()
        for part, former in kept:
            part.copy_(former)
        return message

    def _residual(self, owner: int, gradient: Tensor) -> Tensor:
        dtype = accumulation_dtype(gradient.dtype)
        residual = self._residuals.get(owner)
        fits = (gradient.shape, dtype, gradient.device)
        if residual is None or (residual.shape, residual.dtype, residual.device) != fits:
            residual = self._residuals[owner] = torch.zeros_like(gradient, dtype=dtype)
        return residual


@dataclass
class PendingEncodedReduceScatter:
    """A reduce_scatter of codes under way."""

    codec: Codec
    own: Tensor  # our own slice of our bucket
    rows: list[Tensor]  # the other ranks' messages for it
    works: list[Any]
    sent: Tensor  # the bucket, of which `own` is a view
    outgoing: list[Tensor]  # kept alive until they were sent

    @torch.no_grad()
    def mean(self, workers: float, dtype: torch.dtype) -> Tensor:
        """Return the sum divided by `workers`, as `dtype`."""
        for work in self.works:
            work.wait()
        total = self.own.to(accumulation_dtype(self.own.dtype), copy=True)
        divisor = torch.full((), workers, dtype=torch.float32, device=total.device)
        for row in self.rows:
            divisor += row[:HEADER].view(torch.float32).sum()
            total.add_(_decode(self.codec, row, total))
        return total.div_(divisor).to(dtype)


def message_size(codec: Codec, elements: int, dtype: torch.dtype) -> int:
    """Return the bytes in which a slice travels. `dtype` is that of its sum."""
    if not elements:
        return 0
    size = _codec_for(codec, elements, dtype).size(elements, dtype)
    return HEADER + -(-size // HEADER) * HEADER


def residual_size(codec: Codec, elements: int, dtype: torch.dtype) -> int:
    """Return the bytes that a sender of a slice keeps from one pass to the next."""
    return elements * dtype.itemsize if _codec_for(codec, elements, dtype).rounds else 0


def _codec_for(codec: Codec, elements: int, dtype: torch.dtype) -> Codec:
    """Return the codec, or the plain one if it makes values no smaller; on all ranks the same."""
    plain = CODECS["float32"]
    smaller = codec.size(elements, dtype) < plain.size(elements, dtype)
    return codec if smaller else plain


def _message(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of some values, and the header that they begin with."""
    # Zero times infinity is NaN, as is zero times NaN.
    header = torch.stack(torch.aminmax(values)).mul_(0.0).to(torch.float32)
    message = torch.cat([header.view(torch.uint8), codec.encode(values)])
    size = message_size(codec, values.numel(), values.dtype)
    return F.pad(message, (0, size - message.numel())), header


def _drop_if_longer(residual: Tensor, gradient: Tensor) -> None:
    """Set a residual to zero if it is longer than the gradient. (One of zeros says nothing.)"""
    length = vector_norm(gradient, dtype=residual.dtype)
    kept = (vector_norm(residual) <= length) | (length == 0)
    if residual.device.type != "cpu" or not kept:
        residual.mul_(kept)


def _decode(codec: Codec, message: Tensor, like: Tensor) -> Tensor:
    size = codec.size(like.numel(), like.dtype)
    return codec.decode(message[HEADER : HEADER + size], like.numel(), like.dtype)


def _within(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return what lies between `start` and `stop` of each range, counted from `start`."""
    cut = [(max(a, start) - start, min(b, stop) - start) for a, b in ranges]
    return [(a, b) for a, b in cut if a < b]
