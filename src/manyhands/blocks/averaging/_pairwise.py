"""A chunk that is encoded: two messages between each pair of workers.

The chunk is cut into one slice per worker, its owner:

    values    send every other worker its slice of my values, encoded
    mean      send everybody the mean of the slice that I own, encoded

So 2 (N-1)/N of the encoded payload leaves each worker, as in a ring all_reduce. A ring itself adds
up on the way, and would have to decode and encode again at every hop.

A message is

    [ note: NOTE float64 | the slice, encoded | padding to 8 bytes ]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from manyhands._core.ranks import RankGroup
from manyhands.blocks._codec import encode_with_residual
from manyhands.blocks.averaging._payload import (
    NOTE,
    Note,
    Payload,
    RoundResult,
    Waitable,
    square_of,
)

VALUES_TAG, MEAN_TAG = 28_101, 28_102  # far from the tags that users choose
HEAD = 8 * NOTE  # bytes of the note, in float64
ALIGNED = 256  # elements: a multiple of each codec's group, so that no slice cuts a group


class PairwiseChunk:
    """A range of a payload, cut into a slice for each worker.

    With a codec that leaves values as they are, values are read right into their message, and the
    mean of the own slice is computed in the own message.
    """

    measured = False
    has_mean = False

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        self.payload, self.start, self.workers = payload, start, workers
        step = -(-(stop - start) // workers.size)
        step = -(-step // ALIGNED) * ALIGNED
        self.cuts = [min(rank * step, stop - start) for rank in range(workers.size + 1)]
        self._lengths = [b - a for a, b in pairwise(self.cuts)]
        self._sizes = [self._message_bytes(length) for length in self._lengths]
        self._works: list[Waitable] = []
        self._outgoing: list[Tensor] = []  # torch does not keep a tensor alive while it is sent
        self._incoming: list[Tensor] = []
        self._notes: list[list[float]] = []

    def _message_bytes(self, elements: int) -> int:
        size = HEAD + self.payload.codec.size(elements, self.payload.dtype)
        return -(-size // 8) * 8  # view(float64) needs a multiple of 8

    def _residual(self, rank: int) -> Tensor | None:
        """Return the residual of a slice.

        Of another worker's slice it is what rounding our values has cut off; of the slice that we
        own, what rounding the mean has cut off. The two never overlap.
        """
        if self.payload.residual is None:
            return None
        first, last = self.start + self.cuts[rank], self.start + self.cuts[rank + 1]
        return self.payload.residual[first:last]

    def send_values(self, note: Note) -> None:
        """Send every slice to its owner."""
        payload, rank, size = self.payload, self.workers.rank, self.workers.size
        messages, square = [], 0.0
        for owner, length in enumerate(self._lengths):
            message = torch.empty(self._sizes[owner], dtype=torch.uint8, device=payload.device)
            values = self._values_in(message, length)
            payload.read(self.start + self.cuts[owner], values)
            if not note.included:
                values.zero_()  # codecs take finite numbers only, and nobody adds these
            if self.measured:
                square += square_of(values)
            if owner == rank:
                self._own = values  # stays in full precision
            elif payload.codec.rounds:
                residual = self._residual(owner) if note.included else None
                _write_data(encode_with_residual(payload.codec, values, residual)[0], message)
            messages.append(message)
        self._message = messages[rank]
        own_note = [*note.numbers(), square]
        for message in messages:
            _write_note(own_note, message)
        self._notes = [own_note] * size
        messages[rank] = messages[rank][:0]  # nothing to ourselves
        sizes = [self._sizes[rank]] * size
        sizes[rank] = 0
        self._exchange(messages, sizes, VALUES_TAG)

    def receive_notes(self) -> list[list[float]]:
        self._wait()
        for rank, message in enumerate(self._incoming):
            if rank != self.workers.rank:
                self._notes[rank] = _read_note(message)
        return self._notes

    def send_mean(self, result: RoundResult) -> None:
        """Send the mean of the own slice to everybody."""
        self._average(result.included)
        rank, size = self.workers.rank, self.workers.size
        if self.payload.codec.rounds:
            residual = self._residual(rank) if result.included else None
            # We keep the decoded mean too, so that all workers write the same rounded values.
            data, self._own = encode_with_residual(self.payload.codec, self._own, residual)
            _write_data(data, self._message)
        square = square_of(self._own) if self.measured else 0.0
        _write_note([square], self._message)
        self._notes = [[square]] * size
        messages = [self._message] * size
        messages[rank] = self._message[:0]
        sizes = list(self._sizes)
        sizes[rank] = 0
        self._exchange(messages, sizes, MEAN_TAG)

    def write_mean(self, result: RoundResult) -> float:
        self._wait()
        square = 0.0
        for rank, length in enumerate(self._lengths):
            own = rank == self.workers.rank
            square += (self._notes[rank] if own else _read_note(self._incoming[rank]))[0]
            if length:
                mean = self._own if own else self._decode(rank, length)
                self.payload.write(self.start + self.cuts[rank], mean, result)
        return square

    def _average(self, included: Sequence[int]) -> None:
        """Average the own slice in place over the included ranks, in rank order."""
        included = included[:1] if self.payload.first_only else included
        if self.workers.rank not in included:
            self._own.zero_()
        for rank in included:
            if rank != self.workers.rank:
                self._own.add_(self._decode(rank, self._own.numel()))
        if len(included) > 1:
            self._own.div_(len(included))

    def _values_in(self, message: Tensor, elements: int) -> Tensor:
        """Return memory for a slice's values: inside the message if they travel as they are."""
        dtype = self.payload.dtype
        if self.payload.codec.rounds:
            return torch.empty(elements, dtype=dtype, device=self.payload.device)
        return message[HEAD : HEAD + elements * dtype.itemsize].view(dtype)

    def _decode(self, rank: int, elements: int) -> Tensor:
        """Return the values of the message that came from `rank`."""
        codec, dtype = self.payload.codec, self.payload.dtype
        size = codec.size(elements, dtype)
        data = self._incoming[rank][HEAD : HEAD + size].to(self.payload.device)
        return codec.decode(data, elements, dtype)

    def _exchange(self, messages: list[Tensor], sizes: list[int], tag: int) -> None:
        if self.workers.size > 1:
            self._outgoing = [_to_sendable(message, self.workers) for message in messages]
            self._incoming, self._works = self.workers.all_to_all(self._outgoing, sizes, tag)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._outgoing = [], []


def _to_sendable(data: Tensor, workers: RankGroup) -> Tensor:
    """Return the data where the group can send it from: gloo sends from the host only."""
    on_host = workers.size > 1 and not workers.has_backend(data.device)
    return data.cpu() if on_host else data


def _write_data(data: Tensor, message: Tensor) -> None:
    message[HEAD : HEAD + data.numel()] = data


def _write_note(numbers: list[float], message: Tensor) -> None:
    message[: 8 * len(numbers)] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def _read_note(message: Tensor) -> list[float]:
    return message[:HEAD].cpu().view(torch.float64).tolist()
