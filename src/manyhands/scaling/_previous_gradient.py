"""Compare the gradients of two consecutive steps, with a single rank and pass.

The gradient a is compared with the gradient b of the previous step, as two small batches of a step
of twice the size:

    sum of squares    |a|^2 + |b|^2
    mean's square     |(a + b) / 2|^2 = (|a|^2 + |b|^2) / 2 - |a - b|^2 / 4

The second form is numerically exact for nearly equal a and b. The comparison requires a copy of the
gradient between steps, and a second copy between `backward` and `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from manyhands._optimizers.state_parts import SavedEntries
from manyhands._ranks.ranks import widest_float
from manyhands.scaling._hooks import PlainNorm


class PreviousGradient:
    """Stores the previous step's gradient. `candidates` become `grads` after their step."""

    def __init__(self, norms: PlainNorm) -> None:
        self._norms = norms
        self.grads: dict[int, Tensor] = {}
        self.candidates: dict[int, Tensor] = {}
        self._finite: list[Tensor] = []  # flags of the candidates, on their devices

    def measure(
        self, grads: Mapping[int, Tensor], loss_scale: Tensor | float = 1.0
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return (index, |a|^2 + |b|^2, |(a + b) / 2|^2) for each parameter with a gradient.

        The first result is empty. A missing gradient counts as zero.
        """
        result: list[tuple[int, Tensor, Tensor]] = []
        self.forget()
        for index in sorted(grads.keys() | self.grads.keys()):
            before = self.grads.get(index)
            if index in grads:
                # Remove the loss scale, which may change before the next step.
                now = _to_dense_float(grads[index]) / loss_scale
            else:
                now = torch.zeros_like(self.grads[index])
            square = self._square(index, now)
            self._finite.append(square.isfinite())
            self.candidates[index] = now
            if before is None:
                result.append((index, square, square / 4))
            else:
                squares = square + self._square(index, before)
                difference = self._square(index, now - before)
                result.append((index, squares, squares / 2 - difference / 4))
        if not self.grads:
            return []
        return result

    def remember(self) -> None:
        """Store the measured gradient for the next step if all elements are finite."""
        if not self.candidates:
            return
        # torch.where instead of `if` avoids a synchronization.
        usable = torch.stack(self._finite).all()
        for index, now in self.candidates.items():
            otherwise = self.grads.get(index)
            if otherwise is None:
                otherwise = torch.full_like(now, torch.nan)
            self.grads[index] = torch.where(usable, now, otherwise)
        self.forget()

    def forget(self) -> None:
        self.candidates = {}
        self._finite = []

    def _square(self, index: int, tensor: Tensor) -> Tensor:
        dtype = widest_float(tensor.device)
        norm = self._norms.one(index, tensor)
        return torch.as_tensor(norm, dtype=dtype, device=tensor.device).square()

    # -- saving and loading ------------------------------------------------------------------

    def to_state(self) -> list[Tensor | None]:
        return [self.grads.get(index) for index in range(max(self.grads, default=-1) + 1)]


def parse_previous(saved: SavedEntries, params: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return a copy of a saved gradient; raise if shapes do not match the parameters."""
    previous = saved.each("previous")
    if len(saved["previous"]) > len(params):
        raise saved.wrong("previous", f"a list of at most {len(params)}", saved["previous"])
    grads = {}
    for index, (name, param) in enumerate(zip(previous, params, strict=False)):
        if previous.has(name):
            previous.check_tensor(name, param, finite=False)
            # The dict belongs to the caller.
            grads[index] = torch.clone(previous[name]).to(param.device)
    return grads


def _to_dense_float(grad: Tensor) -> Tensor:
    grad = grad.detach()
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    if grad.dtype in (torch.float16, torch.bfloat16):
        grad = grad.float()
    return grad
