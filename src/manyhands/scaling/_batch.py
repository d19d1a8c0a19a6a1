"""Define the size of a step: `Batch`, and the `Loop` that determines its last pass.

    Loop             the declared number of passes is reached (user, `Ramp`, adapter)
    CountingLoop     the data-parallel module averages this pass, which is outside `no_sync()`
    FollowingLoop    an `Accumulation`, such as a trainer's loop, declares the pass as the last

`_port.py` defines the last two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from manyhands._arguments import real
from manyhands._optimizers.state_parts import SavedEntries

PASSES = "num_gradients_to_accumulate"
PER_STEP = "It is the number of backward() calls between two step() calls."


@runtime_checkable
class Accumulation(Protocol):
    """A loop that chooses the number of backward passes per step, such as a trainer's.

    >>> import torch, manyhands as mh
    >>> class Loop:
    ...     gradient_accumulation_steps = 4
    ...     sync_gradients = False
    >>> loop, model = Loop(), torch.nn.Linear(2, 1)
    >>> optimizer = mh.AdaScale(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=loop
    ... )
    >>> for number in range(3):  # the data ends after three of four passes
    ...     loop.sync_gradients = number == 2
    ...     (model(torch.randn(8, 2)).mean() / 4).backward()
    >>> optimizer.step()
    >>> optimizer.scale
    3.0

    A rule reads `gradient_accumulation_steps` at the beginning of each step and `sync_gradients`
    at the end of each backward pass. All ranks must have equal values.
    """

    @property
    def gradient_accumulation_steps(self) -> int:
        """Passes of a full step. Each pass's loss is divided by this number."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current pass is the last of the step."""


class Averager(Protocol):
    """A data-parallel module."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the module averages the next pass."""


def check_smoothing(smoothing: float) -> float:
    return real("smoothing", smoothing, least=0.0, below=1.0, why="It is the weight of the past.")


class Loop:
    """The source of the number of passes per step: a declared number."""

    counts = False  # whether the number is unknown until the last pass
    decides = False  # whether a training loop sets the number, and may end a step earlier
    module: Averager | None = None  # counts its passes
    # An adapter's statement whether the current pass is the last. Such a loop calls `step()` and
    # `zero_grad()` after every pass.
    declared_last: bool | None = None

    def passes(self) -> int | None:
        return None

    def is_last(self) -> bool | None:
        return self.declared_last

    @property
    def in_mid_step(self) -> bool:
        return self.declared_last is False


@dataclass
class Batch:
    """The size of a batch over all workers and passes. The owner of the number of passes.

    The scale is workers x passes, unless `scale` or `scale_per_pass` is set.

    The default smoothing depends on the number of small gradients, as in fairscale, or on the
    scale, as in adaptdl, if the loop counts passes.
    """

    workers: int = 1
    passes: int = 1  # of a full step: declared, or counted in the last step
    short: int | None = None
    loop: Loop = field(default_factory=Loop)
    scale: float | None = None
    scale_per_pass: float | None = None
    smoothing: float | None = None
    memory: float = 1000.0  # default memory of the averages, in small batches
    loss_is_divided: bool = True
    scale_is_explicit: bool = False  # set in this run
    smoothing_is_explicit: bool = False
    # Passes of a full run per pass of this run, in which fewer ranks take more passes.
    pass_share: float = 1.0

    def scale_for(self, passes: int) -> float:
        if self.scale is not None:
            if self.loop.counts:
                return self.scale
            return self.scale * (passes / self.passes)
        if self.scale_per_pass is not None:
            return self.scale_per_pass * passes * self.pass_share
        return self.workers * passes * self.pass_share

    @property
    def gradients(self) -> int:
        """The number of small gradients in a full step."""
        return round(self.workers * self.passes * self.pass_share)

    def begin_step(self) -> None:
        self.set_passes(self.loop.passes() or self.passes)

    def follow(self, loop: Loop) -> None:
        """Let this loop determine the passes."""
        self.loop = loop
        self.begin_step()
        self.check_divided()

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self.short = None

    @property
    def passes_divided_by_user(self) -> bool:
        return self.loss_is_divided and not self.loop.counts

    def smoothing_for(self, scale: float) -> float:
        if self.smoothing is not None:
            return self.smoothing
        if self.loop.counts:
            return float((1.0 - 1.0 / self.memory) ** scale)
        small_batches = self.workers * (self.short or self.passes) * self.pass_share
        return max(1.0 - small_batches / self.memory, 0.0)

    def set_scale(self, *, scale: float | None = None, per_pass: float | None = None) -> None:
        self.scale = scale
        self.scale_per_pass = per_pass
        self.scale_is_explicit = True

    def set_smoothing(self, smoothing: float | None) -> None:
        self.smoothing = None if smoothing is None else check_smoothing(smoothing)
        self.smoothing_is_explicit = smoothing is not None

    def to_state(self) -> dict[str, float | None]:
        return {
            "scale": self.scale,
            "scale_per_pass": self.scale_per_pass,
            "smoothing": self.smoothing,
            "workers": self.workers,
            "passes": round(self.passes * self.pass_share),
        }

    def parse_state(self, state: SavedEntries) -> Batch:
        """Return the batch with the saved settings, except for explicit settings of this run.

        A saved scale is multiplied by the change of workers x passes.
        """
        saved_passes = state.whole("passes", 1)
        passes = self.passes
        if self.loop.counts:
            passes = saved_passes
        loaded = replace(self, passes=passes, short=None)
        if not self.scale_is_explicit:
            saved_batches = state.whole("workers", 1) * saved_passes
            growth = self.workers * passes * self.pass_share / saved_batches
            loaded.scale = None
            if state.has("scale"):
                loaded.scale = state.real("scale", above=0.0) * growth
            loaded.scale_per_pass = None
            if state.has("scale_per_pass"):
                loaded.scale_per_pass = state.real("scale_per_pass", above=0.0)
        if not self.smoothing_is_explicit:
            loaded.smoothing = None
            if state.has("smoothing"):
                loaded.smoothing = check_smoothing(state["smoothing"])
        return loaded

    def check_divided(self) -> None:
        if self.loop.decides and not self.loss_is_divided:
            raise ValueError(
                "is_scaled_loss=False, but a loop that controls the passes must divide the losses. "
                "Divide each loss by the loop's gradient_accumulation_steps."
            )

    def describe_short(self, passes: int) -> str:
        call = f"call set_num_gradients_to_accumulate({passes}) on every worker"
        other = "pass an Accumulation as num_gradients_to_accumulate"
        if self.loop.decides:
            call = f"set the loop's gradient_accumulation_steps to {passes}"
            other = "make sync_gradients true during the step's last pass"
        return (
            f"step() after {passes} of {self.passes} backward passes. Before the first pass of a "
            f"shorter step, {call}, and divide its losses by {passes}. If the loop divides every "
            f"loss by {self.passes}, {other}."
        )

    def load_state(self, loaded: Batch) -> None:
        """Copy the fields of `loaded`, because other objects refer to this batch."""
        self.passes = loaded.passes
        self.short = loaded.short
        self.scale = loaded.scale
        self.scale_per_pass = loaded.scale_per_pass
        self.smoothing = loaded.smoothing
