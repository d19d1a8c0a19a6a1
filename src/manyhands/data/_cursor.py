"""`Cursor`: a loader whose position in an epoch belongs to the run, and not to a rank.

    _hand_out   what this worker holds of the epoch, when that has changed
    _plan       steps, this rank's passes of each, and their samples: what torch's loader asks for
    _fetched    batches from torch's loader, which may be many passes ahead of the loop
    _begin      a batch is handed to the loop
    the step    counts what the loop was given; what was only fetched is not counted

There are two kinds of run:

    in step     all ranks take each step together (DDP, ZeRO, FSDP). They are one worker, which
                commits after every step. All ranks know all of it, so nothing is sent
    in blocks   each worker of `Blocks` takes steps of its own, and all commit in a sync round. What
                each one took travels in the note of that round (`blocks/_samples.py`)
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from manyhands._core.agreement import agree
from manyhands._core.ranks import RankGroup
from manyhands._core.wrappers import gradient_ranks, unwrap
from manyhands.data._account import Account
from manyhands.data._ledger import Ledger
from manyhands.data._order import Order
from manyhands.data._passes import Pass, divide_step, number_of_passes
from manyhands.data._shards import DataShards, ShardOrder
from manyhands.data._spans import Spans, count, take, union
from manyhands.errors import RanksDisagree
from manyhands.scaling._weighted_mean import WeightedMean

FORMAT = 1
MAPPED = 4096  # positions that are turned into samples together, if there are as many to plan
ADVICE = "Make the same Cursor on every rank, and load the same state on all of them."
ORDER = ("samples", "shards", "seed", "shuffle")  # the rules that a position refers to
OWN_OPTIONS = ("batch_sampler", "sampler")


class SampleRounds(Protocol):
    """What blocks offer to a cursor (`blocks/_samples.py`)."""

    @property
    def account(self) -> Account:
        """This worker's account."""

    @property
    def number(self) -> int:
        """This worker's number."""

    def begin(self, rules: Mapping[str, Any], ledger: Ledger) -> None:
        """Begin with this ledger, or go on with that of the members that are here already."""

    def load(self, rules: Mapping[str, Any], ledger: Ledger) -> None:
        """Go on with a saved ledger."""

    def next_epoch(self) -> None:
        """Begin the next epoch, on all workers after as many steps."""

    def synchronize(self) -> None:
        """Hold a sync round with all other workers, which call this after as many steps."""


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
    `mh.save(folder, model=model, optimizer=optimizer, cursor=cursor)`. Loaded in mid-epoch, on any
    number of ranks, it goes on behind the last sample that was trained on. A loop that was left
    early goes on there, too.

    Each step's samples are known before they are divided among the ranks. So with `keep="batch"`
    the sequence of batches does not depend on the number of ranks. Where a batch does not divide
    evenly, the ranks' parts differ by one sample, and `mean` gives each its right weight.

    Args:
        dataset: a dataset with a length, whose samples are found by index.
        batch_size: the samples of a step, see `keep`.
        keep: "batch": `batch_size` is that of all ranks together, however many there are. "micro":
            `batch_size` is that of one rank, and the batch follows the ranks.
        max_local_batch_size: the most samples in one pass on one rank. A larger part of a step
            comes as several passes, see `passes`.
        shuffle: whether each epoch has an order of its own; otherwise it is the dataset's.
        seed: of the order.
        drop_last: leave out the samples at the end of an epoch that do not fill a batch. By
            default the last batch is a short one.
        optimizer: the optimizer that trains on the data. A batch counts once it has stepped, and
            in blocks once the sync round took place. Without it a batch counts as soon as the loop
            has it.
        process_group: the ranks that share a step, if no optimizer of ours says so; all by default.
        loader: what loads the samples: `DataLoader`, or a class that takes the same arguments.
        options: further arguments of the loader, such as `num_workers` and `collate_fn`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        keep: Literal["batch", "micro"] = "batch",
        max_local_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        optimizer: Optimizer | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        loader: Callable[..., Any] = DataLoader,
        **options: Any,
    ) -> None:
        self._blocks = None if optimizer is None else _blocks_in(optimizer)
        ranks = None if optimizer is None else gradient_ranks(optimizer)
        self._ranks: RankGroup = RankGroup.of(process_group) if ranks is None else ranks
        arguments = {
            "batch_size": batch_size,
            "keep": keep,
            "max_local_batch_size": max_local_batch_size,
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
        }
        mistake = _mistake(dataset, arguments, options, self._ranks.size)
        samples = len(dataset) if mistake is None else 0
        shards = _shards_of(dataset)
        facts = {"mistake": str(mistake), "samples": samples, "shards": shards}
        facts |= {name: str(value) for name, value in arguments.items()}
        try:  # before anything is raised: the other ranks would wait for this one
            agree(self._ranks, {"data": facts}, ADVICE)
        except RanksDisagree as disagreement:
            raise mistake or disagreement from None
        if mistake is not None:
            raise mistake
        self._samples, self._seed, self._shuffle = samples, seed, bool(shuffle)
        self._shards = dataset if isinstance(dataset, DataShards) else None
        self._most = max_local_batch_size
        ahead = options.get("num_workers", 0) * (options.get("prefetch_factor") or 2)
        self._account = Account() if self._blocks is None else self._blocks.account
        self._number = 0 if self._blocks is None else self._blocks.number
        self._rules = {
            "samples": samples,
            "shards": shards,
            "seed": seed,
            "shuffle": self._shuffle,
            "drop_last": bool(drop_last),
            "batch": batch_size if keep == "batch" else batch_size * self._ranks.size,
            "ahead": ahead,
        }
        self._optimizer, self._hook = optimizer, None
        if optimizer is not None and self._blocks is None:
            self._hook = _call_after_step(optimizer, self._commit)
        self._seen = -1  # the account's `changes` that the plan below follows from
        self._planned_epoch = -1
        self._rest: Spans = ()  # what this worker holds and has not planned
        self._steps: int | None = None  # that are left to plan; None: as many as fill a batch
        # On their way through torch's loader: passes, and the positions of each step.
        self._planned: deque[Pass] = deque()
        self._on_their_way: deque[Spans] = deque()
        self._now: Pass | None = None  # the pass that the loop has
        self._mean: WeightedMean | None = None  # of the step under way
        self._mean_due = False  # not called yet for the present batch
        self._warned = self._iterated = False
        # Of its own: torch's loader draws from it, and a resumed run must draw from the default
        # one as often as a run that was not interrupted.
        self._generator = None if "generator" in options else torch.Generator()
        options.setdefault("generator", self._generator)
        self._loader = loader(dataset, batch_sampler=_Plan(self), **options)
        self._begin_with(Ledger(samples))

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
        return int(self._rules["batch"])

    @property
    def passes(self) -> int:
        """The passes of the step under way, which are equally many on every rank."""
        if self._now is None:
            return number_of_passes(self.batch_size, self._ranks.size, self._most)
        return len(self._now.counts)

    @property
    def last_pass(self) -> bool:
        """Whether the optimizer steps after the present batch."""
        return self._now is None or self._now.last

    @property
    def samples(self) -> int:
        """How many samples the present batch counts for: 0 if it only fills up a short step."""
        return 0 if self._now is None else self._now.samples

    def __len__(self) -> int:
        """Return how many batches each rank has in a whole epoch, if it is alone or in step."""
        whole, rest = divmod(self._samples, self.batch_size)
        batches = whole * number_of_passes(self.batch_size, self._ranks.size, self._most)
        if rest and not self._rules["drop_last"]:
            batches += number_of_passes(rest, self._ranks.size, self._most)
        return batches

    def mean(self, loss_sum: Tensor) -> Tensor:
        """Return the present batch's part of the step's mean loss, for `backward()`.

        Call it once for each batch with the sum of its samples' losses. The step's loss is then
        the mean over all its samples, on all ranks and in all passes, also where some batches have
        fewer samples than others, or none. A rule in the optimizer learns the numbers. Do not
        divide the loss by anything else. No collective takes place.
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
        with self._being_iterated():
            for batch in self._fetched():
                self._begin()
                yield batch
                self._check_weighted()
            self._end_epoch()

    @contextmanager
    def _being_iterated(self) -> Iterator[None]:
        if self._iterated:
            raise RuntimeError(
                "this Cursor is iterated already: one loop over it at a time. For another loop "
                "over the same data make another Cursor."
            )
        # What a loop that was left early had fetched, but not trained on, comes again.
        self._account.forget_step()
        if self._blocks is None:
            agree(self._ranks, {"position": self._account.ledger.all_of_it()}, ADVICE)
        self._iterated, self._seen = True, -1
        try:
            yield
        finally:
            self._iterated, self._now, self._mean = False, None, None
            self._planned.clear()
            self._on_their_way.clear()

    @contextmanager
    def _ahead(self) -> Iterator[Iterator[Any]]:
        """Give batches to a caller that fetches more than its loop has, as `Ramp` does.

        It calls `_begin` for each batch that the loop gets.
        """
        if self._blocks is not None:
            raise ValueError(
                "a Ramp changes how many samples a step takes, and in blocks each worker's samples "
                "of a block are handed out before it begins. Iterate the Cursor itself, without the"
                " Ramp; or give the Ramp a DataLoader of this worker's own samples, and count steps"
                " instead of epochs."
            )
        if self._most is not None:
            raise ValueError(
                "a Ramp decides how many batches of a Cursor are the passes of a step, and so does "
                "max_local_batch_size. Make the Cursor without max_local_batch_size: a batch of it "
                "is then one micro-batch of all ranks together."
            )
        with self._being_iterated():
            yield self._fetched()
            self._end_epoch()

    def _fetched(self) -> Iterator[Any]:
        """Yield this rank's batches as they are loaded; `_begin` counts what the loop gets."""
        batches: Iterator[Any] | None = None
        while True:
            if self._restart_due():
                batches = None  # what it has loaded is another worker's now
            if batches is None:
                batches = self._load()
            batch = next(batches, self)  # (the cursor itself, which is no batch, at the end)
            if batch is not self:
                yield batch
                continue
            if self._blocks is None or self._account.ledger.left == 0:
                return
            if self._steps or (self._steps is None and count(self._rest) >= self.batch_size):
                batches = None  # more was handed out since the plan had ended
                continue
            if self._steps is None:
                raise RuntimeError(
                    "the samples that were handed out for a block are used up: this loop takes "
                    "more than one batch for a step. Give the samples of a whole step as "
                    "batch_size, and the most that fit into one pass as max_local_batch_size."
                )
            # All workers come here after equally many steps. What a dead one held comes back.
            changes = self._account.changes
            self._blocks.synchronize()
            if self._account.changes == changes:
                return  # with drop_last: what is left does not fill a batch
            batches = None

    def _load(self) -> Iterator[Any]:
        if self._generator is not None:
            ranks = (self._number, self._ranks.rank)
            text = f"{self._seed} {self.epoch} {self.position} {ranks}"
            self._generator.manual_seed(zlib.crc32(text.encode()))
        return iter(self._loader)

    def _begin(self) -> Pass:
        """Hand one batch to the loop."""
        self._now = now = self._planned.popleft()
        self._mean_due = True
        if now.index == 0:
            self._mean = None
        if now.last:
            self._on_their_way.popleft()
            self._account.handed_out(now.step_samples)
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
            self._seen = account.changes

    def _check_weighted(self) -> None:
        now = self._now
        if self._mean_due and now is not None and now.uneven and not self._warned:
            self._warned = True
            warnings.warn(
                f"a step of {now.step_samples} samples is divided unevenly (a pass of this rank "
                f"has {now.samples}), and the mean of the losses is not that over samples. Write "
                "cursor.mean(sum of the losses).backward(), or choose a batch_size that all ranks "
                "divide evenly, and drop_last=True.",
                UserWarning,
                stacklevel=3,
            )

    def _end_epoch(self) -> None:
        if self._blocks is None:
            self._account.next_epoch()
            self._hold_everything()
        else:
            self._blocks.next_epoch()

    # -- the plan ------------------------------------------------------------------------------

    def _hold_everything(self) -> None:
        """Hand what is left to all ranks together, which are one worker."""
        self._account.hand_out({self._number: self._samples})

    def _restart_due(self) -> bool:
        """Look at what this worker holds, if that has changed; return whether to load anew."""
        account = self._account
        if account.changes == self._seen:
            return False
        self._seen = account.changes
        same_epoch, self._planned_epoch = self._planned_epoch == self.epoch, self.epoch
        spans, self._steps = account.to_plan(self._number)
        planned = union(span for step in self._on_their_way for span in step)
        still, rest = take(spans, count(planned))
        fits = same_epoch and union(still) == planned
        if self._steps is not None:
            fits = fits and self._steps >= len(self._on_their_way)
        if fits:
            self._rest = rest
            if self._steps is not None:
                self._steps -= len(self._on_their_way)
            return False
        self._rest = spans
        self._planned.clear()
        self._on_their_way.clear()
        return True

    def _plan(self) -> Iterator[list[int]]:
        """Yield the samples of each of this rank's batches."""
        order: Order | ShardOrder = Order(self._samples, self._seed, self.epoch, self._shuffle)
        if self._shards is not None:
            order = self._shards.order(self._seed, self.epoch, self._shuffle)
        while group := self._plan_steps():
            self._planned.extend(each for each, _ in group)
            indices = order.indices(tuple(span for _, spans in group for span in spans))
            start = 0
            for each, _ in group:
                stop = start + max(1, each.samples)
                yield indices[start:stop]
                start = stop

    def _plan_steps(self) -> list[tuple[Pass, Spans]]:
        """Return the passes of the next steps, and the positions of each."""
        group: list[tuple[Pass, Spans]] = []
        positions = 0
        while positions < MAPPED:
            if self._steps is None:
                if count(self._rest) < self.batch_size:
                    break
            elif self._steps == 0:
                break
            else:
                self._steps -= 1
            step, self._rest = take(self._rest, self.batch_size)
            self._on_their_way.append(step)
            filler = ((step[0][0], step[0][0] + 1),) if step else ((0, 1),)
            ranks, in_turns = self._ranks, self._shards is not None
            passes = divide_step(step, ranks.rank, ranks.size, self._most, in_turns=in_turns)
            for each, spans in passes:
                group.append((each, spans or filler))
                positions += max(1, each.samples)
        return group

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in plain numbers, for any number of ranks."""
        return {
            "version": FORMAT,
            **{name: self._rules[name] for name in ORDER},
            **self._account.ledger.saved(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue behind the last sample that was trained on. Load the same on every rank."""
        if state_dict.get("version") != FORMAT:
            raise ValueError(
                f"the version of this Cursor's state must be {FORMAT}, got "
                f"{state_dict.get('version')!r}. Load it with the manyhands that saved it."
            )
        if self._iterated:
            raise RuntimeError(
                "this Cursor is iterated, and cannot go to another position. Load it before the "
                "loop, or leave the loop first."
            )
        for name in ORDER:
            saved, here = state_dict[name], self._rules[name]
            if saved != here:
                advice = {
                    "samples": "Give it the dataset that the run was begun with",
                    "shards": "Give it the shards and lanes that the run was begun with",
                }.get(name, f"Make the Cursor with {name}={saved!r}")
                raise ValueError(
                    f"the saved position is one in an order with {name}={saved!r}, and here it is "
                    f"{here!r}. {advice}, or leave the cursor out of the load and begin the epoch "
                    "anew."
                )
        self._begin_with(Ledger.of_saved(self._samples, state_dict), load=True)

    def _begin_with(self, ledger: Ledger, *, load: bool = False) -> None:
        if self._blocks is None:
            self._account.begin(self._rules, ledger)
            self._hold_everything()
        elif load:
            self._blocks.load(self._rules, ledger)
        else:
            self._blocks.begin(self._rules, ledger)

    def __repr__(self) -> str:
        return (
            f"Cursor(samples={self._samples}, batch_size={self.batch_size}, epoch={self.epoch}, "
            f"position={self.position})"
        )


class _Plan:
    """What torch's loader asks for the samples of each batch."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor

    def __iter__(self) -> Iterator[list[int]]:
        return self._cursor._plan()

    def __len__(self) -> int:
        return len(self._cursor)


def _shards_of(dataset: object) -> int | None:
    """Return a number that says in which shards the samples are; None: in none."""
    return dataset.checksum if isinstance(dataset, DataShards) else None


def _blocks_in(optimizer: Optimizer) -> SampleRounds | None:
    """Return what the blocks around an optimizer offer; None without blocks, or other workers."""
    for layer in unwrap(optimizer, every_layer=True):
        # on the class, as wrappers forward what they do not have
        if hasattr(type(layer), "_block_samples"):
            return layer._block_samples  # type: ignore[attr-defined]
    return None


def _call_after_step(optimizer: Optimizer, call: Callable[[], None]) -> Any:
    """Call a bound method after each step of the optimizer, as long as its object lives."""
    method = weakref.WeakMethod(call)

    def after_step(*_: object) -> None:
        if (alive := method()) is not None:
            alive()

    # the innermost: those around it step it
    handle = unwrap(optimizer, every_layer=True)[-1].register_step_post_hook(after_step)
    return weakref.finalize(call.__self__, handle.remove)  # type: ignore[attr-defined]


def _mistake(
    dataset: Any, arguments: Mapping[str, Any], options: Mapping[str, Any], ranks: int
) -> ValueError | TypeError | None:
    """Return what is wrong with a cursor's arguments, if anything is."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return TypeError(
            "Cursor needs a dataset with a length, whose samples are found by index, got "
            f"{type(dataset).__name__}. A stream that is cut in shards of known sizes can be given "
            "as DataShards."
        )
    if len(dataset) == 0:
        return ValueError("Cursor needs a dataset with samples, and got one of length 0.")
    for name in OWN_OPTIONS:
        if options.get(name) is not None:
            return ValueError(f"{name} must be left out: a Cursor orders the samples itself.")
    if options.get("in_order") is False:
        return ValueError(
            "in_order=False gives batches in an order that depends on their speed, so that nobody "
            "knows which were trained on. Leave it out."
        )
    if arguments["keep"] not in ("batch", "micro"):
        return ValueError(f'keep must be "batch" or "micro", got {arguments["keep"]!r}.')
    sizes: Sequence[tuple[str, Any, int]] = [
        ("batch_size", arguments["batch_size"], 1),
        ("max_local_batch_size", arguments["max_local_batch_size"] or 1, 1),
        ("seed", arguments["seed"], 0),
    ]
    for name, value, least in sizes:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    if arguments["keep"] == "batch" and arguments["batch_size"] < ranks:
        return ValueError(
            f"batch_size={arguments['batch_size']} is that of a whole step, and there are {ranks} "
            'ranks. Give each rank a sample at least, or write keep="micro" to give it for one '
            "rank."
        )
    return None
