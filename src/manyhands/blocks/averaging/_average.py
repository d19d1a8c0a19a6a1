"""A sync round: every worker contributes payloads, and all workers get their mean.

Payloads are cut into chunks, and a few chunks are in flight at once: one is read and encoded while
others travel. So a second copy of a payload is never made.

A *note* travels with each chunk: a few numbers that the worker says of itself, and the chunk's
squared length. Checking that workers agree, leaving out values that are not finite and measuring
the drift therefore need no message of their own. All workers see the same notes in the same order,
and come to the same conclusions.

Three kinds of chunks do the same work:

    AllReduceChunk      values as they are: one all_reduce
    SharedMemoryChunk   values as they are, among workers that read each other's memory
    PairwiseChunk       encoded values: two messages between each pair (_pairwise.py)

With an all_reduce, or in pairs, each of N workers sends 2 (N-1)/N of the encoded payload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._pairwise import PairwiseChunk
from manyhands.blocks.averaging._payload import (
    LARGEST,
    NOTE,
    Note,
    Payload,
    PayloadChunk,
    RoundResult,
    Waitable,
    square_of,
)
from manyhands.errors import RanksDisagree

IN_FLIGHT = 2  # chunks in each of the two phases: values on their way, means on their way
SMALLEST = 1 << 18  # elements; below that the latency of a message costs more than its bytes
PARTS = 3  # 3 × 24 bits of a float32's mantissa hold the 53 of a float64
HEAD = 8 * (NOTE + 1)  # bytes in shared memory: a note, and the squared length of the mean
PLACES = 6  # chunks in shared memory


def run_sync_round(
    workers: RankGroup,
    payloads: Sequence[Payload],
    buffers: Sequence[Payload],
    state: Sequence[Payload],
    note: Note,
) -> RoundResult:
    """Average `payloads` and `buffers`, and `state` if every worker has some.

    Every worker passes the same payloads. The squared lengths in the result are of `payloads`.
    """
    with torch.no_grad():
        return _SyncRound(workers, note).run(payloads, buffers, state)


class _SyncRound:
    """The two queues of chunks in flight, and the result as it becomes known."""

    def __init__(self, workers: RankGroup, note: Note) -> None:
        self.workers, self.note = workers, note
        self.result = RoundResult(squares=[0.0] * workers.size)
        self._sent: deque[PayloadChunk] = deque()  # values are on their way
        self._averaging: deque[PayloadChunk] = deque()  # means are on their way

    def run(
        self, payloads: Sequence[Payload], buffers: Sequence[Payload], state: Sequence[Payload]
    ) -> RoundResult:
        for chunk in _cut_into_chunks(self.workers, payloads):
            self._send(chunk, measured=True)
        for chunk in _cut_into_chunks(self.workers, buffers):
            self._send(chunk, measured=False)
        # Only the notes say whether every worker has optimizer state, so at least one chunk's
        # notes have to be here before `state` is sent.
        while not self.result.notes and self._sent:
            self._start_mean(self._sent.popleft())
        if self.result.notes and self.result.averages_state:
            for chunk in _cut_into_chunks(self.workers, state):
                self._send(chunk, measured=False)
        while self._sent:
            self._start_mean(self._sent.popleft())
        while self._averaging:
            self._finish(self._averaging.popleft())
        return self.result

    def _send(self, chunk: PayloadChunk, measured: bool) -> None:
        while len(self._sent) >= IN_FLIGHT:
            self._start_mean(self._sent.popleft())
        chunk.measured = measured
        chunk.send_values(self.note)
        self._sent.append(chunk)

    def _start_mean(self, chunk: PayloadChunk) -> None:
        while len(self._averaging) >= IN_FLIGHT:
            self._finish(self._averaging.popleft())
        notes = chunk.receive_notes()
        if not self.result.notes:  # the first chunk: its notes are those of all the others
            self.result.notes = [Note(*numbers[: NOTE - 1]) for numbers in notes]
            _check_notes(self.result.notes)
        if chunk.measured:
            for rank in self.result.included:
                self.result.squares[rank] += notes[rank][NOTE - 1]
        chunk.send_mean(self.result)
        if chunk.has_mean:
            self._finish(chunk)
        else:
            self._averaging.append(chunk)

    def _finish(self, chunk: PayloadChunk) -> None:
        square = chunk.write_mean(self.result)
        if chunk.measured:
            self.result.square_of_mean += square


def _cut_into_chunks(workers: RankGroup, payloads: Sequence[Payload]) -> Iterator[PayloadChunk]:
    """Yield the chunks of all payloads in order, on every worker the same.

    An empty payload gives one empty chunk, so that the notes are exchanged all the same.
    """
    spare: list[Tensor] = []  # memory of finished chunks, reused by later ones
    sizes = [max(SMALLEST, min(LARGEST, payload.length // 16)) for payload in payloads]
    if workers.shared_memory is not None:
        make_room(workers, list(zip(payloads, sizes, strict=True)))
    for payload, size in zip(payloads, sizes, strict=True):
        summable = workers.size > 1 and not (payload.codec.rounds or payload.first_only)
        for start in range(0, max(payload.length, 1), size):
            stop = min(start + size, payload.length)
            if workers.shared_memory is not None:
                yield SharedMemoryChunk(payload, start, stop, workers)
            elif summable and workers.has_backend(payload.device):
                yield AllReduceChunk(payload, start, stop, workers, spare)
            else:
                yield PairwiseChunk(payload, start, stop, workers)


def _check_notes(notes: Sequence[Note]) -> None:
    """Raise on every worker unless all are at the same step of the same training."""
    steps = [note.step for note in notes]
    if len(set(steps)) > 1:
        listed = ", ".join(f"rank {rank}: {step:.0f}" for rank, step in enumerate(steps[:8]))
        raise RanksDisagree(
            "workers came to a sync round after different numbers of steps "
            f"({listed}). Every worker has to call step() as often as the others: give them "
            "equally many batches, or stop together.",
            steps,
        )
    if len({note.options for note in notes}) > 1:
        differ = [r for r, note in enumerate(notes) if note.options != notes[0].options]
        raise RanksDisagree(
            f"ranks {differ[:8]} came to a sync round with other options than rank 0 (the "
            "interval, the codec, the outer step, ...), or with other parameters frozen. Build "
            "the same optimizer on every worker, and change it on all of them at once.",
            [note.options for note in notes],
        )
    if len({note.state_elements for note in notes if note.state_elements > 0}) > 1:
        counts = (f"rank {rank}: {n.state_elements:.0f}" for rank, n in enumerate(notes[:8]))
        raise RanksDisagree(
            f"workers have different optimizer states to average: elements {', '.join(counts)}. "
            'Use the same inner optimizer and model on every worker, or state="keep".',
            [note.state_elements for note in notes],
        )


# -- a chunk whose values travel as they are -------------------------------------------------------


class AllReduceChunk:
    """A chunk whose values travel as they are: one all_reduce adds them up on the way.

    Everyone's notes travel behind the values, in the same tensor:

        [ values: length | notes: workers × NOTE × PARTS ]

    A worker fills in its own note and leaves the others' at zero, so the sum is everyone's notes.
    The tensor has the payload's type, and a note holds float64: each number is split into PARTS
    float32 whose sum is exact.
    """

    measured = False
    has_mean = True

    def __init__(
        self, payload: Payload, start: int, stop: int, workers: RankGroup, spare: list[Tensor]
    ) -> None:
        self.payload, self.start, self.length = payload, start, stop - start
        self.workers, self._spare = workers, spare
        self._work: Waitable

    def send_values(self, note: Note) -> None:
        tail = self.workers.size * NOTE * PARTS
        self._sent = self._allocate(self.length + tail)
        self._values, notes = self._sent[: self.length], self._sent[self.length :]
        if note.included:
            self.payload.read(self.start, self._values)
        else:
            self._values.zero_()  # all_reduce adds every rank: a NaN would reach all of them
        square = square_of(self._values) if self.measured else 0.0
        self._notes = notes.zero_().view(self.workers.size, NOTE, PARTS)
        self._notes[self.workers.rank] = _split_exactly([*note.numbers(), square]).to(notes)
        self._work = self.workers.start_all_reduce(self._sent)

    def receive_notes(self) -> list[list[float]]:
        self._work.wait()
        return self._notes.double().sum(dim=2).tolist()

    def send_mean(self, result: RoundResult) -> None:
        """Do nothing: the all_reduce has brought every worker the sum."""

    def write_mean(self, result: RoundResult) -> float:
        if len(result.included) > 1:
            self._values.mul_(1 / len(result.included))
        square = square_of(self._values) if self.measured else 0.0
        if self.length:
            self.payload.write(self.start, self._values, result)
        self._spare.append(self._sent)
        return square

    def _allocate(self, size: int) -> Tensor:
        """Return memory for `size` elements: a finished chunk's if there is one, or new."""
        payload = self.payload
        for index, spare in enumerate(self._spare):
            if (spare.numel(), spare.dtype, spare.device) == (size, payload.dtype, payload.device):
                return self._spare.pop(index)
        return torch.empty(size, dtype=payload.dtype, device=payload.device)


def _split_exactly(numbers: list[float]) -> Tensor:
    """Return each number as PARTS float32 that add up to it: shape (len(numbers), PARTS)."""
    left = torch.tensor(numbers, dtype=torch.float64)
    parts = []
    for _ in range(PARTS):
        parts.append(left.float())
        left = left - parts[-1].double()
    return torch.stack(parts, dim=1)


# -- a chunk in shared memory ----------------------------------------------------------------------


def make_room(workers: RankGroup, payloads: list[tuple[Payload, int]]) -> None:
    """Make places for chunks of these payloads, each with its elements per chunk.

    Collective: call it on every worker with the same payloads.
    """
    assert workers.shared_memory is not None
    largest = max((HEAD + min(n, p.length) * p.dtype.itemsize for p, n in payloads), default=0)
    workers.shared_memory.make_ring(largest, PLACES // 2)


class SharedMemoryChunk:
    """A chunk among workers of one host, which read each other's memory: nothing is sent.

    Each worker reads its values into a *place* that all workers can see, averages the slice that
    it owns there, and copies the other slices from their owners' places. One-element all-reduces
    are the barriers: each one says that the newest chunk has been read, and that the second before
    it has been averaged.

    Places are reused after PLACES = 6 chunks. By then no worker still reads them: a worker reaches
    the barrier of a chunk only after it has written the mean of the fourth before it, and nobody
    reads the second before it until that barrier is passed.
    """

    measured = False
    has_mean = False

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        self.payload, self.start, self.length = payload, start, stop - start
        self.workers = workers
        self._cuts = [self.length * rank // workers.size for rank in range(workers.size + 1)]
        self._barrier: Waitable

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
