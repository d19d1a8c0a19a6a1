"""Which elements of long gradients does a step measure, if it measures a share 1/k of them?

Each step has a *turn* from 0 to k - 1, and k steps in a row have all turns: a *rotation*. A long
tensor is divided into blocks, and every k-th block has the same turn, so that each turn has blocks
from all over the tensor. A block of a weight is a few rows, or part of a row. Shorter tensors are
measured whole. Reading them costs little, and if whole tensors took turns, the gain would be wrong,
because tensors differ so much from each other (`docs/notes.md`).

The squared norms of the blocks that have their turn are multiplied by k. For one and the same
gradient, the mean over all k turns is then exactly the squared norm of the whole. All norms of one
step have the same turn: on every rank, in every pass, and those of the mean gradient.

The turn follows from a count of steps, which is in the state dict. Each rotation begins one turn
later than the one before. Otherwise, in a run that repeats itself every k steps, a block would be
seen in the same one of these steps for ever. Two kinds of steps measure everything: the first k
steps, and all steps while the averages look back over fewer than two rotations.
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
from manyhands.scaling._step_stats import Norm

LONG = 131_072  # a tensor with at least this many elements is measured in part
# Elements of a block. Longer blocks are read faster. No multiple of this number is a power of two,
# so that blocks of one turn are not in the same columns of a matrix.
BLOCK = 31_607
LEAST_BLOCKS = 13  # the fewest blocks of a tensor in one turn
LARGEST = 64  # the largest k

# Evenly spaced blocks: offset of the first one, number of blocks, elements of each.
Blocks = tuple[int, int, int]


def default_share(examples: object) -> float:
    """Return the share that is measured by default: an eighth, or all if examples are measured.

    With an eighth, the error of the gain is small beside the estimate's own (`docs/notes.md`).
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
    """Raise if only a share of long gradients is to be measured, and single examples as well."""
    if examples is not None and share < 1.0:
        raise ValueError(
            "measured= below 1 does not work with examples=, which measures whole layers. Leave "
            "one of them out."
        )


def turn_of(step: int, k: int) -> int:
    """Return the turn of a step.

    >>> [turn_of(step, 3) for step in range(9)]
    [0, 1, 2, 1, 2, 0, 2, 0, 1]
    """
    return (step + step // k) % k


class RotatingNorms:
    """Norms: of long tensors those of the blocks that have their turn, with squares times k."""

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
        # Blocks follow the memory order of these: a gradient may have other strides.
        self._order = [unsharded.get(i, param) for i, param in enumerate(params)]
        self._turn: int | None = None  # None: this step measures everything
        # parameter index -> blocks in each turn, elements of a block; for long parameters only
        self._long = {
            i: _divide_into_blocks(param.numel(), k)
            for i, param in enumerate(params)
            if param.numel() >= LONG and _in_one_range(param)
        }

    @property
    def rotates(self) -> bool:
        """Whether any tensor is long enough to be measured in part."""
        return bool(self._long)

    def begin_step(self, step: int, memory: float) -> None:
        """Choose the turn of a step. `memory` is about how many steps the averages look back."""
        partly = step >= self.k and memory >= 2 * self.k
        self._turn = turn_of(step, self.k) if partly else None

    def is_plain(self, index: int) -> bool:
        return index not in self._long and self._norms.is_plain(index)

    def one(self, index: int, grad: Tensor) -> Norm:
        if self._turn is None or index not in self._long:
            return self._norms.one(index, grad)
        order = self._order[index]
        return self._part(index, 0, flatten(grad, order), partial(flatten, like=order))

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> Sequence[Norm]:
        if self._turn is None:
            return self._norms.many(indices, grads)
        whole = {i: g for i, g in zip(indices, grads, strict=True) if i not in self._long}
        norms = iter(self._norms.many(list(whole), list(whole.values())))
        pairs = zip(indices, grads, strict=True)
        return [next(norms) if i in whole else self.one(i, grad) for i, grad in pairs]

    def slices(self, slices: Sequence[GradientSlice]) -> Sequence[Norm]:
        if self._turn is None:
            return self._norms.slices(slices)
        return [self._slice(*gradient_slice) for gradient_slice in slices]

    def _slice(
        self, index: int, grad: Tensor, take_slice: Callable[[Tensor], Tensor], start: int
    ) -> Norm:
        if index in self._long:
            return self._part(index, start, grad.reshape(-1), take_slice)
        (norm,) = self._norms.slices([(index, grad, take_slice, start)])
        return norm

    def _part(
        self, index: int, start: int, flat: Tensor, take_slice: Callable[[Tensor], Tensor]
    ) -> Norm:
        """Return the norm of the elements that have their turn in a range of a long tensor.

        `flat` has the range's elements, and begins at element `start` of the flat tensor.
        `take_slice` takes the same range out of any tensor of the whole shape.
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
        if flat.device.type == "cpu":
            return math.hypot(*norms) * self._root
        if not norms:
            return torch.zeros((), device=flat.device)
        stacked = torch.stack([torch.as_tensor(norm) for norm in norms])
        return torch.linalg.vector_norm(stacked) * self._root


def _compose(
    take_blocks: Callable[[Tensor], Tensor], take_slice: Callable[[Tensor], Tensor], whole: Tensor
) -> Tensor:
    return take_blocks(take_slice(whole).reshape(-1))


def _take_blocks(offset: int, rows: int, width: int, period: int, flat: Tensor) -> Tensor:
    """Return blocks of a flat tensor as a view: (rows, width), or flat if there is one block."""
    if rows == 1:
        return flat[offset : offset + width]
    return flat.as_strided((rows, width), (period, 1), flat.storage_offset() + offset)


def _divide_into_blocks(numel: int, k: int) -> tuple[int, int]:
    """Return how many blocks of a tensor have the same turn, and how long a block is."""
    number = max(numel // (k * BLOCK), LEAST_BLOCKS)
    return number, numel // (k * number)


def _blocks_of_turn(
    start: int, stop: int, total: int, number: int, width: int, k: int, turn: int
) -> Iterator[Blocks]:
    """Yield the blocks of a turn between `start` and `stop` of a tensor of `total` elements.

    Whole blocks come together, cut ones by themselves. Elements that are left over when the tensor
    is divided have the first turn.
    """
    period = k * width
    first = turn * width  # where the turn's first block begins
    # The blocks with the numbers from `begin` to `end` - 1 are whole.
    begin = max(0, -(-(start - first) // period))
    end = min(number, (stop - first - width) // period + 1)
    if 0 < begin <= number:  # the block before these may end in the range
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
