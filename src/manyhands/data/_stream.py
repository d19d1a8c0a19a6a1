"""Load batches from a stream: data without indices, such as files to be read sequentially.

A stream consists of shards. A position in a shard is a number of samples. Each epoch orders the
shards. The readers (all loader processes of all ranks) take turns:

    reader 0    places 0, R, 2R, ...      one shard after the other
    reader 1    places 1, R + 1, ...
      :

Inside a shard, blocks of `buffer_size` samples are shuffled separately. So a position identifies
the next samples for any reader. Each batch carries the positions after the batch's samples, which
count after the optimizer's step.

No rank knows the length of other ranks' shards. So each step starts with an exchange of the number
of samples on each rank, which shows the end of the epoch and gives the divisor of `mean`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from manyhands._arguments import whole
from manyhands._optimizers.state_parts import SavedEntries
from manyhands._ranks.agreement import agree
from manyhands.data._cursor import BaseCursor
from manyhands.data._order import Order
from manyhands.data._plan import Pass
from manyhands.data._rules import ADVICE, FORMAT, Arguments, check_arguments

READ_AT_ONCE = 64  # samples between two states of a shard without shuffling


class Position(NamedTuple):
    shard: int
    taken: int = 0  # samples
    state: str = ""  # the shard's state dict after `state_count` samples, as JSON; "" without
    state_count: int = 0
    ended: bool = False


# Positions after the samples, number of samples (0: only ends of shards), samples.
Batch = tuple[list[Position], int, Any]


@runtime_checkable
class Stream(Protocol):
    """A stream in shards, such as Hugging Face's `IterableDataset`."""

    num_shards: int

    def shard(self, num_shards: int, index: int) -> Iterable[Any]:
        """Return shard `index`. The result may have `state_dict` and `load_state_dict`."""


class StreamCursor(BaseCursor):
    """A cursor over a stream. `manyhands.Cursor` creates it for an iterable without a length.

    >>> import manyhands as mh
    >>> class Lines:
    ...     num_shards = 2
    ...     def shard(self, num_shards, index):
    ...         return [f"file {index}, line {line}" for line in range(3)]
    >>> cursor = mh.Cursor(Lines(), batch_size=4, shuffle=False, collate_fn=list)
    >>> for batch in cursor:
    ...     print(len(batch), batch[-1])
    4 file 1, line 0
    2 file 1, line 2

    The arguments are the same as for `Cursor`, except:

        dataset         an object with `num_shards` and `shard(num_shards, index)`
        shuffle         whether each epoch shuffles the shards
        buffer_size     (additional) shuffle this number of samples of a shard at a time. Default:
                        0, no shuffling inside shards
        drop_last       end the epoch with the last step in which every rank has a full batch
        max_local_batch_size    not available: each step is a single pass
    """

    def __init__(
        self,
        dataset: Stream,
        arguments: Arguments,
        optimizer: Optimizer | None,
        process_group: torch.distributed.ProcessGroup | None,
        loader: Callable[..., Iterable[Any]],
        options: dict[str, Any],
    ) -> None:
        super().__init__(optimizer, process_group)
        if self._blocks is not None:
            raise ValueError(
                "a Cursor over a stream needs ranks that step together, and does not support "
                "blocks. Use a DataLoader of separate shards on each worker."
            )
        size = self._ranks.size
        if options.get("persistent_workers"):
            raise ValueError(
                "omit persistent_workers=True, which would reuse the shards of the first epoch."
            )
        if arguments["max_local_batch_size"] is not None:
            raise TypeError("omit max_local_batch_size: over a stream each step is a single pass.")
        check_arguments(arguments, options, size)
        _check_stream(dataset)
        batch_size = arguments["batch_size"]
        seed = arguments["seed"]
        buffer_size = whole("buffer_size", options.pop("buffer_size", 0))
        self._drop_last = arguments["drop_last"]
        self._num_workers = options.get("num_workers", 0)
        self._reader_count = max(1, self._num_workers)
        self._order = {
            "version": FORMAT,
            "shards": dataset.num_shards,
            "seed": seed,
            "shuffle": bool(arguments["shuffle"]),
            "buffer_size": buffer_size,
        }
        facts = {"batch_size": batch_size, "keep": arguments["keep"], "drop_last": self._drop_last}
        facts["num_workers"] = self._reader_count
        agree(self._ranks, {"data": {**self._order, **facts}}, ADVICE)
        self._batch = batch_size
        if arguments["keep"] == "micro":
            self._batch = batch_size * size
        self._described = f"shards={dataset.num_shards}"
        self.usual_passes = 1
        self._dataset = dataset
        self._collate_fn = options.pop("collate_fn", default_collate)
        rank = self._ranks.rank
        own_batch = self._batch * (rank + 1) // size - self._batch * rank // size
        self._readers = Readers(dataset, own_batch, buffer_size, seed, self._collate_fn)
        self._loader = loader(self._readers, batch_size=None, collate_fn=tuple, **options)
        self._epoch = 0
        self._position = 0
        self._shards: dict[int, Position] = {}  # shards of the current epoch that were started
        self._taken: list[Position] = []  # positions after the loop's current batch
        self._step_samples = 0  # samples of the current step on all ranks
        self._filler: Any = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        return self._position

    def __len__(self) -> int:
        """Raise TypeError: no rank knows the length."""
        raise TypeError("a Cursor over a stream has no length")

    def _steps(self) -> Iterator[Any]:
        agree(self._ranks, {"position": {"epoch": self.epoch, "samples": self.position}}, ADVICE)
        self._begin_reading()
        try:
            yield from self._read_steps()
        finally:
            self._taken = []
            self._step_samples = 0
        self._epoch = self._epoch + 1
        self._position = 0
        self._shards = {}

    def _read_steps(self) -> Iterator[Any]:
        batches = iter(self._loader)
        ended = list[Position]()
        while True:
            problem = None
            taken = list[Position]()
            samples = 0
            batch = None
            try:
                while not samples:
                    taken, samples, batch = next(batches)
                    # Ends of shards count with the next batch. Otherwise they are found again.
                    ended = ended + taken
            except StopIteration:
                pass
            except Exception as error:
                problem = error
                samples = -1  # informs the other ranks, which would wait
            row = self._ranks.all_gather([float(samples)], self._ranks.any_device)
            counts = [int(count) for (count,) in row]
            if min(counts) < 0:
                text = f"rank {counts.index(-1)} could not read its next batch. See its error."
                raise problem or RuntimeError(text)
            total = sum(counts)
            if total < (self._batch if self._drop_last else 1):
                return
            if samples == 0:
                batch = self._find_filler()
            elif self._filler is None:
                self._filler = batch
            self._taken = ended
            ended = []
            self._step_samples = total
            not_empty = len(counts) - counts.count(0)
            self._now = Pass(samples, 0, (samples,), total, not_empty, len(counts))
            self._mean = None
            self._mean_due = True
            if self.optimizer is None:
                self._commit()
            yield batch

    def _begin_reading(self) -> None:
        shards = self._order["shards"]
        order = Order(shards, self._order["seed"], self._epoch, bool(self._order["shuffle"]))
        queues: list[list[Position]] = [[] for _ in range(self._reader_count)]
        for place, shard in enumerate(order.indices(((0, shards),))):
            turn, rank = divmod(place, self._ranks.size)
            found = self._shards.get(shard, Position(shard))
            if rank == self._ranks.rank and not found.ended:
                queues[turn % self._reader_count].append(found)
        self._readers.queues = queues
        self._readers.epoch = self._epoch

    def _find_filler(self) -> Any:
        """Return a batch of weight zero: this rank's first batch, or a single sample."""
        if self._filler is not None:
            return self._filler
        for shard in range(self._order["shards"]):
            for sample in self._readers.stream.shard(self._order["shards"], shard):
                self._filler = self._readers.collate([sample])
                return self._filler
        raise AssertionError("another rank has samples, and there are none")

    def _commit(self) -> None:
        self._shards |= {position.shard: position for position in self._taken}
        self._position += self._step_samples
        self._taken = []
        self._step_samples = 0

    def state_dict(self) -> dict[str, Any]:
        shards: dict[int, Position] = {}
        for text in self._ranks.all_gather_text(json.dumps([*self._shards.values()])):
            for values in json.loads(text):
                position = Position(*values)
                known = shards.get(position.shard, position)
                if (position.ended, position.taken) >= (known.ended, known.taken):
                    shards[position.shard] = position
        ended = []
        begun = []
        for shard in sorted(shards):
            position = shards[shard]
            if position.ended:
                ended.append(shard)
            else:
                begun.append(list(position[:4]))
        return {
            **self._order,
            "epoch": self._epoch,
            "position": self._position,
            "ended": ended,
            "open": begun,
        }

    def _continue_from(self, state_dict: Mapping[str, Any]) -> None:
        entries = SavedEntries(state_dict, "a position in a stream")
        entries.expect(self._order)
        epoch = entries.whole("epoch")
        position = entries.whole("position")
        try:
            found = [Position(*each) for each in entries["open"]]
            found += [Position(shard, ended=True) for shard in entries["ended"]]
            shards = {each.shard: each for each in found}
            if not set(shards) <= set(range(self._order["shards"])):
                raise ValueError("it names shards that are not there")
        except (TypeError, ValueError) as error:
            raise entries.wrong("open", "positions in shards", error) from error
        self._epoch = epoch
        self._position = position
        self._shards = shards


def _check_stream(dataset: object) -> None:
    if not isinstance(dataset, Stream):
        raise TypeError(
            f"a Cursor cannot resume a {type(dataset).__name__}, which has no positions. Add "
            "num_shards and a method shard(num_shards, index) that returns an iterable, as in "
            "Hugging Face's IterableDataset. With known sizes: mh.DataShards."
        )
    inside: object = dataset
    while inside is not None:
        if "BufferShuffled" in type(inside).__name__:
            raise ValueError(
                "this stream shuffles through a buffer, whose samples would be lost when a run is "
                "resumed. Omit .shuffle(buffer_size=...), and pass buffer_size= to the Cursor."
            )
        inside = getattr(inside, "_ex_iterable", getattr(inside, "ex_iterable", None))


class Readers(IterableDataset[Batch]):
    """This rank's readers for torch's loader. Each reader yields batches of separate shards."""

    def __init__(
        self,
        stream: Stream,
        batch_size: int,
        buffer_size: int,
        seed: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.stream = stream
        self.collate = collate
        self.epoch = 0
        self.queues: list[list[Position]] = []  # the positions of each reader
        self._batch_size = batch_size
        self._buffer_size = buffer_size
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        if worker is not None:
            # A Hugging Face stream would otherwise leave this shard to a different process.
            torch.utils.data._utils.worker._worker_info = None
        samples = list[Any]()
        leads_to = dict[int, Position]()
        for begin in self.queues[number]:
            for position, sample in self._read(begin):
                leads_to[position.shard] = position
                samples += [] if position.ended else [sample]
                if len(samples) == self._batch_size:
                    yield [*leads_to.values()], len(samples), self.collate(samples)
                    samples = []
                    leads_to = {}
        if leads_to:
            batch = self.collate(samples) if samples else None
            yield [*leads_to.values()], len(samples), batch

    def _read(self, begin: Position) -> Iterator[tuple[Position, Any]]:
        """Yield a shard's samples, each with the position after the sample, and finally the end."""
        shard: Any = self.stream.shard(self.stream.num_shards, begin.shard)
        has_state = hasattr(shard, "state_dict") and hasattr(shard, "load_state_dict")
        if has_state and begin.state:
            shard.load_state_dict(json.loads(begin.state))
            samples = iter(shard)
            at = begin.state_count
        else:  # from the start of the position's block
            at = begin.taken - begin.taken % max(1, self._buffer_size)
            samples = islice(iter(shard), at, None)
        while True:
            state = json.dumps(shard.state_dict()) if has_state else ""
            block = list(islice(samples, self._buffer_size or READ_AT_ONCE))
            if not block:
                yield Position(begin.shard, at, ended=True), None
                return
            text = f"{self._seed} {self.epoch} {begin.shard} {at}"
            order = Order(len(block), zlib.crc32(text.encode()), 0, self._buffer_size > 1)
            for done, place in enumerate(order.indices(((0, len(block)),)), start=at + 1):
                if done > begin.taken:  # not trained before
                    yield Position(begin.shard, done, state, at), block[place]
            at += len(block)
