"""The common point: what all workers agreed on last, and how the next one is made of their mean.

Tensors held, and when (n: elements of the trained parameters, in float32 unless wider)

    anchor      n                   the common point, always
    memories    n for each          of the outer step (a momentum), always
    residual    n                   with a codec that rounds: what it has not yet sent
    held        n / fragments       with overlap, while under way: the differences as sent,
    arrived     n / fragments       and the mean that came of them
    stage       n                   16-bit parameters only, during a meeting without overlap

Without overlap the mean is put where the parameters are, which are replaced in any case, and only
when all of it is there does the outer step change anchor and memories: a meeting that fails in
the middle has changed nothing that is common. With overlap the parameters train on
meanwhile, and are moved by as much as the common point has moved from where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manyhands._comm import Workers
from manyhands._dtensors import local
from manyhands._host import summed_in
from manyhands.blocks._codec import Codec
from manyhands.blocks._meeting import LARGEST
from manyhands.blocks._outer import Outer
from manyhands.blocks._vector import Vector


@dataclass
class Segment:
    """The common point of the parameters of one type, on one device."""

    params: list[Tensor]
    anchor: Tensor  # perhaps on the host
    memories: list[Tensor]
    residual: Tensor | None
    device: torch.device  # of the parameters
    span: tuple[int, int]  # of the parameters, which this worker answers for

    @property
    def vector(self) -> Vector:
        return Vector(self.params)

    def part(self, fragment: int, fragments: int) -> tuple[int, int]:
        """Where in the anchor a fragment is."""
        length = self.anchor.numel()
        return length * fragment // fragments, length * (fragment + 1) // fragments


class Difference:
    """A row: the anchor less the parameters. Its mean goes where the parameters are."""

    first_only = False

    def __init__(self, segment: Segment, start: int, stop: int, codec: Codec) -> None:
        self.segment, self.start, self.length = segment, start, stop - start
        self.dtype, self.device, self.codec = segment.anchor.dtype, segment.device, codec
        self.residual = None if segment.residual is None else segment.residual[start:stop]
        self.params = segment.vector
        in_place = local(segment.params[0]).dtype in (self.dtype, _COMPLEX.get(self.dtype))
        self._stage = None if in_place else torch.empty_like(segment.anchor[start:stop])

    @property
    def first(self) -> int:
        """Where it begins among the parameters."""
        return self.segment.span[0] + self.start

    def read(self, start: int, length: int) -> Tensor:
        values = torch.empty(length, dtype=self.dtype, device=self.device)
        self.params.read(self.first + start, values)
        chosen = slice(self.start + start, self.start + start + length)
        return torch.sub(self.segment.anchor[chosen].to(self.device), values, out=values)

    def write(self, start: int, mean: Tensor) -> None:
        if self._stage is not None:
            self._stage[start : start + mean.numel()].copy_(mean)
        else:
            self.params.write(self.first + start, mean)

    def staged(self, start: int, length: int) -> Tensor:
        """The mean that was written."""
        if self._stage is not None:
            return self._stage[start : start + length]
        values = torch.empty(length, dtype=self.dtype, device=self.device)
        return self.params.read(self.first + start, values)


class HeldDifference:
    """A row: the difference as it was when it was sent. Its mean is kept beside it."""

    first_only = False

    def __init__(self, difference: Difference) -> None:
        self.segment, self.start, self.length = (
            difference.segment,
            difference.start,
            difference.length,
        )
        self.dtype, self.device, self.codec = difference.dtype, difference.device, difference.codec
        self.residual = difference.residual
        self.first = difference.first
        self.held = torch.empty(self.length, dtype=self.dtype, device=self.device)
        self.arrived = torch.empty_like(self.held)

    @classmethod
    def now(cls, difference: Difference) -> HeldDifference:
        """As the parameters are now."""
        row = cls(difference)
        for start in range(0, row.length, LARGEST):
            part = row.held[start : start + LARGEST]
            part.copy_(difference.read(start, part.numel()))
        return row

    def read(self, start: int, length: int) -> Tensor:
        return self.held[start : start + length].clone()

    def write(self, start: int, mean: Tensor) -> None:
        self.arrived[start : start + mean.numel()].copy_(mean)


_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass
class CommonPoint:
    """Anchor and memories of all parameters."""

    outer: Outer
    codec: Codec
    fragments: int
    on_host: bool
    inner: Workers = field(default_factory=Workers)  # who have the same parameters, and share work
    segments: list[Segment] = field(default_factory=list)

    def extend(self, params: Sequence[Tensor]) -> None:
        """Take in parameters, whose values are common now."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for param in params:
            kinds.setdefault((param.dtype, param.device), []).append(param)
        for (_, device), same in kinds.items():
            vector, rank, size = Vector(same), self.inner.rank, self.inner.size
            span = len(vector) * rank // size, len(vector) * (rank + 1) // size
            dtype = summed_in(local(same[0]).real.dtype)
            where = torch.device("cpu") if self.on_host else device
            anchor = torch.empty(span[1] - span[0], dtype=dtype, device=where)
            vector.read(span[0], anchor)
            memories = [torch.zeros_like(anchor) for _ in range(self.outer.memories)]
            residual = None
            if self.codec.rounds:
                residual = torch.zeros(anchor.numel(), dtype=dtype, device=device)
            self.segments.append(Segment(same, anchor, memories, residual, device, span))

    def begin(self) -> None:
        """The parameters, as they are now on every worker, are the common point."""
        for segment in self.segments:
            segment.vector.read(segment.span[0], segment.anchor)
            for tensor in [*segment.memories, segment.residual]:
                if tensor is not None:
                    tensor.zero_()

    def share(self) -> None:
        """Fill in the parts of the parameters that the others of the inner group answer for."""
        if self.inner.size == 1:
            return
        for segment in self.segments:
            vector, size = segment.vector, self.inner.size
            for rank in range(size):
                stop = len(vector) * (rank + 1) // size
                for start in range(len(vector) * rank // size, stop, LARGEST):
                    length = min(LARGEST, stop - start)
                    part = torch.empty(length, dtype=segment.anchor.dtype, device=segment.device)
                    if rank == self.inner.rank:
                        vector.read(start, part)
                    self.inner.bring(part, rank, -1)
                    if rank != self.inner.rank:
                        vector.write(start, part)

    def differences(self, fragment: int) -> list[Difference]:
        """The rows of a fragment."""
        return [
            Difference(segment, *segment.part(fragment, self.fragments), self.codec)
            for segment in self.segments
        ]

    def step(self, rows: Sequence[Difference], outer: Outer) -> None:
        """The outer step with the means in `rows`; the parameters are at the new point."""
        for row in rows:
            for start in range(0, row.length, LARGEST):
                length = min(LARGEST, row.length - start)
                anchor = _moved(row, start, row.staged(start, length), outer)
                row.params.write(row.first + start, anchor)

    def step_under_way(self, rows: Sequence[HeldDifference], outer: Outer, finite: bool) -> None:
        """The outer step with the means that have arrived; parameters keep what they did since.

        A worker whose parameters are not finite takes the new point as it is.
        """
        for row in rows:
            params, anchors = row.segment.vector, row.segment.anchor[row.start :]
            for start in range(0, row.length, LARGEST):
                held = row.held[start : start + LARGEST]
                before = anchors[start : start + held.numel()].clone()
                anchor = _moved(row, start, row.arrived[start : start + LARGEST], outer)
                if finite:
                    moved = torch.sub(anchor, before, out=before).to(row.device)
                    params.add(row.first + start, moved.add_(held))
                else:
                    params.write(row.first + start, anchor)

    def go_back(self, fragment: int | None = None) -> None:
        """Put the parameters (of a fragment) at the common point."""
        for segment in self.segments:
            start, stop = (0, segment.anchor.numel())
            if fragment is not None:
                start, stop = segment.part(fragment, self.fragments)
            segment.vector.write(segment.span[0] + start, segment.anchor[start:stop])
        self.share()

    def forget_residuals(self) -> None:
        """Slices have other owners now, and what is left of the mean is not theirs."""
        for segment in self.segments:
            if segment.residual is not None:
                segment.residual.zero_()


def _moved(row: Difference | HeldDifference, start: int, mean: Tensor, outer: Outer) -> Tensor:
    """The anchor from `start` on in a row, after the outer step with this mean."""
    segment, first = row.segment, row.start + start
    chosen = slice(first, first + mean.numel())
    anchor = segment.anchor[chosen]
    outer.step(anchor, mean.to(anchor.device), [memory[chosen] for memory in segment.memories])
    return anchor
