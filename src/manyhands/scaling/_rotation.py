"""Which elements of long gradients a step measures, if it is to measure one k-th (`measured=1/k`).

A step has a *turn* from 0 to k - 1, and k steps in a row have all turns. A long tensor is divided
into blocks, and every k-th of them has the same turn, so that each turn has blocks from all over
the tensor. A block of a weight is a few rows, or part of a row. Shorter tensors are measured whole:
to read them costs little, and turns among whole tensors would be an error of the gain, because
tensors differ so much (`docs/notes.md`).

Squared norms of what has its turn are multiplied by k. So the squared norms of k turns, of the same
gradient, have exactly the whole squared norm as their mean. All norms of a step are of one turn:
on every rank, in every pass, and of the mean gradient.

The turn follows from a count of steps that is in the state dict. A rotation begins one turn later
than the one before, lest a run that repeats itself every k steps sees some blocks in the same of
its steps for ever. Two kinds of steps measure everything: the first k, and all of them while the
averages do not look back over two rotations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from manyhands._core.flat import flatten
from manyhands._core.sharded import DTensorShards, is_dtensor
from manyhands.scaling._hooks import GradientSlice, Norms

LONG = 131_072  # elements from which on a tensor is measured in part
# Elements of a block. The longer, the faster memory is read. As no multiple of it is a power of
# two, blocks of one turn are not below each other in a matrix.
BLOCK = 31_607
LEAST_BLOCKS = 13  # of a tensor in one turn
LARGEST = 64  # the largest k

# offset of the first block, number of blocks, and elements of each
Blocks = tuple[int, int, int]


def default_share(examples: object) -> float:
    """Return the share that is measured by default: all where single examples are.

    The gain's error by an eighth is lost in the estimate's own (`docs/notes.md`).
    """
    return 1.0 if examples else 1 / 8


def parse_measured(measured: float) -> int:
    """Return k for `measured` = 1/k, or raise."""
    is_share = isinstance(measured, (int, float)) and 0.0 < measured <= 1.0
    k = round(1.0 / measured) if is_share else 0
    if not (1 <= k <= LARGEST and math.isclose(k * measured, 1.0, rel_tol=1e-6)):
        raise ValueError(
            f"measured must be 1 or a fraction 1/2, 1/3, ... 1/{LARGEST}, got {measured!r}. It is "
            "the share of the gradients that a step measures; 1 measures all."
        )
    return k


def check_share(share: float, examples: object) -> None:
    """Raise if only a share of long gradients is measured, and examples are as well."""
    if examples is not None and share < 1.0:
        raise ValueError(
            "measured= below 1 does not work with examples=, which measures whole layers. Leave "
            "one of them out."
        )


def turn_of(step: int, k: int) -> int:
    """Return whose turn it is in a step.

    >>> [turn_of(step, 3) for step in range(9)]
    [0, 1, 2, 1, 2, 0, 2, 0, 1]
    """
    return (step + step // k) % k


class RotatingNorms:
    """Norms of which those of long tensors are of what has its turn; their squares times k."""

    def __init__(
        self,
        norms: Norms,
        params: Sequence[Tensor],
        unsharded: dict[int, Tensor],
        k: int,
    ) -> None:
        self.k = k
        self._norms = norms
        self._root = math.sqrt(k)
        # whose memory order counts: a gradient may have other strides than its parameter
        self._order = [unsharded.get(i, param) for i, param in enumerate(params)]
        self._turn: int | None = None  # None: everything is measured
        # blocks in each turn, and elements of each, of the parameters that are measured in part
        self._long = {
            i: _divide_into_blocks(param.numel(), k)
            for i, param in enumerate(params)
            if param.numel() >= LONG and _in_one_range(param)
        }

    def begin_step(self, step: int, memory: float) -> None:
        """Choose the turn of a step; the averages look back over about `memory` steps."""
        partly = step >= self.k and memory >= 2 * self.k
        self._turn = turn_of(step, self.k) if partly else None

    def one(self, index: int, grad: Tensor) -> Tensor:
        if self._turn is None or index not in self._long:
            return self._norms.one(index, grad)
        order = self._order[index]
        return self._part(index, 0, flatten(grad, order), partial(flatten, like=order))

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        if self._turn is None:
            return self._norms.many(indices, grads)
        whole = {i: g for i, g in zip(indices, grads, strict=True) if i not in self._long}
        norms = iter(self._norms.many(list(whole), list(whole.values())))
        pairs = zip(indices, grads, strict=True)
        return [next(norms) if i in whole else self.one(i, grad) for i, grad in pairs]

    def slices(self, slices: Sequence[GradientSlice]) -> list[Tensor]:
        if self._turn is None:
            return self._norms.slices(slices)
        return [self._slice(*gradient_slice) for gradient_slice in slices]

    def _slice(
        self, index: int, grad: Tensor, take_slice: Callable[[Tensor], Tensor], start: int
    ) -> Tensor:
        if index in self._long:
            return self._part(index, start, grad.reshape(-1), take_slice)
        (norm,) = self._norms.slices([(index, grad, take_slice, start)])
        return norm

    def _part(
        self, index: int, start: int, flat: Tensor, take_slice: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the norm of those elements of a range of a long tensor that have their turn.

        `flat` is the range, which begins at `start`; `take_slice` takes it out of whole tensors.
        """
        assert self._turn is not None
        number, width = self._long[index]
        total = self._order[index].numel()
        ranges = _blocks_of_turn(
            start, start + flat.numel(), total, number, width, self.k, self._turn
        )
        parts: list[GradientSlice] = []
        for offset, rows, size in ranges:
            take = partial(_take_blocks, offset - start, rows, size, width * self.k)
            parts.append((index, take(flat), partial(_compose, take, take_slice), start + offset))
        norms = self._norms.slices(parts)
        if len(norms) == 1:
            return norms[0] * self._root
        if not norms:
            return torch.zeros((), device=flat.device)
        return torch.linalg.vector_norm(torch.stack(norms)) * self._root


def _compose(
    take_blocks: Callable[[Tensor], Tensor], take_slice: Callable[[Tensor], Tensor], whole: Tensor
) -> Tensor:
    return take_blocks(take_slice(whole).reshape(-1))


def _take_blocks(offset: int, rows: int, width: int, period: int, flat: Tensor) -> Tensor:
    """Return blocks of a flat tensor as a view: one row each. (One range is flat.)"""
    if rows == 1:
        return flat[offset : offset + width]
    return flat.as_strided((rows, width), (period, 1), flat.storage_offset() + offset)


def _divide_into_blocks(numel: int, k: int) -> tuple[int, int]:
    """Return how many blocks of a tensor have the same turn, and the elements of a block."""
    number = max(numel // (k * BLOCK), LEAST_BLOCKS)
    return number, numel // (k * number)


def _blocks_of_turn(
    start: int, stop: int, total: int, number: int, width: int, k: int, turn: int
) -> Iterator[Blocks]:
    """Yield the blocks of a turn in a range of a tensor of `total` elements, as few at a time.

    The elements that are left over when the tensor is divided have the first turn.
    """
    period = k * width
    first = turn * width  # where the turn's first block begins
    # whole blocks are those from `begin` to `end`
    begin = max(0, -(-(start - first) // period))
    end = min(number, (stop - first - width) // period + 1)
    if 0 < begin <= number:  # the block before may end inside
        until = min((begin - 1) * period + first + width, stop)
        if until > start:
            yield start, 1, until - start
    if end > begin:
        yield begin * period + first, end - begin, width
    if begin <= end < number and max(end * period + first, start) < stop:
        after = max(end * period + first, start)
        yield after, 1, stop - after
    rest = max(number * period, start)
    if turn == 0 and rest < min(stop, total):
        yield rest, 1, stop - rest


def _in_one_range(param: Tensor) -> bool:
    """Return whether each rank's shard of a parameter, if it has shards, is one flat range."""
    return not is_dtensor(param) or DTensorShards.of(param).own.dim == 0
