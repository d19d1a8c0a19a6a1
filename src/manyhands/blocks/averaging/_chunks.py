"""Chunks: ranges of a payload on the way to the other workers, and means on the way back.

    AllReduceChunk      unencoded values: a single all_reduce
    SharedMemoryChunk   unencoded values, in memory that workers of a host share
    PairwiseChunk       encoded values: two messages between each pair of workers

With all_reduce or pairwise messages, each of N workers sends 2 (N-1)/N of the encoded payload.
Reports travel with the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from manyhands._ranks.ranks import RankGroup
from manyhands._tensors.profiler import Range
from manyhands.blocks.averaging._codec import encode_with_residual
from manyhands.blocks.averaging._payload import (
    MAX_CHUNK,
    REPORT,
    Payload,
    RoundResult,
    WorkerReport,
)

MIN_CHUNK = 1 << 18  # elements; in smaller messages latency dominates
FEW_BITS = 2  # per value; codecs with fewer bits use the largest chunks
CHUNK_MULTIPLE = 1 << 16  # elements; a multiple of each codec's group


class Waitable(Protocol):
    def wait(self) -> object: ...


class PayloadChunk:
    """A range of a payload in flight. The public methods are called in this order."""

    has_mean = False  # whether all values are here, so that `send_mean` sends no message

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        self.payload = payload
        self.start = start
        self.length = stop - start
        self.workers = workers

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        """Read the payload, and start to send values and report.

        `squares` accumulates the squared lengths: as sent, and unrounded.
        """
        raise NotImplementedError

    def receive_reports(self) -> list[list[float]]:
        """Wait for all workers' values; return reports with squared lengths, if any."""
        raise NotImplementedError

    def send_mean(self, result: RoundResult) -> None:
        """Average this worker's slice, and start to send the mean."""
        raise NotImplementedError

    def write_mean(self, result: RoundResult) -> float:
        """Wait for the mean, write it to the payload, and return the squared length."""
        raise NotImplementedError

    def _read(self, report: WorkerReport, first: int, out: Tensor) -> None:
        """Read values from element `first` of the chunk; zeros if this worker is excluded."""
        if report.included:
            self.payload.read(self.start + first, out)
        else:
            out.zero_()  # in a sum, NaN would reach all workers; codecs need finite numbers

    def _read_all(self, report: WorkerReport, out: Tensor, squares: list[float]) -> None:
        self._read(report, 0, out)
        square = self._square(out)
        squares[0] += square
        squares[1] += square

    def _square(self, values: Tensor) -> float:
        # A dot product reads the memory once, and is faster than norm().square().
        return float(torch.dot(values, values)) if self.payload.measured else 0.0

    def _average(self, own: Tensor, result: RoundResult, read: Callable[[int], Tensor]) -> None:
        included = result.included
        if self.payload.first_only:
            included = included[:1]
        weights = dict(zip(included, result.weights(included), strict=True))
        weight = weights.pop(self.workers.rank, 0.0)
        if weight == 1.0 and list(weights.values()) == [1.0]:
            own.lerp_(read(next(iter(weights))), 0.5)  # reads the memory once instead of twice
            return
        if weight != 1.0:
            own.mul_(weight)
        for rank, other in weights.items():
            own.add_(read(rank), alpha=other)
        if len(included) > 1:
            own.mul_(1 / (weight + sum(weights.values())))


def cut_into_chunks(workers: RankGroup, payloads: Sequence[Payload]) -> list[PayloadChunk]:
    # An empty payload becomes an empty chunk, because reports are necessary.
    spare: list[Tensor] = []  # memory of finished chunks
    chunks: list[PayloadChunk] = []
    summed: list[AllReduceChunk] = []
    largest = 0  # bytes of a chunk in shared memory
    for payload in payloads:
        size = _chunk_length(payload)
        largest = max(largest, PLACE_HEAD + min(size, payload.length) * payload.dtype.itemsize)
        summable = workers.size > 1 and not (payload.codec.rounds or payload.first_only)
        for start in range(0, max(payload.length, 1), size):
            stop = min(start + size, payload.length)
            if workers.shared_memory is not None:
                chunks.append(SharedMemoryChunk(payload, start, stop, workers))
            elif summable and workers.has_backend(payload.device):
                chunk = AllReduceChunk(payload, start, stop, workers, spare)
                # The squared length arrives with the last chunk.
                if len(summed) > 1:
                    summed[-1].reports_in = 0
                summed.append(chunk)
                chunks.append(chunk)
            else:
                chunks.append(PairwiseChunk(payload, start, stop, workers))
    if workers.shared_memory is not None:
        workers.shared_memory.make_ring(largest, PLACES // 2)
    return chunks


def _chunk_length(payload: Payload) -> int:
    """Return the elements per chunk. Few bits need large chunks, because of latency."""
    codec = payload.codec
    if codec.rounds and 8 * codec.size(CHUNK_MULTIPLE, payload.dtype) < FEW_BITS * CHUNK_MULTIPLE:
        return MAX_CHUNK
    return elements_per_chunk(payload.length)


def elements_per_chunk(length: int) -> int:
    return max(MIN_CHUNK, min(MAX_CHUNK, length // 16)) // CHUNK_MULTIPLE * CHUNK_MULTIPLE


# -- unencoded values: all_reduce ------------------------------------------------------------------

PARTS = 3  # 3 × 24 bits of a float32's mantissa hold the 53 of a float64


class AllReduceChunk(PayloadChunk):
    """A chunk of unencoded values, added up by an all_reduce.

    All reports follow the values in a single tensor of the payload's type:

        [ values: length | reports: workers × REPORT × PARTS ]

    Each worker fills in one report and leaves zeros elsewhere, so the sum contains all reports.
    Each float64 of a report is split into PARTS float32 numbers with an exact sum. To save time,
    only the first and last chunk have reports.
    """

    has_mean = True

    def __init__(
        self, payload: Payload, start: int, stop: int, workers: RankGroup, spare: list[Tensor]
    ) -> None:
        super().__init__(payload, start, stop, workers)
        self._spare = spare
        self._work: Waitable
        self.reports_in = workers.size  # number of reports in the tensor

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        self._sent = self._allocate(self.length + self.reports_in * REPORT * PARTS)
        self._values = self._sent[: self.length]
        reports = self._sent[self.length :]
        self._read_all(report, self._values, squares)
        if report.weight != 1.0:  # the other weights are unknown until `write_mean`
            self._values.mul_(report.weight)
        self._reports = reports.view(self.reports_in, REPORT, PARTS)
        if self.reports_in:
            own = _split_exactly([*report, *squares]).to(reports)
            self._work = self.workers.start_all_reduce(self._sent, self._reports, own)
        else:
            self._work = self.workers.start_all_reduce(self._sent)

    def receive_reports(self) -> list[list[float]]:
        with Range("manyhands::wait all_reduce"):
            self._work.wait()
        return self._reports.double().sum(dim=2).tolist()

    def send_mean(self, result: RoundResult) -> None:
        """Do nothing: every worker has the sum."""

    def write_mean(self, result: RoundResult) -> float:
        total = 0.0
        for rank in result.included:
            total += result.reports[rank].weight
        if total not in (0.0, 1.0):
            self._values.mul_(1 / total)
        square = self._square(self._values)
        if self.length:
            self.payload.write(self.start, self._values, result)
        self._spare.append(self._sent)
        return square

    def _allocate(self, size: int) -> Tensor:
        payload = self.payload
        for index, spare in enumerate(self._spare):
            if (spare.numel(), spare.dtype, spare.device) == (size, payload.dtype, payload.device):
                return self._spare.pop(index)
        return torch.empty(size, dtype=payload.dtype, device=payload.device)


def _split_exactly(numbers: list[float]) -> Tensor:
    """Split numbers into PARTS float32 with exact sums: shape (len(numbers), PARTS)."""
    left = torch.tensor(numbers, dtype=torch.float64)
    parts = []
    for _ in range(PARTS):
        parts.append(left.float())
        left = left - parts[-1].double()
    return torch.stack(parts, dim=1)


# -- unencoded values: shared memory ---------------------------------------------------------------

PLACE_HEAD = 8 * (REPORT + 1)  # bytes of a report and of the mean's squared length
PLACES = 6  # chunks in shared memory


class SharedMemoryChunk(PayloadChunk):
    """A chunk in memory that the workers of a host share, without messages.

    Each worker reads values into a *place* visible to all workers, averages one slice there, and
    copies the other slices from other workers' places. One-element all-reduces serve as barriers.
    A barrier announces that the newest chunk is read, and the second chunk before it averaged.

    Places are reused after PLACES = 6 chunks. By then no worker reads them: a worker reaches the
    barrier of a chunk only after writing the mean of the fourth chunk before it, and no worker
    reads the second chunk before it until that barrier.
    """

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        super().__init__(payload, start, stop, workers)
        self._cuts = [self.length * rank // workers.size for rank in range(workers.size + 1)]
        self._barrier: Waitable

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        host = self.workers.shared_memory
        assert host is not None
        size = PLACE_HEAD + self.length * self.payload.dtype.itemsize
        places = host.next_buffers(size)  # by rank
        self._reports = [place[:PLACE_HEAD].view(torch.float64) for place in places]
        self._values = [place[PLACE_HEAD:].view(self.payload.dtype) for place in places]
        values = self._values[self.workers.rank]
        self._read_all(report, values, squares)
        own_report = torch.tensor([*report, *squares], dtype=torch.float64)
        self._reports[self.workers.rank][:REPORT] = own_report
        # The barrier comes last, because it allows other workers to read.
        self._barrier = host.barrier()

    def receive_reports(self) -> list[list[float]]:
        with Range("manyhands::wait barrier"):
            self._barrier.wait()
        return [numbers[:REPORT].tolist() for numbers in self._reports]

    def send_mean(self, result: RoundResult) -> None:
        rank = self.workers.rank
        host = self.workers.shared_memory
        assert host is not None
        own = self._slice(rank, rank)
        self._average(own, result, lambda other: self._slice(other, rank))
        self._reports[rank][REPORT] = self._square(own)
        # No separate message: the barrier of the next chunk announces the mean.
        self._barrier = host.deferred_barrier()

    def write_mean(self, result: RoundResult) -> float:
        with Range("manyhands::wait barrier"):
            self._barrier.wait()
        for owner, first in enumerate(self._cuts[:-1]):
            if first < self._cuts[owner + 1]:
                self.payload.write(self.start + first, self._slice(owner, owner), result)
        return sum(float(numbers[REPORT]) for numbers in self._reports)

    def _slice(self, worker: int, owner: int) -> Tensor:
        return self._values[worker][self._cuts[owner] : self._cuts[owner + 1]]


# -- encoded values: pairwise messages -------------------------------------------------------------

# Tags that user code is unlikely to choose.
VALUES_TAG = 28_101
MEAN_TAG = 28_102
MESSAGE_HEAD = 8 * REPORT  # bytes of the report, in float64
MEAN_HEAD = 8  # bytes of the squared length, in float64, before a mean
SLICE_MULTIPLE = 256  # elements; a multiple of the group of each codec


class PairwiseChunk(PayloadChunk):
    """An encoded chunk: two messages between each pair of workers.

    Each worker owns a slice of the chunk:

        values    send each owner this worker's encoded values of the owner's slice
        mean      send all workers the encoded mean of this worker's slice

    A ring all_reduce sends equal amounts, but would have to decode and encode at every hop.

    Without rounding, values and mean are computed directly in the message:

        [ report: REPORT float64 | encoded values | padding to 8 bytes ]

    A mean has the squared length, one float64, instead of the report.
    """

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        super().__init__(payload, start, stop, workers)
        step = -(-self.length // workers.size)
        step = -(-step // SLICE_MULTIPLE) * SLICE_MULTIPLE
        self._cuts = [min(rank * step, self.length) for rank in range(workers.size + 1)]
        self._works: list[Waitable] = []
        self._outgoing: list[Tensor] = []  # torch does not keep tensors alive during a send
        self._incoming: list[Tensor] = []
        self._own: Tensor  # values of this worker's slice, later the mean
        self._own_message: Tensor
        self._own_head: list[float] = []

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        payload = self.payload
        rank = self.workers.rank
        messages = []
        for owner, first in enumerate(self._cuts[:-1]):
            message = torch.empty(self._bytes(owner), dtype=torch.uint8, device=payload.device)
            values = self._values_in(message, self._elements(owner))
            self._read(report, first, values)
            squares[1] += self._square(values)
            if owner == rank:
                self._own = values  # in full precision
            elif payload.codec.rounds:
                values = self._encode(values, owner, message, correct=report.included)
            squares[0] += self._square(values)
            messages.append(message)
        self._own_message = messages[rank]
        self._own_head = [*report, *squares]
        head = torch.tensor(self._own_head, dtype=torch.float64).view(torch.uint8)
        for message in messages:
            message[:MESSAGE_HEAD] = head
        self._exchange(messages, [self._bytes(rank)] * len(messages), VALUES_TAG)

    def receive_reports(self) -> list[list[float]]:
        self._wait()
        return [self._head(rank, MESSAGE_HEAD) for rank in range(self.workers.size)]

    def send_mean(self, result: RoundResult) -> None:
        rank = self.workers.rank
        size = self.workers.size
        self._average(self._own, result, lambda other: self._decode(other, rank, MESSAGE_HEAD))
        square = self._square(self._own)
        if self.payload.codec.rounds:
            # Keep the decoded mean, so that all workers write equal values.
            correct = bool(result.included)
            self._own = self._encode(self._own, rank, self._own_message, correct=correct)
        shorter = MESSAGE_HEAD - MEAN_HEAD
        message = self._own_message[shorter:]
        message[:MEAN_HEAD] = torch.tensor([square], dtype=torch.float64).view(torch.uint8)
        self._own_head = [square]
        sizes = [self._bytes(owner) - shorter for owner in range(size)]
        self._exchange([message] * size, sizes, MEAN_TAG)

    def write_mean(self, result: RoundResult) -> float:
        self._wait()
        square = 0.0
        for owner, first in enumerate(self._cuts[:-1]):
            square += self._head(owner, MEAN_HEAD)[0]
            mean = self._own
            if owner != self.workers.rank:
                mean = self._decode(owner, owner, MEAN_HEAD)
            if len(mean):
                self.payload.write(self.start + first, mean, result)
        return square

    def _elements(self, owner: int) -> int:
        return self._cuts[owner + 1] - self._cuts[owner]

    def _bytes(self, owner: int) -> int:
        size = self.payload.codec.size(self._elements(owner), self.payload.dtype)
        return -(-(MESSAGE_HEAD + size) // 8) * 8  # view(float64) needs a multiple of 8

    def _values_in(self, message: Tensor, elements: int) -> Tensor:
        dtype = self.payload.dtype
        if self.payload.codec.rounds:
            return torch.empty(elements, dtype=dtype, device=self.payload.device)
        return message[MESSAGE_HEAD : MESSAGE_HEAD + elements * dtype.itemsize].view(dtype)

    def _encode(self, values: Tensor, owner: int, message: Tensor, *, correct: bool) -> Tensor:
        """Write encoded values of a slice to a message, and return the values after decoding.

        If `correct`, add the residual: the rounding error of the mean for this worker's slice, and
        of this worker's values for other slices.
        """
        residual = None
        if correct and self.payload.residual is not None:
            first = self.start + self._cuts[owner]
            residual = self.payload.residual[first : first + len(values)]
        with Range("manyhands::encode"):
            data, arriving = encode_with_residual(self.payload.codec, values, residual)
        message[MESSAGE_HEAD : MESSAGE_HEAD + len(data)] = data
        return arriving

    def _decode(self, rank: int, owner: int, head: int) -> Tensor:
        codec = self.payload.codec
        elements = self._elements(owner)
        size = codec.size(elements, self.payload.dtype)
        data = self._incoming[rank][head : head + size].to(self.payload.device)
        with Range("manyhands::decode"):
            return codec.decode(data, elements, self.payload.dtype)

    def _head(self, rank: int, size: int) -> list[float]:
        if rank == self.workers.rank:
            return self._own_head
        return self._incoming[rank][:size].cpu().view(torch.float64).tolist()

    def _exchange(self, messages: list[Tensor], sizes: list[int], tag: int) -> None:
        if self.workers.size > 1:
            rank = self.workers.rank
            # No message to this worker.
            messages[rank] = messages[rank][:0]
            sizes[rank] = 0
            if not self.workers.has_backend(self.payload.device):  # gloo sends from the host only
                messages = [message.cpu() for message in messages]
            self._outgoing = messages
            self._incoming, self._works = self.workers.all_to_all(messages, sizes, tag)

    def _wait(self) -> None:
        with Range("manyhands::wait all_to_all"):
            for work in self._works:
                work.wait()
        self._works = []
        self._outgoing = []
