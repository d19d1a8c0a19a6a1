"""Measure the norm of the mean gradient, once per step.

Under DDP, each rank measures a share of the long parameters and all short parameters. The squared
norm of the short parameters is equal on all ranks only if gradients were averaged
(`RankReport.shared_square`). Of sharded gradients, each rank measures local slices.

With a single rank and pass, the gradient is compared with that of the previous step
(`_previous_gradient.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands._optimizers.wrappers import ParamGroup, params_of
from manyhands._ranks.ranks import RankGroup, widest_float
from manyhands._ranks.sharded_gradient import ShardedGradient
from manyhands._tensors.flat import DTensorShards, deal_out, flatten, is_dtensor, local_shard
from manyhands.scaling._hooks import GradientSlice, Norm, PlainNorm
from manyhands.scaling._payload import LocalNumbers, Numbers, to_tensor
from manyhands.scaling._previous_gradient import PreviousGradient

UNDIVIDED = 4_096  # largest parameter, in elements, that every rank measures


class StepFacts(NamedTuple):
    passes: int
    scale: float
    loss_scale: Tensor | float
    # Factors of the small batches' squares and of the mean's square, for the loss scale and
    # divisions by the passes; None: no correction.
    corrections: tuple[Tensor | float, Tensor | float] | None
    valid: bool
    small_batches: float | None  # compared on all ranks; None: the passes


class MeanGradient:
    """Measure accumulated and averaged gradients.

    Unless `compare_at_scale_1`, gradients are not compared at scale 1, where every gain is 1.
    """

    def __init__(
        self,
        param_groups: Sequence[ParamGroup],
        ranks: RankGroup,
        norms: PlainNorm,
        previous: PreviousGradient,
        *,
        compare_at_scale_1: bool,
    ) -> None:
        self._ranks = ranks
        self._norms = norms
        self._previous = previous
        self._compare_at_scale_1 = compare_at_scale_1
        self._params = params_of(param_groups)
        self._groups = len(param_groups)
        self._group_of: list[int] = []  # by parameter
        for number, group in enumerate(param_groups):
            self._group_of += [number] * len(group["params"])
        self._device = self._params[0].device
        self._on_cpu = all(param.device.type == "cpu" for param in self._params)
        # Whether the last mean gradient equals a gradient of this rank alone.
        self.not_averaged = False
        self._shares = {i: DTensorShards.of(p) for i, p in enumerate(self._params) if is_dtensor(p)}
        self._common_indices, self._own_indices = _assign_params(self._params, ranks)
        self._group_tensors: dict[tuple[int, ...], Tensor] = {}

    def squares_per_group(self, norms: Mapping[int, Norm]) -> Tensor:
        squares = self._square_all(list(norms.values()))
        groups = [self._group_of[i] for i in norms]
        return to_tensor(self._sum_by_group(squares, groups, self._groups), self._device)

    def _square_all(self, norms: Sequence[Norm]) -> Numbers:
        if self._on_cpu:
            return [norm * norm for norm in map(float, norms)]
        return _stack(norms, self._device).square()

    def _sum_by_group(self, values: Numbers, groups: Sequence[int], number: int) -> Numbers:
        if isinstance(values, list):
            totals = [0.0] * number
            for value, group in zip(values, groups, strict=True):
                totals[group] += value
            return totals
        sums = torch.zeros(number, dtype=widest_float(self._device), device=self._device)
        key = tuple(groups)
        if key not in self._group_tensors:
            if len(self._group_tensors) > 64:  # the model uses different parameters in every step
                self._group_tensors.clear()
            self._group_tensors[key] = torch.tensor(key, dtype=torch.long, device=self._device)
        return sums.index_add_(0, self._group_tensors[key], values)

    # -- one step ----------------------------------------------------------------------------

    def empty_numbers(self) -> LocalNumbers:
        return LocalNumbers([0.0] * (2 * self._groups), 1)

    def measure(
        self, squares: Tensor | None, norms: Mapping[int, Norm], facts: StepFacts
    ) -> LocalNumbers:
        """Measure the mean. `norms` belong to the last pass, `squares` to the earlier passes."""
        small_batches: float = facts.passes * self._ranks.size
        if small_batches == 1:
            return self._compare_with_previous(facts)
        self._previous.grads = {}  # free the copy
        groups = self._groups
        numbers, shared_square = self._local_squares_and_mean(norms)
        if squares is not None:
            numbers = to_tensor(numbers, self._device)
            numbers[:groups] += squares
        if facts.corrections is not None:
            numbers = to_tensor(numbers, self._device)
            numbers[:groups] *= facts.corrections[0]
            numbers[groups:] *= facts.corrections[1]
        if facts.small_batches is not None:
            small_batches = facts.small_batches
        return LocalNumbers(numbers, small_batches, shared_square)

    def _local_squares_and_mean(self, norms: Mapping[int, Norm]) -> tuple[Numbers, Norm]:
        """Return per group the local squares, then the part of |G|^2; and the shared square."""
        # A single call sums all squares, because each operation on a small tensor is costly.
        grads = [param.grad for param in self._params]
        whole = {}  # the gradients without sharding
        for i, grad in enumerate(grads):
            sharded = type(grad) is ShardedGradient or i in self._shares
            if grad is not None and not sharded:
                whole[i] = grad
        common = {i: whole[i] for i in self._common_indices if i in whole}
        own = {i: whole[i] for i in self._own_indices if i in whole}
        compared = common
        if whole and not common and self._ranks.size > 1:  # compare the shortest gradient
            shortest = min(whole, key=lambda i: self._params[i].numel())
            compared = {shortest: whole[shortest]}
        measured = {**compared, **own}
        mean_norms = self._norms.many(list(measured), list(measured.values()))
        slices = self._sharded_slices(grads)
        if slices:
            mean_norms = [*mean_norms, *self._norms.slices(slices)]
        squares = self._square_all([*norms.values(), *mean_norms])
        groups = self._groups
        group_of = self._group_of
        # Rank 0 adds the common gradients to the sum over ranks.
        uncounted = 2 * groups
        sum_into = [group_of[i] for i in norms]
        for i in measured:
            if i in own or (i in common and self._ranks.rank == 0):
                sum_into.append(groups + group_of[i])
            else:
                sum_into.append(uncounted)
        for i, *_ in slices:
            sum_into.append(groups + group_of[i])
        start = len(norms)
        compared_squares = squares[start : start + len(compared)]
        if isinstance(compared_squares, list):
            shared_square: Norm = sum(compared_squares, 0.0)
            # (On a GPU, this comparison would synchronize.)
            self.not_averaged = any(compared_squares) and all(
                math.isclose(mean_square, float(norms.get(i, math.inf)) ** 2, rel_tol=1e-5)
                for i, mean_square in zip(compared, compared_squares, strict=True)
            )
        else:
            shared_square = compared_squares.sum()
            self.not_averaged = False
        return self._sum_by_group(squares, sum_into, uncounted + 1)[:uncounted], shared_square

    def _sharded_slices(self, grads: Sequence[Tensor | None]) -> list[GradientSlice]:
        slices: list[GradientSlice] = []
        for i, grad in enumerate(grads):
            if isinstance(grad, ShardedGradient):
                for piece, start in zip(grad.slices, grad.starts, strict=True):
                    slices.append((i, piece, partial(_flat_slice, start, piece.numel())))
        for i, share in self._shares.items():
            grad = grads[i]
            # Under HSDP, only the first replica counts a slice.
            if grad is not None and share.first_replica and share.own.length:
                slices.append((i, local_shard(grad), share.own.narrow))
        return slices

    def _compare_with_previous(self, facts: StepFacts) -> LocalNumbers:
        if facts.scale == 1.0 and not self._compare_at_scale_1:
            return self.empty_numbers()
        grads = {}
        for i, param in enumerate(self._params):
            if param.grad is not None:
                grads[i] = local_shard(param.grad)
        measured = self._previous.measure(grads, facts.loss_scale)
        if not measured or not facts.valid:
            return self.empty_numbers()
        groups = self._groups
        group_of = self._group_of
        values = []
        sum_into = []
        for i, squares, mean in measured:
            values += [squares, mean]
            sum_into += [group_of[i], groups + group_of[i]]
        numbers = self._sum_by_group(_stack(values, self._device), sum_into, 2 * groups)
        return LocalNumbers(numbers, 2, consecutive=True)


def _stack(norms: Sequence[Norm], device: torch.device) -> Tensor:
    dtype = widest_float(device)
    if not norms:
        return torch.zeros(0, dtype=dtype, device=device)
    values = list(map(torch.as_tensor, norms))
    first = values[0]
    if any(v.dtype != first.dtype or v.device != device for v in values):
        values = [v.to(device, dtype) for v in values]
    return torch.stack(values).to(dtype)


def _flat_slice(start: int, length: int, whole: Tensor) -> Tensor:
    return flatten(whole)[start : start + length]


def _assign_params(params: Sequence[Tensor], ranks: RankGroup) -> tuple[list[int], list[int]]:
    """Return the indices that every rank measures, and this rank's share."""
    if ranks.size == 1:
        return [], list(range(len(params)))
    short = []
    long = []
    for i, param in enumerate(params):
        if param.numel() <= UNDIVIDED:
            short.append(i)
        else:
            long.append(i)
    owners = deal_out([(i, params[i].numel()) for i in long], [0] * ranks.size)
    return short, [i for i in long if owners[i] == ranks.rank]
