"""The anchor, differences of the parameters, and outer steps.

Tensors (n: elements of the trained parameters, in float32 unless wider):

    anchor      n                   always
    memories    n for each          always; state of the outer step, such as a momentum
    residual    n                   with a codec that rounds: the rounding error, not sent yet
    held        n / fragments       with overlap, while in flight: the differences as sent
    arrived     n / fragments       with overlap, `mix` or a crew, until the merge: the mean

Without overlap, a process group takes the outer step chunk by chunk as the mean arrives. A crew may
undo a sync round, so it changes the anchor only after all workers agree that the round took place.
With overlap, parameters change while the mean is in flight. The merge preserves these steps:

    param += (new anchor - old anchor) + held

With `mix`, the merge moves the parameters towards the anchor instead:

    param += (1 - mix) * (new anchor - param)

An outer step changes the anchor in place. It receives the *gradient*, which is the anchor minus the
mean of the workers' parameters: the negative movement of a block, as an optimizer expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypedDict

import torch
from torch import Tensor

from manyhands._optimizers.state_parts import StatePart
from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.flat import (
    FlatTensors,
    accumulation_dtype,
    group_by_type,
    local_shard,
    read_range,
)
from manyhands._tensors.profiler import Range
from manyhands.blocks.averaging._codec import Codec
from manyhands.blocks.averaging._payload import MAX_CHUNK, Payload, RoundResult, fingerprint


@dataclass
class AnchorBucket:
    """The flat anchor of the parameters with a common type and device.

    `anchor`, `memories` and `residual` have the shape (span[1] - span[0],).
    """

    params: list[Tensor]
    anchor: Tensor  # on the host with `anchor_on_host`
    memories: list[Tensor]
    residual: Tensor | None  # on `device`
    device: torch.device  # of the parameters
    param_dtype: torch.dtype  # real, also for complex parameters
    span: tuple[int, int]  # this rank's slice of the parameters' elements

    @property
    def vector(self) -> FlatTensors:
        # Not cached: users may replace a parameter's `.data`.
        return FlatTensors(self.params)

    def outer_tensors(self) -> list[Tensor]:
        residual = [] if self.residual is None else [self.residual]
        return [*self.memories, *residual]

    def pieces(self) -> Iterator[tuple[Tensor, slice, int]]:
        begin, end = self.span
        for param, (first, last) in zip(self.params, self.vector.spans, strict=True):
            if max(first, begin) < min(last, end):
                here = slice(max(first - begin, 0), min(last, end) - begin)
                yield param, here, max(begin - first, 0)


def even_range(length: int, index: int, count: int) -> tuple[int, int]:
    return length * index // count, length * (index + 1) // count


class AnchorDifference(Payload):
    """A payload of differences, anchor minus parameters.

    After `defer_outer_step`, `merge` takes the outer step instead of `write`.
    """

    measured = True

    def __init__(
        self, bucket: AnchorBucket, span: tuple[int, int], codec: Codec, outer: Outer
    ) -> None:
        start, stop = span
        self.bucket = bucket
        self.start = start
        self.length = stop - start
        self.dtype = bucket.anchor.dtype
        self.device = bucket.device
        self.codec = codec
        if bucket.residual is not None:
            self.residual = bucket.residual[start:stop]
        self.params = bucket.vector
        self.outer = outer
        self.held: Tensor | None = None  # with overlap: the difference as sent
        self.arrived: Tensor | None = None  # the mean, until `merge`

    @property
    def offset(self) -> int:
        return self.bucket.span[0] + self.start

    def defer_outer_step(self, *, copied: bool) -> None:
        """Defer the outer step to `merge`. If `copied`, send a copy of the current difference."""
        self.arrived = torch.empty(self.length, dtype=self.dtype, device=self.device)
        if copied:
            held = torch.empty_like(self.arrived)
            for start in range(0, self.length, MAX_CHUNK):
                self.read(start, held[start : start + MAX_CHUNK])
            self.held = held

    def read(self, start: int, out: Tensor) -> None:
        if self.held is not None:
            out.copy_(self.held[start : start + out.numel()])
            return
        self.subtract_params(start, self.bucket.anchor[self.start + start :], out)

    def subtract_params(self, start: int, anchor: Tensor, out: Tensor) -> None:
        """Write the differences of an anchor and the parameters, from `start` on, to `out`."""
        for part, inner, outer in self.params.ranges(self.offset + start, out.numel()):
            before = self.round_like_params(anchor[outer]).to(self.device)
            torch.sub(before, read_range(part, inner), out=out[outer])

    def write(self, start: int, mean: Tensor, result: RoundResult) -> None:
        if self.arrived is None:
            self.params.write(self.offset + start, self.step_anchor(start, mean, result))
        else:
            self.arrived[start : start + mean.numel()].copy_(mean)

    def round_like_params(self, anchor: Tensor) -> Tensor:
        """Round the anchor like 16-bit parameters; otherwise rounding would count as movement."""
        return anchor.to(self.bucket.param_dtype).to(anchor.dtype)

    def step_anchor(self, start: int, mean: Tensor, result: RoundResult) -> Tensor:
        """Take the outer step on a range of the anchor, unless no worker has usable values."""
        first = self.start + start
        chosen = slice(first, first + mean.numel())
        anchor = self.bucket.anchor[chosen]
        if result.included:
            memories = [memory[chosen] for memory in self.bucket.memories]
            # Copy only if the outer step overwrites it: the caller reuses `mean`.
            gradient = mean.to(anchor.device, copy=self.outer.overwrites)
            # All workers use the first worker's learning rate, so that anchors stay equal.
            outer = self.outer.at(result.first_report.lr)
            with Range("manyhands::outer step"):
                outer.step(anchor, gradient, memories)
        return anchor

    def merge(self, result: RoundResult, included: bool, mix: float | None) -> None:
        """Take the outer step, and preserve the steps since the send, or mix."""
        # `old anchor - held` was sent, so param += (new anchor - old anchor) + held. An excluded
        # worker takes the new anchor.
        if self.arrived is None:  # `write` has taken the outer step
            return
        anchors = self.bucket.anchor[self.start :]
        follows = included and bool(result.included)
        for start in range(0, self.length, MAX_CHUNK):
            mean = self.arrived[start : start + MAX_CHUNK]
            if not follows or mix == 0 or (mix is None and self.held is None):
                self.params.write(self.offset + start, self.step_anchor(start, mean, result))
                continue
            if mix is not None:
                # After the outer step, `mean` is free.
                self.subtract_params(start, self.step_anchor(start, mean, result), mean)
                self.params.add(self.offset + start, mean.mul_(1 - mix))
                continue
            assert self.held is not None
            before = anchors[start : start + mean.numel()].clone()  # the outer step is in place
            now = self.round_like_params(self.step_anchor(start, mean, result))
            then = self.round_like_params(before)
            moved = torch.sub(now, then, out=before).to(self.device)
            self.params.add(self.offset + start, moved.add_(self.held[start : start + MAX_CHUNK]))


def memory_order(params: Sequence[Tensor]) -> float:
    """Return a checksum of the strides, because elements are averaged in memory order."""
    strides = []
    for index, part in enumerate(map(local_shard, params)):
        if not part.is_contiguous():
            strides.append((index, part.stride()))
    return fingerprint(strides)


class AnchorState(TypedDict):
    order: float  # `memory_order` of the parameters
    anchor: list[Tensor]
    memories: list[list[Tensor]]


@dataclass
class Anchor:
    """Anchor and memories of all parameters."""

    outer: Outer
    codec: Codec
    fragments: int
    on_host: bool
    # Ranks with equal parameters: each owns a slice of the anchor.
    inner: RankGroup = field(default_factory=RankGroup)
    buckets: list[AnchorBucket] = field(default_factory=list)

    def extend(self, params: Sequence[Tensor]) -> None:
        for group in group_by_type(params):
            vector = FlatTensors(group)
            device = group[0].device
            span = even_range(len(vector), self.inner.rank, self.inner.size)
            param_dtype = local_shard(group[0]).real.dtype
            dtype = accumulation_dtype(param_dtype)
            where = torch.device("cpu") if self.on_host else device
            anchor = torch.empty(span[1] - span[0], dtype=dtype, device=where)
            vector.read(span[0], anchor)
            memories = [torch.zeros_like(anchor) for _ in range(self.outer.memories)]
            residual = None
            if self.codec.rounds:
                residual = torch.zeros(anchor.numel(), dtype=dtype, device=device)
            self.buckets.append(
                AnchorBucket(group, anchor, memories, residual, device, param_dtype, span)
            )

    def begin(self) -> None:
        for bucket in self.buckets:
            bucket.vector.read(bucket.span[0], bucket.anchor)
            for tensor in bucket.outer_tensors():
                tensor.zero_()

    def all_gather_inner(self, fragments: Sequence[int]) -> None:
        if self.inner.size == 1:
            return
        for bucket in self.buckets:
            for rank in range(self.inner.size):
                first, end = even_range(len(bucket.vector), rank, self.inner.size)
                for fragment in fragments:
                    start, stop = even_range(end - first, fragment, self.fragments)
                    self._broadcast_range(bucket, rank, first + start, first + stop)

    def _broadcast_range(self, bucket: AnchorBucket, owner: int, first: int, end: int) -> None:
        vector = bucket.vector
        for start in range(first, end, MAX_CHUNK):
            length = min(MAX_CHUNK, end - start)
            chunk = torch.empty(length, dtype=bucket.anchor.dtype, device=bucket.device)
            if owner == self.inner.rank:
                vector.read(start, chunk)
            self.inner.broadcast(chunk, owner, -1)  # -1: every rank receives
            if owner != self.inner.rank:
                vector.write(start, chunk)

    @property
    def params(self) -> list[Tensor]:
        params: list[Tensor] = []
        for bucket in self.buckets:
            params.extend(bucket.params)
        return params

    def outer_parts(self) -> Iterator[StatePart]:
        for bucket in self.buckets:
            tensors = {"anchor": bucket.anchor}
            if bucket.residual is not None:
                tensors["residual"] = bucket.residual
            for number, memory in enumerate(bucket.memories):
                tensors[f"memory.{number}"] = memory
            for param, here, first in bucket.pieces():
                entries = {name: tensor[here] for name, tensor in tensors.items()}
                yield StatePart(param, entries, first)

    def saved(self) -> AnchorState:
        return {
            "order": memory_order(self.params),
            "anchor": [bucket.anchor for bucket in self.buckets],
            "memories": [bucket.memories for bucket in self.buckets],
        }

    def load(self, state: AnchorState) -> None:
        saved = zip(self.buckets, state["anchor"], state["memories"], strict=True)
        for bucket, anchor, memories in saved:
            bucket.anchor.copy_(anchor)
            for memory, value in zip(bucket.memories, memories, strict=True):
                memory.copy_(value)

    def reset_frozen(self) -> None:
        """Zero memories and residuals of frozen parameters, so that these stop moving."""
        if all(param.requires_grad for param in self.params):
            return
        for bucket in self.buckets:
            for param, here, _ in bucket.pieces():
                if not param.requires_grad:
                    for tensor in bucket.outer_tensors():
                        tensor[here].zero_()

    def differences(self, fragments: Sequence[int]) -> list[AnchorDifference]:
        found = []
        for fragment in fragments:
            for bucket in self.buckets:
                span = even_range(bucket.anchor.numel(), fragment, self.fragments)
                found.append(AnchorDifference(bucket, span, self.codec, self.outer))
        return found

    def restore_params(self) -> None:
        """Set the parameters to the anchor, discarding the steps of the current block."""
        for bucket in self.buckets:
            bucket.vector.write(bucket.span[0], bucket.anchor)
        self.all_gather_inner(range(self.fragments))

    def reset_residuals(self) -> None:
        """Zero the residuals after a change of slice owners.

        Allocate new tensors, because an abandoned sync round may still write to the old ones.
        """
        for bucket in self.buckets:
            if bucket.residual is not None:
                bucket.residual = torch.zeros_like(bucket.residual)


# -- outer steps -----------------------------------------------------------------------------------


class Outer:
    """Base class of outer steps, which move the anchor after the workers' mean is known.

    >>> import torch, manyhands as mh
    >>> from manyhands.blocks import Outer
    >>> class Half(Outer):
    ...     def step(self, anchor, gradient, memories):
    ...         anchor.sub_(gradient, alpha=0.5)  # halfway to the workers' mean
    >>> param = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = mh.Blocks(torch.optim.SGD([param], lr=0.1), every=50, outer=Half())
    """

    memories: ClassVar[int] = 0  # number of state tensors with the anchor's shape
    overwrites: ClassVar[bool] = True  # whether `step` may change `gradient`; False saves a copy

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        """Move `anchor` in place. Memories are initially zero.

        All tensors have the shape (elements,). `step` receives slices of the model, so it must work
        element by element.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        settings = [f"{name}={value!r}" for name, value in sorted(vars(self).items())]
        return f"{type(self).__name__}({', '.join(settings)})"

    def at(self, lr: float) -> Outer:
        """Return this outer step for the inner learning rate `lr`."""
        return self


@dataclass(frozen=True)
class Average(Outer):
    """LocalSGD: the next anchor is the workers' mean.

        anchor -= gradient

    R. McDonald, K. Hall, G. Mann, "Distributed Training Strategies for the Structured Perceptron",
    NAACL 2010.
    """

    overwrites: ClassVar[bool] = False

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        anchor.sub_(gradient)


@dataclass(frozen=True)
class BlockMomentum(Outer):
    """Block momentum: BMUF, and with `nesterov` DiLoCo.

        velocity = momentum * velocity + lr * gradient
        anchor -= velocity
        anchor -= lr * gradient + momentum * velocity     with nesterov
        anchor -= (1 + momentum) * velocity               with use_nbm: fairseq's form

    K. Chen, Q. Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training with
    Intra-Block Parallel Optimization and Blockwise Model-Update Filtering", ICASSP 2016.
    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    arXiv:2311.08105.
    """

    lr: float = 1.0
    momentum: float = 0.875
    nesterov: bool = False
    use_nbm: bool = False

    memories: ClassVar[int] = 1
    overwrites: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.nesterov and self.use_nbm:
            raise ValueError(
                "nesterov=True and use_nbm=True exclude each other. use_nbm is fairseq's form, "
                "which equals plain momentum with a larger step."
            )

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        (momentum,) = memories
        momentum.mul_(self.momentum).add_(gradient, alpha=self.lr)
        if self.nesterov:
            anchor.sub_(gradient, alpha=self.lr).sub_(momentum, alpha=self.momentum)
        else:
            anchor.sub_(momentum, alpha=1 + self.momentum if self.use_nbm else 1)


@dataclass(frozen=True)
class SlowMomentum(Outer):
    """SlowMo: a slow momentum, measured in units of the inner learning rate.

        velocity = momentum * velocity + gradient / inner_lr
        anchor -= slow_lr * inner_lr * velocity

    J. Wang, V. Tantia, N. Ballas, M. Rabbat, "SlowMo: Improving Communication-Efficient Distributed
    SGD with Slow Momentum", ICLR 2020, arXiv:1910.00643.
    """

    inner_lr: float | None = None  # None: the inner optimizer's current rate
    slow_lr: float = 1.0
    momentum: float = 0.7

    memories: ClassVar[int] = 1
    overwrites: ClassVar[bool] = False

    def step(self, anchor: Tensor, gradient: Tensor, memories: Sequence[Tensor]) -> None:
        (slow,) = memories
        assert self.inner_lr is not None
        slow.mul_(self.momentum).add_(gradient, alpha=1 / self.inner_lr)
        anchor.sub_(slow, alpha=self.slow_lr * self.inner_lr)

    def at(self, lr: float) -> Outer:
        if self.inner_lr is not None:
            return self
        return replace(self, inner_lr=max(lr, 1e-12))  # a schedule may end at 0
