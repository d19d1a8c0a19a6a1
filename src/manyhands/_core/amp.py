"""What a gradient scaler leaves on an optimizer, and when.

`scaler.step(optimizer)` leaves two tensors on an optimizer that declares that it can take them:
`found_inf` (did the gradients overflow?) and `grad_scale` (what they are still multiplied
with; None after `unscale_`). An optimizer with a fused step uses them itself; for the others
we unscale and skip, as the scaler would have.

`LossScale` is for gradients that are measured in backward, before the scaler leaves anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._core.sharded import local_shard


@dataclass(frozen=True)
class ScalerSignals:
    """The scaler's tensors for this step; both None without a scaler."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @classmethod
    def read_from(cls, *optimizers: Optimizer) -> ScalerSignals:
        for optimizer in optimizers:
            found_inf = vars(optimizer).get("found_inf")
            if found_inf is not None:
                return cls(vars(optimizer).get("grad_scale"), found_inf)
        return cls()

    @property
    def present(self) -> bool:
        return self.found_inf is not None


class LossScale:
    """What gradients are multiplied by when they are measured: the one owner of that number.

    If `scaler` is known, the scale is read in backward. If not, the scaler leaves the scale on the
    optimizer at the step, after the gradients have been measured; it is then divided out of the
    measurement, and `last` is that of the last step.
    """

    def __init__(self, scaler: Any = None) -> None:
        self.scaler = scaler
        self.last: float | None = None

    @property
    def known(self) -> bool:
        """Whether the scale is known in backward."""
        return self.scaler is not None

    def in_backward(self) -> Tensor | float:
        """Return the scale of the gradients at present, without waiting for the device."""
        scaler = self.scaler
        if scaler is None or not getattr(scaler, "is_enabled", lambda: True)():
            return 1.0
        if hasattr(scaler, "_scale"):  # get_scale() would copy it to the host
            return 1.0 if scaler._scale is None else scaler._scale
        return float(scaler.get_scale())

    def at_step(self, signals: ScalerSignals) -> Tensor | None:
        """Return the scale that is known only now; None if there is none."""
        return None if self.known else signals.grad_scale

    def update(self, scale: float) -> bool:
        """Keep the scale of this step; return whether it is another one than the last step's."""
        changed = scale != self.last
        self.last = scale
        return changed


def supports_amp(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's own step unscales gradients and skips overflows."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def _left_on(signals: ScalerSignals, optimizer: Optimizer) -> Iterator[None]:
    """Set the signals on an inner optimizer for the length of its step."""
    before = dict(vars(optimizer))
    optimizer.grad_scale, optimizer.found_inf = signals.grad_scale, signals.found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in ("grad_scale", "found_inf"):
            if name in before:
                setattr(optimizer, name, before[name])
            else:
                delattr(optimizer, name)


@contextmanager
def apply_signals(
    signals: ScalerSignals, optimizer: Optimizer, supports_amp: bool
) -> Iterator[None]:
    """Apply the signals around a step: pass them to the optimizer, or unscale in its place."""
    if supports_amp and signals.present:
        with _left_on(signals, optimizer):
            yield
        return
    if signals.grad_scale is not None:
        unscale(optimizer.param_groups, signals.grad_scale)
    yield


@torch.no_grad()
def unscale(param_groups: Sequence[dict[str, Any]], grad_scale: Tensor) -> None:
    """Divide the gradients by the loss scale, as `GradScaler.unscale_` does."""
    inverse = grad_scale.double().reciprocal().float()
    for group in param_groups:
        for param in group["params"]:
            if param.grad is not None:
                local_shard(param.grad).mul_(inverse.to(param.grad.device))
