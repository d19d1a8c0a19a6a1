"""Noise from consecutive gradients, where a step has only one.

With one worker and one pass a step there is nothing to compare a gradient a with but the one
before it, b. Taken as two small batches of one step of twice the size:

    sum of squares    |a|^2 + |b|^2
    mean's square     |(a + b) / 2|^2 = (|a|^2 + |b|^2) / 2 - |a - b|^2 / 4

The second form is used: a and b are often nearly equal, and then only their difference is
exact. The price is a copy of the gradient, kept from one step to the next, and a second one
between `backward` and `step`: a gradient that no step follows is not remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.scaling._measures import Norms


class Difference:
    """Remembers the last step's gradient and measures the next one against it."""

    def __init__(self, norms: Norms) -> None:
        self._norms = norms
        self.previous: list[Tensor | None] = []
        self._candidates: list[tuple[int, Tensor]] = []
        self._finite: list[Tensor] = []

    def measure(
        self, grads: Sequence[Tensor | None], loss_scale: Tensor | float = 1.0
    ) -> list[tuple[int, Tensor, Tensor]]:
        """(index, |a|^2 + |b|^2, |(a + b) / 2|^2) for each parameter that had a gradient.

        Empty the first time. A missing gradient counts as zero.
        """
        first = not self.previous
        previous = [*self.previous, *[None] * (len(grads) - len(self.previous))]
        result: list[tuple[int, Tensor, Tensor]] = []
        self._candidates, self._finite = [], []
        for index, (grad, before) in enumerate(zip(grads, previous, strict=True)):
            if grad is not None:
                now = _plain(grad) / loss_scale
            elif before is not None:
                now = torch.zeros_like(before)
            else:
                continue
            squared = self._square(index, now)
            self._finite.append(squared.isfinite())
            self._candidates.append((index, now))
            if before is None:
                result.append((index, squared, squared / 4))
            else:
                squares = squared + self._square(index, before)
                difference = self._square(index, now - before)
                result.append((index, squares, squares / 2 - difference / 4))
        return [] if first else result

    def remember(self) -> None:
        """Keep what was measured for the next step; unless a part of it is not finite."""
        if not self._candidates:
            return
        usable = torch.stack(self._finite).all()
        missing = 1 + self._candidates[-1][0] - len(self.previous)
        self.previous += [None] * missing
        for index, now in self._candidates:
            before = self.previous[index]
            other = torch.full_like(now, torch.nan) if before is None else before
            self.previous[index] = torch.where(usable, now, other)
        self.forget()

    def forget(self) -> None:
        """Drop what was measured and is not to be remembered."""
        self._candidates, self._finite = [], []

    def _square(self, index: int, tensor: Tensor) -> Tensor:
        length = self._norms.one(index, tensor)
        return (length if length.device.type == "mps" else length.double()).square()


def _plain(grad: Tensor) -> Tensor:
    grad = grad.detach()
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
