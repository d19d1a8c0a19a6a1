"""What a loop says about accumulation: how many passes a step has, and which one is its last.

In a loop of one's own, the number of passes is declared, and every step has it. The loops of
trainers decide it themselves, and take the last step of an epoch with the passes that are left:

    N     passes of a whole step; trainers divide every pass's loss by it
    m     passes of a short step, m < N; its gradient is then m / N times the mean of m passes

An `Accumulation` says both while the loop runs, so nothing is declared twice. Its names are those
of Accelerate, whose `Accelerator` is one. Other trainers have adapters (`manyhands.integrations`).
"""

from __future__ import annotations

from typing import Literal, Protocol, SupportsIndex, TypeAlias, get_args, runtime_checkable

from torch.optim import Optimizer

from manyhands._core.wrappers import find_prepared

ShortStep: TypeAlias = Literal["error", "count", "drop"]


@runtime_checkable
class Accumulation(Protocol):
    """A loop that decides how many backward passes a step has; Accelerate's `Accelerator` is one.

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

    A rule asks it at the beginning of each step and at the end of each backward pass. The answers
    are the same on all ranks.
    """

    @property
    def gradient_accumulation_steps(self) -> int:
        """Passes of a whole step, by which the loss of each pass is divided."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the pass under way is its step's last."""


class GatedAccumulation:
    """The accumulation of an optimizer that Accelerate has prepared.

    Accelerate's loop calls `step()` and `zero_grad()` in every pass. A prepared optimizer does
    nothing then, unless the pass is the step's last; a rule around one does the same.
    """

    def __init__(self, gradient_state: object) -> None:
        self._gradient_state = gradient_state

    @property
    def gradient_accumulation_steps(self) -> int:
        return int(self._gradient_state.num_steps)  # type: ignore[attr-defined]

    @property
    def sync_gradients(self) -> bool:
        return bool(self._gradient_state.sync_gradients)  # type: ignore[attr-defined]


def check_prepared(prepared: Optimizer, rule: str) -> None:
    """Raise if the gradients of a prepared optimizer cannot be measured."""
    state = getattr(prepared, "accelerator_state", None)
    kind = getattr(getattr(state, "distributed_type", None), "value", None)
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise TypeError(
            f"{rule} cannot measure gradients under {kind}, which reduces them, and steps, in a "
            "place of its own. Use Accelerate with DDP or FSDP2, or OSS and ShardedDataParallel."
        )
    if kind == "FSDP" and getattr(state.fsdp_plugin, "fsdp_version", 2) == 1:  # type: ignore[union-attr]
        raise TypeError(
            f"{rule} needs the gradients of single parameters, and version 1 of FSDP has them in "
            "flat tensors. Use FullyShardedDataParallelPlugin(fsdp_version=2)."
        )


def accumulation_of(optimizer: Optimizer, declared: int) -> GatedAccumulation | None:
    """Return the accumulation of a prepared optimizer, or None if it says nothing.

    A loop may accumulate on its own, with a prepared optimizer that does not: then the declared
    number of passes counts.
    """
    prepared = find_prepared(optimizer)
    if prepared is None:
        return None
    found = GatedAccumulation(vars(prepared)["gradient_state"])
    passes = found.gradient_accumulation_steps
    if declared not in (1, passes):
        if passes == 1:
            return None
        raise ValueError(
            f"num_gradients_to_accumulate={declared}, but the Accelerator that has prepared this "
            f"optimizer accumulates {passes} passes. Leave the argument out: the number is found."
        )
    return found


def parse_accumulation(
    passes: SupportsIndex | Accumulation,
) -> tuple[SupportsIndex, Accumulation | None]:
    """Return the declared number of passes, and the loop that decides it, if one was given."""
    if isinstance(passes, Accumulation):
        return passes.gradient_accumulation_steps, passes
    return passes, None


def parse_short_step(short_step: str | None, found: bool) -> ShortStep:
    """Return the policy for a step with too few passes; by default that of the loop."""
    if short_step is None:
        return "count" if found else "error"
    if short_step not in get_args(ShortStep):
        raise ValueError(
            f"short_step must be 'error', 'count' or 'drop', got {short_step!r}. It says what a "
            "step with fewer passes than declared does."
        )
    return short_step  # type: ignore[return-value]
