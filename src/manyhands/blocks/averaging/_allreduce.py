"""A chunk whose values travel as they are: an all-reduce adds them up on the way.

The notes travel behind the values. Each worker has a place there, which is zero on all the
others, so that adding them up brings every worker everyone's. A number of a note is in as many
parts as its type needs to be exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import NOTE, Note, Outcome, Row, square_of

PARTS = 3  # a float64 is the sum of three float32


class SummedChunk:
    """A range of a row, and everyone's note."""

    counts = False
    shared = True

    def __init__(
        self, row: Row, start: int, stop: int, workers: RankGroup, spare: list[Tensor]
    ) -> None:
        self.row, self.start, self.length, self.workers = row, start, stop - start, workers
        self._work: Any = None
        self._spare = spare

    def send(self, note: Note) -> None:
        tail = self.workers.size * NOTE * PARTS
        sent = self._memory(self.length + tail)
        self._sent = sent
        self._values, notes = sent[: self.length], sent[self.length :]
        if note.counts:
            self.row.read(self.start, self._values)
        else:
            self._values.zero_()
        square = square_of(self._values) if self.counts else 0.0
        self._notes = notes.zero_().view(self.workers.size, NOTE, PARTS)
        self._notes[self.workers.rank] = _in_parts([*note.numbers(), square]).to(notes)
        self._work = self.workers.start_all_reduce(sent)

    def receive(self) -> list[list[float]]:
        self._work.wait()
        return self._notes.double().sum(dim=2).tolist()

    def share(self, outcome: Outcome) -> None:
        """Everybody has it already."""

    def land(self, outcome: Outcome) -> float:
        if len(outcome.counted) > 1:
            self._values.mul_(1 / len(outcome.counted))
        square = square_of(self._values) if self.counts else 0.0
        if self.length:
            self.row.write(self.start, self._values, outcome)
        self._spare.append(self._sent)
        return square

    def _memory(self, size: int) -> Tensor:
        """Of a chunk that has landed, or new."""
        row = self.row
        for at, there in enumerate(self._spare):
            if (there.numel(), there.dtype, there.device) == (size, row.dtype, row.device):
                return self._spare.pop(at)
        return torch.empty(size, dtype=row.dtype, device=row.device)


def _in_parts(numbers: list[float]) -> torch.Tensor:
    """Each number as a sum of float32."""
    left = torch.tensor(numbers, dtype=torch.float64)
    parts = []
    for _ in range(PARTS):
        parts.append(left.float())
        left = left - parts[-1].double()
    return torch.stack(parts, dim=1)
