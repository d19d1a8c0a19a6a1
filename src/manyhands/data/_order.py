"""The order of an epoch: a permutation that is computed where it is needed, and stored nowhere.

The N positions of an epoch are laid out as a table of a x b >= N cells, and a position is a row l
and a column r. Eight rounds stir them (a Feistel network; Black and Rogaway, 2002),

    l <- (l + f(r)) mod a        and then        r <- (r + f(l)) mod b

each with a function f of its own, which seed and epoch determine. A round can be undone, so all of
them together are a permutation of the cells. A result that is no position (there are fewer than a
of these cells) is stirred again.

The same seed and epoch give the same order on every rank, on every machine and under every version
of torch, so a saved position always means the same samples. torch.randperm promises none of that.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from manyhands.data._spans import Spans

ROUNDS = 8
MASK = 0xFFFFFFFF  # products of 32 and 31 bits fit an int64


@dataclass(frozen=True)
class Order:
    """The order of one epoch."""

    samples: int
    seed: int
    epoch: int
    shuffle: bool = True

    def indices(self, spans: Spans) -> list[int]:
        """Return the samples at these positions.

        >>> order = Order(samples=6, seed=0, epoch=0)
        >>> sorted(order.indices(((0, 6),)))
        [0, 1, 2, 3, 4, 5]
        """
        if not self.shuffle or self.samples < 2:
            return [index for start, stop in spans for index in range(start, stop)]
        if not spans:
            return []
        ranges = [torch.arange(start, stop) for start, stop in spans]
        cells = self._stir(ranges[0] if len(ranges) == 1 else torch.cat(ranges))
        while (outside := (cells >= self.samples).nonzero().flatten()).numel():
            cells[outside] = self._stir(cells[outside])
        return cells.tolist()

    @cached_property
    def _rows(self) -> int:
        return math.isqrt(self.samples - 1) + 1

    @cached_property
    def _columns(self) -> int:
        return -(-self.samples // self._rows)

    @cached_property
    def _keys(self) -> list[int]:
        # Not Python's hash(), which differs between processes.
        text = f"manyhands order 1: {self.seed} {self.epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=4 * ROUNDS).digest()
        return [int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(ROUNDS)]

    def _stir(self, cells: Tensor) -> Tensor:
        a, b = self._rows, self._columns
        row = torch.div(cells, b, rounding_mode="floor")
        column = cells - row * b
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                row = (row + _mix(column, key)).remainder_(a)
            else:
                column = (column + _mix(row, key)).remainder_(b)
        return row.mul_(b).add_(column)


def _mix(values: Tensor, key: int) -> Tensor:
    """Return 32 bits that look random for each value (a hash of C. Wellons, "lowbias32")."""
    # In place: nearly all the time that an order takes is spent here.
    bits = values ^ key
    bits.bitwise_xor_(bits >> 16).mul_(0x21F0AAAD).bitwise_and_(MASK)
    bits.bitwise_xor_(bits >> 15).mul_(0x735A2D97).bitwise_and_(MASK)
    return bits.bitwise_xor_(bits >> 15)
