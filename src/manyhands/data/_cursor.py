"""Load batches from a position in an epoch. The position belongs to the run, not to a rank.

    the plan       the samples of each pass of this rank (`_plan.py`)
    _fetch         takes batches from torch's loader, which may be many passes ahead
    begin_batch    counts a batch when the loop receives it
    the step       commits the batches of the loop; batches that were only fetched do not count

There are two types of runs:

    in step     all ranks take each step together (DDP, ZeRO, FSDP) and form a single worker, which
                commits after every step, without messages
    in blocks   each worker of `Blocks` takes separate steps, and all commit in a sync round
                (`blocks/_samples.py`)
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._optimizers.wrappers import gradient_ranks, unwrap, weak_hook
from manyhands._ranks.agreement import agree
from manyhands._ranks.ranks import RankGroup
from manyhands._warn import warn
from manyhands.data._account import Account
from manyhands.data._ledger import Ledger
from manyhands.data._order import DataShards
from manyhands.data._plan import LoaderPlan, Pass, number_of_passes
from manyhands.data._rules import (
    ADVICE,
    Arguments,
    MapDataset,
    Rules,
    agree_on_rules,
    check_state,
    describe_order,
)
from manyhands.scaling._weighted_mean import WeightedMean


class CursorBlocks(Protocol):
    """The interface of blocks for a cursor: `SampleRounds` in `blocks/_samples.py`."""

    @property
    def account(self) -> Account:
        """This worker's account."""

    @property
    def number(self) -> int:
        """This worker's number."""

    def begin(self, rules: Rules, ledger: Ledger) -> None:
        """Register a new cursor, with this ledger unless the run has a ledger."""

    def load(self, rules: Rules, ledger: Ledger) -> None:
        """Continue with a saved ledger."""

    def next_epoch(self) -> None:
        """Start the next epoch, on all workers after equal numbers of steps."""

    def synchronize(self) -> None:
        """Run a sync round, on all workers after equal numbers of steps."""


class StepGuard(Protocol):
    """The interface of `mh.start(survive=True)` for a cursor."""

    def between_steps(self) -> bool:
        """Prepare the next step. Return whether the cursor must divide the samples again."""

    def begin_step(self) -> None:
        """Note that the loop receives the first batch of a step."""

    def end_loop(self) -> None:
        """Note that no loop runs over the cursor."""


class BaseCursor:
    """Base class of the data loaders that `manyhands.Cursor` makes.

    >>> import manyhands as mh
    >>> from manyhands.data import BaseCursor
    >>> isinstance(mh.Cursor(range(8), batch_size=4), BaseCursor)
    True
    """

    # Set by the subclasses.
    _dataset: Any
    _described: str  # for `repr`
    _batch: int
    usual_passes: int  # in a full step
    _num_workers: int
    _drop_last: bool
    _collate_fn: Any

    def __init__(
        self, optimizer: Optimizer | None, group: torch.distributed.ProcessGroup | None
    ) -> None:
        self._blocks: CursorBlocks | None = None
        ranks: RankGroup | None = None
        if optimizer is not None:
            self._blocks = _find_blocks(optimizer)
            ranks = gradient_ranks(optimizer)
            if self._blocks is None:
                innermost = unwrap(optimizer, every_layer=True)[-1]
                # Weak: the optimizer must not keep the loader's processes alive.
                handle = innermost.register_step_post_hook(weak_hook(self._commit))
                weakref.finalize(self, handle.remove)
        self._ranks = ranks or RankGroup.of(group)
        self.optimizer = optimizer
        self.guard: StepGuard | None = None  # decides whether steps are repeated
        self._now: Pass | None = None  # the current pass of the loop
        self._mean: WeightedMean | None = None  # of the current step
        self._mean_due = False  # whether the current batch still needs `mean`
        self._warned = False
        self._iterated = False

    # -- what a loop reads ---------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The current epoch, starting at 0."""
        raise NotImplementedError

    @property
    def position(self) -> int:
        """The number of trained samples in the epoch, over all workers."""
        raise NotImplementedError

    # Read-only attributes for code that expects a DataLoader.

    @property
    def batch_size(self) -> int:
        """The number of samples per step, over all ranks, or in blocks of a single worker."""
        return self._batch

    @property
    def dataset(self) -> Any:
        """The dataset or the stream."""
        return self._dataset

    @property
    def num_workers(self) -> int:
        """The number of this rank's loader processes. 0 loads in the training process."""
        return self._num_workers

    @property
    def drop_last(self) -> bool:
        """Whether an epoch ends with the last full batch."""
        return self._drop_last

    @property
    def collate_fn(self) -> Any:
        """The function that combines a list of samples into a batch."""
        return self._collate_fn

    @property
    def passes(self) -> int:
        """The number of backward passes in the current step on every rank."""
        return self.usual_passes if self._now is None else len(self._now.counts)

    @property
    def last_pass(self) -> bool:
        """Whether the optimizer steps after the current batch."""
        return self._now is None or self._now.last

    @property
    def samples(self) -> int:
        """The number of samples in the current batch. 0 means a filler with weight zero."""
        return 0 if self._now is None else self._now.samples

    def mean(self, loss_sum: Tensor) -> Tensor:
        """Return the current batch's contribution to the step's mean loss, for `backward()`.

        Call it once per batch with the sum of the samples' losses. The step's loss is then the mean
        over all samples of all ranks and passes, even if some batches are smaller or empty. A
        scaling rule receives the sample counts. Do not divide the loss further. This is not a
        collective.
        """
        now = self._now
        if now is not None and self._mean_due and now.index == 0:
            self._mean = WeightedMean.of_known(
                now.counts,
                self.optimizer,
                ranks=self._ranks.size,
                total=now.step_samples,
                not_empty=now.not_empty,
            )
        if not self._mean_due or self._mean is None:
            raise RuntimeError(
                "mean() needs a batch: call it once per batch inside `for batch in cursor:`."
            )
        self._mean_due = False
        return self._mean(loss_sum)

    # -- the loop ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's remaining batches of the epoch."""
        with self._iteration():
            for batch in self._steps():
                yield batch
                self._check_weighted()

    @contextmanager
    def _iteration(self) -> Iterator[None]:
        """Run a loop over the epoch. Only a single loop may run."""
        if self._iterated:
            raise RuntimeError("this Cursor is in use by a loop. Create a Cursor for each loop.")
        self._iterated = True
        try:
            yield
        finally:
            self._iterated = False
            if self.guard is not None:
                self.guard.end_loop()
            self._now = None
            self._mean = None
            self._mean_due = False

    def ahead(self) -> AbstractContextManager[Iterator[Any]]:
        """Pass the batches to a caller such as `Ramp`, which calls `begin_batch` for each."""
        raise ValueError("a Ramp needs a Cursor over a dataset with a length, not over a stream.")

    def begin_batch(self) -> Pass:
        """Count a batch when the loop receives it. Return the pass."""
        raise NotImplementedError

    def _steps(self) -> Iterator[Any]:
        """Yield the batches, setting `_now` for each, and then begin the next epoch."""
        raise NotImplementedError

    def _commit(self) -> None:
        """Commit the batches of the loop after all ranks have stepped."""
        raise NotImplementedError

    def _check_weighted(self) -> None:
        """Warn once if a step is divided unevenly but the loop does not call `mean`."""
        now = self._now
        if self._mean_due and now is not None and now.uneven and not self._warned:
            self._warned = True
            warn(
                f"a step of {now.step_samples} samples is divided unevenly (a pass of this rank "
                f"has {now.samples}). Write cursor.mean(sum of the losses).backward(), or choose a "
                "batch_size that all ranks divide evenly, and drop_last=True.",
            )

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values, for any number of ranks. Call it on every rank."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue after the last trained sample. Load the same state on every rank.

        A worker that has just joined a crew keeps the crew's position.
        """
        if self._iterated and self.guard is None:
            raise RuntimeError(
                "this Cursor is in use by a loop. Load its state before the loop starts."
            )
        self._continue_from(state_dict)

    def _continue_from(self, state_dict: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return (
            f"Cursor({self._described}, batch_size={self.batch_size}, "
            f"epoch={self.epoch}, position={self.position})"
        )


class MapCursor(BaseCursor):
    """A cursor over a dataset with a length, or over `DataShards`. `manyhands.Cursor` makes it.

    >>> import manyhands as mh
    >>> mh.Cursor(range(100), batch_size=16)
    Cursor(samples=100, batch_size=16, epoch=0, position=0)
    """

    def __init__(
        self,
        dataset: MapDataset,
        arguments: Arguments,
        optimizer: Optimizer | None,
        process_group: torch.distributed.ProcessGroup | None,
        loader: Callable[..., Iterable[Any]],
        options: dict[str, Any],
    ) -> None:
        super().__init__(optimizer, process_group)
        self._rules = agree_on_rules(dataset, arguments, options, self._ranks)
        self._batch = self._rules["batch"]
        self._described = f"samples={self._rules['samples']}"
        self._account = Account()
        self._number = 0
        if self._blocks is not None:
            self._account = self._blocks.account
            self._number = self._blocks.number
        self.keep = arguments["keep"]
        most = arguments["max_local_batch_size"]
        self._most = most
        self.usual_passes = number_of_passes(self._batch, self._ranks.size, most)
        shards = dataset if isinstance(dataset, DataShards) else None
        self._plan = LoaderPlan(self._rules, self._account, self._number, self._ranks, most, shards)
        # A separate generator, because torch's loader draws numbers, and a resumed run must draw
        # from the default generator as an uninterrupted run.
        self._generator = None if "generator" in options else torch.Generator()
        options.setdefault("generator", self._generator)
        self._loader = loader(dataset, batch_sampler=self._plan, **options)
        self._dataset = dataset
        self._num_workers = options.get("num_workers", 0)
        self._drop_last = self._rules["drop_last"]
        self._collate_fn = getattr(self._loader, "collate_fn", options.get("collate_fn"))
        ledger = Ledger(len(dataset))
        if self._blocks is None:
            self._begin_with(ledger)
        else:
            self._blocks.begin(self._rules, ledger)

    @property
    def epoch(self) -> int:
        return self._account.ledger.epoch

    def describe(self) -> str:
        """Return the rules of the cursor, which are equal on all ranks."""
        return str(self._rules)

    @property
    def position(self) -> int:
        return self._account.ledger.committed

    def __len__(self) -> int:
        """Return the number of batches per rank in an epoch with a single worker."""
        return len(self._plan)

    # -- the loop ------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Any]:
        for batch in self._fetch():
            self.begin_batch()
            yield batch
        self._end_epoch()

    def passes_on(self, ranks: int) -> int:
        """Return the number of passes of a full step on this number of ranks."""
        return number_of_passes(self._batch, ranks, self._most)

    def change_ranks(self, ranks: RankGroup, expected: int) -> None:
        """Divide the samples among these ranks, from the last trained sample on.

        `expected` is the number of ranks of the full run.
        """
        self._ranks = ranks
        self._account.forget_step()
        self._plan.change_ranks(ranks, expected)
        self.usual_passes = self._plan.passes_of(self._batch)

    @contextmanager
    def ahead(self) -> Iterator[Iterator[Any]]:
        if self.guard is not None:
            raise ValueError(
                "survive=True does not support Ramp, because a repeated step could have another "
                "number of batches. Iterate over the Cursor itself."
            )
        if self._blocks is not None:
            raise ValueError(
                "a Ramp cannot change the batch of a Cursor in blocks, which assigns the samples "
                "before each block. Pass the Ramp a DataLoader of this worker's samples."
            )
        if self._most is not None:
            raise ValueError(
                "a Ramp sets the number of passes per step. Create the Cursor without "
                "max_local_batch_size."
            )
        with self._iteration():
            yield self._fetch()
            self._end_epoch()

    def _fetch(self) -> Iterator[Any]:
        """Yield this rank's batches as they are loaded. `begin_batch` counts received batches."""
        # Batches of an earlier loop that were not trained are repeated.
        self._account.forget_step()
        if self._blocks is None and self.guard is None:
            agree(self._ranks, {"position": self._account.ledger.state()}, ADVICE)
        self._plan.begin()
        batches: Iterator[Any] | None = None
        end = object()
        while True:
            if self.guard is not None and (self._now is None or self._now.last):
                if self.guard.between_steps():
                    batches = None
                self._now = None
            if self._plan.has_changed():
                batches = None  # a different worker may hold the loaded samples
            if batches is None:
                batches = self._load()
            batch = next(batches, end)
            if batch is not end:
                yield batch
                continue
            if self._blocks is None or self._account.ledger.left == 0:
                return
            if self._plan.has_more:
                batches = None  # samples were added after the loader asked for the last pass
                continue
            if self._plan.steps_left is None:
                raise RuntimeError(
                    "the block has no samples left, because a step took more than one batch. Pass "
                    "the samples per step as batch_size, and the maximum samples per pass as "
                    "max_local_batch_size."
                )
            # After equal numbers of steps on all workers. The round reassigns samples of a worker
            # that died.
            changes = self._account.changes
            self._blocks.synchronize()
            if self._account.changes == changes:
                return  # drop_last: the remaining samples do not fill a batch
            batches = None

    def _load(self) -> Iterator[Any]:
        if self._generator is not None:
            ranks = (self._number, self._ranks.rank)
            text = f"{self._rules['seed']} {self.epoch} {self.position} {ranks}"
            self._generator.manual_seed(zlib.crc32(text.encode()))
        return iter(self._loader)

    def begin_batch(self) -> Pass:
        now = self._plan.next_pass()
        if self.guard is not None and now.index == 0:
            self.guard.begin_step()
        self._now = now
        self._mean_due = True
        if now.index == 0:
            self._mean = None
        if now.last:
            self._account.add_to_step(now.step_samples)
            if self.optimizer is None:
                self._commit()
        return now

    def end_step(self) -> None:
        """Do not repeat the batches of this step, which a gradient scaler may have skipped."""
        self._account.step()

    def _commit(self) -> None:
        self._account.step()
        self.commit_steps()

    def commit_steps(self) -> None:
        """Count the batches of ended steps as trained."""
        account = self._account
        if account.taken:
            account.commit({self._number: account.taken}, self._number)
            account.due = False  # there are no other workers
            self._plan.keep()

    def _end_epoch(self) -> None:
        if self._blocks is None:
            self._account.next_epoch()
            self._hand_out_all()
        else:
            self._blocks.next_epoch()

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**describe_order(self._rules), **self._account.ledger.saved()}

    def _continue_from(self, state_dict: Mapping[str, Any]) -> None:
        check_state(state_dict, self._rules)
        ledger = Ledger.of_saved(self._rules["samples"], state_dict)
        if self._blocks is None:
            self._begin_with(ledger)
        else:
            self._blocks.load(self._rules, ledger)

    def _begin_with(self, ledger: Ledger) -> None:
        self._account.begin(self._rules, ledger)
        self._hand_out_all()

    def _hand_out_all(self) -> None:
        self._account.hand_out({self._number: self._rules["samples"]})


def _find_blocks(optimizer: Optimizer) -> CursorBlocks | None:
    for layer in unwrap(optimizer, every_layer=True):
        # Checked on the class: instances of wrappers forward missing attributes.
        if hasattr(type(layer), "block_samples"):
            rounds: CursorBlocks | None = layer.block_samples()  # type: ignore[attr-defined]
            return rounds
    return None
