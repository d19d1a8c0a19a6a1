"""Protect tensors that a worker has received from its run against loads from files.

A worker that joins a run under way receives the run's parameters. Its script loads a checkpoint or
pretrained weights afterwards, as the scripts of all workers do at their start. What is in a file is
older than what the worker has received, so a load leaves these tensors as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class Receiver(Protocol):
    """An object that receives tensors from other workers, such as the blocks of a crew."""

    def received_tensors(self) -> Iterable[Tensor]:
        """Return the tensors that were received, as long as no step was taken since."""


_receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


def add_receiver(receiver: Receiver) -> None:
    """Ask this object whenever something is loaded, as long as it lives."""
    _receivers.add(receiver)


def received_tensors() -> dict[int, Tensor]:
    """Return all tensors that were received, by id."""
    found: dict[int, Tensor] = {}
    for receiver in list(_receivers):
        for tensor in receiver.received_tensors():
            found[id(tensor)] = tensor
    return found
