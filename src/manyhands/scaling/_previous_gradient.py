"""The gradient of the step before, for a step that has nothing else to compare its gradient with.

With one rank and one pass, a step has a single gradient a. Together with the gradient b of the step
before, as two small batches of one step of twice the size, it gives

    sum of squares    |a|^2 + |b|^2
    mean's square     |(a + b) / 2|^2 = (|a|^2 + |b|^2) / 2 - |a - b|^2 / 4

The second form is used: a and b are often nearly equal, and then only their difference is exact.
The price is a copy of the gradient that is kept from one step to the next, and a second copy
between `backward` and `step`, because a gradient that no step follows must not be remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.scaling._norm_kinds import NormKind


class PreviousGradient:
    """Remembers the last step's gradient, whose owner it is, and measures the next one against it.

    `grads`       the last step's gradient by parameter, in float32 or better; empty at first
    `candidates`  the gradient just measured, which becomes `grads` if its step is taken
    """

    def __init__(self, norms: NormKind) -> None:
        self._norms = norms
        self.grads: list[Tensor | None] = []
        self.candidates: list[tuple[int, Tensor]] = []
        self._finite: list[Tensor] = []  # for each candidate, on its device

    def measure(
        self, grads: Sequence[Tensor | None], loss_scale: Tensor | float = 1.0
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return (index, |a|^2 + |b|^2, |(a + b) / 2|^2) for each parameter with a gradient.

        The result is empty the first time. A missing gradient counts as zero.
        """
        first = not self.grads
        previous = [*self.grads, *[None] * (len(grads) - len(self.grads))]
        result: list[tuple[int, Tensor, Tensor]] = []
        self.forget()
        for index, (grad, before) in enumerate(zip(grads, previous, strict=True)):
            if grad is not None:
                # divided by the loss scale now, as it may be another one at the next step
                now = _to_dense_float(grad) / loss_scale
            elif before is not None:
                now = torch.zeros_like(before)
            else:
                continue
            square = self._square(index, now)
            self._finite.append(square.isfinite())
            self.candidates.append((index, now))
            if before is None:
                result.append((index, square, square / 4))
            else:
                squares = square + self._square(index, before)
                difference = self._square(index, now - before)
                result.append((index, squares, squares / 2 - difference / 4))
        return [] if first else result

    def remember(self) -> None:
        """Keep the measured gradient for the next step, unless any element is not finite."""
        if not self.candidates:
            return
        # torch.where instead of `if`: reading the flag would wait for a GPU
        usable = torch.stack(self._finite).all()
        missing = 1 + self.candidates[-1][0] - len(self.grads)
        self.grads += [None] * missing
        for index, now in self.candidates:
            before = self.grads[index]
            otherwise = torch.full_like(now, torch.nan) if before is None else before
            self.grads[index] = torch.where(usable, now, otherwise)
        self.forget()

    def forget(self) -> None:
        """Drop the measured gradient: no step was made along it."""
        self.candidates, self._finite = [], []

    def _square(self, index: int, tensor: Tensor) -> Tensor:
        norm = self._norms.one(index, tensor)
        return (norm if norm.device.type == "mps" else norm.double()).square()

    # -- saving and loading ------------------------------------------------------------------

    def to_state(self) -> list[Tensor | None]:
        """Return the last step's gradient for a state dict."""
        return list(self.grads)

    def load_state(self, grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> None:
        """Continue from what `parse_previous` returned."""
        # a loaded state dict may be on another device
        self.grads = [
            None if grad is None else grad.to(param.device)
            for grad, param in zip(grads, params, strict=False)
        ]


def parse_previous(
    previous: Sequence[Tensor | None], params: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return a copy of a saved gradient; raise if its shapes are not the parameters'."""
    for grad, param in zip(previous, params, strict=False):
        if grad is not None and (not isinstance(grad, Tensor) or grad.shape != param.shape):
            raise ValueError("the previous gradient has other shapes than the parameters")
    if len(previous) > len(params):
        raise ValueError("the previous gradient has more tensors than there are parameters")
    # a copy, because the gradient is later written to in place and the dict is the caller's
    return [None if grad is None else torch.clone(grad) for grad in previous]


def _to_dense_float(grad: Tensor) -> Tensor:
    """Return a gradient as a strided tensor of at least float32."""
    grad = grad.detach()
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
