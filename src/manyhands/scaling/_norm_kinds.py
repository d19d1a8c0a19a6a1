"""What the length of a gradient is to be: `Plain` here, and `_preconditioned.py`'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands._core.norms import SHORT, norm, norms

Piece = tuple[int, Tensor, Callable[[Tensor], Tensor]]  # see `Norms.pieces`


class Norms(Protocol):
    """Lengths of gradients; `indices` say which parameters they belong to."""

    @property
    def unit(self) -> str:
        """What the lengths are of: "plain" or "preconditioned" gradients."""

    def one(self, index: int, grad: Tensor) -> Tensor: ...

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]: ...

    def pieces(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Of parts of gradients: (parameter, elements, what takes the like part of a whole)."""

    def stepped(self) -> None:
        """The optimizer's state has changed; called on every worker."""

    def refresh(self) -> None:
        """Look at the optimizer again, after a group was added or its state replaced."""

    def saved(self) -> list[Any]:
        """What a bitwise continuation needs."""

    def load(self, state: list[Any]) -> None:
        """Take over what was `saved`."""


class Plain:
    """The Euclidean norm."""

    unit = "plain"

    def refresh(self) -> None:
        pass

    def saved(self) -> list[Any]:
        return []

    def load(self, state: list[Any]) -> None:
        pass

    def one(self, index: int, grad: Tensor) -> Tensor:
        if grad.numel() <= SHORT and grad.dtype is torch.float32 and grad.layout is torch.strided:
            return torch.linalg.vector_norm(grad)
        return norm(grad)

    def many(self, indices: Sequence[int], grads: Sequence[Tensor]) -> list[Tensor]:
        return norms(grads)

    def pieces(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return norms([piece for _, piece, _ in pieces])

    def stepped(self) -> None:
        pass
