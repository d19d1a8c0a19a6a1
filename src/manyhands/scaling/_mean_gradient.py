"""The norm of the mean gradient, once a step, and the vector that goes to the other workers.

Where every worker has all of the mean gradient (under DDP), long parameters are shared out and
each worker reads only its part of the memory. Short ones are measured by every worker: they
are the witness that the gradients were averaged at all (`_step_stats.py`). Where gradients are
sharded, each worker measures what it holds.
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

from manyhands._core.dtensor import DTensorShards, is_dtensor, local
from manyhands._core.flat import flatten
from manyhands._core.ranks import PendingSums, RankGroup, widest_float
from manyhands._core.sharded_gradient import ShardedGradient
from manyhands.scaling._late_ranks import are_the_same
from manyhands.scaling._norm_kinds import Norms, Piece
from manyhands.scaling._step_stats import RankClaims, StepStats


class ConsecutiveGradients:
    """Remembers the last step's gradient and measures the next one against it."""

    def __init__(self, norms: Norms) -> None:
        self._norms = norms
        self.previous: list[Tensor | None] = []
        self._candidates: list[tuple[int, Tensor]] = []
        self._finite: list[Tensor] = []

    def measure(
        self, grads: Sequence[Tensor | None], loss_scale: Tensor | float = 1.0
    ) -> list[tuple[int, Tensor, Tensor]]:
        """(index, |a|^2 + |b|^2, |(a + b) / 2|^2) for each parameter that had a gradient.

        Empty the first time. A missing gradient counts as zero.
        """
        first = not self.previous
        previous = [*self.previous, *[None] * (len(grads) - len(self.previous))]
        result: list[tuple[int, Tensor, Tensor]] = []
        self._candidates, self._finite = [], []
        for index, (grad, before) in enumerate(zip(grads, previous, strict=True)):
            if grad is not None:
                now = _plain(grad) / loss_scale
            elif before is not None:
                now = torch.zeros_like(before)
            else:
                continue
            squared = self._square(index, now)
            self._finite.append(squared.isfinite())
            self._candidates.append((index, now))
            if before is None:
                result.append((index, squared, squared / 4))
            else:
                squares = squared + self._square(index, before)
                difference = self._square(index, now - before)
                result.append((index, squares, squares / 2 - difference / 4))
        return [] if first else result

    def remember(self) -> None:
        """Keep what was measured for the next step; unless a part of it is not finite."""
        if not self._candidates:
            return
        usable = torch.stack(self._finite).all()
        missing = 1 + self._candidates[-1][0] - len(self.previous)
        self.previous += [None] * missing
        for index, now in self._candidates:
            before = self.previous[index]
            other = torch.full_like(now, torch.nan) if before is None else before
            self.previous[index] = torch.where(usable, now, other)
        self.forget()

    def forget(self) -> None:
        """Drop what was measured and is not to be remembered."""
        self._candidates, self._finite = [], []

    def _square(self, index: int, tensor: Tensor) -> Tensor:
        length = self._norms.one(index, tensor)
        return (length if length.device.type == "mps" else length.double()).square()


def _plain(grad: Tensor) -> Tensor:
    grad = grad.detach()
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad


SHORT = 4_096

# On a GPU lengths stay there; on a CPU plain floats cost a fraction of what tensors of one do.
Length = Tensor | float
Numbers = Tensor | list[float]


@dataclass(frozen=True)
class StepFacts:
    """What is known of a step when its last backward pass is over.

    Small batches' gradients were measured divided by `small_batch_divided_by`, and `.grad` is
    the mean times `mean_multiplied_by`, depending on who divides by the number of passes.
    """

    passes: int
    seen: int
    scale: float
    small_batch_divided_by: int
    mean_multiplied_by: int
    loss_scale: Tensor | float
    history: float
    micro_batch: float
    usable: bool

    @property
    def as_measured(self) -> bool:
        """Whether the norms need no correction."""
        divided = self.small_batch_divided_by != 1 or self.mean_multiplied_by != 1
        scaled = isinstance(self.loss_scale, Tensor) or self.loss_scale != 1.0
        return self.usable and not divided and not scaled


class MeanGradient:
    """Measures the accumulated, averaged gradients of some parameter groups."""

    def __init__(self, workers: RankGroup, norms: Norms, *, difference_at_scale_1: bool) -> None:
        self.difference = ConsecutiveGradients(norms)
        self.workers = workers
        self._norms = norms
        self._difference_at_scale_1 = difference_at_scale_1
        self.announced: list[PendingSums] = []

    def cover(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Measure these parameters from now on."""
        self._params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        self._groups = len(param_groups)
        self._device = self._params[0].device
        self.not_averaged = False  # whether the last mean looks like one pass of this rank alone
        self.on_host = all(param.device.type == "cpu" for param in self._params)
        self._shares = {i: DTensorShards.of(p) for i, p in enumerate(self._params) if is_dtensor(p)}
        self._short, self._mine = _shares(self._params, self.workers)
        self._group_of = [i for i, group in enumerate(param_groups) for _ in group["params"]]
        self._bins: dict[tuple[int, ...], Tensor] = {}

    def squares_per_group(self, lengths: Mapping[int, Length]) -> Tensor:
        """Sum of squared lengths by parameter group, in the widest float there is."""
        squares = self._squared(list(lengths.values()))
        return self._tensor(
            self._binned(squares, [self._group_of[i] for i in lengths], self._groups)
        )

    def _squared(self, lengths: Sequence[Length]) -> Numbers:
        if self.on_host:
            return [length * length for length in map(float, lengths)]
        return _stacked(lengths, self._device).square()  # type: ignore[arg-type]

    def _binned(self, values: Numbers, bins: Sequence[int], number: int) -> Numbers:
        """The sum of the values in each of a number of bins."""
        if isinstance(values, list):
            totals = [0.0] * number
            for value, place in zip(values, bins, strict=True):
                totals[place] += value
            return totals
        sums = torch.zeros(number, dtype=widest_float(self._device), device=self._device)
        key = tuple(bins)
        if key not in self._bins:
            if len(self._bins) > 64:  # a model that uses other parameters every step
                self._bins.clear()
            self._bins[key] = torch.tensor(key, dtype=torch.long, device=self._device)
        return sums.index_add_(0, self._bins[key], values)

    def sample(
        self, squares: Tensor | None, lengths: Mapping[int, Length], facts: StepFacts
    ) -> StepStats:
        """Put the step's numbers together and start their way to the other workers.

        `squares` are those of the passes before the last, of which `lengths` are.
        """
        self.check_announcements()
        count = facts.passes * self.workers.size
        if count == 1:
            return self._single(facts)
        self.difference.previous = []
        numbers, witness = self._squares_and_mean(lengths)
        if squares is not None or not facts.as_measured:
            numbers = self._corrected(self._tensor(numbers), squares, facts)
        return self._sent(numbers, facts, count, witness=witness)

    def _corrected(self, numbers: Tensor, squares: Tensor | None, facts: StepFacts) -> Tensor:
        """With the passes before, and without what gradients were multiplied with."""
        groups = self._groups
        if squares is not None:
            numbers[:groups] += squares
        numbers[:groups] *= facts.small_batch_divided_by**2
        numbers[groups:] /= facts.mean_multiplied_by**2
        numbers /= facts.loss_scale**2
        if not facts.usable:
            numbers *= torch.nan
        return numbers

    def _squares_and_mean(self, local: Mapping[int, Length]) -> tuple[Numbers, Length]:
        """Per group the local squares, then |G|^2 of this worker's share; and the witness.

        All in one go: small tensors cost by the operation.
        """
        shared = self._with_gradient(self._short)
        mine = self._with_gradient(self._mine)
        witnesses = shared or self._shortest_with_gradient()
        measured = {**witnesses, **mine}
        lengths = self._norms.many(list(measured), list(measured.values()))
        pieces = self._pieces_held()
        if pieces:
            lengths = [*lengths, *self._norms.pieces(pieces)]
        squares = self._squared([*local.values(), *lengths])
        groups, of = self._groups, self._group_of
        counted = {**shared, **mine} if self.workers.rank == 0 else mine
        uncounted = 2 * groups
        bins = [
            *(of[i] for i in local),
            *(groups + of[i] if i in counted else uncounted for i in measured),
            *(groups + of[i] for i, *_ in pieces),
        ]
        start = len(local)
        compared = squares[start : start + len(witnesses)]
        witness = sum(compared, 0.0) if isinstance(compared, list) else compared.sum()
        self.not_averaged = isinstance(compared, list) and are_the_same(
            compared, [float(local.get(i, -1.0)) for i in witnesses]
        )
        return self._binned(squares, bins, uncounted + 1)[:uncounted], witness

    def _with_gradient(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Whole gradients, of those of these parameters that have one."""
        grads = ((i, self._params[i].grad) for i in indices if i not in self._shares)
        return {i: g for i, g in grads if g is not None and type(g) is not ShardedGradient}

    def _pieces_held(self) -> list[Piece]:
        """This worker's parts of sharded gradients."""
        pieces: list[Piece] = [
            (i, piece, partial(_run, start, piece.numel()))
            for i, param in enumerate(self._params)
            if isinstance(grad := param.grad, ShardedGradient)
            for piece, start in zip(grad.slices, grad.starts, strict=True)
        ]
        for i, share in self._shares.items():
            grad = self._params[i].grad
            if grad is not None and share.first_replica and share.own.length:
                pieces.append((i, local(grad), share.own.narrow))
        return pieces

    def _shortest_with_gradient(self) -> dict[int, Tensor]:
        if self.workers.size == 1:
            return {}
        have = self._with_gradient(range(len(self._params)))
        shortest = min(have, key=lambda i: self._params[i].numel(), default=None)
        return {} if shortest is None else {shortest: have[shortest]}

    def announce(self, passes: int, scale: float, history: float) -> None:
        """Tell the other workers that steps have so many passes from now on, without waiting.

        Where they do not say the same by the end of the next step, all find out: the
        announcement looks like a step's vector, and is taken for one by whoever sends one.
        """
        if self.workers.own_group:
            row = [0.0] * (2 * self._groups) + [1.0, passes, passes, scale, history, 0.0, 0.0]
            self.announced.append(self.workers.sum_and_gather(self._tensor(row), 2 * self._groups))

    def check_announcements(self, patience: float = math.inf) -> None:
        """Raise where the others did not announce the same. Waits for them, but not longer."""
        deadline = time.monotonic() + patience
        while self.announced:
            if patience < math.inf and not self.announced[0].done_within(
                deadline - time.monotonic()
            ):
                return
            RankClaims.check(RankClaims.table(self.announced.pop(0).read()[2 * self._groups :]))

    def _tensor(self, numbers: Numbers) -> Tensor:
        if isinstance(numbers, Tensor):
            return numbers
        on_host = torch.tensor(numbers, dtype=widest_float(self._device))
        return on_host.to(self._device, non_blocking=True)

    def _single(self, facts: StepFacts) -> StepStats:
        """One worker, one pass: compare with the gradient before, if it is of any use."""
        measured = []
        if facts.scale != 1.0 or self._difference_at_scale_1:
            grads = [None if p.grad is None else local(p.grad) for p in self._params]
            measured = self.difference.measure(grads, facts.loss_scale)
        if not measured or not facts.usable:
            return self._sent([0.0] * (2 * self._groups), facts, 1)
        groups, of = self._groups, self._group_of
        values = [value for _, squares, mean in measured for value in (squares, mean)]
        bins = [place for i, _, _ in measured for place in (of[i], groups + of[i])]
        numbers = self._binned(_stacked(values, self._device), bins, 2 * groups)
        return self._sent(numbers, facts, 2, differenced=True)

    def _sent(
        self,
        numbers: Numbers,
        facts: StepFacts,
        count: int,
        *,
        witness: Length = 0.0,
        differenced: bool = False,
    ) -> StepStats:
        beliefs = (0.0, facts.passes, facts.seen, facts.scale, facts.history, facts.micro_batch)
        row = self._row(numbers, beliefs, witness)
        self._last = self.workers.sum_and_gather(row, 2 * self._groups)
        return StepStats(
            self._last,
            self._groups,
            self.workers.size,
            facts.passes,
            count,
            2.0 * facts.scale if differenced else facts.scale,
            differenced,
            self._norms.unit,
            facts.micro_batch,
        )

    def _row(self, numbers: Numbers, beliefs: Sequence[float], witness: Length) -> Tensor:
        """What this worker sends."""
        if self.workers.size == 1:
            return self._tensor(numbers)
        if isinstance(numbers, list) and isinstance(witness, float):
            return self._tensor([*numbers, *beliefs, witness])
        row = torch.cat([self._tensor(numbers), self._tensor([*beliefs, 0.0])])
        row[-1] = witness
        return row


def _stacked(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Numbers in one tensor of the widest float, wherever and of whatever type each is."""
    dtype = widest_float(device)
    if not values:
        return torch.zeros(0, dtype=dtype, device=device)
    first = values[0]
    if any(v.dtype != first.dtype or v.device != device for v in values):
        values = [v.to(device, dtype) for v in values]
    return torch.stack(list(values)).to(dtype)


def _run(start: int, length: int, whole: Tensor) -> Tensor:
    return flatten(whole)[start : start + length]


def _shares(params: Sequence[Tensor], workers: RankGroup) -> tuple[list[int], list[int]]:
    """Indices of the parameters that every worker measures, and of those that are this one's."""
    if workers.size == 1:
        return [], list(range(len(params)))
    short = [i for i, p in enumerate(params) if p.numel() <= SHORT]
    long = [i for i, p in enumerate(params) if p.numel() > SHORT]
    load = [0] * workers.size
    mine = []
    for i in sorted(long, key=lambda i: -params[i].numel()):
        lightest = load.index(min(load))
        load[lightest] += params[i].numel()
        if lightest == workers.rank:
            mine.append(i)
    return short, sorted(mine)
