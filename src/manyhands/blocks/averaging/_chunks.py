"""A chunk: a range of a payload on its way to the other workers, and the mean on its way back.

Three kinds of chunks do the same work:

    AllReduceChunk      values as they are: one all_reduce
    SharedMemoryChunk   values as they are, among workers that read each other's memory
    PairwiseChunk       encoded values: two messages between each pair of workers

With an all_reduce, or in pairs, each of N workers sends 2 (N-1)/N of the encoded payload. A report
travels with each chunk, but in an all_reduce, where it has a place for every worker, only with the
first and the last (with several optimizers: the last of each one's).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


class PayloadChunk(Protocol):
    """A range of a payload in flight. The four methods are called in this order."""

    payload: Payload
    measured: bool  # whether its squared length is part of the drift: differences only
    has_mean: bool  # whether `send_mean` has nothing to send: all is here to compute the mean from

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        """Read the payload and start to send its values and the report.

        `squares` are the squared lengths of all that was measured: as sent, and before rounding.
        """

    def receive_reports(self) -> list[list[float]]:
        """Wait for all workers' values; return the reports and squared lengths, if any came."""

    def send_mean(self, result: RoundResult) -> None:
        """Average what this worker owns and start to send the mean. The reports are known."""

    def write_mean(self, result: RoundResult) -> float:
        """Wait for the mean, write it to the payload, and return its squared length."""


def cut_into_chunks(workers: RankGroup, payloads: Sequence[Payload]) -> list[PayloadChunk]:
    """Return the chunks of all payloads in order, on every worker the same."""
    # An empty payload gives one empty chunk, so that the reports are exchanged all the same.
    spare: list[Tensor] = []  # memory of finished chunks, reused by later ones
    sizes = [_chunk_length(payload) for payload in payloads]
    chunks = list[PayloadChunk]()
    summed = list[AllReduceChunk]()
    if workers.shared_memory is not None:
        _make_ring_for_chunks(workers, list(zip(payloads, sizes, strict=True)))
    for payload, size in zip(payloads, sizes, strict=True):
        summable = workers.size > 1 and not (payload.codec.rounds or payload.first_only)
        for start in range(0, max(payload.length, 1), size):
            stop = min(start + size, payload.length)
            if workers.shared_memory is not None:
                chunks.append(SharedMemoryChunk(payload, start, stop, workers))
            elif summable and workers.has_backend(payload.device):
                summed.append(AllReduceChunk(payload, start, stop, workers, spare))
                chunks.append(summed[-1])
            else:
                chunks.append(PairwiseChunk(payload, start, stop, workers))
    after = {id(chunk): following for chunk, following in pairwise(chunks)}
    for chunk in summed[1:-1]:
        # The last chunk of a part has them too: they say the part's squared length.
        if chunk.payload.part == after[id(chunk)].payload.part:
            chunk.reports_in = 0
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


def square_of(values: Tensor) -> float:
    # A dot product reads the slice once, and is faster than norm().square().
    return float(torch.dot(values, values))


# -- values as they are: an all_reduce -------------------------------------------------------------

PARTS = 3  # 3 × 24 bits of a float32's mantissa hold the 53 of a float64


class AllReduceChunk:
    """A chunk whose values travel as they are: one all_reduce adds them up on the way.

    Everyone's reports travel after the values, in the same tensor:

        [ values: length | reports: workers × REPORT × PARTS ]

    Of many chunks only the first and each optimizer's last have them: the former's are needed to go
    on, the latter's have the squared lengths. All workers' in each would take longer than that.

    A worker fills in its own report and leaves the others' at zero, so the sum is everyone's
    reports. The tensor has the payload's type, and a report holds float64: each number is split
    into PARTS float32 whose sum is exact.
    """

    measured = False
    has_mean = True

    def __init__(
        self, payload: Payload, start: int, stop: int, workers: RankGroup, spare: list[Tensor]
    ) -> None:
        self.payload = payload
        self.start = start
        self.length = stop - start
        self.workers = workers
        self._spare = spare
        self._work: Waitable
        self.reports_in = workers.size  # places for reports

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        """Start an all_reduce of the values; every worker's report travels behind them."""
        self._sent = self._allocate(self.length + self.reports_in * REPORT * PARTS)
        self._values = self._sent[: self.length]
        reports = self._sent[self.length :]
        if report.included:
            self.payload.read(self.start, self._values)
        else:
            self._values.zero_()  # all_reduce adds every rank: a NaN would reach all of them
        square = square_of(self._values) if self.measured else 0.0
        squares[:] = [each + square for each in squares]
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
        total = sum(result.reports[rank].weight for rank in result.included)
        if total not in (0.0, 1.0):  # 0: no worker is included
            self._values.mul_(1 / total)
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


# -- values as they are: shared memory -------------------------------------------------------------

PLACE_HEAD = 8 * (REPORT + 1)  # bytes in shared memory: a report, and the mean's squared length
PLACES = 6  # chunks in shared memory


def _make_ring_for_chunks(workers: RankGroup, payloads: list[tuple[Payload, int]]) -> None:
    """Make places for chunks of these payloads, each with its elements per chunk."""
    # Collective: call it on every worker with the same payloads.
    assert workers.shared_memory is not None
    largest = max(
        (PLACE_HEAD + min(n, p.length) * p.dtype.itemsize for p, n in payloads), default=0
    )
    workers.shared_memory.make_ring(largest, PLACES // 2)


class SharedMemoryChunk:
    """A chunk among workers of one host, which read each other's memory: nothing is sent.

    Each worker reads its values into a *place* that all workers can see, averages the slice that
    it owns there, and copies the other slices from their owners' places. One-element all-reduces
    are the barriers: each one says that the newest chunk has been read, and that the second before
    it has been averaged.

    Places are reused after PLACES = 6 chunks. By then no worker still reads them: a worker reaches
    the barrier of a chunk only after it has written the mean of the fourth before it, and no worker
    reads the second before it until that barrier is passed.
    """

    measured = False
    has_mean = False

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        self.payload = payload
        self.start = start
        self.length = stop - start
        self.workers = workers
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
        if report.included:
            self.payload.read(self.start, values)
        else:
            values.zero_()
        square = square_of(values) if self.measured else 0.0
        squares[:] = [each + square for each in squares]
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
        included = result.included[:1] if self.payload.first_only else result.included
        weights = dict(zip(included, result.weights(included), strict=True))
        others = [(self._slice(r, rank), w) for r, w in weights.items() if r != rank]
        own = self._slice(rank, rank)
        if (weight := weights.get(rank, 0.0)) != 1.0:
            own.mul_(weight)
        if len(included) == 2 and len(others) == 1 and weight == others[0][1]:
            own.lerp_(others[0][0], 0.5)  # reads the memory once instead of twice
        else:
            for other, weight in others:
                own.add_(other, alpha=weight)
            if len(included) > 1:
                own.mul_(1 / sum(weights.values()))
        self._reports[rank][REPORT] = square_of(own) if self.measured else 0.0
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


class PairwiseChunk:
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

    measured = False
    has_mean = False

    def __init__(self, payload: Payload, start: int, stop: int, workers: RankGroup) -> None:
        self.payload = payload
        self.start = start
        self.workers = workers
        self._works: list[Waitable] = []
        self._outgoing: list[Tensor] = []  # torch does not keep a tensor alive while it is sent
        self._incoming: list[Tensor] = []
        self._reports: list[list[float]] = []
        step = -(-(stop - start) // workers.size)
        step = -(-step // ALIGNED_SLICE) * ALIGNED_SLICE
        self.cuts = [min(rank * step, stop - start) for rank in range(workers.size + 1)]
        self._lengths = [b - a for a, b in pairwise(self.cuts)]
        self._sizes = [self._message_bytes(length) for length in self._lengths]

    def receive_reports(self) -> list[list[float]]:
        """Wait for the messages, and return every worker's report from its head."""
        self._wait()
        for rank, message in enumerate(self._incoming):
            if rank != self.workers.rank:
                self._reports[rank] = _read_report(message)
        return self._reports

    def _message_bytes(self, elements: int) -> int:
        size = MESSAGE_HEAD + self.payload.codec.size(elements, self.payload.dtype)
        return -(-size // 8) * 8  # view(float64) needs a multiple of 8

    def _decode(self, rank: int, elements: int, head: int = MESSAGE_HEAD) -> Tensor:
        """Return the values of the message that came from `rank`, which follow its head."""
        codec = self.payload.codec
        dtype = self.payload.dtype
        size = codec.size(elements, dtype)
        data = self._incoming[rank][head : head + size].to(self.payload.device)
        return codec.decode(data, elements, dtype)

    def _exchange(self, messages: list[Tensor], sizes: list[int], tag: int) -> None:
        """Send each of the others its message, and receive one of `sizes[rank]` bytes from each."""
        if self.workers.size > 1:
            rank = self.workers.rank
            device = self.payload.device
            # nothing to ourselves
            messages[rank] = messages[rank][:0]
            sizes[rank] = 0
            to_host = not self.workers.has_backend(device)  # gloo sends from the host only
            self._outgoing = [each.cpu() for each in messages] if to_host else messages
            self._incoming, self._works = self.workers.all_to_all(self._outgoing, sizes, tag)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        self._outgoing = []

    def _residual(self, rank: int) -> Tensor | None:
        """Return the residual of a slice."""
        # Of another worker's slice it is what rounding our values has cut off; of the slice that we
        # own, what rounding the mean has cut off. The two never overlap.
        if self.payload.residual is None:
            return None
        first = self.start + self.cuts[rank]
        last = self.start + self.cuts[rank + 1]
        return self.payload.residual[first:last]

    def send_values(self, report: WorkerReport, squares: list[float]) -> None:
        """Send every slice of the values, encoded, to the worker that averages it."""
        payload = self.payload
        rank = self.workers.rank
        size = self.workers.size
        messages = []
        square = 0.0
        exact = 0.0
        for owner, length in enumerate(self._lengths):
            message = torch.empty(self._sizes[owner], dtype=torch.uint8, device=payload.device)
            values = self._values_in(message, length)
            payload.read(self.start + self.cuts[owner], values)
            if not report.included:
                values.zero_()  # codecs take finite numbers only, and these are not added
            if self.measured:
                exact += square_of(values)
            if owner == rank:
                self._own = values  # stays in full precision
            elif payload.codec.rounds:
                residual = self._residual(owner) if report.included else None
                data, values = encode_with_residual(payload.codec, values, residual)
                _write_data(data, message)
            if self.measured:
                square += square_of(values)
            messages.append(message)
        self._message = messages[rank]
        squares[:] = [squares[0] + square, squares[1] + exact]
        own_report = [*report, *squares]
        for message in messages:
            _write_report(own_report, message)
        self._reports = [own_report] * size
        self._exchange(messages, [self._sizes[rank]] * size, VALUES_TAG)

    def send_mean(self, result: RoundResult) -> None:
        """Send the mean of the own slice to all others."""
        self._average(result)
        square = square_of(self._own) if self.measured else 0.0
        rank = self.workers.rank
        size = self.workers.size
        if self.payload.codec.rounds:
            residual = self._residual(rank) if result.included else None
            # We keep the decoded mean too, so that all workers write the same rounded values.
            data, self._own = encode_with_residual(self.payload.codec, self._own, residual)
            _write_data(data, self._message)
        shorter = MESSAGE_HEAD - MEAN_HEAD
        message = self._message[shorter:]
        _write_report([square], message)
        self._reports = [[square]] * size
        sizes = [each - shorter for each in self._sizes]
        self._exchange([message] * size, sizes, MEAN_TAG)

    def write_mean(self, result: RoundResult) -> float:
        """Decode the owners' means, write them to the payload; return the mean's square."""
        self._wait()
        square = 0.0
        for rank, length in enumerate(self._lengths):
            own = rank == self.workers.rank
            square += (
                self._reports[rank] if own else _read_report(self._incoming[rank], MEAN_HEAD)
            )[0]
            if length:
                mean = self._own if own else self._decode(rank, length, MEAN_HEAD)
                self.payload.write(self.start + self.cuts[rank], mean, result)
        return square

    def _average(self, result: RoundResult) -> None:
        """Average the own slice in place over the included ranks, in rank order."""
        included = result.included[:1] if self.payload.first_only else result.included
        weights = dict(zip(included, result.weights(included), strict=True))
        if (weight := weights.get(self.workers.rank, 0.0)) != 1.0:
            self._own.mul_(weight)
        for rank, weight in weights.items():
            if rank != self.workers.rank:
                self._own.add_(self._decode(rank, self._own.numel()), alpha=weight)
        if len(included) > 1:
            self._own.div_(sum(weights.values()))

    def _values_in(self, message: Tensor, elements: int) -> Tensor:
        """Return memory for a slice's values: inside the message if they travel as they are."""
        dtype = self.payload.dtype
        if self.payload.codec.rounds:
            return torch.empty(elements, dtype=dtype, device=self.payload.device)
        return message[MESSAGE_HEAD : MESSAGE_HEAD + elements * dtype.itemsize].view(dtype)


def _write_data(data: Tensor, message: Tensor) -> None:
    message[MESSAGE_HEAD : MESSAGE_HEAD + data.numel()] = data


def _write_report(numbers: list[float], message: Tensor) -> None:
    message[: 8 * len(numbers)] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)


def _read_report(message: Tensor, head: int = MESSAGE_HEAD) -> list[float]:
    return message[:head].cpu().view(torch.float64).tolist()
