"""A meeting: every worker's numbers go in, their mean over the workers comes out on all of them.

A *row* is what a worker brings: numbers of one type, read and written in ranges, and a codec. Rows
are cut into chunks, a few of which are under way at once: one is read and encoded while others
travel, and no second copy of a row is ever made.

With a chunk goes a *note* of a few numbers: what the worker has to say of itself, and squared
lengths. So agreement, who is finite, and the drift cost no message of their own; and all workers
see the same numbers, in the same order, and come to the same conclusions.

Plain values are summed by an all-reduce (`_allreduce.py`). Encoded values travel in two messages
between each pair of workers (`_pairwise.py`). Either way each worker sends 2 (N-1)/N of the encoded
row. Workers of one host may read each other's memory instead (`_shared_memory.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._allreduce import SummedChunk
from manyhands.blocks.averaging._pairwise import EncodedChunk
from manyhands.blocks.averaging._payload import LARGEST, NOTE, Chunk, Note, Outcome, Row
from manyhands.blocks.averaging._shared_memory import SharedChunk, make_room
from manyhands.errors import RanksDisagree

UNDER_WAY = 2  # chunks in each of the two phases
SMALLEST = 1 << 18


def meet(
    workers: RankGroup, rows: Sequence[Row], beside: Sequence[Row], more: Sequence[Row], note: Note
) -> Outcome:
    """Average `rows`, what is `beside` them, and `more` if every worker has some of that.

    The same rows on every worker. The squared lengths are those of `rows`.
    """
    with torch.no_grad():
        return _Meeting(workers, note).run(rows, beside, more)


class _Meeting:
    def __init__(self, workers: RankGroup, note: Note) -> None:
        self.workers, self.note = workers, note
        self.outcome = Outcome(squares=[0.0] * workers.size)
        self._sent: deque[Chunk] = deque()
        self._shared: deque[Chunk] = deque()

    def run(self, rows: Sequence[Row], beside: Sequence[Row], more: Sequence[Row]) -> Outcome:
        for chunk in _chunks(self.workers, rows):
            self._send(chunk, counts=True)
        for chunk in _chunks(self.workers, beside):
            self._send(chunk, counts=False)
        while not self.outcome.notes and self._sent:
            self._share(self._sent.popleft())
        if self.outcome.notes and self.outcome.more:
            for chunk in _chunks(self.workers, more):
                self._send(chunk, counts=False)
        while self._sent:
            self._share(self._sent.popleft())
        while self._shared:
            self._land(self._shared.popleft())
        return self.outcome

    def _send(self, chunk: Chunk, counts: bool) -> None:
        while len(self._sent) >= UNDER_WAY:
            self._share(self._sent.popleft())
        chunk.counts = counts
        chunk.send(self.note)
        self._sent.append(chunk)

    def _share(self, chunk: Chunk) -> None:
        while len(self._shared) >= UNDER_WAY:
            self._land(self._shared.popleft())
        notes = chunk.receive()
        if not self.outcome.notes:
            self.outcome.notes = [Note(*numbers[: NOTE - 1]) for numbers in notes]
            _check(self.outcome.notes)
        if chunk.counts:
            for rank in self.outcome.counted:
                self.outcome.squares[rank] += notes[rank][NOTE - 1]
        chunk.share(self.outcome)
        if chunk.shared:
            self._land(chunk)
        else:
            self._shared.append(chunk)

    def _land(self, chunk: Chunk) -> None:
        square = chunk.land(self.outcome)
        if chunk.counts:
            self.outcome.square_of_mean += square


def _chunks(workers: RankGroup, rows: Sequence[Row]) -> Iterator[Chunk]:
    """Of all rows in order; at least one, so that the workers hear of each other."""
    spare: list[torch.Tensor] = []  # memory of chunks that have landed, for those that come
    sizes = [max(SMALLEST, min(LARGEST, row.length // 16)) for row in rows]
    if workers.shared_memory is not None:
        make_room(workers, list(zip(rows, sizes, strict=True)))
    for row, size in zip(rows, sizes, strict=True):
        as_it_is = workers.size > 1 and not (row.codec.rounds or row.first_only)
        for start in range(0, max(row.length, 1), size):
            stop = min(start + size, row.length)
            if workers.shared_memory is not None:
                yield SharedChunk(row, start, stop, workers)
            elif as_it_is and workers.has_backend(row.device):
                yield SummedChunk(row, start, stop, workers, spare)
            else:
                yield EncodedChunk(row, start, stop, workers)


def _check(notes: Sequence[Note]) -> None:
    """Raise, on every worker, where workers are not at the same step of the same training."""
    steps = [note.step for note in notes]
    if len(set(steps)) > 1:
        listed = ", ".join(f"rank {rank}: {step:.0f}" for rank, step in enumerate(steps[:8]))
        raise RanksDisagree(
            f"workers met after different numbers of steps ({listed}). Every worker has to call "
            "step() as often as the others: give them equally many batches, or stop together.",
            steps,
        )
    if len({note.options for note in notes}) > 1:
        differ = [r for r, note in enumerate(notes) if note.options != notes[0].options]
        raise RanksDisagree(
            f"ranks {differ[:8]} met rank 0 with other options (the interval, the codec, the outer "
            "step, ...), or with other parameters frozen. Build the same optimizer on every "
            "worker, and change it on all at once.",
            [note.options for note in notes],
        )
    if len({note.more for note in notes if note.more > 0}) > 1:
        raise RanksDisagree(
            "workers have different optimizer states to average: elements "
            + ", ".join(f"rank {rank}: {note.more:.0f}" for rank, note in enumerate(notes[:8]))
            + '. Use the same inner optimizer and model on every worker, or state="keep".',
            [note.more for note in notes],
        )
