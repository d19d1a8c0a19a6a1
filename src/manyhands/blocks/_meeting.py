"""A meeting: every worker's numbers go in, their mean over the workers comes out on all of them.

A *row* is what a worker brings: numbers of one type, read and written in ranges, and a codec. Rows
are cut into chunks, and each chunk into one slice for each worker, its owner. Two messages go
between each two workers for a chunk:

    send      my slice of the chunk for you to average, encoded
    share     the mean of the slice that I own, encoded

so that 2 (N-1)/N of the encoded row leaves each worker, as in a ring, whatever N is. A few chunks
are under way at once: one is read and encoded while others travel, and no second copy of a row
is ever made.

Each message begins with a *note* of a few numbers: what the worker has to say of itself, and
squared lengths. So agreement, who is finite, and the drift cost no message of their own; and
all workers see the same numbers, in the same order, and come to the same conclusions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands._comm import Workers
from manyhands.blocks._codec import Codec, encode_with

SEND, SHARE = 28_101, 28_102  # tags of the two messages
NOTE = 64  # bytes of a note: eight float64
UNDER_WAY = 3  # chunks in each of the two phases
LARGEST = 1 << 20  # elements of a chunk
SMALLEST = 1 << 16
ALIGNED = 256  # elements: no group of a codec, and no type, is cut by a slice


class Row(Protocol):
    """What a worker brings."""

    length: int
    dtype: torch.dtype
    device: torch.device
    codec: Codec
    residual: Tensor | None  # what rounding has left, as long as the row
    first_only: bool  # take the first worker's for the mean

    def read(self, start: int, length: int) -> Tensor:
        """New memory with these numbers."""

    def write(self, start: int, mean: Tensor) -> None:
        """The mean of these numbers; of this chunk nothing is read any more."""


@dataclass(frozen=True)
class Note:
    """What each worker says of itself. Where workers disagree it is a mistake, or left out."""

    step: float = 0.0
    finite: float = 1.0  # 0: leave my numbers out
    options: float = 0.0  # a fingerprint
    more: float = 0.0  # elements of the rows after the first ones
    seconds: float = 0.0  # of a step
    lr: float = 0.0


@dataclass
class Outcome:
    """What all workers know after a meeting."""

    notes: list[Note] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)  # |numbers of the first rows|², by worker
    square_of_mean: float = 0.0

    @property
    def counted(self) -> list[int]:
        """The ranks whose numbers are in the mean."""
        return [rank for rank, note in enumerate(self.notes) if note.finite]

    @property
    def more(self) -> bool:
        """Whether the rows after the first ones were averaged."""
        return min(note.more for note in self.notes) > 0


def meet(workers: Workers, rows: Sequence[Row], more: Sequence[Row], note: Note) -> Outcome:
    """Average `rows`, and then `more` if every worker has some. The same rows on every worker."""
    with torch.no_grad():
        return _Meeting(workers, note).run(rows, more)


class Disagreement(ValueError):
    """Workers came to a meeting that do not belong into one."""


class _Meeting:
    def __init__(self, workers: Workers, note: Note) -> None:
        self.workers, self.note = workers, note
        self.outcome = Outcome()
        self._sent: deque[_Chunk] = deque()
        self._shared: deque[_Chunk] = deque()

    def run(self, rows: Sequence[Row], more: Sequence[Row]) -> Outcome:
        workers, outcome = self.workers, self.outcome
        outcome.squares = [0.0] * workers.size
        for chunk in _chunks(workers, rows):
            self._send(chunk, counts=True)
        while not outcome.notes and self._sent:
            self._share(self._sent.popleft())
        if outcome.notes and outcome.more:
            for chunk in _chunks(workers, more):
                self._send(chunk, counts=False)
        while self._sent:
            self._share(self._sent.popleft())
        while self._shared:
            self._land(self._shared.popleft())
        return outcome

    def _send(self, chunk: _Chunk, counts: bool) -> None:
        """A chunk's slices to their owners."""
        while len(self._sent) >= UNDER_WAY:
            self._share(self._sent.popleft())
        chunk.counts = counts
        values = chunk.row.read(chunk.start, chunk.stop - chunk.start)
        if not self.note.finite:
            values.zero_()  # the codec takes finite numbers only, and nobody adds them
        square = float(torch.linalg.vector_norm(values)) ** 2 if counts else 0.0
        chunk.note = _as_bytes([*_numbers(self.note), square])
        chunk.send(values, self.workers, keep=bool(self.note.finite))
        self._sent.append(chunk)

    def _share(self, chunk: _Chunk) -> None:
        """The mean of the slice that is ours to the others."""
        while len(self._shared) >= UNDER_WAY:
            self._land(self._shared.popleft())
        notes = chunk.receive(self.workers)
        if not self.outcome.notes:
            self.outcome.notes = [Note(*numbers[:-2]) for numbers in notes]
            _check(self.outcome.notes)
        if chunk.counts:
            for rank in self.outcome.counted:
                self.outcome.squares[rank] += notes[rank][len(fields(Note))]
        chunk.share(self.workers, self.outcome.counted)
        self._shared.append(chunk)

    def _land(self, chunk: _Chunk) -> None:
        square = chunk.land(self.workers)
        if chunk.counts:
            self.outcome.square_of_mean += square


class _Chunk:
    """A range of a row on its way."""

    counts = False
    note: Tensor

    def __init__(self, row: Row, start: int, stop: int, workers: Workers) -> None:
        self.row, self.start, self.stop = row, start, stop
        step = -(-(stop - start) // workers.size)
        step = -(-step // ALIGNED) * ALIGNED
        self.cuts = [min(rank * step, stop - start) for rank in range(workers.size + 1)]
        self._works: list[Any] = []
        self._outgoing: list[Tensor] = []  # kept until it has gone
        self._incoming: list[Tensor] = []

    def _lengths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.cuts)]

    def _bytes(self, elements: int) -> int:
        size = NOTE + self.row.codec.size(elements, self.row.dtype)
        return -(-size // 8) * 8  # whole numbers of the widest type

    def _residual(self, rank: int) -> Tensor | None:
        """Of a slice: what rounding has left of ours, or, of the slice that we own, of the mean."""
        if self.row.residual is None:
            return None
        return self.row.residual[self.start + self.cuts[rank] : self.start + self.cuts[rank + 1]]

    def send(self, values: Tensor, workers: Workers, keep: bool) -> None:
        self._own = values[self.cuts[workers.rank] : self.cuts[workers.rank + 1]]
        lengths = self._lengths()
        for rank, part in enumerate(values.split(lengths)):
            if rank == workers.rank:
                self._outgoing.append(_wire(values[:0].view(torch.uint8), workers))
                continue
            data, _ = encode_with(self.row.codec, part, self._residual(rank) if keep else None)
            self._outgoing.append(self._message(data, workers))
        sizes = [self._bytes(lengths[workers.rank])] * workers.size
        sizes[workers.rank] = 0
        self._exchange(workers, sizes, SEND)

    def receive(self, workers: Workers) -> list[list[float]]:
        """Wait for all messages; everyone's note."""
        self._wait()
        return [
            _numbers_in(self.note if rank == workers.rank else self._incoming[rank])
            for rank in range(workers.size)
        ]

    def share(self, workers: Workers, counted: Sequence[int]) -> None:
        mean = self._mean(workers, counted)
        residual = self._residual(workers.rank) if counted else None
        data, self._own = encode_with(self.row.codec, mean, residual)
        self.note = _as_bytes([float(torch.linalg.vector_norm(self._own)) ** 2])
        message = self._message(data, workers)
        empty = message[:0]
        lengths = self._lengths()
        self._outgoing = [
            empty if rank == workers.rank else message for rank in range(len(lengths))
        ]
        sizes = [0 if r == workers.rank else self._bytes(n) for r, n in enumerate(lengths)]
        self._exchange(workers, sizes, SHARE)

    def land(self, workers: Workers) -> float:
        """Wait for the means and write them; the squared length of all of them."""
        self._wait()
        square = 0.0
        for rank, (start, stop) in enumerate(pairwise(self.cuts)):
            if rank == workers.rank:
                part, note = self._own, self.note
            else:
                part, note = self._decoded(rank, stop - start), self._incoming[rank]
            square += _numbers_in(note)[0]
            if start < stop:
                self.row.write(self.start + start, part)
        return square

    def _mean(self, workers: Workers, counted: Sequence[int]) -> Tensor:
        """Of our slice, over those who are finite, in the order of ranks."""
        total = None
        counted = counted[:1] if self.row.first_only else counted
        for rank in counted:
            mine = rank == workers.rank
            values = self._own if mine else self._decoded(rank, self._own.numel())
            total = values if total is None else total.add_(values)
        return torch.zeros_like(self._own) if total is None else total.div_(len(counted))

    def _decoded(self, rank: int, elements: int) -> Tensor:
        size = self.row.codec.size(elements, self.row.dtype)
        data = self._incoming[rank][NOTE : NOTE + size].to(self.row.device)
        return self.row.codec.decode(data, elements, self.row.dtype)

    def _message(self, data: Tensor, workers: Workers) -> Tensor:
        size = NOTE + data.numel()
        message = torch.empty(-(-size // 8) * 8, dtype=torch.uint8, device=data.device)
        message[:NOTE] = self.note
        message[NOTE:size] = data
        return _wire(message, workers)

    def _exchange(self, workers: Workers, sizes: list[int], tag: int) -> None:
        if workers.size > 1:
            self._incoming, self._works = workers.swap(self._outgoing, sizes, tag)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._outgoing = [], []


def _chunks(workers: Workers, rows: Sequence[Row]) -> Iterator[_Chunk]:
    """Of all rows in order; at least one, so that the workers hear of each other."""
    for row in rows:
        size = max(SMALLEST, min(LARGEST, row.length // 16))
        for start in range(0, max(row.length, 1), size):
            yield _Chunk(row, start, min(start + size, row.length), workers)


def _wire(data: Tensor, workers: Workers) -> Tensor:
    """Where the group can send it from: gloo sends from the host."""
    on_host = workers.size > 1 and not workers.has_backend(data.device)
    return data.cpu() if on_host else data


def _numbers(note: Note) -> list[float]:
    return [getattr(note, f.name) for f in fields(note)]


def _as_bytes(numbers: list[float]) -> Tensor:
    padded = numbers + [0.0] * (NOTE // 8 - len(numbers))
    return torch.tensor(padded, dtype=torch.float64).view(torch.uint8)


def _numbers_in(message: Tensor) -> list[float]:
    return message[:NOTE].cpu().view(torch.float64).tolist()


def _check(notes: Sequence[Note]) -> None:
    """Raise, on every worker, where workers are not at the same step of the same training."""
    steps = [note.step for note in notes]
    if len(set(steps)) > 1:
        listed = ", ".join(f"rank {rank}: {step:.0f}" for rank, step in enumerate(steps[:8]))
        raise Disagreement(
            f"workers met after different numbers of steps ({listed}). Every worker has to call "
            "step() as often as the others: give them equally many batches, or stop together."
        )
    if len({note.options for note in notes}) > 1:
        differ = [r for r, note in enumerate(notes) if note.options != notes[0].options]
        raise Disagreement(
            f"ranks {differ[:8]} met rank 0 with other options (the interval, the codec, the outer "
            "step, ...). Build the same optimizer on every worker, and change it on all at once."
        )
    lengths = {note.more for note in notes if note.more > 0}
    if len(lengths) > 1:
        raise Disagreement(
            "workers have different optimizer states or buffers to average: elements "
            + ", ".join(f"rank {rank}: {note.more:.0f}" for rank, note in enumerate(notes[:8]))
            + '. Use the same inner optimizer and model on every worker, or state="keep".'
        )
