"""Carry a range of a payload, a chunk, to the other workers, and the mean back.

Three kinds of chunks do the same work:

    AllReduceChunk      values as they are: one all_reduce
    SharedMemoryChunk   values as they are, among workers that read each other's memory
    PairwiseChunk       encoded values: two messages between each pair of workers

With an all_reduce, or in pairs, each of N workers sends 2 (N-1)/N of the encoded payload. A report
travels with each chunk, but in an all_reduce, where it has a place for every worker, only with the
first and the last (with several optimizers: the last of each one's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from manyhands._ranks.ranks import RankGroup
from manyhands.blocks.averaging._codec import encode_with_residual
from manyhands.blocks.averaging._payload import LARGEST, REPORT, Payload, RoundResult, WorkerReport

SMALLEST = 1 << 18  # elements; below that the latency of a message costs more than its bytes
FEW_BITS = 2  # a value: with fewer, messages are so short that chunks are as large as they may be
ALIGNED = 1 << 16  # elements: a multiple of each codec's group, so that no chunk cuts a group


class Waitable(Protocol):
    """A message or a barrier under way."""

    def wait(self) -> object:
        """Return when it is done."""


class PayloadChunk:
    """A range of a payload in flight. The four methods are called in this order."""

    has_mean = False  # whether the values of all workers are here, and `send_mean` sends nothing

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        self.payload = payload
        self.start = start
        self.length = stop - start
        self.workers = workers

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        """Read the payload and start to send its values and the report.

        `squares` are the squared lengths of the payload's part so far: as sent, and before
        rounding.
        """
        raise NotImplementedError

    def receive_reports(self) -> list[list[float]]:
        """Wait for all workers' values; return the reports and squared lengths, if any came."""
        raise NotImplementedError

    def send_mean(self, result: RoundResult) -> None:
        """Average the own slice and start to send the mean. The reports are known."""
        raise NotImplementedError

    def write_mean(self, result: RoundResult) -> float:
        """Wait for the mean, write it to the payload, and return its squared length."""
        raise NotImplementedError

    def _read(self, report: WorkerReport, first: int, out: Tensor) -> None:
        """Read values from an element of the chunk on; zeros if this worker is left out."""
        if report.included:
            self.payload.read(self.start + first, out)
        else:
            out.zero_()  # NaN would reach all workers in a sum, and codecs take finite numbers only

    def _read_all(self, report: WorkerReport, out: Tensor, squares: list[float]) -> None:
        """Fill `out` with the chunk's values, and add their squared length to both `squares`."""
        self._read(report, 0, out)
        square = self._square(out)
        squares[0] += square
        squares[1] += square

    def _square(self, values: Tensor) -> float:
        """Return the squared length of values if it is part of the drift, otherwise 0."""
        # A dot product reads the slice once, and is faster than norm().square().
        return float(torch.dot(values, values)) if self.payload.measured else 0.0

    def _average(self, own: Tensor, result: RoundResult, read: Callable[[int], Tensor]) -> None:
        """Average a slice in place over the included ranks; `read` returns a rank's values."""
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
    """Return the chunks of all payloads in order, on every worker the same."""
    # An empty payload gives one empty chunk, so that the reports are exchanged all the same.
    spare: list[Tensor] = []  # memory of finished chunks, reused by later ones
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
                # The last chunk of a part has reports: they say the part's squared length.
                if len(summed) > 1 and summed[-1].payload.part == payload.part:
                    summed[-1].reports_in = 0
                summed.append(chunk)
                chunks.append(chunk)
            else:
                chunks.append(PairwiseChunk(payload, start, stop, workers))
    if workers.shared_memory is not None:
        workers.shared_memory.make_ring(largest, PLACES // 2)
    return chunks


def _chunk_length(payload: Payload) -> int:
    """Return the elements of a chunk: large ones for few bits, as short messages cost time."""
    codec = payload.codec
    if codec.rounds and 8 * codec.size(ALIGNED, payload.dtype) < FEW_BITS * ALIGNED:
        return LARGEST
    return elements_per_chunk(payload.length)


def elements_per_chunk(length: int) -> int:
    """Return the elements of a chunk of values that travel as they are."""
    return max(SMALLEST, min(LARGEST, length // 16)) // ALIGNED * ALIGNED


# -- values as they are: an all_reduce -------------------------------------------------------------

PARTS = 3  # 3 × 24 bits of a float32's mantissa hold the 53 of a float64


class AllReduceChunk(PayloadChunk):
    """A chunk whose values travel as they are: one all_reduce adds them up on the way.

    Everyone's reports travel after the values, in the same tensor:

        [ values: length | reports: workers × REPORT × PARTS ]

    Of many chunks only the first and each optimizer's last have them: the former's are needed to go
    on, the latter's have the squared lengths. All workers' in each would take longer than that.

    A worker fills in its own report and leaves the others' at zero, so the sum is everyone's
    reports. The tensor has the payload's type, and a report holds float64: each number is split
    into PARTS float32 whose sum is exact.
    """

    has_mean = True

    def __init__(
        self, payload: Payload, start: int, stop: int, workers: RankGroup, spare: list[Tensor]
    ) -> None:
        super().__init__(payload, start, stop, workers)
        self._spare = spare
        self._work: Waitable
        self.reports_in = workers.size  # places for reports

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        """Start an all_reduce of the values; every worker's report travels behind them."""
        self._sent = self._allocate(self.length + self.reports_in * REPORT * PARTS)
        self._values = self._sent[: self.length]
        reports = self._sent[self.length :]
        self._read_all(report, self._values, squares)
        if report.weight != 1.0:  # others' are not known yet: `write_mean` divides by all
            self._values.mul_(report.weight)
        self._reports = reports.view(self.reports_in, REPORT, PARTS)
        if self.reports_in:
            own = _split_exactly([*report, *squares]).to(reports)
            self._work = self.workers.start_all_reduce(self._sent, self._reports, own)
        else:
            self._work = self.workers.start_all_reduce(self._sent)

    def receive_reports(self) -> list[list[float]]:
        self._work.wait()
        return self._reports.double().sum(dim=2).tolist()

    def send_mean(self, result: RoundResult) -> None:
        """Do nothing: the all_reduce has brought every worker the sum."""

    def write_mean(self, result: RoundResult) -> float:
        """Divide the sum by the weights, write it to the payload; return its square."""
        total = 0.0
        for rank in result.included:
            total += result.reports[rank].weight
        if total not in (0.0, 1.0):  # 0: no worker is included
            self._values.mul_(1 / total)
        square = self._square(self._values)
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


# -- values as they are: shared memory -------------------------------------------------------------

PLACE_HEAD = 8 * (REPORT + 1)  # bytes in shared memory: a report, and the mean's squared length
PLACES = 6  # chunks in shared memory


class SharedMemoryChunk(PayloadChunk):
    """A chunk among workers of one host, which read each other's memory: nothing is sent.

    Each worker reads its values into a *place* that all workers can see, averages the slice that
    it owns there, and copies the other slices from their owners' places. One-element all-reduces
    are the barriers: each one says that the newest chunk has been read, and that the second before
    it has been averaged.

    Places are reused after PLACES = 6 chunks. By then no worker still reads them: a worker reaches
    the barrier of a chunk only after it has written the mean of the fourth before it, and no worker
    reads the second before it until that barrier is passed.
    """

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        super().__init__(payload, start, stop, workers)
        self._cuts = [self.length * rank // workers.size for rank in range(workers.size + 1)]
        self._barrier: Waitable

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        """Write the values and the report where the other workers can read them."""
        host = self.workers.shared_memory
        assert host is not None
        size = PLACE_HEAD + self.length * self.payload.dtype.itemsize
        places = host.next_buffers(size)  # one place per worker; ours is places[rank]
        self._reports = [place[:PLACE_HEAD].view(torch.float64) for place in places]
        self._values = [place[PLACE_HEAD:].view(self.payload.dtype) for place in places]
        values = self._values[self.workers.rank]
        self._read_all(report, values, squares)
        own_report = torch.tensor([*report, *squares], dtype=torch.float64)
        self._reports[self.workers.rank][:REPORT] = own_report
        # The barrier comes last: a worker that passes it may read the report and the values.
        self._barrier = host.barrier()

    def receive_reports(self) -> list[list[float]]:
        self._barrier.wait()
        return [numbers[:REPORT].tolist() for numbers in self._reports]

    def send_mean(self, result: RoundResult) -> None:
        """Average the own slice, in the place where it was read."""
        rank = self.workers.rank
        host = self.workers.shared_memory
        assert host is not None
        own = self._slice(rank, rank)
        self._average(own, result, lambda other: self._slice(other, rank))
        self._reports[rank][REPORT] = self._square(own)
        # No message of its own: the barrier of the chunk that is read next says it.
        self._barrier = host.deferred_barrier()

    def write_mean(self, result: RoundResult) -> float:
        """Copy each owner's mean from its memory into the payload."""
        self._barrier.wait()
        for owner, first in enumerate(self._cuts[:-1]):
            if first < self._cuts[owner + 1]:
                self.payload.write(self.start + first, self._slice(owner, owner), result)
        return sum(float(numbers[REPORT]) for numbers in self._reports)

    def _slice(self, worker: int, owner: int) -> Tensor:
        """Return the slice that `owner` averages, in the place of `worker`."""
        return self._values[worker][self._cuts[owner] : self._cuts[owner + 1]]


# -- encoded values: messages in pairs -------------------------------------------------------------

# far from the tags that users choose
VALUES_TAG = 28_101
MEAN_TAG = 28_102
MESSAGE_HEAD = 8 * REPORT  # bytes of the report, in float64
MEAN_HEAD = 8  # bytes of what a mean has in its place: its squared length
ALIGNED_SLICE = 256  # elements: a multiple of the group of each codec that is sent in pairs


class PairwiseChunk(PayloadChunk):
    """A chunk that is encoded: two messages between each pair of workers.

    The chunk is cut into one slice per worker, its owner:

        values    send every other worker its slice of this worker's values, encoded
        mean      send all others the mean of the slice that this worker owns, encoded

    So 2 (N-1)/N of the encoded payload leaves each worker, as in a ring all_reduce. A ring itself
    adds up on the way, and would have to decode and encode again at every hop.

    With a codec that leaves values as they are, values are read right into their message, and the
    mean of the own slice is computed in the own message. A message is

        [ report: REPORT float64 | encoded values | padding to 8 bytes ]

    and a mean has its squared length, one float64, in place of the report.
    """

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        super().__init__(payload, start, stop, workers)
        step = -(-self.length // workers.size)
        step = -(-step // ALIGNED_SLICE) * ALIGNED_SLICE
        self._cuts = [min(rank * step, self.length) for rank in range(workers.size + 1)]
        self._works: list[Waitable] = []
        self._outgoing: list[Tensor] = []  # torch does not keep a tensor alive while it is sent
        self._incoming: list[Tensor] = []
        self._own: Tensor  # the values of the own slice, and later the mean
        self._own_message: Tensor
        self._own_head: list[float] = []

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        """Send every slice of the values, encoded, to the worker that averages it."""
        payload = self.payload
        rank = self.workers.rank
        messages = []
        for owner, first in enumerate(self._cuts[:-1]):
            message = torch.empty(self._bytes(owner), dtype=torch.uint8, device=payload.device)
            values = self._values_in(message, self._elements(owner))
            self._read(report, first, values)
            squares[1] += self._square(values)
            if owner == rank:
                self._own = values  # stays in full precision
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
        """Send the mean of the own slice to all others."""
        rank = self.workers.rank
        size = self.workers.size
        self._average(self._own, result, lambda other: self._decode(other, rank, MESSAGE_HEAD))
        square = self._square(self._own)
        if self.payload.codec.rounds:
            # We keep the decoded mean too, so that all workers write the same rounded values.
            correct = bool(result.included)
            self._own = self._encode(self._own, rank, self._own_message, correct=correct)
        shorter = MESSAGE_HEAD - MEAN_HEAD
        message = self._own_message[shorter:]
        message[:MEAN_HEAD] = torch.tensor([square], dtype=torch.float64).view(torch.uint8)
        self._own_head = [square]
        sizes = [self._bytes(owner) - shorter for owner in range(size)]
        self._exchange([message] * size, sizes, MEAN_TAG)

    def write_mean(self, result: RoundResult) -> float:
        """Decode the owners' means, write them to the payload; return the mean's square."""
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
        """Return the elements of a slice."""
        return self._cuts[owner + 1] - self._cuts[owner]

    def _bytes(self, owner: int) -> int:
        """Return the size of a message with the values of a slice."""
        size = self.payload.codec.size(self._elements(owner), self.payload.dtype)
        return -(-(MESSAGE_HEAD + size) // 8) * 8  # view(float64) needs a multiple of 8

    def _values_in(self, message: Tensor, elements: int) -> Tensor:
        """Return memory for a slice's values: inside the message if they travel as they are."""
        dtype = self.payload.dtype
        if self.payload.codec.rounds:
            return torch.empty(elements, dtype=dtype, device=self.payload.device)
        return message[MESSAGE_HEAD : MESSAGE_HEAD + elements * dtype.itemsize].view(dtype)

    def _encode(self, values: Tensor, owner: int, message: Tensor, *, correct: bool) -> Tensor:
        """Write values of a slice to a message; return the values that will be decoded from it.

        To `correct` them, add the residual. Of another worker's slice it is what rounding our
        values has cut off; of the own slice, what rounding the mean has cut off. The two never
        overlap.
        """
        residual = None
        if correct and self.payload.residual is not None:
            first = self.start + self._cuts[owner]
            residual = self.payload.residual[first : first + len(values)]
        data, arriving = encode_with_residual(self.payload.codec, values, residual)
        message[MESSAGE_HEAD : MESSAGE_HEAD + len(data)] = data
        return arriving

    def _decode(self, rank: int, owner: int, head: int) -> Tensor:
        """Return the values of a slice in the message that came from `rank`, after its head."""
        codec = self.payload.codec
        elements = self._elements(owner)
        size = codec.size(elements, self.payload.dtype)
        data = self._incoming[rank][head : head + size].to(self.payload.device)
        return codec.decode(data, elements, self.payload.dtype)

    def _head(self, rank: int, size: int) -> list[float]:
        """Return the numbers at the head of a worker's message."""
        if rank == self.workers.rank:
            return self._own_head
        return self._incoming[rank][:size].cpu().view(torch.float64).tolist()

    def _exchange(self, messages: list[Tensor], sizes: list[int], tag: int) -> None:
        """Send each of the others its message, and receive one of `sizes[rank]` bytes from each."""
        if self.workers.size > 1:
            rank = self.workers.rank
            # nothing to ourselves
            messages[rank] = messages[rank][:0]
            sizes[rank] = 0
            if not self.workers.has_backend(self.payload.device):  # gloo sends from the host only
                messages = [message.cpu() for message in messages]
            self._outgoing = messages
            self._incoming, self._works = self.workers.all_to_all(messages, sizes, tag)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        self._outgoing = []
