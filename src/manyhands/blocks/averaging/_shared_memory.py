"""A chunk among workers of one host, who read each other's memory: nothing is sent.

Each worker reads its numbers into a place that all can see, averages the slice that it owns there,
and takes the other slices from their owners' places. Collectives of one number say when: one says
that a chunk has been read, and that the second before it has been averaged.

A place is used again for the sixth chunk after (`PLACES`). By then everybody has done with it: who
says that a chunk is read has landed the fourth before it, and nobody reads the second after it
before he has heard that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import NOTE, Note, Outcome, Row, square_of

HEAD = 8 * (NOTE + 1)  # bytes: a note, and the squared length of the mean
PLACES = 6


def make_room(workers: RankGroup, rows: list[tuple[Row, int]]) -> None:
    """Places for chunks of these rows, of so many elements. On every worker, in one order."""
    assert workers.shared_memory is not None
    largest = max((HEAD + min(n, row.length) * row.dtype.itemsize for row, n in rows), default=0)
    workers.shared_memory.make_ring(largest, PLACES // 2)


class SharedChunk:
    """A range of a row."""

    counts = False
    shared = False

    def __init__(self, row: Row, start: int, stop: int, workers: RankGroup) -> None:
        self.row, self.start, self.length, self.workers = row, start, stop - start, workers
        self._cuts = [self.length * rank // workers.size for rank in range(workers.size + 1)]
        self._told: Any = None

    def send(self, note: Note) -> None:
        host = self.workers.shared_memory
        assert host is not None
        size = HEAD + self.length * self.row.dtype.itemsize
        places = host.next_buffers(size)
        self._notes = [place[:HEAD].view(torch.float64) for place in places]
        self._values = [place[HEAD:].view(self.row.dtype) for place in places]
        values = self._values[self.workers.rank]
        if note.counts:
            self.row.read(self.start, values)
        else:
            values.zero_()
        square = square_of(values) if self.counts else 0.0
        mine = torch.tensor([*note.numbers(), square], dtype=torch.float64)
        self._notes[self.workers.rank][:NOTE] = mine
        self._told = host.barrier()

    def receive(self) -> list[list[float]]:
        self._told.wait()
        return [numbers[:NOTE].tolist() for numbers in self._notes]

    def share(self, outcome: Outcome) -> None:
        """Average the slice that we own, where it is."""
        rank, host = self.workers.rank, self.workers.shared_memory
        assert host is not None
        counted = outcome.counted[:1] if self.row.first_only else outcome.counted
        own, *others = [self._slice(r, rank) for r in (rank, *(c for c in counted if c != rank))]
        if rank not in counted:
            own.zero_()
        if len(counted) == 2 and len(others) == 1:
            own.lerp_(others[0], 0.5)  # once through the memory, not twice
        else:
            for other in others:
                own.add_(other)
            if len(counted) > 1:
                own.mul_(1 / len(counted))
        self._notes[rank][NOTE] = square_of(own) if self.counts else 0.0
        self._told = host.deferred_barrier()  # with the chunk that is read next

    def land(self, outcome: Outcome) -> float:
        self._told.wait()
        for owner, first in enumerate(self._cuts[:-1]):
            if first < self._cuts[owner + 1]:
                self.row.write(self.start + first, self._slice(owner, owner), outcome)
        return sum(float(numbers[NOTE]) for numbers in self._notes)

    def _slice(self, worker: int, owner: int) -> Tensor:
        return self._values[worker][self._cuts[owner] : self._cuts[owner + 1]]
