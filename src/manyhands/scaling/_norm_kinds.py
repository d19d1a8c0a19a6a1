"""Which norm of a gradient is measured: the plain one here, Adam's in `_preconditioned.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from manyhands._core.flat import SHORT, norm

# (parameter index, the elements of its gradient that this rank holds, a function that takes the
# same elements out of any tensor of the parameter's shape)
GradientSlice = tuple[int, Tensor, Callable[[Tensor], Tensor]]


class NormKind(Protocol):
    """Norms of gradients; an index says which parameter a gradient belongs to."""

    @property
    def norm_kind(self) -> str:
        """Which gradients the norms are of at present: "plain" or "preconditioned"."""

    def one(self, index: int, grad: Tensor) -> Tensor:
        """Return the norm of one whole gradient, as a tensor without dimensions."""

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the norm of each of several whole gradients."""

    def slices(self, slices: Sequence[GradientSlice]) -> list[Tensor]:
        """Return the norm of each slice."""

    def optimizer_stepped(self) -> None:
        """React to a step that has changed the optimizer's state. Called on every rank."""

    def refresh(self) -> None:
        """Look at the optimizer again, after a group was added or its state was replaced."""

    def to_state(self) -> list[list[float]]:
        """Return what a bitwise continuation needs."""

    def load_state(self, state: list[list[float]]) -> None:
        """Continue from `to_state`."""


class PlainNorm:
    """The Euclidean norm."""

    norm_kind = "plain"

    def one(self, index: int, grad: Tensor) -> Tensor:
        # The common case, decided here: this runs once per parameter within backward.
        if grad.numel() <= SHORT and grad.dtype is torch.float32 and grad.layout is torch.strided:
            return torch.linalg.vector_norm(grad)
        return norm(grad)

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        """Take short dense float32 gradients in one call, and the others one by one."""
        simple = [_is_simple(grad) for grad in grads]
        together = list(compress(grads, simple))
        lengths = iter(torch._foreach_norm(together) if together else [])
        pairs = zip(grads, simple, strict=True)
        return [next(lengths) if is_simple else norm(grad) for grad, is_simple in pairs]

    def slices(self, slices: Sequence[GradientSlice]) -> list[Tensor]:
        return self.many([], [elements for _, elements, _ in slices])

    # A plain norm does not depend on the optimizer, so there is nothing to follow or to save.

    def optimizer_stepped(self) -> None:
        pass

    def refresh(self) -> None:
        pass

    def to_state(self) -> list[list[float]]:
        return []

    def load_state(self, state: list[list[float]]) -> None:
        pass


def _is_simple(grad: Tensor) -> bool:
    """Return whether one call of torch's, and no more, gives an exact norm."""
    return (
        grad.dtype is torch.float32
        and grad.layout is torch.strided
        and (grad.numel() <= SHORT or grad.device.type != "cpu")
    )
