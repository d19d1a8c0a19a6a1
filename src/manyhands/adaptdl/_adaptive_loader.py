"""Load a batch that scales itself, and count the epochs that remain, as adaptdl does.

adaptdl's loop calls `optimizer.step()` and `zero_grad()` after each micro-batch. Between the passes
of one step both do nothing, and the model accumulates. So the loop need not know how large a batch
is:

    loader      yields micro-batches, and says whether more of the step follow (`accumulates`)
    model       `AdaptiveDataParallel` asks the loader in `forward`, and attaches its rule the
                first time
    ramp        is made then, around the rule, and decides how large the next steps are

Names, and the order of arguments, are adaptdl's. adaptdl's scheduler and its cluster are not
needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import StateDict

from manyhands._arguments import whole
from manyhands._optimizers.state_parts import SavedEntries, SavedState
from manyhands.adaptdl._data_parallel import AdaptiveDataParallel, ScalarWriter, write_scalars
from manyhands.ramp._micro_batches import StepLoader, StepSize, step_size
from manyhands.ramp._ramp import Ramp, SavedRamp


class AdaptiveDataLoader(StepLoader):
    """A `DataLoader` whose micro-batches grow, for `Ramp` or in adaptdl's own loop.

    With a ramp, which takes each step's micro-batches from it:

    >>> import torch, manyhands as mh
    >>> from manyhands.adaptdl import AdaptiveDataLoader
    >>> data = torch.utils.data.TensorDataset(torch.randn(512, 4), torch.randn(512, 1))
    >>> loader = AdaptiveDataLoader(data, batch_size=8, shuffle=True, max_local_batch_size=32)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> ramp = mh.Ramp(optimizer, max_scale=16)
    >>> for micro_batches in ramp.over(loader):
    ...     for inputs, targets in micro_batches:
    ...         loss = torch.nn.functional.mse_loss(model(inputs), targets)
    ...         (loss / len(micro_batches)).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    adaptdl's loop, with `AdaptiveDataParallel`, works too: see `autoscale_batch_size`.

    Every rank has an equally large part of each step. The samples come in the order of a `Cursor`
    with this `seed`, whatever the number of ranks and the size of the steps. If a loop is
    left early, the next loop over the loader continues after the last step's samples.

    Args:
        dataset: a dataset with a length, whose samples are found by index.
        batch_size: the small batch, on all ranks together: the batch that the learning rate was
            tuned for. Each rank has an equal part of it, rounded up.
        shuffle: whether the samples come in another order each time.
        max_local_batch_size: the samples that fit into one backward pass on one rank. Larger
            batches come as several passes. By default a pass stays at its part of the small batch.
        seed: the seed of the samples' order.
        process_group: the ranks that share the data; by default all.
        options: further arguments of `DataLoader`, except `sampler` and `batch_sampler`. With
            `drop_last=True` samples at the end that do not fill a small batch are left out.
            Otherwise the last step takes the missing ones from the beginning of the data.
    """

    # The arguments of `autoscale_batch_size`, in units; without it the batch does not scale.
    _max_scale: float | None = None
    _least_per_pass = 1
    _accumulate = False
    _ramp: Ramp | None = None
    _module: AdaptiveDataParallel | None = None
    _saved_ramp: SavedRamp | None = None  # of a run that continues, until there is a ramp
    _more_follow = False
    _iterated = False
    _end: float | None = None  # the progress at which the present epoch ends

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch of a training loop with `AdaptiveDataParallel` grow as far as it pays.

        A loop over the loader then ends when the run has made as much progress as one epoch at the
        small batch. So it may go through the data more than once.

        >>> import torch, manyhands.adaptdl as adl
        >>> data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
        >>> loader = adl.AdaptiveDataLoader(data, batch_size=8, shuffle=True)
        >>> loader.autoscale_batch_size(64, local_bsz_bounds=(8, 32), gradient_accumulation=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = adl.AdaptiveDataParallel(model, optimizer)
        >>> for epoch in adl.remaining_epochs_until(2):
        ...     for inputs, targets in loader:
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(inputs), targets).backward()
        ...         optimizer.step()

        Args:
            max_batch_size: the largest batch, on all ranks together, in samples.
            local_bsz_bounds: the fewest and the most samples of one pass on one rank; either may
                be None.
            gradient_accumulation: whether a step may have several passes.
        """
        max_batch_size = whole(
            "max_batch_size",
            max_batch_size,
            self.samples_per_unit,
            f"The small batch is batch_size={self._small_batch}, divided among "
            f"{self._ranks.size} rank(s) and rounded up.",
        )
        low, high = local_bsz_bounds or (None, None)
        low = 1 if low is None else whole("local_bsz_bounds", low, 1)
        if low > max(self._small_batch, self._unit):
            raise ValueError(
                f"local_bsz_bounds={local_bsz_bounds}: the first must be at most the batch_size, "
                f"which is {self._small_batch}."
            )
        most_units = max_batch_size // self.samples_per_unit
        most_per_pass = most_units if high is None else min(most_units, self._units_within(high))
        self._max_scale = most_per_pass * self.scale_per_unit
        if gradient_accumulation:
            self._max_scale = most_units * self.scale_per_unit
        self._least_per_pass = min(-(-low // self._unit), most_per_pass)
        self._accumulate = gradient_accumulation
        self._most_per_pass = most_per_pass

    # -- what adaptdl's loop reads -------------------------------------------------------------

    @property
    def current_local_bsz(self) -> int:
        """adaptdl's name for the samples of one micro-batch on each rank, in the present step."""
        return self.size.per_pass * self._unit

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a step, without the last one, which the optimizer's step follows."""
        return self.size.passes - 1

    @property
    def current_batch_size(self) -> int:
        """Samples of the whole step under way, on all ranks."""
        return self.size.units * self.samples_per_unit

    @property
    def training(self) -> bool:
        """Whether the batch scales itself, as the loader of the training data does."""
        return self._max_scale is not None

    def to_tensorboard(self, writer: ScalarWriter, global_step: int, tag_prefix: str = "") -> None:
        """Write the sizes to a TensorBoard `SummaryWriter`."""
        values = {
            "Total_Batch_Size": self.current_batch_size,
            "Local_Batch_Size": self.current_local_bsz,
            "Accumulation_Steps": self.accumulation_steps,
        }
        write_scalars(writer, values, global_step, tag_prefix)

    # -- iteration -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield micro-batches of the whole data once, or for one epoch's worth of progress."""
        with self._being_iterated():
            while True:
                for step in self._ordered_steps(self._plan_step):
                    if self._ramp is not None:
                        self._ramp._begin_step(self.size)
                    for index, batch in enumerate(step, start=1):
                        self._more_follow = index < self.size.passes
                        yield batch
                    if self._is_over():
                        return
                if self._ramp is None:
                    return  # the data was gone through once, and nothing scales the batch

    @contextmanager
    def _being_iterated(self) -> Iterator[None]:
        """Open one loop over the data, in which the model asks this loader about each pass."""
        if self._iterated:
            raise RuntimeError(
                "this loader is iterated already: one loop over it at a time. For another loop "
                "over the same data make another AdaptiveDataLoader."
            )
        # The model asks this loader in `forward`. A loader that is iterated inside the loop, as for
        # an evaluation, takes its place for that time.
        outer = AdaptiveDataParallel._loader
        self._iterated = True
        AdaptiveDataParallel._loader = self
        try:
            yield
        finally:
            AdaptiveDataParallel._loader = outer
            self._iterated = False
            self._more_follow = False
            if self._module is not None:
                self._module.set_accumulating(None)
            if self._is_over():
                self._end = None

    def size_of(self, units: int) -> StepSize:
        """Return the passes of a step of this many units, within `local_bsz_bounds`."""
        units = max(units, self._least_per_pass)
        if self._max_scale is None or self._accumulate:
            return super().size_of(units)
        return StepSize(1, step_size(units, self._most_per_pass).per_pass)

    def _plan_step(self) -> StepSize:
        """Return the size of the next step: one unit until there is a rule that measures."""
        if self._max_scale is None:
            return StepSize(1, 1)
        return self.size_of(1 if self._ramp is None else self._ramp.units)

    def _is_over(self) -> bool:
        """Return whether the epoch's progress is reached."""
        if self._ramp is None or self._end is None:
            return False
        # the tolerance covers rounding in a sum of many gains
        return self._ramp.optimizer.progress >= self._end - 1e-9

    # -- what the model asks -------------------------------------------------------------------

    @property
    def accumulates(self) -> bool:
        """Whether more micro-batches of the same step follow."""
        return self._more_follow

    def attach(self, module: AdaptiveDataParallel) -> None:
        """Before each forward of the module: take over its rule's batch, the first time."""
        if self._module is module:
            if self._ramp is not None and self._end is None:
                self._begin_epoch(module)
            return
        self._module = module
        rule = module.scaling_rule
        if self._max_scale is None:
            # the batch stays at one unit
            rule.port.begin_step(1, scale_per_pass=self.scale_per_unit)
            return
        self._ramp = Ramp(rule, self._max_scale, loader=self)
        if self._saved_ramp is not None:
            self._ramp._take(self._saved_ramp)
            self._saved_ramp = None
        self._ramp._begin_step(self.size)
        if self._end is None:
            self._begin_epoch(module)

    def _begin_epoch(self, module: AdaptiveDataParallel) -> None:
        self._end = module.scaling_rule.progress + self._samples / self._small_batch

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the position in the data, the number of finished epochs, and the ramp's state.

        Take it between two steps.
        """
        return {
            **super().state_dict(),
            "finished_epochs": _epochs.finished,
            "end": self._end,
            "ramp": None if self._ramp is None else self._ramp.state_dict(),
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Continue after the last step's samples, on any number of ranks.

        The rest of the data comes first, in the order that it had. `remaining_epochs_until` goes on
        with the epoch that was not finished.
        """
        ledger = self._parse_position(state_dict)
        saved = SavedEntries(state_dict, "an AdaptiveDataLoader")
        finished = saved.whole("finished_epochs")
        end = None if saved["end"] is None else saved.real("end")
        ramp = None if saved["ramp"] is None else SavedRamp.parse(saved["ramp"])
        self._ledger = ledger
        _epochs.finished = finished
        self._end = end
        if self._ramp is None:
            self._saved_ramp = ramp
        elif ramp is not None:
            self._ramp._take(ramp)


class _Epochs:
    """The number of epochs that this process has finished."""

    finished = 0
    running = False


_epochs = _Epochs()


def remaining_epochs_until(epoch: int) -> Iterator[int]:
    """Yield the numbers of the epochs that are left, from 0 or from where a saved run stopped.

    After an `AdaptiveDataLoader`'s `load_state_dict`, the epochs that the saved run had finished
    are skipped. A second loop goes on where the first one ended.

    >>> from manyhands.adaptdl import remaining_epochs_until
    >>> epochs = remaining_epochs_until(0)
    >>> list(epochs)
    []

    Args:
        epoch: the number of epochs at which the run ends.
    """
    if _epochs.running:
        raise RuntimeError(
            "a loop over remaining_epochs_until() is running already: end it first. Epochs are "
            "counted for the whole process."
        )
    while _epochs.finished < epoch:
        _epochs.running = True
        try:
            yield _epochs.finished
        finally:
            # also if the loop is left by break or an exception, as in adaptdl
            _epochs.finished += 1
            _epochs.running = False
