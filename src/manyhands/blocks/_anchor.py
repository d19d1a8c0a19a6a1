"""The common point: what all workers agreed on last, and how the next one is made of their mean.

Tensors held, and when (n: elements of the trained parameters, in float32 unless wider)

    anchor      n                   the common point, always
    memories    n for each          of the outer step (a momentum), always
    residual    n                   with a codec that rounds: what it has not yet sent
    held        n / fragments       with overlap, while under way: the differences as sent,
    arrived     n / fragments       and the mean that came of them
    stage       n / fragments       in a crew without overlap, during a meeting: the mean

In a process group, without overlap, the outer step is taken part by part as means arrive, and
nothing is held. A crew may undo a meeting, so nothing is changed before all have agreed that it has
taken place. With overlap the parameters train on meanwhile, and are then moved by as much as the
common point has moved from where they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands._core.dtensor import local
from manyhands._core.flat import FlatTensors, group_by_type, read_range
from manyhands._core.norms import accumulation_dtype
from manyhands._core.ranks import RankGroup
from manyhands.blocks._codec import Codec
from manyhands.blocks._outer import Outer
from manyhands.blocks.averaging._payload import LARGEST, Outcome


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
    def vector(self) -> FlatTensors:
        return FlatTensors(self.params)


@dataclass(frozen=True)
class OuterState:
    """What is kept here for one parameter: views of the anchor and of all that is laid out like it.

    They are of this rank's elements of the parameter from `start` on, in the order of memory
    (complex numbers as pairs): all that it holds, or its share in an inner group.
    """

    param: Tensor
    start: int
    anchor: Tensor
    memories: list[Tensor]
    residual: Tensor | None

    def begin(self) -> None:
        """The parameter, as it is now on every worker, is the anchor."""
        FlatTensors([self.param]).read(self.start, self.anchor)
        for memory in self.memories:
            memory.zero_()


def part_of(length: int, index: int, parts: int) -> tuple[int, int]:
    """Where one of so many equal parts begins and ends."""
    return length * index // parts, length * (index + 1) // parts


class Difference:
    """A row: the anchor less the parameters. The outer step is taken as each part arrives."""

    first_only = False

    def __init__(self, segment: Segment, start: int, stop: int, codec: Codec, outer: Outer) -> None:
        self.segment, self.start, self.length = segment, start, stop - start
        self.dtype, self.device, self.codec = segment.anchor.dtype, segment.device, codec
        self.residual = None if segment.residual is None else segment.residual[start:stop]
        self.params = segment.vector
        self.outer = outer
        self.kind = local(segment.params[0]).real.dtype

    @property
    def first(self) -> int:
        """Where it begins among the parameters."""
        return self.segment.span[0] + self.start

    def read(self, start: int, out: Tensor) -> None:
        anchor = self.segment.anchor[self.start + start :]
        for part, inner, outer in self.params.ranges(self.first + start, out.numel()):
            there = self.as_trained(anchor[outer]).to(self.device)
            torch.sub(there, read_range(part, inner), out=out[outer])

    def write(self, start: int, mean: Tensor, outcome: Outcome) -> None:
        self.params.write(self.first + start, self.moved(start, mean, outcome))

    def as_trained(self, anchor: Tensor) -> Tensor:
        """Where the parameters were put: with 16 bits, the anchor rounded."""
        return anchor if self.kind == anchor.dtype else anchor.to(self.kind).to(anchor.dtype)

    def moved(self, start: int, mean: Tensor, outcome: Outcome) -> Tensor:
        """The anchor from `start` on, after the outer step with this mean.

        If nobody's numbers could be used, it stays.
        """
        first = self.start + start
        chosen = slice(first, first + mean.numel())
        anchor = self.segment.anchor[chosen]
        if outcome.counted:
            memories = [memory[chosen] for memory in self.segment.memories]
            gradient = mean.to(anchor.device, copy=self.outer.overwrites)
            self.outer.at(outcome.first.lr).step(anchor, gradient, memories)
        return anchor

    def merge(self, outcome: Outcome, counts: bool) -> None:
        """Take in what has arrived: here it has been."""


class StagedDifference(Difference):
    """The same; the outer step is taken when all of the mean is there, and nobody objects."""

    def __init__(self, difference: Difference) -> None:
        vars(self).update(vars(difference))
        self._stage = torch.empty(self.length, dtype=self.dtype, device=self.device)

    def write(self, start: int, mean: Tensor, outcome: Outcome) -> None:
        self._stage[start : start + mean.numel()].copy_(mean)

    def merge(self, outcome: Outcome, counts: bool) -> None:
        for start in range(0, self.length, LARGEST):
            super().write(start, self._stage[start : start + LARGEST], outcome)


class HeldDifference(Difference):
    """The difference as it was when it was sent. Parameters keep what they have done since."""

    def __init__(self, difference: Difference) -> None:
        vars(self).update(vars(difference))
        self.held = torch.empty(self.length, dtype=self.dtype, device=self.device)
        self.arrived = torch.empty_like(self.held)

    @classmethod
    def now(cls, difference: Difference) -> HeldDifference:
        """As the parameters are now."""
        row = cls(difference)
        for start in range(0, row.length, LARGEST):
            difference.read(start, row.held[start : start + LARGEST])
        return row

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self.held[start : start + out.numel()])

    def write(self, start: int, mean: Tensor, outcome: Outcome) -> None:
        self.arrived[start : start + mean.numel()].copy_(mean)

    def merge(self, outcome: Outcome, counts: bool) -> None:
        """The outer step. A worker whose numbers do not count takes the new point as it is."""
        params, anchors = self.segment.vector, self.segment.anchor[self.start :]
        keep = counts and bool(outcome.counted)
        for start in range(0, self.length, LARGEST):
            held = self.held[start : start + LARGEST]
            before = anchors[start : start + held.numel()].clone()
            anchor = self.moved(start, self.arrived[start : start + LARGEST], outcome)
            if keep:
                now, then = self.as_trained(anchor), self.as_trained(before)
                moved = torch.sub(now, then, out=before).to(self.device)
                params.add(self.first + start, moved.add_(held))
            else:
                params.write(self.first + start, anchor)


@dataclass
class Anchor:
    """Anchor and memories of all parameters."""

    outer: Outer
    codec: Codec
    fragments: int
    on_host: bool
    inner: RankGroup = field(
        default_factory=RankGroup
    )  # who have the same parameters, and share work
    segments: list[Segment] = field(default_factory=list)

    def extend(self, params: Sequence[Tensor]) -> None:
        """Take in parameters, whose values are common now."""
        for same in group_by_type(params):
            vector, device = FlatTensors(same), same[0].device
            span = part_of(len(vector), self.inner.rank, self.inner.size)
            dtype = accumulation_dtype(local(same[0]).real.dtype)
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

    def share(self, fragments: Sequence[int]) -> None:
        """Fill in what the others of the inner group answer for in these fragments."""
        if self.inner.size == 1:
            return
        for segment in self.segments:
            for rank in range(self.inner.size):
                first, end = part_of(len(segment.vector), rank, self.inner.size)
                for fragment in fragments:
                    start, stop = part_of(end - first, fragment, self.fragments)
                    self._bring(segment, rank, first + start, first + stop)

    def _bring(self, segment: Segment, owner: int, first: int, end: int) -> None:
        """Have a range of the parameters as its owner in the inner group has it."""
        vector = segment.vector
        for start in range(first, end, LARGEST):
            length = min(LARGEST, end - start)
            part = torch.empty(length, dtype=segment.anchor.dtype, device=segment.device)
            if owner == self.inner.rank:
                vector.read(start, part)
            self.inner.broadcast(part, owner, -1)
            if owner != self.inner.rank:
                vector.write(start, part)

    @property
    def params(self) -> list[Tensor]:
        """All that it is the common point of."""
        return [param for segment in self.segments for param in segment.params]

    def outer_state(self) -> Iterator[OuterState]:
        """Anchor, memories and residual by parameter, for those that this rank has a part of."""
        for segment in self.segments:
            begin, end = segment.span
            for param, (first, last) in zip(segment.params, segment.vector.spans, strict=True):
                if max(first, begin) < min(last, end):
                    here = slice(max(first - begin, 0), min(last, end) - begin)
                    memories = [memory[here] for memory in segment.memories]
                    residual = None if segment.residual is None else segment.residual[here]
                    start = max(begin - first, 0)
                    yield OuterState(param, start, segment.anchor[here], memories, residual)

    def layout(self) -> list[Any]:
        """What has to be the same for a residual to be of use: who rounds and averages what."""
        lengths = [(len(segment.vector), *segment.span) for segment in self.segments]
        return [self.inner.size, self.inner.rank, *lengths]

    def hold_frozen(self) -> None:
        """Forget how parameters moved that have been frozen: they meet once more, and then rest."""
        if not self.outer.memories or all(param.requires_grad for param in self.params):
            return
        for segment in self.segments:
            begin, end = segment.span
            for param, (first, last) in zip(segment.params, segment.vector.spans, strict=True):
                if not param.requires_grad and first < end and begin < last:
                    for memory in segment.memories:
                        memory[max(first - begin, 0) : last - begin].zero_()

    def differences(self, fragment: int) -> list[Difference]:
        """The rows of a fragment."""
        return [
            Difference(
                segment,
                *part_of(segment.anchor.numel(), fragment, self.fragments),
                self.codec,
                self.outer,
            )
            for segment in self.segments
        ]

    def go_back(self) -> None:
        """Put the parameters at the common point."""
        for segment in self.segments:
            segment.vector.write(segment.span[0], segment.anchor)
        self.share(range(self.fragments))

    def forget_residuals(self) -> None:
        """Slices have other owners now, and what is left of the mean is not theirs.

        In new memory: a meeting that was given up may still write to the old.
        """
        for segment in self.segments:
            if segment.residual is not None:
                segment.residual = torch.zeros_like(segment.residual)
