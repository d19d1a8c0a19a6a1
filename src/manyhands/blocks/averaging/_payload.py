"""What goes into a meeting and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

from manyhands.blocks._codec import Codec

LARGEST = 1 << 20  # elements that are handled at once
NOT_FINITE = 0.0
NOTHING_YET = -1.0  # of a worker that has just come


@dataclass(frozen=True)
class Note:
    """What each worker says of itself. Where workers disagree it is a mistake, or left out."""

    step: float = 0.0
    brings: float = 1.0  # 1: numbers; NOT_FINITE and NOTHING_YET: leave mine out
    options: float = 0.0  # a fingerprint
    more: float = 0.0  # elements of what is averaged if all have it
    seconds: float = 0.0  # of a step
    lr: float = 0.0
    length: float = 0.0  # steps of the block that follows; the first worker's holds

    @property
    def counts(self) -> bool:
        """Whether its numbers are in the mean."""
        return self.brings > 0

    def numbers(self) -> list[float]:
        return [getattr(self, f.name) for f in fields(self)]


NOTE = len(fields(Note)) + 1  # numbers that go with a chunk: a note, and a squared length


class Row(Protocol):
    """What a worker brings."""

    length: int
    dtype: torch.dtype
    device: torch.device
    codec: Codec
    residual: Tensor | None  # what rounding has left, as long as the row
    first_only: bool  # take the first worker's for the mean

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` with the numbers from `start` on."""

    def write(self, start: int, mean: Tensor, outcome: Outcome) -> None:
        """Take in the mean of the numbers from `start` on, which are read no more. It is not ours.

        Of the outcome the notes are there.
        """


@dataclass
class Outcome:
    """What all workers know after a meeting."""

    notes: list[Note] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)  # |numbers of the first rows|², by worker
    square_of_mean: float = 0.0

    @property
    def counted(self) -> list[int]:
        """The ranks whose numbers are in the mean."""
        return [rank for rank, note in enumerate(self.notes) if note.counts]

    @property
    def first(self) -> Note:
        """The note of the first of them: what it says of the learning rate holds for all."""
        return self.notes[(self.counted or [0])[0]]

    @property
    def more(self) -> bool:
        """Whether everybody had some of what is averaged only then."""
        return min(note.more for note in self.notes) > 0


class Chunk(Protocol):
    """A range of a row on its way. Its three waits come in this order."""

    counts: bool  # whether its length is that of what the meeting is about
    shared: bool  # whether everybody has the mean before `share`

    def send(self, note: Note) -> None:
        """Read the numbers, and begin to bring them together."""

    def receive(self) -> list[list[float]]:
        """Wait for everyone's note, and the squared length that goes with it."""

    def share(self, outcome: Outcome) -> None:
        """With the notes known: begin to bring everybody the mean."""

    def land(self, outcome: Outcome) -> float:
        """Wait for the mean and write it; its squared length."""


def square_of(values: Tensor) -> float:
    return float(torch.dot(values, values))  # the fastest way to read a slice
