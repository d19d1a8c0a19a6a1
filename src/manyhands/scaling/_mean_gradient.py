"""The norm of the mean gradient, once a step, and the payload that goes to the other ranks.

Under DDP every rank holds all of the mean gradient. Long parameters are divided among the ranks,
and each rank reads only its own. Short ones are measured by every rank: their squared norm is
equal on all ranks only if the gradients were averaged at all (`RankClaims.shared_square`). If
gradients are sharded, each rank measures the slices that it holds.

With one rank and one pass, a step has a single gradient a, and there is nothing to compare it
with except the gradient b of the step before. Taken as two small batches of one step of twice the
size, they give

    sum of squares    |a|^2 + |b|^2
    mean's square     |(a + b) / 2|^2 = (|a|^2 + |b|^2) / 2 - |a - b|^2 / 4

The second form is used: a and b are often nearly equal, and then only their difference is exact.
The price is a copy of the gradient that is kept from one step to the next, and a second copy
between `backward` and `step`, because a gradient that no step follows must not be remembered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands._core.dtensor import DTensorShards, is_dtensor, local_shard
from manyhands._core.flat import flatten
from manyhands._core.ranks import PendingSums, RankGroup, widest_float
from manyhands._core.sharded_gradient import ShardedGradient
from manyhands.scaling._late_ranks import norms_match
from manyhands.scaling._norm_kinds import GradientSlice, NormKind
from manyhands.scaling._step_stats import RankClaims, StepStats


class ConsecutiveGradients:
    """Remembers the last step's gradient and measures the next one against it.

    `previous`     the last step's gradient by parameter, in float32 or better; empty at first
    `_candidates`  the gradient just measured, which becomes `previous` if its step is taken
    """

    def __init__(self, norms: NormKind) -> None:
        self._norms = norms
        self.previous: list[Tensor | None] = []
        self._candidates: list[tuple[int, Tensor]] = []
        self._finite: list[Tensor] = []  # for each candidate, on its device

    def measure(
        self, grads: Sequence[Tensor | None], loss_scale: Tensor | float = 1.0
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return (index, |a|^2 + |b|^2, |(a + b) / 2|^2) for each parameter with a gradient.

        The result is empty the first time. A missing gradient counts as zero.
        """
        first = not self.previous
        previous = [*self.previous, *[None] * (len(grads) - len(self.previous))]
        result: list[tuple[int, Tensor, Tensor]] = []
        self._candidates, self._finite = [], []
        for index, (grad, before) in enumerate(zip(grads, previous, strict=True)):
            if grad is not None:
                # divided by the loss scale now, as it may be another one at the next step
                now = _to_dense_float(grad) / loss_scale
            elif before is not None:
                now = torch.zeros_like(before)
            else:
                continue
            square = self._square(index, now)
            self._finite.append(square.isfinite())
            self._candidates.append((index, now))
            if before is None:
                result.append((index, square, square / 4))
            else:
                squares = square + self._square(index, before)
                difference = self._square(index, now - before)
                result.append((index, squares, squares / 2 - difference / 4))
        return [] if first else result

    def remember(self) -> None:
        """Keep the measured gradient for the next step, unless any element is not finite."""
        if not self._candidates:
            return
        # torch.where instead of `if`: reading the flag would wait for a GPU
        usable = torch.stack(self._finite).all()
        missing = 1 + self._candidates[-1][0] - len(self.previous)
        self.previous += [None] * missing
        for index, now in self._candidates:
            before = self.previous[index]
            otherwise = torch.full_like(now, torch.nan) if before is None else before
            self.previous[index] = torch.where(usable, now, otherwise)
        self.forget()

    def forget(self) -> None:
        """Drop the measured gradient: no step was made along it."""
        self._candidates, self._finite = [], []

    def _square(self, index: int, tensor: Tensor) -> Tensor:
        norm = self._norms.one(index, tensor)
        return (norm if norm.device.type == "mps" else norm.double()).square()


def _to_dense_float(grad: Tensor) -> Tensor:
    """Return a gradient as a strided tensor of at least float32."""
    grad = grad.detach()
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad


SHORT = 4_096  # elements of a parameter that every rank measures

# On a GPU norms stay there, as waiting for them would cost more than the work. On a CPU plain
# floats cost a fraction of what one-element tensors do.
Norm = Tensor | float
Numbers = Tensor | list[float]


@dataclass(frozen=True)
class StepContext:
    """What a step's gradients cannot tell: the owner of the tap provides it."""

    scale: float
    checksum: float = 0.0  # see `RankClaims`
    micro_batch: float = 0.0  # samples in this rank's first training input; 0 if unknown
    loss_scale: Tensor | float = 1.0


@dataclass(frozen=True)
class StepFacts:
    """What is known about a step when its last backward pass is over.

    The small batches' gradients were divided by `small_batch_divided_by` when they were measured,
    and `.grad` is the mean times `mean_multiplied_by`: it depends on who divides by the passes.
    """

    passes: int
    passes_seen: int
    context: StepContext
    small_batch_divided_by: int
    mean_multiplied_by: int
    valid: bool

    @property
    def needs_no_correction(self) -> bool:
        """Whether the norms can be used as they were measured."""
        loss_scale = self.context.loss_scale
        divided = self.small_batch_divided_by != 1 or self.mean_multiplied_by != 1
        scaled = isinstance(loss_scale, Tensor) or loss_scale != 1.0
        return self.valid and not divided and not scaled


class MeanGradient:
    """Measures the accumulated, averaged gradients of some parameter groups."""

    def __init__(self, ranks: RankGroup, norms: NormKind, *, compare_at_scale_1: bool) -> None:
        self.consecutive = ConsecutiveGradients(norms)
        self.ranks = ranks
        self._norms = norms
        self._compare_at_scale_1 = compare_at_scale_1
        self._announcements: list[PendingSums] = []  # sent, and not checked yet

    def set_params(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Measure these parameters from now on."""
        self._params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        self._groups = len(param_groups)
        self._group_of = [i for i, group in enumerate(param_groups) for _ in group["params"]]
        self._device = self._params[0].device
        self.on_cpu = all(param.device.type == "cpu" for param in self._params)
        # whether the last mean looks like the gradient of one pass of this rank alone
        self.not_averaged = False
        self._shares = {i: DTensorShards.of(p) for i, p in enumerate(self._params) if is_dtensor(p)}
        self._common_indices, self._own_indices = _assign_params(self._params, self.ranks)
        # group indices on the device, by their values: copying them there every step would cost
        self._group_tensors: dict[tuple[int, ...], Tensor] = {}

    def squares_per_group(self, norms: Mapping[int, Norm]) -> Tensor:
        """Return the sum of squared norms per parameter group, in the widest float there is."""
        squares = self._square_all(list(norms.values()))
        groups = [self._group_of[i] for i in norms]
        return self._to_tensor(self._sum_by_group(squares, groups, self._groups))

    def _square_all(self, norms: Sequence[Norm]) -> Numbers:
        if self.on_cpu:
            return [norm * norm for norm in map(float, norms)]
        return _stack(norms, self._device).square()  # type: ignore[arg-type]

    def _sum_by_group(self, values: Numbers, groups: Sequence[int], number: int) -> Numbers:
        """Return for each of `number` groups the sum of the values that belong to it."""
        if isinstance(values, list):
            totals = [0.0] * number
            for value, group in zip(values, groups, strict=True):
                totals[group] += value
            return totals
        sums = torch.zeros(number, dtype=widest_float(self._device), device=self._device)
        key = tuple(groups)
        if key not in self._group_tensors:
            if len(self._group_tensors) > 64:  # a model that uses other parameters every step
                self._group_tensors.clear()
            self._group_tensors[key] = torch.tensor(key, dtype=torch.long, device=self._device)
        return sums.index_add_(0, self._group_tensors[key], values)

    # -- one step ----------------------------------------------------------------------------

    def measure_step(
        self, squares: Tensor | None, norms: Mapping[int, Norm], facts: StepFacts
    ) -> StepStats:
        """Measure the mean gradient and start to send the step's numbers to the other ranks.

        `norms` are those of the last pass; `squares` are the sums over the passes before it.
        """
        self.check_announcements()
        small_batches = facts.passes * self.ranks.size
        if small_batches == 1:
            return self._measure_consecutive(facts)
        self.consecutive.previous = []  # no longer needed: free the copy
        numbers, shared_square = self._local_squares_and_mean(norms)
        if squares is not None or not facts.needs_no_correction:
            numbers = self._correct(self._to_tensor(numbers), squares, facts)
        return self._send(numbers, facts, small_batches, shared_square=shared_square)

    def _correct(self, numbers: Tensor, squares: Tensor | None, facts: StepFacts) -> Tensor:
        """Add the passes before, and undo what the gradients were multiplied by."""
        groups = self._groups
        if squares is not None:
            numbers[:groups] += squares
        numbers[:groups] *= facts.small_batch_divided_by**2
        numbers[groups:] /= facts.mean_multiplied_by**2
        numbers /= facts.context.loss_scale**2
        if not facts.valid:  # the noise tracker leaves out what is not finite
            numbers *= torch.nan
        return numbers

    def _local_squares_and_mean(self, norms: Mapping[int, Norm]) -> tuple[Numbers, Norm]:
        """Return sums per group (local squares, then this rank's part of |G|^2); the shared square.

        `norms` are those of this rank's last pass. All squares are summed in one call, because
        operations on small tensors cost the same whatever their size.
        """
        common = self._gradients_of(self._common_indices)
        own = self._gradients_of(self._own_indices)
        compared = common or self._shortest_gradient()
        measured = {**compared, **own}
        mean_norms = self._norms.many(list(measured), list(measured.values()))
        slices = self._sharded_slices()
        if slices:
            mean_norms = [*mean_norms, *self._norms.slices(slices)]
        squares = self._square_all([*norms.values(), *mean_norms])
        groups, group_of = self._groups, self._group_of
        # Every rank has measured the common ones; rank 0 alone adds them to the sum over ranks.
        counted = {**common, **own} if self.ranks.rank == 0 else own
        uncounted = 2 * groups  # one group more, to be dropped
        sum_into = [
            *(group_of[i] for i in norms),
            *(groups + group_of[i] if i in counted else uncounted for i in measured),
            *(groups + group_of[i] for i, *_ in slices),
        ]
        start = len(norms)
        compared_squares = squares[start : start + len(compared)]
        if isinstance(compared_squares, list):
            shared_square: Norm = sum(compared_squares, 0.0)
            # (On a GPU the comparison would have to wait for the device.)
            self.not_averaged = norms_match(
                compared_squares, [float(norms.get(i, -1.0)) for i in compared]
            )
        else:
            shared_square, self.not_averaged = compared_squares.sum(), False
        return self._sum_by_group(squares, sum_into, uncounted + 1)[:uncounted], shared_square

    def _gradients_of(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Return the whole gradients among these parameters; sharded ones are left out."""
        grads = ((i, self._params[i].grad) for i in indices if i not in self._shares)
        return {i: g for i, g in grads if g is not None and type(g) is not ShardedGradient}

    def _sharded_slices(self) -> list[GradientSlice]:
        """Return the slices of sharded gradients that this rank holds."""
        slices: list[GradientSlice] = [
            (i, piece, partial(_flat_slice, start, piece.numel()))
            for i, param in enumerate(self._params)
            if isinstance(grad := param.grad, ShardedGradient)
            for piece, start in zip(grad.slices, grad.starts, strict=True)
        ]
        for i, share in self._shares.items():
            grad = self._params[i].grad
            # under HSDP several ranks hold the same slice, and one of them counts it
            if grad is not None and share.first_replica and share.own.length:
                slices.append((i, local_shard(grad), share.own.narrow))
        return slices

    def _shortest_gradient(self) -> dict[int, Tensor]:
        """Return one gradient to compare over the ranks, if no short parameter has one."""
        if self.ranks.size == 1:
            return {}
        grads = self._gradients_of(range(len(self._params)))
        shortest = min(grads, key=lambda i: self._params[i].numel(), default=None)
        return {} if shortest is None else {shortest: grads[shortest]}

    def _measure_consecutive(self, facts: StepFacts) -> StepStats:
        """Compare the only gradient with the one before, if the result is of any use."""
        measured = []
        if facts.context.scale != 1.0 or self._compare_at_scale_1:
            grads = [None if p.grad is None else local_shard(p.grad) for p in self._params]
            measured = self.consecutive.measure(grads, facts.context.loss_scale)
        if not measured or not facts.valid:
            return self._send([0.0] * (2 * self._groups), facts, 1)
        groups, group_of = self._groups, self._group_of
        values = [value for _, squares, mean in measured for value in (squares, mean)]
        sum_into = [g for i, _, _ in measured for g in (group_of[i], groups + group_of[i])]
        numbers = self._sum_by_group(_stack(values, self._device), sum_into, 2 * groups)
        return self._send(numbers, facts, 2, consecutive=True)

    # -- what the other ranks get ------------------------------------------------------------

    def _send(
        self,
        numbers: Numbers,
        facts: StepFacts,
        small_batches: int,
        *,
        shared_square: Norm = 0.0,
        consecutive: bool = False,
    ) -> StepStats:
        """Start the step's collective and return the statistics that will come of it."""
        context = facts.context
        # in the order of the fields of `RankClaims`, whose last one is added in `_payload`
        claims = (
            0.0,
            facts.passes,
            facts.passes_seen,
            context.scale,
            context.checksum,
            context.micro_batch,
        )
        payload = self._payload(numbers, claims, shared_square)
        # Kept until the next step's has begun: see `PendingSums`.
        self._last_sent = self.ranks.sum_and_gather(payload, 2 * self._groups)
        return StepStats(
            pending=self._last_sent,
            groups=self._groups,
            ranks=self.ranks.size,
            passes=facts.passes,
            small_batches=small_batches,
            # two consecutive gradients stand for one step of twice the size
            scale=2.0 * context.scale if consecutive else context.scale,
            consecutive=consecutive,
            norm_kind=self._norms.norm_kind,
            micro_batch=context.micro_batch,
        )

    def _payload(self, numbers: Numbers, claims: Sequence[float], shared_square: Norm) -> Tensor:
        """Return what this rank sends, as one vector."""
        if self.ranks.size == 1:
            return self._to_tensor(numbers)
        if isinstance(numbers, list) and isinstance(shared_square, float):
            return self._to_tensor([*numbers, *claims, shared_square])
        payload = torch.cat([self._to_tensor(numbers), self._to_tensor([*claims, 0.0])])
        payload[-1] = shared_square  # on the device, without a copy to the host and back
        return payload

    def announce(self, passes: int, scale: float, checksum: float) -> None:
        """Announce to the other ranks that steps have so many passes from now on.

        This does not wait. If a rank announces something else, or nothing until the end of its
        next step, all ranks notice: an announcement is as long as a step's payload, so it is
        paired with whatever the other ranks send next.
        """
        if self.ranks.own_group:
            claims = [1.0, passes, passes, scale, checksum, 0.0, 0.0]  # see `RankClaims`
            payload = self._to_tensor([0.0] * (2 * self._groups) + claims)
            self._announcements.append(self.ranks.sum_and_gather(payload, 2 * self._groups))

    def check_announcements(self, patience: float = math.inf) -> None:
        """Raise if other ranks announced something else. Wait for them, but at most `patience`."""
        deadline = time.monotonic() + patience
        while self._announcements:
            if patience < math.inf and not self._announcements[0].done_within(
                deadline - time.monotonic()
            ):
                return
            numbers = self._announcements.pop(0).read()
            RankClaims.check(RankClaims.parse_table(numbers[2 * self._groups :]))

    def _to_tensor(self, numbers: Numbers) -> Tensor:
        if isinstance(numbers, Tensor):
            return numbers
        on_host = torch.tensor(numbers, dtype=widest_float(self._device))
        return on_host.to(self._device, non_blocking=True)


def _stack(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one-element tensors of any type and device as one tensor of the widest float."""
    dtype = widest_float(device)
    if not values:
        return torch.zeros(0, dtype=dtype, device=device)
    first = values[0]
    if any(v.dtype != first.dtype or v.device != device for v in values):
        values = [v.to(device, dtype) for v in values]
    return torch.stack(list(values)).to(dtype)


def _flat_slice(start: int, length: int, whole: Tensor) -> Tensor:
    return flatten(whole)[start : start + length]


def _assign_params(params: Sequence[Tensor], ranks: RankGroup) -> tuple[list[int], list[int]]:
    """Return the indices of the parameters that every rank measures, and of this rank's own."""
    if ranks.size == 1:
        return [], list(range(len(params)))
    short = [i for i, p in enumerate(params) if p.numel() <= SHORT]
    long = [i for i, p in enumerate(params) if p.numel() > SHORT]
    # The longest first, each to the rank with the least to read. All ranks compute the same.
    load = [0] * ranks.size
    own = []
    for i in sorted(long, key=lambda i: -params[i].numel()):
        lightest = load.index(min(load))
        load[lightest] += params[i].numel()
        if lightest == ranks.rank:
            own.append(i)
    return short, sorted(own)
