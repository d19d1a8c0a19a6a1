"""The vocabulary of a sync round: what a worker contributes, and what all workers learn.

Payload        tensors of one type that a worker contributes, read and written in ranges
Note           a few numbers about the worker itself, sent with every chunk
PayloadChunk   a range of a payload in flight
RoundResult    everyone's notes and the squared lengths; equal on all workers

A worker whose numbers are not all finite is left out of the mean. A norm reads the memory once, and
it is finite only if all numbers are. The reverse does not hold: in float32 the square of 3e19 is
infinite, and 3e19 is not. So where a norm is not finite, the largest absolute value decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch
from torch import Tensor

from manyhands._core.flat import accumulation_dtype, group_by_type, norm
from manyhands._core.sharded import local_shard
from manyhands.blocks._codec import Codec

LARGEST = 1 << 20  # elements in one chunk at most: 4 MiB of float32 stay in the cache

# Values of `Note.status` other than 1.
NOT_FINITE = 0.0  # a NaN or an infinity: leave this worker out, and report it
NOTHING_YET = -1.0  # a worker that has just joined has nothing to contribute


@dataclass(frozen=True)
class Note:
    """What a worker says of itself.

    All fields are floats, because a note travels as float64 in the same message as the values.
    """

    step: float = 0.0  # has to be equal on all workers
    status: float = 1.0  # 1: in the mean; NOT_FINITE or NOTHING_YET: left out of it
    options: float = 0.0  # a checksum; has to be equal on all workers
    state_elements: float = 0.0  # of optimizer state, averaged only if every worker has some
    seconds: float = 0.0  # a step takes on this worker
    lr: float = 0.0
    length: float = 0.0  # steps of the next block; the first worker's number holds for all

    @property
    def included(self) -> bool:
        """Whether this worker's values are in the mean."""
        return self.status > 0

    def numbers(self) -> list[float]:
        return [getattr(self, f.name) for f in fields(self)]


NOTE = len(fields(Note)) + 1  # numbers that travel with a chunk: a note and a squared length


class Payload(Protocol):
    """Tensors of one type on one device, as one flat sequence of `length` elements."""

    length: int
    dtype: torch.dtype
    device: torch.device
    codec: Codec
    residual: Tensor | None  # (length,): what rounding has cut off so far; None without rounding
    first_only: bool  # broadcast the first worker's values instead of averaging

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` with the elements from `start` on."""

    def write(self, start: int, mean: Tensor, result: RoundResult) -> None:
        """Take in the mean of the elements from `start` on. They are not read again.

        `mean` belongs to the caller and is reused: copy what has to stay. `result.notes` is
        complete; the squared lengths are not yet.
        """


@dataclass
class RoundResult:
    """What all workers know after a sync round. Equal on all of them, bit for bit."""

    notes: list[Note] = field(default_factory=list)  # by rank
    squares: list[float] = field(default_factory=list)  # |difference|² by rank, finite ones only
    square_of_mean: float = 0.0

    @property
    def included(self) -> list[int]:
        """The ranks whose values are in the mean."""
        return [rank for rank, note in enumerate(self.notes) if note.included]

    @property
    def first_note(self) -> Note:
        """The note of the first included rank. Its learning rate and block length hold for all."""
        return self.notes[(self.included or [0])[0]]

    @property
    def averages_state(self) -> bool:
        """Whether every worker had optimizer state to average."""
        return min(note.state_elements for note in self.notes) > 0


class Waitable(Protocol):
    """A message or a barrier under way."""

    def wait(self) -> object:
        """Return when it is done."""


class PayloadChunk(Protocol):
    """A range of a payload in flight. The four methods are called in this order."""

    measured: bool  # whether its squared length is part of the drift: differences only
    has_mean: bool  # whether `send_mean` has nothing to send: an all_reduce brought the sum

    def send_values(self, note: Note) -> None:
        """Read the payload and start to send its values and the note."""

    def receive_notes(self) -> list[list[float]]:
        """Wait for all workers' values; return each one's note and squared length."""

    def send_mean(self, result: RoundResult) -> None:
        """Average what this worker owns and start to send the mean. The notes are known."""

    def write_mean(self, result: RoundResult) -> float:
        """Wait for the mean, write it to the payload, and return its squared length."""


def square_of(values: Tensor) -> float:
    # A dot product reads the slice once, and is faster than norm().square().
    return float(torch.dot(values, values))


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers in these tensors are finite."""
    for same in group_by_type([local_shard(tensor).detach() for tensor in tensors]):
        parts = [torch.view_as_real(part) if part.is_complex() else part for part in same]
        # One fused kernel and one wait for the device, instead of one for each tensor.
        lengths = torch._foreach_norm(parts, dtype=accumulation_dtype(parts[0].dtype))
        if torch.stack(lengths).isfinite().all():
            continue
        doubtful = [p for p, size in zip(parts, lengths, strict=True) if not size.isfinite()]
        if not all(map(_has_finite_maximum, doubtful)):
            return False
    return True


def _has_finite_maximum(values: Tensor) -> bool:
    # The maximum norm needs no second tensor of this size, as `isfinite()` would.
    return bool(torch.linalg.vector_norm(values, float("inf")).isfinite())


def is_payload_finite(payload: Payload) -> bool:
    """Return whether all numbers in a payload are finite, read chunk by chunk."""
    memory = torch.empty(min(LARGEST, payload.length), dtype=payload.dtype, device=payload.device)
    for start in range(0, payload.length, LARGEST):
        chunk = memory[: payload.length - start]
        payload.read(start, chunk)
        if not torch.isfinite(norm(chunk)) and not _has_finite_maximum(chunk):
            return False
    return True
