"""One bucket of gradients: filled while backward runs, sent to its owners, averaged.

    filling    what will be sent, from the bucket's first gradient until it is sent
    pending    what is in flight, until the mean is there
    mean       of our slice

With a codec, slices travel as codes (`_core/encoded_slices.py`). Their residuals stay here from one
pass to the next. They start at zero with a new bucket (whenever the buckets are laid out anew), if
gradients are cleared that no step has used, and when a state is loaded. A rank that has no gradient
of a parameter in a pass sends zeros, and keeps the parameter's residual for its next one: if no
rank has a gradient, what the owner gets is dropped.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from manyhands._core.codec import Codec
from manyhands._core.encoded_slices import EncodedSlices, PendingEncodedReduceScatter
from manyhands._core.ranks import RankGroup
from manyhands._core.shared_memory import SharedMemoryReduceScatter
from manyhands._core.slices import PendingReduceScatter
from manyhands.sharding.zero._flat_params import FlatBucket, Shards
from manyhands.sharding.zero._layout import ParamRange

Pending: TypeAlias = PendingReduceScatter | SharedMemoryReduceScatter | PendingEncodedReduceScatter


class GradientBucket:
    """One bucket of gradients, filled and sent once in each pass."""

    def __init__(
        self,
        index: int,
        shards: Shards,
        flat: FlatBucket,
        params: dict[int, int],
        codec: Codec | None,
    ) -> None:
        self.index, self.shards, self.flat = index, shards, flat
        # Complex numbers travel as they are.
        encodes = codec is not None and flat.data.dtype.is_floating_point
        self.encoded = EncodedSlices(codec) if codec is not None and encodes else None
        self.ranges = [
            (params[id(shards.params[place.param])], place) for place in flat.layout.ranges
        ]
        self.owned = [
            (params[id(shards.params[place.param])], place)
            for place in flat.layout.owned(shards.workers.rank)
        ]
        self.needed = sum(shards.params[place.param].requires_grad for place in flat.layout.ranges)
        self.clear()

    def clear(self) -> None:
        """Forget the pass that was."""
        self.waiting = self.needed  # gradients that have not arrived
        self.filling: Tensor | None = None
        self.copied = False  # whether `filling` is a buffer of ours, and not a view of a gradient
        self.absent: list[tuple[int, int]] = []  # ranges in it of missing gradients
        self.pending: Pending | None = None
        self.mean: Tensor | None = None

    def fill(
        self, place: ParamRange, grad: Tensor | None, dtype: torch.dtype, buffers: SendBuffers
    ) -> None:
        """Copy a range of a flat gradient into the bucket; or zeros, if `grad` is None."""
        layout, data = self.flat.layout, self.flat.data
        self.waiting -= 1
        if grad is not None and place.size == layout.size:
            # The bucket lies inside this gradient: no copy.
            self.filling = grad[place.start : place.stop].to(dtype)
            return
        self.copied = True
        if self.filling is None:
            self.filling = buffers.take(layout.size, dtype, data.device)
            if self.encoded is not None:
                # What lies between gradients shares scales with them.
                self.filling.zero_()
        target = self.filling[place.offset : place.offset + place.size]
        if grad is None:
            target.zero_()
            self.absent.append((place.offset, place.offset + place.size))
        else:
            target.copy_(grad[place.start : place.stop])

    def send(self, workers: RankGroup) -> None:
        """Begin to send each slice to its owner."""
        assert self.filling is not None
        cuts = self.flat.layout.cuts
        if self.encoded is None:
            self.pending = workers.reduce_scatter_slices(self.filling, cuts)
        else:
            self.pending = self.encoded.reduce_scatter(workers, self.filling, cuts, self.absent)
        self.filling = None

    def finish(self, workers: RankGroup, buffers: SendBuffers) -> None:
        """Wait for the other ranks' data, and compute the mean of our slice."""
        assert self.pending is not None
        self.mean = self.pending.mean(workers.size, self.flat.data.dtype)
        if self.copied:  # or else it is a view of a gradient, and not ours to keep
            buffers.give_back(self.pending.sent)
        self.pending = None


class SendBuffers:
    """Memory for buckets to be sent. The last one is kept, because new memory costs page faults."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        kept, self._kept = self._kept, None
        if kept is not None and (kept.numel(), kept.dtype, kept.device) == (size, dtype, device):
            return kept
        return torch.empty(size, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        self._kept = buffer
