"""A chunk that is encoded, in two messages between each two workers.

It is cut into one slice for each worker, its owner:

    send      my slice of the chunk for you to average, encoded
    share     the mean of the slice that I own, encoded

so that 2 (N-1)/N of the encoded row leaves each worker, as in a ring. A ring itself adds up on the
way, and would have to decode and encode at every stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from manyhands._core.ranks import RankGroup
from manyhands.blocks._codec import encode_with
from manyhands.blocks.averaging._payload import NOTE, Note, Outcome, Row, square_of

SEND, SHARE = 28_101, 28_102  # tags of the two messages
HEAD = 8 * NOTE  # bytes, in float64
ALIGNED = 256  # elements: no group of a codec, and no type, is cut by a slice


class EncodedChunk:
    """A range of a row on its way.

    A message is a note and a slice, encoded. With a codec that leaves values as they are, they
    are read into the message, and the mean of the slice that we own is made in ours.
    """

    counts = False
    shared = False

    def __init__(self, row: Row, start: int, stop: int, workers: RankGroup) -> None:
        self.row, self.start, self.workers = row, start, workers
        step = -(-(stop - start) // workers.size)
        step = -(-step // ALIGNED) * ALIGNED
        self.cuts = [min(rank * step, stop - start) for rank in range(workers.size + 1)]
        self._lengths = [b - a for a, b in pairwise(self.cuts)]
        self._sizes = [self._bytes(length) for length in self._lengths]
        self._works: list[Any] = []
        self._outgoing: list[Tensor] = []  # kept until it has gone
        self._incoming: list[Tensor] = []
        self._notes: list[list[float]] = []

    def _bytes(self, elements: int) -> int:
        size = HEAD + self.row.codec.size(elements, self.row.dtype)
        return -(-size // 8) * 8  # whole numbers of the widest type

    def _residual(self, rank: int) -> Tensor | None:
        """Of a slice: what rounding has left of ours, or, of the slice that we own, of the mean."""
        if self.row.residual is None:
            return None
        return self.row.residual[self.start + self.cuts[rank] : self.start + self.cuts[rank + 1]]

    def send(self, note: Note) -> None:
        """Every slice to its owner."""
        row, messages, square = self.row, [], 0.0
        for rank, length in enumerate(self._lengths):
            message = torch.empty(self._sizes[rank], dtype=torch.uint8, device=row.device)
            values = self._values_in(message, length)
            row.read(self.start + self.cuts[rank], values)
            if not note.counts:
                values.zero_()  # codecs take finite numbers only, and nobody adds them
            if self.counts:
                square += square_of(values)
            if rank == self.workers.rank:
                self._own = values
            elif row.codec.rounds:
                residual = self._residual(rank) if note.counts else None
                _put(encode_with(row.codec, values, residual)[0], message)
            messages.append(message)
        self._message = messages[self.workers.rank]
        mine = [*note.numbers(), square]
        for message in messages:
            _put_note(mine, message)
        self._notes = [mine] * self.workers.size
        messages[self.workers.rank] = messages[self.workers.rank][:0]
        sizes = [self._sizes[self.workers.rank]] * self.workers.size
        sizes[self.workers.rank] = 0
        self._exchange(messages, sizes, SEND)

    def receive(self) -> list[list[float]]:
        """Wait for everyone's slice; everyone's note."""
        self._wait()
        for rank, message in enumerate(self._incoming):
            if rank != self.workers.rank:
                self._notes[rank] = _note_in(message)
        return self._notes

    def share(self, outcome: Outcome) -> None:
        """The mean of our slice to everybody."""
        self._average(outcome.counted)
        if self.row.codec.rounds:
            residual = self._residual(self.workers.rank) if outcome.counted else None
            data, self._own = encode_with(self.row.codec, self._own, residual)
            _put(data, self._message)
        square = square_of(self._own) if self.counts else 0.0
        _put_note([square], self._message)
        self._notes = [[square]] * self.workers.size
        messages = [self._message] * self.workers.size
        messages[self.workers.rank] = self._message[:0]
        sizes = list(self._sizes)
        sizes[self.workers.rank] = 0
        self._exchange(messages, sizes, SHARE)

    def land(self, outcome: Outcome) -> float:
        """Wait for the means and write them; the squared length of all of them."""
        self._wait()
        square = 0.0
        for rank, length in enumerate(self._lengths):
            mine = rank == self.workers.rank
            square += (self._notes[rank] if mine else _note_in(self._incoming[rank]))[0]
            if length:
                part = self._own if mine else self._decoded(rank, length)
                self.row.write(self.start + self.cuts[rank], part, outcome)
        return square

    def _average(self, counted: Sequence[int]) -> None:
        """Of our slice, over those who are finite."""
        counted = counted[:1] if self.row.first_only else counted
        if self.workers.rank not in counted:
            self._own.zero_()
        for rank in counted:
            if rank != self.workers.rank:
                self._own.add_(self._decoded(rank, self._own.numel()))
        if len(counted) > 1:
            self._own.div_(len(counted))

    def _values_in(self, message: Tensor, elements: int) -> Tensor:
        """Memory for a slice's values: in its message, if they travel as they are."""
        dtype = self.row.dtype
        if self.row.codec.rounds:
            return torch.empty(elements, dtype=dtype, device=self.row.device)
        return message[HEAD : HEAD + elements * dtype.itemsize].view(dtype)

    def _decoded(self, rank: int, elements: int) -> Tensor:
        size = self.row.codec.size(elements, self.row.dtype)
        data = self._incoming[rank][HEAD : HEAD + size].to(self.row.device)
        return self.row.codec.decode(data, elements, self.row.dtype)

    def _exchange(self, messages: list[Tensor], sizes: list[int], tag: int) -> None:
        if self.workers.size > 1:
            self._outgoing = [_wire(message, self.workers) for message in messages]
            self._incoming, self._works = self.workers.all_to_all(self._outgoing, sizes, tag)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._outgoing = [], []


def _wire(data: Tensor, workers: RankGroup) -> Tensor:
    """Where the group can send it from: gloo sends from the host."""
    on_host = workers.size > 1 and not workers.has_backend(data.device)
    return data.cpu() if on_host else data


def _put(data: Tensor, message: Tensor) -> None:
    message[HEAD : HEAD + data.numel()] = data


def _put_note(numbers: list[float], message: Tensor) -> None:
    message[: 8 * len(numbers)] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def _note_in(message: Tensor) -> list[float]:
    return message[:HEAD].cpu().view(torch.float64).tolist()
