"""Which rank owns which sharded tensor, and the messages from shards to owners and back.

Tensors are dealt out by size, so that ranks own about equally much. A shard is sent to one rank
only: with N ranks, 1/N of the bytes of an all-gather. Tensors travel together, in buckets, in one
message between each pair of ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands._core.ranks import RankGroup
from manyhands._core.sharded import DTensorShards, is_dtensor, local_shard
from manyhands.sharding.zero._layout import deal_out

BUCKET = 2**24  # elements of tensors that travel together
TAG = 28_103  # of messages between pairs of ranks; far from the tags that users choose
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass
class OwnedTensor:
    """A sharded tensor with its owner, and the rows of it that each rank holds."""

    param: Tensor  # the DTensor
    owner: int
    # By rank: where its rows begin in the flat tensor, and where they end.
    cuts: tuple[tuple[int, int], ...]
    whole: nn.Parameter | None = None  # on the owner
    seen: int | None = None  # the fingerprint of the shard that the owner knows

    def elements(self, rank: int) -> int:
        """Return how many elements a rank holds."""
        start, stop = self.cuts[rank]
        return stop - start


def fingerprints(params: Sequence[Tensor]) -> list[int]:
    """Return a number for each shard, which changes with its bits.

    torch's counts of changes are not enough: it does not count those through `param.data`.
    """
    if not params:
        return []
    return torch.stack([_fingerprint(local_shard(param).detach()) for param in params]).tolist()


def _fingerprint(shard: Tensor) -> Tensor:
    if not shard.numel():
        return torch.zeros((), dtype=torch.int64, device=shard.device)
    bits = shard.reshape(shard.size(0), -1).view(INTEGERS.get(shard.element_size(), torch.int64))
    rows = bits.sum(dim=1, dtype=torch.int64)
    # Weighted, so that rows that change places are another number.
    weights = torch.arange(1, 2 * len(rows), 2, device=rows.device)
    return (rows * weights).sum()


def remember(tensors: Sequence[OwnedTensor]) -> None:
    """Note that the owners know the shards as they are now."""
    for tensor, seen in zip(tensors, fingerprints([t.param for t in tensors]), strict=True):
        tensor.seen = seen


class Owners:
    """The ranks that a model is sharded over, as owners of its tensors."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._load = [0] * ranks.size  # elements that each rank owns

    def deal_out(self, params: Sequence[Tensor]) -> list[OwnedTensor]:
        """Give each tensor an owner."""
        owners = deal_out([(n, param.numel()) for n, param in enumerate(params)], self._load)
        tensors = []
        for number, param in enumerate(params):
            assert is_dtensor(param)
            row = param.numel() // param.size(0) if param.numel() else 0
            ranges = DTensorShards.of(param).ranges
            cuts = tuple((r.start * row, (r.start + r.length) * row) for r in ranges)
            tensors.append(OwnedTensor(param, owners[number], cuts))
        return tensors

    def to_owners(
        self, tensors: Sequence[OwnedTensor], shards: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Send this rank's shards to the owners; return the whole tensors that this rank owns."""
        own = self._ranks.rank
        result: list[Tensor | None] = []
        for bucket in _buckets(tensors):
            members, held = tensors[bucket], [shard.reshape(-1) for shard in shards[bucket]]
            for_owner = [
                [shard for tensor, shard in zip(members, held, strict=True) if tensor.owner == rank]
                for rank in range(self._ranks.size)
            ]
            mine = [tensor for tensor in members if tensor.owner == own]
            sizes = [[tensor.elements(rank) for tensor in mine] for rank in range(self._ranks.size)]
            pieces = self._exchange(for_owner, sizes, held[0])
            wholes = iter([torch.cat(rows) for rows in zip(*pieces, strict=True)])
            for tensor in members:
                owned = tensor.owner == own
                result.append(next(wholes).view(tensor.param.shape) if owned else None)
        return result

    def to_shards(self, tensors: Sequence[OwnedTensor]) -> None:
        """Send the rows of the tensors that this rank owns to the ranks that hold them."""
        own = self._ranks.rank
        for bucket in _buckets(tensors):
            members = tensors[bucket]
            flat = [(p, p.whole.detach().view(-1)) for p in members if p.whole is not None]
            for_rank = [
                [whole[slice(*tensor.cuts[rank])] for tensor, whole in flat]
                for rank in range(self._ranks.size)
            ]
            by_owner = [
                [tensor for tensor in members if tensor.owner == rank]
                for rank in range(self._ranks.size)
            ]
            sizes = [[tensor.elements(own) for tensor in theirs] for theirs in by_owner]
            arrived = self._exchange(for_rank, sizes, local_shard(members[0].param))
            for theirs, rows in zip(by_owner, arrived, strict=True):
                for tensor, values in zip(theirs, rows, strict=True):
                    shard = local_shard(tensor.param)
                    shard.copy_(values.view(shard.shape))
        remember(tensors)

    def _exchange(
        self, outgoing: Sequence[list[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[list[Tensor]]:
        """Send each rank its flat tensors; return those from each rank, of `sizes` elements.

        What this rank has for itself comes back as it is.
        """
        own = self._ranks.rank
        messages, expected = [], []
        for rank, (tensors, numbers) in enumerate(zip(outgoing, sizes, strict=True)):
            message = torch.cat(tensors) if tensors and rank != own else like.new_empty(0)
            messages.append(message.view(torch.uint8))
            expected.append(0 if rank == own else sum(numbers) * like.element_size())
        arrived, works = self._ranks.all_to_all(messages, expected, TAG)
        for work in works:
            work.wait()
        return [
            outgoing[own] if rank == own else list(data.view(like.dtype).split(list(numbers)))
            for rank, (data, numbers) in enumerate(zip(arrived, sizes, strict=True))
        ]


def _buckets(tensors: Sequence[OwnedTensor]) -> list[slice]:
    return bucket_ranges([(tensor.param.dtype, tensor.param.numel()) for tensor in tensors])


def bucket_ranges(tensors: Sequence[tuple[Hashable, int]]) -> list[slice]:
    """Return ranges of consecutive tensors of one kind, of about `BUCKET` elements.

    A tensor is given as its kind and its elements.
    """
    ranges, start, total = [], 0, 0
    for number, (kind, size) in enumerate(tensors):
        if number > start and (kind != tensors[start][0] or total + size > BUCKET):
            ranges.append(slice(start, number))
            start, total = number, 0
        total += size
    return [*ranges, slice(start, len(tensors))] if tensors else []
