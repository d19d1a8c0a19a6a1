"""Map the positions of an epoch to samples, by a permutation or along data shards.

**`Order`** is a permutation that is computed on demand and not stored. The N positions of an epoch
form a table of a x b >= N cells, and a position is a row l and a column r. Eight rounds of a
Feistel network (Black and Rogaway, 2002) mix them,

    l <- (l + f(r)) mod a        and then        r <- (r + f(l)) mod b

each with a different function f, derived from seed and epoch. Each round is invertible, so the
result is a permutation of the cells. A cell outside the N positions (fewer than a cells) is mixed
again.

A seed and an epoch give the same order on every rank and machine, under every version of torch. So
a saved position always identifies the same samples. torch.randperm does not guarantee
this.

**`DataShards`** is a dataset of shards, such as files, that are read sequentially. An epoch
shuffles the shards and reads several shards side by side, in *lanes*:

    lane 0      shard 7  shard 2  ...        positions 0, K, 2K, ...
    lane 1      shard 0  shard 5  ...        positions 1, K + 1, ...
      :                                        :
    lane K-1    shard 3  shard 6  ...        positions K - 1, ...

After the end of a lane, the remaining lanes continue taking turns. So a position determines a shard
and a sample before any shard is read, and a `Cursor` treats these samples like any others. Rank r
of W has every W-th sample of a step. If W divides K, and K divides the batch, the rank reads only
the lanes r, r + W, ...
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from manyhands._arguments import explained, whole
from manyhands.data._ledger import Spans

ROUNDS = 8
MASK = 0xFFFFFFFF  # products of 32 and 31 bits fit into an int64
Shard = TypeVar("Shard")
Sample = TypeVar("Sample")

SKIPPED = 64  # maximum samples to skip before a shard is reopened


class Order:
    """The order of an epoch."""

    def __init__(self, samples: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.samples = samples
        self.shuffle = shuffle and samples > 1
        self._rows = math.isqrt(max(0, samples - 1)) + 1
        self._columns = -(-samples // self._rows)
        # A key per round. Python's hash() differs between processes.
        text = f"manyhands order 1: {seed} {epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=4 * ROUNDS).digest()
        self._keys = struct.unpack(f"<{ROUNDS}I", digest)

    def indices(self, spans: Spans) -> list[int]:
        """Return the samples at these positions.

        >>> order = Order(samples=6, seed=0, epoch=0)
        >>> sorted(order.indices(((0, 6),)))
        [0, 1, 2, 3, 4, 5]
        """
        if not self.shuffle:
            return positions_in(spans)
        if not spans:
            return []
        cells = self._stir(torch.cat([torch.arange(start, stop) for start, stop in spans]))
        while True:
            outside = (cells >= self.samples).nonzero().flatten()
            if not outside.numel():
                return cells.tolist()
            cells[outside] = self._stir(cells[outside])

    def _stir(self, cells: Tensor) -> Tensor:
        """Return the cells after the rounds in the module's docstring."""
        a = self._rows
        b = self._columns
        row = torch.div(cells, b, rounding_mode="floor")
        column = cells - row * b
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                row = (row + _mix_bits(column, key)).remainder_(a)
            else:
                column = (column + _mix_bits(row, key)).remainder_(b)
        return row.mul_(b).add_(column)


def _mix_bits(values: Tensor, key: int) -> Tensor:
    """Return 32 pseudorandom bits for each value (C. Wellons' hash "lowbias32")."""
    # In place: nearly all of the time for an order is spent here.
    bits = values ^ key
    bits.bitwise_xor_(bits >> 16).mul_(0x21F0AAAD).bitwise_and_(MASK)
    bits.bitwise_xor_(bits >> 15).mul_(0x735A2D97).bitwise_and_(MASK)
    return bits.bitwise_xor_(bits >> 15)


def positions_in(spans: Spans) -> list[int]:
    """Return the positions as a list."""
    positions: list[int] = []
    for start, stop in spans:
        positions += range(start, stop)
    return positions


class DataShards(Dataset[Sample], Generic[Shard, Sample]):
    """A dataset for `Cursor` whose samples are in shards, such as files, and are read in order.

    >>> import manyhands as mh
    >>> def read(path, start):  # a shard's samples, from number `start` on
    ...     return iter([f"{path}: {number}" for number in range(start, 5)])
    >>> data = mh.DataShards(["a.tar", "b.tar"], sizes=[5, 5], open=read)
    >>> cursor = mh.Cursor(data, batch_size=4, shuffle=False, collate_fn=list)
    >>> next(iter(cursor))
    ['a.tar: 0', 'b.tar: 0', 'a.tar: 1', 'b.tar: 1']

    Shuffling permutes the shards, not the samples inside a shard: shuffle the samples when writing
    the shards.

    Each loader process reads all shards of its rank and skips the samples of other processes. So
    `num_workers` above 1 only helps if `open` can start at a sample without reading earlier
    samples.

    Args:
        shards: the arguments of `open`: paths, addresses, or numbers.
        sizes: the number of samples in each shard.
        open: a function of a shard and a number that returns an iterator over the shard's samples,
            starting at this number.
        lanes: the number of shards to read side by side. Choose a divisor of the batch that is a
            multiple of all numbers of ranks in use; then each rank reads separate shards.
    """

    @explained
    def __init__(
        self,
        shards: Sequence[Shard],
        sizes: Sequence[int],
        open: Callable[[Shard, int], Iterator[Sample]],
        *,
        lanes: int = 8,
    ) -> None:
        if not shards or len(shards) != len(sizes):
            raise ValueError(
                "DataShards needs at least one shard and a size for each shard, got "
                f"{len(shards)} shard(s) and {len(sizes)} size(s)."
            )
        sizes = [whole("each size", size) for size in sizes]
        lanes = whole("lanes", lanes, 1)
        self.shards = list(shards)
        self.sizes = list(sizes)
        self.lanes = min(lanes, len(shards))
        self._starts = [0, *accumulate(self.sizes)]  # index of each shard's first sample
        self._open = open
        # Open shards, each with the number of the next sample.
        self._being_read: dict[int, tuple[Iterator[Sample], int]] = _BeingRead()

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def checksum(self) -> int:
        """A checksum of sizes and lanes, on which the meaning of positions depends."""
        return zlib.crc32(repr([self.sizes, self.lanes]).encode())

    def order(self, seed: int, epoch: int, shuffle: bool) -> ShardOrder:
        """Return the order of an epoch."""
        shards = Order(len(self.shards), seed, epoch, shuffle).indices(((0, len(self.shards)),))
        return ShardOrder([shards[lane :: self.lanes] for lane in range(self.lanes)], self.sizes)

    def __getitem__(self, index: int) -> Sample:
        """Return a sample: the next sample of an open shard, or open a shard."""
        shard = bisect_right(self._starts, index) - 1
        number = index - self._starts[shard]
        samples, there = self._being_read.pop(shard, (iter(()), -1))
        if not 0 <= there <= number <= there + SKIPPED:
            samples = iter(self._open(self.shards[shard], number))
            there = number
        for there in range(there, number + 1):  # noqa: B020
            try:
                sample = next(samples)
            except StopIteration:
                raise RuntimeError(
                    f"shard {self.shards[shard]!r} must have {self.sizes[shard]} samples, but "
                    f"ended after {there}. Correct its size and restart the epoch."
                ) from None
        if number + 1 < self.sizes[shard]:
            self._being_read[shard] = (samples, number + 1)
        return sample


class _BeingRead(dict[int, Any]):
    """Open shards. Pickles as empty, so a loader's processes open the shards themselves."""

    def __reduce__(self) -> Any:
        return _BeingRead, ()


class ShardOrder:
    """The order of an epoch over lanes of shards."""

    def __init__(self, lanes: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        starts = [0, *accumulate(sizes)]
        # For each shard of each lane: the number in the lane of the first sample after the shard,
        # and the offset from a number in the lane to a sample's index in the dataset.
        self._ends: list[list[int]] = []
        self._offsets: list[list[int]] = []
        lengths = []
        for lane in lanes:
            length = 0
            ends = []
            offsets = []
            for shard in lane:
                if sizes[shard]:
                    offsets.append(starts[shard] - length)
                    length += sizes[shard]
                    ends.append(length)
            self._ends.append(ends)
            self._offsets.append(offsets)
            lengths.append(length)
        # From position `_positions[i]` on, the lanes of `_turns[i]` take turns, each starting at
        # the number in its lane at which the turn begins.
        self._positions = [0]
        self._turns = []
        begin = 0
        for end in sorted(set(lengths) - {0}):
            active = [lane for lane, length in enumerate(lengths) if length > begin]
            self._turns.append((begin, active))
            self._positions.append(self._positions[-1] + (end - begin) * len(active))
            begin = end

    def indices(self, spans: Spans) -> list[int]:
        """Return the samples at these positions."""
        samples = []
        for position in positions_in(spans):
            turn = bisect_right(self._positions, position) - 1
            begin, active = self._turns[turn]
            number, place = divmod(position - self._positions[turn], len(active))
            number = begin + number
            lane = active[place]
            samples.append(number + self._offsets[lane][bisect_right(self._ends[lane], number)])
        return samples
