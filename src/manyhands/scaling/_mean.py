"""The norm of the mean gradient, once a step, and the vector that goes to the other workers.

Every worker has all of the mean gradient (under DDP), so long parameters are shared out and
each worker reads only its part of the memory. Short ones are measured by every worker: they
are the witness that the gradients were averaged at all (`_sample.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands._comm import Workers, precise
from manyhands.scaling._difference import Difference
from manyhands.scaling._norms import Norms
from manyhands.scaling._sample import SLOTS, Sample

SHORT = 4_096


class MeanGradient:
    """Measures the accumulated, averaged gradients of some parameter groups."""

    def __init__(self, workers: Workers, norms: Norms) -> None:
        self.difference = Difference(norms)
        self.workers = workers
        self._norms = norms

    def cover(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Measure these parameters from now on."""
        self._params: list[Tensor] = [p for group in param_groups for p in group["params"]]
        self._groups = len(param_groups)
        self._device = self._params[0].device
        self._short, self._mine = _shares(self._params, self.workers)
        group_of = [i for i, group in enumerate(param_groups) for _ in group["params"]]
        self._group_of = torch.tensor(group_of, device=self._device)
        self._positions: dict[tuple[int, ...], Tensor] = {}

    def squares_per_group(self, lengths: Mapping[int, Tensor]) -> Tensor:
        """Sum of squared lengths by parameter group, in the widest float there is."""
        return self._per_group(lengths, squared=True)

    def _per_group(self, values: Mapping[int, Tensor], squared: bool = False) -> Tensor:
        sums = torch.zeros(self._groups, dtype=precise(self._device), device=self._device)
        if not values:
            return sums
        stacked = torch.stack([x.to(self._device, sums.dtype) for x in values.values()])
        if squared:
            stacked.square_()
        if self._groups == 1:
            return stacked.sum(dim=0, keepdim=True)
        which = tuple(values)
        if which not in self._positions:
            if len(self._positions) > 64:  # a model that uses other parameters every step
                self._positions.clear()
            self._positions[which] = self._group_of[torch.tensor(which, device=self._device)]
        return sums.index_add_(0, self._positions[which], stacked)

    def sample(
        self,
        squares: Tensor | None,
        *,
        passes: int,
        scale: float,
        small_batch_divided_by: int,
        mean_multiplied_by: int,
        loss_scale: Tensor | float,
        usable: bool,
    ) -> Sample:
        """Put the step's numbers together and start their way to the other workers.

        `squares` were taken of gradients that the user had divided by `small_batch_divided_by`;
        `.grad` is `mean_multiplied_by` times the mean.
        """
        count = passes * self.workers.size
        if count == 1:
            return self._differenced(scale, loss_scale, usable)
        self.difference.previous = []
        if squares is None:
            squares = self.squares_per_group({})
        if not usable:
            squares = squares * torch.nan
        mean, witness = self._mean()
        numbers = torch.cat([squares * small_batch_divided_by**2, mean / mean_multiplied_by**2])
        numbers /= loss_scale**2
        if self.workers.size > 1:
            numbers = torch.cat([numbers, self._slots(passes, scale, witness)])
        return self._sent(numbers, passes, count, scale)

    def _mean(self) -> tuple[Tensor, Tensor]:
        """|G|^2 per group of this worker's share, and of the short parameters together."""
        shared = [i for i in self._short if self._params[i].grad is not None]
        mine = [i for i in self._mine if self._params[i].grad is not None]
        grads = [self._params[i].grad for i in (*shared, *mine)]
        lengths = self._norms.many([*shared, *mine], grads)  # type: ignore[arg-type]
        common = self.squares_per_group(dict(zip(shared, lengths[: len(shared)], strict=True)))
        own = self.squares_per_group(dict(zip(mine, lengths[len(shared) :], strict=True)))
        return (own + common if self.workers.rank == 0 else own), common.sum()

    def _slots(self, passes: int, scale: float, witness: Tensor) -> Tensor:
        slots = torch.zeros(self.workers.size, SLOTS, dtype=witness.dtype, device=witness.device)
        mine = slots[self.workers.rank]
        mine[0].fill_(passes)
        mine[1].fill_(scale)
        mine[2].copy_(witness)
        return slots.flatten()

    def _differenced(self, scale: float, loss_scale: Tensor | float, usable: bool) -> Sample:
        grads = [param.grad for param in self._params]
        measured = self.difference.measure(grads, loss_scale)
        if not measured or not usable:
            empty = self.squares_per_group({}).repeat(2)
            return self._sent(empty, 1, 1, scale)
        squares = self._per_group({i: a for i, a, _ in measured})
        mean = self._per_group({i: b for i, _, b in measured})
        return self._sent(torch.cat([squares, mean]), 1, 2, 2.0 * scale, differenced=True)

    def _sent(
        self, numbers: Tensor, passes: int, count: int, scale: float, differenced: bool = False
    ) -> Sample:
        work = self.workers.sum(numbers)
        return Sample(
            numbers, work, self._groups, self.workers.size, passes, count, scale, differenced
        )


def _shares(params: Sequence[Tensor], workers: Workers) -> tuple[list[int], list[int]]:
    """Indices of the parameters that every worker measures, and of those that are this one's."""
    if workers.size == 1:
        return [], list(range(len(params)))
    shortest = min(param.numel() for param in params)
    short = [i for i, p in enumerate(params) if p.numel() <= max(SHORT, shortest)]
    load = [0] * workers.size
    mine = []
    for i in sorted(set(range(len(params))) - set(short), key=lambda i: -params[i].numel()):
        lightest = load.index(min(load))
        load[lightest] += params[i].numel()
        if lightest == workers.rank:
            mine.append(i)
    return short, sorted(mine)
