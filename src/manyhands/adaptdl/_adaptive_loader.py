"""Load batches of adaptive size, and count epochs, with adaptdl's names and arguments.

adaptdl's loop calls `optimizer.step()` and `zero_grad()` after every micro-batch. The rule ignores
both calls between the passes of a step:

    loader      yields micro-batches; `accumulates` is True if the step continues
    model       `AdaptiveDataParallel.forward` reads `accumulates`, and first attaches the rule
    ramp        is created with the attached rule, and sets the size of the next steps
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import StateDict

from manyhands._arguments import whole
from manyhands._optimizers.state_parts import SavedEntries, SavedState
from manyhands.adaptdl._data_parallel import AdaptiveDataParallel, ScalarWriter, write_scalars
from manyhands.ramp._micro_batches import StepLoader, StepSize, step_size
from manyhands.ramp._ramp import Ramp, SavedRamp


class AdaptiveDataLoader(StepLoader):
    """A `DataLoader` with adaptive micro-batches, for `Ramp` or adaptdl's loop.

    Example with `Ramp`:

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

    For adaptdl's loop with `AdaptiveDataParallel`, see `autoscale_batch_size`.

    All ranks have equal parts of each step. A `Cursor` with this `seed` has the same order of
    samples, for any number of ranks and any size of steps. After an interrupted loop, the next loop
    continues after the last step.

    Args:
        dataset: a dataset with a length and with samples by index.
        batch_size: the small batch of all ranks, for which the learning rate was tuned. A rank's
            part is rounded up.
        shuffle: whether to reorder the samples in each epoch.
        max_local_batch_size: the largest backward pass on a rank, in samples. Default: a rank's
            part of the small batch.
        seed: the seed of the order.
        process_group: the ranks that share the data; default: all.
        options: further arguments of `DataLoader`, except `sampler` and `batch_sampler`.
            `drop_last=True` drops an incomplete small batch at the end. Otherwise samples from the
            start of the data complete the last step.
    """

    # Arguments of `autoscale_batch_size`, in units. None: the size is fixed.
    _max_scale: float | None = None
    _least_per_pass = 1
    _accumulate = False
    _ramp: Ramp | None = None
    _module: AdaptiveDataParallel | None = None
    _saved_ramp: SavedRamp | None = None  # loaded before the ramp exists
    _more_follow = False
    _iterated = False
    _end: float | None = None  # the progress at the end of this epoch

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Adapt the batch size of a training loop with `AdaptiveDataParallel`.

        A loop over the loader then ends when the progress equals an epoch of small batches. It may
        read the data repeatedly.

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
            max_batch_size: the largest batch of all ranks, in samples.
            local_bsz_bounds: minimum and maximum samples of a pass on a rank, or None.
            gradient_accumulation: whether a step may have more than one pass.
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
                f"the first of local_bsz_bounds must not exceed batch_size={self._small_batch}, "
                f"got {local_bsz_bounds}."
            )
        most_units = max_batch_size // self.samples_per_unit
        most_per_pass = most_units if high is None else min(most_units, self._units_within(high))
        self._max_scale = most_per_pass * self.scale_per_unit
        if gradient_accumulation:
            self._max_scale = most_units * self.scale_per_unit
        self._least_per_pass = min(-(-low // self._unit), most_per_pass)
        self._accumulate = gradient_accumulation
        self._most_per_pass = most_per_pass

    # -- adaptdl's properties ------------------------------------------------------------------

    @property
    def current_local_bsz(self) -> int:
        """Samples of a micro-batch on a rank, in the current step."""
        return self.size.per_pass * self._unit

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a step, excluding the last."""
        return self.size.passes - 1

    @property
    def current_batch_size(self) -> int:
        """Samples of the current step on all ranks."""
        return self.size.units * self.samples_per_unit

    @property
    def training(self) -> bool:
        """Whether the batch size adapts, which applies to training data only."""
        return self._max_scale is not None

    def to_tensorboard(self, writer: ScalarWriter, global_step: int, tag_prefix: str = "") -> None:
        """Write the batch sizes to a TensorBoard `SummaryWriter`."""
        values = {
            "Total_Batch_Size": self.current_batch_size,
            "Local_Batch_Size": self.current_local_bsz,
            "Accumulation_Steps": self.accumulation_steps,
        }
        write_scalars(writer, values, global_step, tag_prefix)

    # -- iteration -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield micro-batches of the data, once or until the progress equals an epoch."""
        if self._iterated:
            raise RuntimeError(
                "this AdaptiveDataLoader supports one loop at a time. Create a second "
                "AdaptiveDataLoader for a nested loop over the data."
            )
        # The model reads this loader in `forward`. A loader in a nested loop, for example in an
        # evaluation, replaces it temporarily.
        outer = AdaptiveDataParallel._loader
        self._iterated = True
        AdaptiveDataParallel._loader = self
        try:
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
                    return  # a fixed batch size reads the data once
        finally:
            AdaptiveDataParallel._loader = outer
            self._iterated = False
            self._more_follow = False
            if self._module is not None:
                self._module.set_accumulating(None)
            if self._is_over():
                self._end = None

    def size_of(self, units: int) -> StepSize:
        units = max(units, self._least_per_pass)
        if self._max_scale is None or self._accumulate:
            return super().size_of(units)
        return StepSize(1, step_size(units, self._most_per_pass).per_pass)

    def _plan_step(self) -> StepSize:
        if self._max_scale is None:
            return StepSize(1, 1)
        return self.size_of(1 if self._ramp is None else self._ramp.units)

    def _is_over(self) -> bool:
        if self._ramp is None or self._end is None:
            return False
        # The tolerance covers rounding in the sum of gains.
        return self._ramp.optimizer.progress >= self._end - 1e-9

    # -- calls from the model ------------------------------------------------------------------

    @property
    def accumulates(self) -> bool:
        """Whether more micro-batches of this step follow."""
        return self._more_follow

    def attach(self, module: AdaptiveDataParallel) -> None:
        """Set the batch of the module's rule. The module calls this before every forward."""
        rule = module.scaling_rule
        if self._module is not module:
            self._module = module
            if self._max_scale is None:
                rule.port.begin_step(1, scale_per_pass=self.scale_per_unit)
                return
            self._ramp = Ramp(rule, self._max_scale, loader=self)
            if self._saved_ramp is not None:
                self._ramp._take(self._saved_ramp)
                self._saved_ramp = None
            self._ramp._begin_step(self.size)
        if self._ramp is not None and self._end is None:
            self._end = rule.progress + self._samples / self._small_batch

    # -- saving --------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return the position in the data, the number of finished epochs, and the ramp's state.

        Call it between steps.
        """
        return {
            **super().state_dict(),
            "finished_epochs": _epochs.finished,
            "end": self._end,
            "ramp": None if self._ramp is None else self._ramp.state_dict(),
        }

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore a `state_dict`, on any number of ranks.

        The next loop starts with the remaining data of the epoch, in the original order.
        `remaining_epochs_until` continues with the unfinished epoch.
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
    """Epochs finished by this process, and whether a loop over epochs is running."""

    finished = 0
    running = False


_epochs = _Epochs()


def remaining_epochs_until(epoch: int) -> Iterator[int]:
    """Yield the numbers of the remaining epochs.

    After `AdaptiveDataLoader.load_state_dict`, epochs that the saved run has finished are skipped.
    A second loop continues after the first.

    >>> from manyhands.adaptdl import remaining_epochs_until
    >>> epochs = remaining_epochs_until(0)
    >>> list(epochs)
    []

    Args:
        epoch: the total number of epochs.
    """
    if _epochs.running:
        raise RuntimeError(
            "remaining_epochs_until() supports one loop at a time per process. End the first loop."
        )
    while _epochs.finished < epoch:
        _epochs.running = True
        try:
            yield _epochs.finished
        finally:
            # Also after break or an exception in the loop, as in adaptdl.
            _epochs.finished += 1
            _epochs.running = False
