"""A chunk among workers of one host, which read each other's memory: nothing is sent.

Each worker reads its values into a *place* that all workers can see, averages the slice that it
owns there, and copies the other slices from their owners' places. One-element all-reduces are the
barriers: each one says that the newest chunk has been read, and that the second before it has been
averaged.

Places are reused after PLACES = 6 chunks. By then no worker still reads them: a worker reaches the
barrier of a chunk only after it has written the mean of the fourth before it, and nobody reads the
second before it until that barrier is passed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import NOTE, Note, Payload, RoundResult, square_of

HEAD = 8 * (NOTE + 1)  # bytes: a note, and the squared length of the mean
PLACES = 6


def make_room(workers: RankGroup, payloads: list[tuple[Payload, int]]) -> None:
    """Make places for chunks of these payloads, each with its elements per chunk.

    Collective: call it on every worker with the same payloads.
    """
    assert workers.shared_memory is not None
    largest = max((HEAD + min(n, p.length) * p.dtype.itemsize for p, n in payloads), default=0)
    workers.shared_memory.make_ring(largest, PLACES // 2)


class SharedMemoryChunk:
    """A range of a payload, with one slice for each worker to average."""

    measured = False
    has_mean = False

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        self.payload, self.start, self.length = payload, start, stop - start
        self.workers = workers
        self._cuts = [self.length * rank // workers.size for rank in range(workers.size + 1)]
        self._barrier: Any = None

    def send_values(self, note: Note) -> None:
        host = self.workers.shared_memory
        assert host is not None
        size = HEAD + self.length * self.payload.dtype.itemsize
        places = host.next_buffers(size)  # one place per worker; ours is places[rank]
        self._notes = [place[:HEAD].view(torch.float64) for place in places]
        self._values = [place[HEAD:].view(self.payload.dtype) for place in places]
        values = self._values[self.workers.rank]
        if note.included:
            self.payload.read(self.start, values)
        else:
            values.zero_()
        square = square_of(values) if self.measured else 0.0
        own_note = torch.tensor([*note.numbers(), square], dtype=torch.float64)
        self._notes[self.workers.rank][:NOTE] = own_note
        # The barrier comes last: whoever passes it may read the note and the values.
        self._barrier = host.barrier()

    def receive_notes(self) -> list[list[float]]:
        self._barrier.wait()
        return [numbers[:NOTE].tolist() for numbers in self._notes]

    def send_mean(self, result: RoundResult) -> None:
        """Average the own slice, in the place where it was read."""
        rank, host = self.workers.rank, self.workers.shared_memory
        assert host is not None
        included = result.included[:1] if self.payload.first_only else result.included
        others = [self._slice(other, rank) for other in included if other != rank]
        own = self._slice(rank, rank)
        if rank not in included:
            own.zero_()
        if len(included) == 2 and len(others) == 1:
            own.lerp_(others[0], 0.5)  # reads the memory once instead of twice
        else:
            for other in others:
                own.add_(other)
            if len(included) > 1:
                own.mul_(1 / len(included))
        self._notes[rank][NOTE] = square_of(own) if self.measured else 0.0
        # No message of its own: the barrier of the chunk that is read next says it.
        self._barrier = host.deferred_barrier()

    def write_mean(self, result: RoundResult) -> float:
        self._barrier.wait()
        for owner, first in enumerate(self._cuts[:-1]):
            if first < self._cuts[owner + 1]:
                self.payload.write(self.start + first, self._slice(owner, owner), result)
        return sum(float(numbers[NOTE]) for numbers in self._notes)

    def _slice(self, worker: int, owner: int) -> Tensor:
        """Return the slice that `owner` averages, in the place of `worker`."""
        return self._values[worker][self._cuts[owner] : self._cuts[owner + 1]]
