"""A sync round: every worker contributes payloads, and all workers get their mean.

Payloads are cut into chunks, and a few chunks are in flight at once: one is read and encoded while
others travel. So a second copy of a payload is never made.

A *note* travels with each chunk: a few numbers that the worker says of itself, and the chunk's
squared length. Checking that workers agree, leaving out values that are not finite and measuring
the drift therefore need no message of their own. All workers see the same notes in the same order,
and come to the same conclusions.

Three kinds of chunks do the same work:

    AllReduceChunk      values as they are: one all_reduce                 (_allreduce.py)
    PairwiseChunk       encoded values: two messages between each pair     (_pairwise.py)
    SharedMemoryChunk   workers of one host read each other's memory       (_shared_memory.py)

With the first two each of N workers sends 2 (N-1)/N of the encoded payload.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._allreduce import AllReduceChunk
from manyhands.blocks.averaging._pairwise import PairwiseChunk
from manyhands.blocks.averaging._payload import (
    LARGEST,
    NOTE,
    Note,
    Payload,
    PayloadChunk,
    RoundResult,
)
from manyhands.blocks.averaging._shared_memory import SharedMemoryChunk, make_room
from manyhands.errors import RanksDisagree

IN_FLIGHT = 2  # chunks in each of the two phases: values on their way, means on their way
SMALLEST = 1 << 18  # elements; below that the latency of a message costs more than its bytes


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
    spare: list[torch.Tensor] = []  # memory of finished chunks, reused by later ones
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
