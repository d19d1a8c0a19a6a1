"""`Cursor`: a loader whose position in an epoch belongs to the run, and not to a rank.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from manyhands._arguments import explained
from manyhands._optimizers.wrappers import gradient_ranks, unwrap
from manyhands._ranks.agreement import agree
from manyhands._ranks.ranks import RankGroup
from manyhands._warn import warn
from manyhands.data._account import Account
from manyhands.data._ledger import Ledger
from manyhands.data._order import DataShards
from manyhands.data._plan import LoaderPlan, Pass
from manyhands.data._rules import (
    ADVICE,
    Arguments,
    CursorState,
    MapDataset,
    Rules,
    agree_on_rules,
    check_dataset,
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


class Cursor:
    """A data loader that gives every sample once in an epoch, however many workers there are.

    >>> import torch, manyhands as mh
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randn(100, 1))
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> cursor = mh.Cursor(data, batch_size=16, optimizer=optimizer)
    >>> while cursor.epoch < 2:
    ...     for inputs, targets in cursor:
    ...         optimizer.zero_grad()
    ...         losses = torch.nn.functional.mse_loss(model(inputs), targets, reduction="none")
    ...         cursor.mean(losses.sum()).backward()
    ...         optimizer.step()
    >>> cursor.epoch, cursor.position
    (2, 0)

    It takes the place of a `DataLoader` and its `DistributedSampler`. Save it with the run, as in
    `mh.save(folder, model=model, optimizer=optimizer, cursor=cursor)`. A run that loads it, on any
    number of ranks, continues after the last sample that was trained on. So does a new loop after
    one that was left early.

    Each step's samples are known before they are divided among the ranks. So with `keep="batch"`
    the sequence of batches does not depend on the number of ranks. Where a batch does not divide
    evenly, the ranks' parts differ by one sample, and `mean` gives each its right weight.

    Args:
        dataset: a dataset with a length, whose samples are found by index; or a stream, for which
            `manyhands.data.StreamCursor` says what else there is.
        batch_size: the samples of a step, see `keep`.
        keep: "batch": `batch_size` is that of all ranks together, however many there are. "micro":
            `batch_size` is that of one rank, and the batch follows the ranks.
        max_local_batch_size: the most samples in one pass on one rank. If a rank has more of them
            in a step, they come as several passes: see `passes`.
        shuffle: whether each epoch has an order of its own; otherwise it is the dataset's.
        seed: the seed of these orders.
        drop_last: leave out the samples at the end of an epoch that do not fill a batch. By
            default the last batch is a short one.
        optimizer: the optimizer that trains on the data. A batch counts as trained on once the
            optimizer has stepped, and in blocks once the next sync round took place. Without an
            optimizer, a batch counts as soon as the loop has it.
        process_group: the ranks that share a step, if no optimizer of ours says so; all by default.
        loader: what loads the samples: `DataLoader`, or a class that takes the same arguments.
        options: further arguments of the loader, such as `num_workers` and `collate_fn`.
    """

    of_streams: ClassVar[type[Cursor]]  # `StreamCursor`, which is a Cursor
    _dataset: Any
    _num_workers: int
    _drop_last: bool
    _collate_fn: Any

    @explained
    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        *,
        keep: Literal["batch", "micro"] = "batch",
        max_local_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        optimizer: Optimizer | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        loader: Callable[..., Iterable[Any]] = DataLoader,
        **options: Any,
    ) -> None:
        self._join(optimizer, process_group)
        arguments: Arguments = {
            "batch_size": batch_size,
            "keep": keep,
            "max_local_batch_size": max_local_batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
        }
        self._rules = agree_on_rules(dataset, arguments, options, self._ranks)
        self._account = Account() if self._blocks is None else self._blocks.account
        self._number = 0 if self._blocks is None else self._blocks.number
        shards = dataset if isinstance(dataset, DataShards) else None
        self._one_pass = max_local_batch_size is None
        self._plan = LoaderPlan(
            self._rules, self._account, self._number, self._ranks, max_local_batch_size, shards
        )
        # A generator of its own: torch's loader draws from it, and a resumed run must draw from
        # the default one as often as a run that was not interrupted.
        self._generator = None if "generator" in options else torch.Generator()
        options.setdefault("generator", self._generator)
        self._loader = loader(dataset, batch_sampler=self._plan, **options)
        self._dataset = dataset
        self._num_workers = options.get("num_workers", 0)
        self._drop_last = self._rules["drop_last"]
        self._collate_fn = getattr(self._loader, "collate_fn", options.get("collate_fn"))
        self._begin_with(Ledger(len(dataset)))

    def __new__(cls, dataset: object = None, *arguments: object, **options: object) -> Cursor:
        """Make a `Cursor`, or for an iterable without a length a `StreamCursor`."""
        if isinstance(dataset, DataLoader) and not arguments and "batch_size" not in options:
            check_dataset("Cursor", dataset)
        stream = isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized)
        stream = stream and dataset is not None and cls is Cursor
        return super().__new__(cls.of_streams if stream else cls)

    def _join(
        self, optimizer: Optimizer | None, group: torch.distributed.ProcessGroup | None
    ) -> None:
        """Find the ranks, and count their steps."""
        self._blocks = None if optimizer is None else _find_blocks(optimizer)
        ranks = None if optimizer is None else gradient_ranks(optimizer)
        self._ranks: RankGroup = RankGroup.of(group) if ranks is None else ranks
        self._optimizer = optimizer
        if optimizer is not None and self._blocks is None:
            _call_after_step(optimizer, self._commit)
        self._now: Pass | None = None  # the pass that the loop has
        self._mean: WeightedMean | None = None  # of the step under way
        self._mean_due = False  # whether `mean` was not called yet for the present batch
        self._warned = False
        self._iterated = False

    # -- what a loop reads ---------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0 on."""
        return self._account.ledger.epoch

    @property
    def position(self) -> int:
        """How many samples of the epoch count as trained on, on all workers together."""
        return self._account.ledger.committed

    @property
    def batch_size(self) -> int:
        """The samples of a step: of all ranks together, or in blocks of one worker."""
        return self._rules["batch"]

    # Read-only: other code may ask a loader for these, and a change would reach no loader.

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
        if self._now is None:
            return self._plan.passes_of(self.batch_size)
        return len(self._now.counts)

    @property
    def last_pass(self) -> bool:
        """Whether the optimizer steps after the present batch."""
        return self._now is None or self._now.last

    @property
    def samples(self) -> int:
        """How many samples the present batch has; 0 if it is there only to fill a short step."""
        return 0 if self._now is None else self._now.samples

    def __len__(self) -> int:
        """Return how many batches each rank has in a whole epoch, if one worker takes all of it."""
        return len(self._plan)

    def mean(self, loss_sum: Tensor) -> Tensor:
        """Return the present batch's part of the step's mean loss, for `backward()`.

        Call it once for each batch with the sum of its samples' losses. The step's loss is then
        the mean over all its samples, on all ranks and in all passes, even if some batches have
        fewer samples than others, or none. A scaling rule in the optimizer takes the numbers into
        account. Do not divide the loss by anything else. This is no collective.
        """
        now = self._now
        begun = now is not None and (now.index == 0 or self._mean is not None)
        if now is None or not self._mean_due or not begun:
            raise RuntimeError(
                "mean() belongs to a batch: call it once for each, inside `for batch in cursor:`."
            )
        self._mean_due = False
        if now.index == 0:
            self._mean = WeightedMean.of_known(
                now.counts,
                self._optimizer,
                ranks=self._ranks.size,
                total=now.step_samples,
                not_empty=now.not_empty,
            )
        assert self._mean is not None
        return self._mean(loss_sum)

    # -- the loop ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the rest of the epoch."""
        with self._iteration():
            for batch in self._fetch():
                self.begin_batch()
                yield batch
                self._check_weighted()
            self._end_epoch()

    @contextmanager
    def _iteration(self) -> Iterator[None]:
        """Open one loop over the epoch, from the position that all ranks have; one at a time."""
        if self._iterated:
            raise RuntimeError("this Cursor is iterated already. Make another for another loop.")
        # What an earlier loop was given, but has not trained on, comes again.
        self._account.forget_step()
        if self._blocks is None:
            agree(self._ranks, {"position": self._account.ledger.state()}, ADVICE)
        self._iterated = True
        self._plan.begin()
        try:
            yield
        finally:
            self._iterated = False
            self._now = None
            self._mean = None
            self._plan.begin()

    @contextmanager
    def ahead(self) -> Iterator[Iterator[Any]]:
        """Give the batches to a caller that keeps some ready for its loop, as `Ramp` does.

        The caller calls `begin_batch` for each batch when the loop gets it.
        """
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
            if self._plan.ran_dry:
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
        """Count a batch as the loop gets it (more may be loaded already), and return its pass."""
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
        """Commit what the loop was given: all ranks have taken a step."""
        account = self._account
        account.step()
        if account.taken:
            account.commit({self._number: account.taken}, self._number)
            account.due = False  # nobody else holds anything
            self._plan.keep()

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

    def _end_epoch(self) -> None:
        """Begin the next epoch, as a loop has trained on all that was left of this one."""
        if self._blocks is None:
            self._account.next_epoch()
            self._hand_out_all()
        else:
            self._blocks.next_epoch()

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> CursorState:
        """Return the position, in plain numbers, for any number of ranks."""
        return {**describe_order(self._rules), **self._account.ledger.saved()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue after the last sample that was trained on. Load the same on every rank.

        A worker that has just joined a crew keeps the crew's position.
        """
        if self._iterated:
            raise RuntimeError(
                "this Cursor is iterated, and cannot go to another position: load it before."
            )
        check_state(state_dict, self._rules)
        ledger = Ledger.of_saved(self._rules["samples"], state_dict)
        self._begin_with(ledger, load=True)

    def _begin_with(self, ledger: Ledger, *, load: bool = False) -> None:
        """Go to the position of a ledger: that of a new cursor or, with `load`, a saved one."""
        if self._blocks is None:
            self._account.begin(self._rules, ledger)
            self._hand_out_all()
        elif load:
            self._blocks.load(self._rules, ledger)
        else:
            self._blocks.begin(self._rules, ledger)

    def _hand_out_all(self) -> None:
        """Hand what is left of the epoch to all ranks together, which are one worker."""
        self._account.hand_out({self._number: self._rules["samples"]})

    def __repr__(self) -> str:
        return (
            f"Cursor(samples={self._rules['samples']}, batch_size={self.batch_size}, "
            f"epoch={self.epoch}, position={self.position})"
        )


def _find_blocks(optimizer: Optimizer) -> CursorBlocks | None:
    """Return what a cursor asks of the blocks around an optimizer; None if there are none."""
    for layer in unwrap(optimizer, every_layer=True):
        # On the class: wrappers forward attributes that they do not have to what they wrap.
        if hasattr(type(layer), "block_samples"):
            rounds: CursorBlocks | None = layer.block_samples()  # type: ignore[attr-defined]
            return rounds
    return None


def _call_after_step(
    optimizer: Optimizer, call: Callable[[], None]
) -> weakref.finalize[[], Cursor]:
    """Call a method of a cursor after each step of the optimizer, as long as the cursor lives."""
    # Weak: an optimizer must not keep a cursor, its loader and its processes alive.
    method = weakref.WeakMethod(call)

    def after_step(*_: object) -> None:
        if (alive := method()) is not None:
            alive()

    # The innermost optimizer: whatever is wrapped around it calls its `step`.
    handle = unwrap(optimizer, every_layer=True)[-1].register_step_post_hook(after_step)
    return weakref.finalize(call.__self__, handle.remove)  # type: ignore[attr-defined]
