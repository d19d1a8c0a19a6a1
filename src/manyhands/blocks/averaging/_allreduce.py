"""A chunk whose values travel as they are: one all_reduce adds them up on the way.

Everyone's notes travel behind the values, in the same tensor:

    [ values: length | notes: workers × NOTE × PARTS ]

A worker fills in its own note and leaves the others' at zero, so the sum is everyone's notes. The
tensor has the payload's type, and a note holds float64: each number is split into PARTS float32
whose sum is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from manyhands._core.ranks import RankGroup
from manyhands.blocks.averaging._payload import NOTE, Note, Payload, RoundResult, square_of

PARTS = 3  # 3 × 24 bits of a float32's mantissa hold the 53 of a float64


class AllReduceChunk:
    """A range of a payload, and everyone's note."""

    measured = False
    has_mean = True

    def __init__(
        self, payload: Payload, start: int, stop: int, workers: RankGroup, spare: list[Tensor]
    ) -> None:
        self.payload, self.start, self.length = payload, start, stop - start
        self.workers, self._spare = workers, spare
        self._work: Any = None

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
