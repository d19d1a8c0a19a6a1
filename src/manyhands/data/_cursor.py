"""Load batches from a position in an epoch that belongs to the run, and not to a rank.

    the plan    says which samples each pass of this rank has (`_plan.py`)
    _fetch      takes batches from torch's loader, which may be many passes ahead of the loop
    _begin      hands one batch to the loop
    the step    commits what the loop was given; a batch that was only fetched does not count

There are two kinds of run:

    in step     all ranks take each step together (DDP, ZeRO, FSDP). They are one worker, which
                commits after every step. Every rank knows the whole ledger, so nothing is sent
    in blocks   each worker of `Blocks` takes steps of its own, and all commit in a sync round. The
                number of samples that each one took is in its note (`blocks/_samples.py`)
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
    """What a cursor asks of blocks: the `SampleRounds` of `blocks/_samples.py`."""

    @property
    def account(self) -> Account:
        """This worker's account."""

    @property
    def number(self) -> int:
        """This worker's number."""

    def begin(self, rules: Rules, ledger: Ledger) -> None:
        """As a cursor is made: begin with this ledger, or go on with the run's, if it has one."""

    def load(self, rules: Rules, ledger: Ledger) -> None:
        """As a cursor loads a state: go on with the saved ledger."""

    def next_epoch(self) -> None:
        """Begin the next epoch. All workers do so after equally many steps."""

    def synchronize(self) -> None:
        """Hold a sync round. All workers do so after equally many steps."""


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
    _usual_passes: int
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
                # The innermost optimizer: whatever is wrapped around it calls its `step`.
                innermost = unwrap(optimizer, every_layer=True)[-1]
                # Weak: an optimizer must not keep a cursor, its loader and its processes alive.
                handle = innermost.register_step_post_hook(weak_hook(self._commit))
                weakref.finalize(self, handle.remove)
        self._ranks = ranks or RankGroup.of(group)
        self._optimizer = optimizer
        self._now: Pass | None = None  # the pass that the loop has
        self._mean: WeightedMean | None = None  # of the step under way
        self._mean_due = False  # whether `mean` was not called yet for the present batch
        self._warned = False
        self._iterated = False

    # -- what a loop reads ---------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0 on."""
        raise NotImplementedError

    @property
    def position(self) -> int:
        """The samples of the epoch that count as trained on, on all workers together."""
        raise NotImplementedError

    # Read-only: other code may ask a loader for these, and a change would reach no loader.

    @property
    def batch_size(self) -> int:
        """The samples of a step: of all ranks together, or in blocks of one worker."""
        return self._batch

    @property
    def dataset(self) -> Any:
        """The dataset or the stream that was given."""
        return self._dataset

    @property
    def num_workers(self) -> int:
        """The number of this rank's processes that load samples; 0: the process that trains."""
        return self._num_workers

    @property
    def drop_last(self) -> bool:
        """Whether an epoch ends with the last full batch."""
        return self._drop_last

    @property
    def collate_fn(self) -> Any:
        """The function that makes a batch of a list of samples."""
        return self._collate_fn

    @property
    def passes(self) -> int:
        """Backward passes in the present step, on every rank; 1 without `max_local_batch_size`."""
        return self._usual_passes if self._now is None else len(self._now.counts)

    @property
    def last_pass(self) -> bool:
        """Whether the optimizer steps after the present batch."""
        return self._now is None or self._now.last

    @property
    def samples(self) -> int:
        """The samples of the present batch; 0 if it is there only to fill a short step."""
        return 0 if self._now is None else self._now.samples

    def mean(self, loss_sum: Tensor) -> Tensor:
        """Return the present batch's part of the step's mean loss, for `backward()`.

        Call it once for each batch with the sum of its samples' losses. The step's loss is then
        the mean over all its samples, on all ranks and in all passes, even if some batches have
        fewer samples than others, or none. A scaling rule in the optimizer takes the numbers into
        account. Do not divide the loss by anything else. This is no collective.
        """
        now = self._now
        if now is not None and self._mean_due and now.index == 0:
            self._mean = WeightedMean.of_known(
                now.counts,
                self._optimizer,
                ranks=self._ranks.size,
                total=now.step_samples,
                not_empty=now.not_empty,
            )
        if not self._mean_due or self._mean is None:
            raise RuntimeError(
                "mean() belongs to a batch: call it once for each, inside `for batch in cursor:`."
            )
        self._mean_due = False
        return self._mean(loss_sum)

    # -- the loop ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the rest of the epoch."""
        with self._iteration():
            for batch in self._steps():
                yield batch
                self._check_weighted()

    @contextmanager
    def _iteration(self) -> Iterator[None]:
        """Open one loop over the epoch, from the position that all ranks have; one at a time."""
        if self._iterated:
            raise RuntimeError("this Cursor is iterated already. Make another for another loop.")
        self._iterated = True
        try:
            yield
        finally:
            self._iterated = False
            self._now = None
            self._mean = None
            self._mean_due = False

    def ahead(self) -> AbstractContextManager[Iterator[Any]]:
        """Give the batches to a caller that keeps some ready for its loop, as `Ramp` does.

        The caller calls `begin_batch` for each batch when the loop gets it.
        """
        raise ValueError("a Ramp needs a Cursor over a dataset with a length, not over a stream.")

    def begin_batch(self) -> Pass:
        """Count a batch as the loop gets it (more may be loaded already), and return its pass."""
        raise NotImplementedError

    def _steps(self) -> Iterator[Any]:
        """Yield the batches, each as `_now`, and then begin the next epoch."""
        raise NotImplementedError

    def _commit(self) -> None:
        """Commit what the loop was given: all ranks have taken a step."""
        raise NotImplementedError

    def _check_weighted(self) -> None:
        """Warn once if a step is divided unevenly and the loop has not called `mean` for it."""
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
        """Return the position in plain values, for any number of ranks. Call it on every rank."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue after the last sample that was trained on. Load the same on every rank.

        A worker that has just joined a crew keeps the crew's position.
        """
        if self._iterated:
            raise RuntimeError(
                "this Cursor is iterated, and cannot go to another position: load it before."
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
        most = arguments["max_local_batch_size"]
        self._one_pass = most is None
        self._usual_passes = number_of_passes(self._batch, self._ranks.size, most)
        shards = dataset if isinstance(dataset, DataShards) else None
        self._plan = LoaderPlan(self._rules, self._account, self._number, self._ranks, most, shards)
        # A separate generator: torch's loader draws from it, and a resumed run must draw from
        # the default one as often as a run that was not interrupted.
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

    @property
    def position(self) -> int:
        return self._account.ledger.committed

    def __len__(self) -> int:
        """Return the number of batches of each rank in an epoch, if one worker takes all of it."""
        return len(self._plan)

    # -- the loop ------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Any]:
        for batch in self._fetch():
            self.begin_batch()
            yield batch
        self._end_epoch()

    @contextmanager
    def ahead(self) -> Iterator[Iterator[Any]]:
        if self._blocks is not None:
            raise ValueError(
                "in blocks a Cursor hands out each block's samples before it begins, so a Ramp "
                "cannot change the batch. Give the Ramp a DataLoader of this worker's samples."
            )
        if not self._one_pass:
            raise ValueError(
                "a Ramp decides how many passes a step has: make the Cursor without "
                "max_local_batch_size."
            )
        with self._iteration():
            yield self._fetch()
            self._end_epoch()

    def _fetch(self) -> Iterator[Any]:
        """Yield this rank's batches as they are loaded; `begin_batch` counts what the loop gets."""
        # What an earlier loop was given, but has not trained on, comes again.
        self._account.forget_step()
        if self._blocks is None:
            agree(self._ranks, {"position": self._account.ledger.state()}, ADVICE)
        self._plan.begin()
        batches: Iterator[Any] | None = None
        end = object()
        while True:
            if self._plan.has_changed():
                batches = None  # another worker may hold the samples that it has loaded
            if batches is None:
                batches = self._load()
            batch = next(batches, end)
            if batch is not end:
                yield batch
                continue
            if self._blocks is None or self._account.ledger.left == 0:
                return
            if self._plan.has_more:
                batches = None  # more was handed out since the loader had asked for the last pass
                continue
            if self._plan.steps_left is None:
                raise RuntimeError(
                    "the samples handed out for a block are used up: a step took more than one "
                    "batch. Give a step's samples as batch_size, and the most that fit into one "
                    "pass as max_local_batch_size."
                )
            # All workers come here after equally many steps. If one of them has died, the samples
            # that it held are handed out again in this round.
            changes = self._account.changes
            self._blocks.synchronize()
            if self._account.changes == changes:
                return  # with drop_last: what is left does not fill a batch
            batches = None

    def _load(self) -> Iterator[Any]:
        """Start torch's loader from the present position."""
        if self._generator is not None:
            ranks = (self._number, self._ranks.rank)
            text = f"{self._rules['seed']} {self.epoch} {self.position} {ranks}"
            self._generator.manual_seed(zlib.crc32(text.encode()))
        return iter(self._loader)

    def begin_batch(self) -> Pass:
        now = self._plan.next_pass()
        self._now = now
        self._mean_due = True
        if now.index == 0:
            self._mean = None
        if now.last:
            self._account.add_to_step(now.step_samples)
            if self._optimizer is None:
                self._commit()
        return now

    def _commit(self) -> None:
        account = self._account
        account.step()
        if account.taken:
            account.commit({self._number: account.taken}, self._number)
            account.due = False  # no other worker holds samples
            self._plan.keep()

    def _end_epoch(self) -> None:
        """Begin the next epoch, as a loop has trained on all that was left of this one."""
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
        """Go to the position of a ledger."""
        self._account.begin(self._rules, ledger)
        self._hand_out_all()

    def _hand_out_all(self) -> None:
        """Hand what is left of the epoch to all ranks together, which are one worker."""
        self._account.hand_out({self._number: self._rules["samples"]})


def _find_blocks(optimizer: Optimizer) -> CursorBlocks | None:
    """Return what a cursor asks of the blocks around an optimizer; None if there are none."""
    for layer in unwrap(optimizer, every_layer=True):
        # On the class: wrappers forward attributes that they do not have to what they wrap.
        if hasattr(type(layer), "block_samples"):
            rounds: CursorBlocks | None = layer.block_samples()  # type: ignore[attr-defined]
            return rounds
    return None
