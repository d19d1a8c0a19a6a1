"""A dataset that is cut in shards, each of which is read from its beginning on.

An epoch takes the shards in an order of its own, and reads some of them side by side, in *lanes*:

    lane 0      shard 7  shard 2  ...        positions 0, K, 2K, ...
    lane 1      shard 0  shard 5  ...        positions 1, K + 1, ...
      :                                        :
    lane K-1    shard 3  shard 6  ...        positions K - 1, ...

Where a lane has ended, the others go on in turns. So a position says which sample of which shard it
is, without a look into any shard, and all that holds for a `Cursor` holds here. Rank r of W has
every W-th sample of a step. If W divides K, and K the batch, it reads the lanes r, r + W, ... only.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from manyhands.data._order import Order
from manyhands.data._spans import Spans

SKIPPED = 64  # samples that are read and dropped, rather than opening a shard again


class DataShards(Dataset[Any]):
    """A dataset for `Cursor` whose samples lie in shards, such as files, and are read in order.

    >>> import manyhands as mh
    >>> def read(path, start):  # a shard's samples, from number `start` on
    ...     return iter([f"{path}: {number}" for number in range(start, 5)])
    >>> data = mh.DataShards(["a.tar", "b.tar"], sizes=[5, 5], open=read)
    >>> cursor = mh.Cursor(data, batch_size=4, shuffle=False, collate_fn=list)
    >>> next(iter(cursor))
    ['a.tar: 0', 'b.tar: 0', 'a.tar: 1', 'b.tar: 1']

    Shuffling changes the order of the shards, and leaves that inside a shard: write the shards
    shuffled. `lanes` of them are read side by side.

    Each process of a loader reads its rank's shards, and drops what the others have. So more than
    one (`num_workers`) helps only if `open` gets to its start without reading what is before it.

    Args:
        shards: what `open` is given: paths, addresses, or numbers.
        sizes: the number of samples in each shard.
        open: a function of a shard and a number, that returns an iterator over the shard's samples
            from this number on.
        lanes: the shards that are read side by side. Choose a multiple of the numbers of ranks that
            the run may have, which divides the batch: then each rank reads shards of its own.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        sizes: Sequence[int],
        open: Callable[[Any, int], Iterator[Any]],
        *,
        lanes: int = 8,
    ) -> None:
        if not shards or len(shards) != len(sizes):
            raise ValueError(
                "DataShards needs at least one shard, and a size for each, got "
                f"{len(shards)} shard(s) and {len(sizes)} size(s)."
            )
        for shard, size in zip(shards, sizes, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(
                    f"the size of shard {shard!r} must be a whole number of samples, got {size!r}."
                )
        if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
            raise ValueError(f"lanes must be a whole number of at least 1, got {lanes!r}.")
        self.shards, self.sizes, self.lanes = list(shards), list(sizes), min(lanes, len(shards))
        self._starts = [0, *accumulate(self.sizes)]  # number of each shard's first sample
        self._open = open
        self._being_read: dict[int, tuple[Iterator[Any], int]] = {}  # and the next sample's number

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def checksum(self) -> int:
        """A number of the sizes and lanes, which positions refer to."""
        return zlib.crc32(repr([self.sizes, self.lanes]).encode())

    def order(self, seed: int, epoch: int, shuffle: bool) -> ShardOrder:
        """Return the order of an epoch."""
        shards = Order(len(self.shards), seed, epoch, shuffle).indices(((0, len(self.shards)),))
        return ShardOrder([shards[lane :: self.lanes] for lane in range(self.lanes)], self.sizes)

    def __getitem__(self, index: int) -> Any:
        shard = bisect_right(self._starts, index) - 1
        number = index - self._starts[shard]
        samples, there = self._being_read.pop(shard, (iter(()), -1))
        if not 0 <= there <= number <= there + SKIPPED:
            samples, there = iter(self._open(self.shards[shard], number)), number
        for there in range(there, number + 1):  # noqa: B020
            try:
                sample = next(samples)
            except StopIteration:
                raise RuntimeError(
                    f"shard {self.shards[shard]!r} should have {self.sizes[shard]} samples, and "
                    f"ended after {there}. Give its true size, and begin the epoch anew, or put "
                    "the shard back as it was."
                ) from None
        if number + 1 < self.sizes[shard]:
            self._being_read[shard] = (samples, number + 1)
        return sample

    def __getstate__(self) -> dict[str, Any]:
        # for a loader's processes: what is being read here stays here
        return {**vars(self), "_being_read": {}}


class ShardOrder:
    """The order of one epoch over lanes of shards."""

    def __init__(self, lanes: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        starts = [0, *accumulate(sizes)]
        self._lanes = [[shard for shard in lane if sizes[shard]] for lane in lanes]
        # number of the first sample behind each shard of a lane, counted in the lane
        self._ends = [list(accumulate(sizes[shard] for shard in lane)) for lane in self._lanes]
        # what to add to a number in the lane
        self._offsets = [
            [starts[shard] + sizes[shard] - end for shard, end in zip(lane, ends, strict=True)]
            for lane, ends in zip(self._lanes, self._ends, strict=True)
        ]
        # From each of these positions on, these lanes take turns, and begin at this number.
        self._positions, self._turns = [0], []
        lengths = [ends[-1] if ends else 0 for ends in self._ends]
        begin = 0
        for end in sorted(set(lengths) - {0}):
            active = [lane for lane, length in enumerate(lengths) if length > begin]
            self._turns.append((begin, active))
            self._positions.append(self._positions[-1] + (end - begin) * len(active))
            begin = end

    def indices(self, spans: Spans) -> list[int]:
        """Return the samples at these positions."""
        return [self._index(position) for start, stop in spans for position in range(start, stop)]

    def _index(self, position: int) -> int:
        turn = bisect_right(self._positions, position) - 1
        begin, active = self._turns[turn]
        number, lane = divmod(position - self._positions[turn], len(active))
        number, lane = begin + number, active[lane]
        return number + self._offsets[lane][bisect_right(self._ends[lane], number)]
