"""Record or replace the batches of each DataLoader."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from manyhands.tools.check._batches import digest, map_tensors, row_hashes
from manyhands.tools.check._feed import Feed
from manyhands.tools.check._machine import wrap
from manyhands.tools.check._noise import FrozenNoise
from manyhands.tools.check._records import Recording, SeenBatch, SeenLoader

EVALUATED = 2  # batches of an evaluation in a shortened epoch
READ_ON = 8  # additional batches of a shortened epoch
LONGEST = 100_000  # noted indices of an epoch


class LoaderRecorder:
    """Records the loaders of a process, or returns the ranks' batches."""

    def __init__(
        self,
        record: Recording,
        feed: Feed | None,
        noise: FrozenNoise,
        limit: int | None,
        take: Callable[[Tensor], Tensor],
        place: Callable[[], str],
    ) -> None:
        self.record = record
        self.feed = feed
        self.noise = noise
        self.limit = limit  # steps of an epoch; None: full epochs
        self.take = take  # casts a tensor to the precision of the run
        self.place = place  # returns the script's current line
        self.batches: dict[str, list[Any]] = {}  # by loader
        self.loaders: dict[str, DataLoader[Any]] = {}
        self.latest = SeenBatch()
        self.since_pass: set[str] = set()  # with a batch since the last pass

    def patch(self) -> None:
        wrap(DataLoader, "__init__", self._init)
        wrap(DataLoader, "__iter__", self._iterate)
        wrap(DataLoader, "__len__", self._length)
        patch_indices()

    def note_pass(self) -> None:
        """Mark the loaders with a batch since the last pass as training loaders."""
        for key in self.since_pass:
            self.record.loaders[key].trains = True
        self.since_pass.clear()

    def describe_datasets(self) -> None:
        """Describe each data set by a few samples without noise.

        Call this last: worker processes must not share files that a data set opens here.
        """
        self.noise.thaw()
        for key, loader in self.loaders.items():
            seen = self.record.loaders[key]
            if not seen.trains:
                continue
            with suppress(Exception):  # no length
                len(loader)  # `_length` notes it
            with suppress(Exception):  # no index or length
                dataset = loader.dataset
                size = len(dataset)  # type: ignore[arg-type]
                found: list[Any] = [size]
                for index in (0, (size - 1) // 2, size - 1):
                    torch.manual_seed(0)
                    random.seed(0)
                    numpy.random.seed(0)
                    found.append(map_tensors(dataset[index], digest))
                seen.data = repr(found)

    def _init(self, begin: Any, loader: Any, *args: Any, **named: Any) -> None:
        begin(loader, *args, **named)
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        repeats = getattr(sampler, "replacement", False)
        seen = SeenLoader(
            place=self.place(),
            reshuffles=hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", False),
            repeats=repeats,
            shuffles_all=type(sampler) is RandomSampler and not repeats,
        )
        places = [other.place for other in self.record.loaders.values()]
        loader.check_key = f"{seen.place} {places.count(seen.place)}"
        self.record.loaders[loader.check_key] = seen
        self.loaders[loader.check_key] = loader

    def _length(self, length: Any, loader: Any) -> int:
        found = length(loader)
        self.record.loaders[loader.check_key].length = found
        return found if self.feed is None else self.feed.length(loader.check_key, found)

    def _iterate(self, iterate: Any, loader: Any) -> Iterator[Any]:
        key = loader.check_key
        self.noise.thaw()
        if self.feed is not None and self.feed.replaces(key):
            batches = self.feed.epoch(key)
        else:
            batches = iterate(loader)
        seen = self.record.loaders[key]
        epoch: list[SeenBatch] = []
        seen.epochs.append(epoch)
        seen.starts.append(self.record.backward_passes)
        copies = self.batches.setdefault(key, [])
        steps = len(self.record.steps)
        for number, batch in enumerate(batches):
            if self._is_long(key, number, steps):
                self.record.cut = True
                if len(seen.epochs) == 1 and torch.is_grad_enabled():
                    self._read_on(batches, batch, seen.rest)
                break
            batch = map_tensors(batch, self.take)
            if self.feed is None:
                given = SeenBatch(row_hashes(batch), next_indices(batches))
                epoch.append(given)
                copies.append(map_tensors(batch, copy_of))
                if torch.is_grad_enabled():
                    self.latest = given
            if torch.is_grad_enabled():
                self.since_pass.add(key)
            self.noise.freeze()
            yield batch
            self.noise.thaw()
        self.since_pass.discard(key)  # an evaluation with gradients enabled

    def _is_long(self, key: str, batches: int, steps: int) -> bool:
        """Return whether to end an epoch that began at step `steps`."""
        if self.limit is None or (self.feed is not None and self.feed.replaces(key)):
            return False
        if not torch.is_grad_enabled():
            return batches >= EVALUATED
        made = Counter(step.optimizer for step in self.record.steps[steps:])
        return max(made.values(), default=0) >= self.limit

    def _read_on(self, batches: Any, batch: Any, rest: SeenBatch) -> None:
        """Note samples after the end of a shortened epoch."""
        with suppress(StopIteration):
            for _ in range(READ_ON):
                rest.hashes += row_hashes(map_tensors(batch, self.take))
                rest.indices += next_indices(batches)
                batch = next(batches)
        with suppress(StopIteration):
            while len(rest.indices) < LONGEST:
                batches._next_index()
                found = next_indices(batches)
                if not found:
                    break
                rest.indices += found


def copy_of(tensor: Any) -> Tensor:
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def patch_indices() -> None:
    wrap(_BaseDataLoaderIter, "_reset", _reset)
    wrap(_BaseDataLoaderIter, "_next_index", _next_index)


def _reset(reset: Any, iterator: Any, *args: Any, **named: Any) -> None:
    iterator.check_drawn = deque()
    reset(iterator, *args, **named)


def _next_index(draw: Any, iterator: Any) -> Any:
    drawn = draw(iterator)  # ahead of the batch, if there are worker processes
    iterator.__dict__.setdefault("check_drawn", deque()).append(drawn)
    return drawn


def next_indices(batches: Any) -> list[int]:
    """Return the indices of the iterator's next batch, if known."""
    drawn = getattr(batches, "check_drawn", None)
    if not drawn:
        return []
    first = drawn.popleft()
    indices: list[Any] = list(first) if isinstance(first, list | tuple) else [first]
    if not all(isinstance(index, int | numpy.integer) for index in indices):
        return []
    return list(map(int, indices))
