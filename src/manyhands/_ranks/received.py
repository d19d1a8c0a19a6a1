"""Protect tensors received from a running job against loads from files.

A worker that joins a running job receives the current parameters. Its script then loads a
checkpoint or pretrained weights, like the scripts of all workers at their start. Files are older
than received tensors, so loads do not overwrite these tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class Receiver(Protocol):
    """An object that receives tensors from other workers, such as blocks of a crew."""

    def received_tensors(self) -> Iterable[Tensor]:
        """Return the received tensors, until the next step."""


_receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


def add_receiver(receiver: Receiver) -> None:
    """Register an object for `received_tensors` until it is deleted."""
    _receivers.add(receiver)


def received_tensors() -> dict[int, Tensor]:
    """Return all received tensors, by id."""
    found: dict[int, Tensor] = {}
    for receiver in list(_receivers):
        for tensor in receiver.received_tensors():
            found[id(tensor)] = tensor
    return found
