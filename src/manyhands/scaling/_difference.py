"""Noise from consecutive gradients, where a step has only one.

With one worker and one pass a step there is nothing to compare a gradient a with but the one
before it, b. Taken as two small batches of one step of twice the size:

    sum of squares    |a|^2 + |b|^2
    mean's square     |(a + b) / 2|^2 = (|a|^2 + |b|^2) / 2 - |a - b|^2 / 4

The second form is used: a and b are often nearly equal, and then only their difference is
exact. The price is a copy of the gradient, kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.scaling._norms import Norms


class Difference:
    """Remembers the last gradient and measures the next one against it."""

    def __init__(self, norms: Norms) -> None:
        self._norms = norms
        self.previous: list[Tensor | None] = []

    def measure(
        self, grads: Sequence[Tensor | None], loss_scale: Tensor | float = 1.0
    ) -> list[tuple[int, Tensor, Tensor]]:
        """(index, |a|^2 + |b|^2, |(a + b) / 2|^2) for each parameter that had a gradient.

        Empty the first time. A missing gradient counts as zero.
        """
        first = not self.previous
        self.previous += [None] * (len(grads) - len(self.previous))
        result: list[tuple[int, Tensor, Tensor]] = []
        news: list[tuple[int, Tensor]] = []
        finite: list[Tensor] = []
        for index, (grad, before) in enumerate(zip(grads, self.previous, strict=True)):
            if grad is None and before is None:
                continue
            now = torch.zeros_like(before) if grad is None else _plain(grad) / loss_scale  # type: ignore[arg-type]
            squared = self._square(index, now)
            finite.append(squared.isfinite())
            news.append((index, now))
            if before is None:
                result.append((index, squared, squared / 4))
            else:
                squares = squared + self._square(index, before)
                difference = self._square(index, now - before)
                result.append((index, squares, squares / 2 - difference / 4))
        self._remember(news, finite)
        return [] if first else result

    def _square(self, index: int, tensor: Tensor) -> Tensor:
        length = self._norms.one(index, tensor)
        return (length if length.device.type == "mps" else length.double()).square()

    def _remember(self, news: list[tuple[int, Tensor]], finite: list[Tensor]) -> None:
        """Keep this gradient for the next step; or the one before it, if not all is finite."""
        if not news:
            return
        usable = torch.stack(finite).all()
        for index, now in news:
            before = self.previous[index]
            other = torch.full_like(now, torch.nan) if before is None else before
            self.previous[index] = torch.where(usable, now, other)


def _plain(grad: Tensor) -> Tensor:
    grad = grad.detach()
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
