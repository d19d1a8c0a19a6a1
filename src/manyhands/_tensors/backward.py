"""Detect the beginning and end of backward passes.

Autograd does not notify an optimizer of `loss.backward()`, but hooks on parameters run. The first
hook marks the beginning of a pass. An autograd callback after the last node marks the end. It is
queued twice, so that it runs after DDP's callback, which waits for the reduced gradients.

Terms
    pass       a `loss.backward()` of the user
    task       autograd's graph task, a run of the engine
    nested     a task inside another task, for reentrant activation checkpointing. It belongs to the
               outer pass. Its callbacks run at the end of the nested task, so the callback is
               queued from a node of the outer task.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

current_task: Callable[[], int] = torch._C._current_graph_task_id
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


class PassOwner(Protocol):
    """The owner of `BackwardPasses`."""

    def begin_pass(self) -> None:
        """Handle a pass's first gradient, before any `.grad` changes."""

    def end_pass(self) -> None:
        """Handle the end of a pass."""


class BackwardPasses:
    """Notifies an owner of the beginning and end of backward passes.

    With `early`, the end is reported before the owners of other objects are notified.
    """

    def __init__(self, owner: PassOwner, *, early: bool = False) -> None:
        # Weak, because in a reference cycle hooks would run until the next garbage collection.
        self._owner = weakref.ref(owner)
        self._early = early
        self._pass: int | None = None
        self.count = 0
        self.task: int | None = None
        self._outer: int | None = None

    @property
    def open(self) -> bool:
        return self._pass is not None

    @property
    def nested(self) -> bool:
        """Whether the current task is nested, which may divide a gradient into parts."""
        return self.task != self._outer

    def forget(self) -> None:
        """Close the pass after the end or an error."""
        self._pass = None
        self.task = None

    def enter(self, task: int) -> None:
        around = _node_around()
        if around is None and self._outer is not None and task != self._outer:
            self._pass = None  # an earlier pass raised an error and did not end
        self.task = task
        if self._pass is None:
            self.count += 1
            self._pass = self.count
            self._outer = None
            owner = self._owner()
            if owner is not None:
                owner.begin_pass()
        if self._outer is None:
            self._find_end(around, task, self._pass)

    def _find_end(self, around: Node | None, task: int, number: int) -> None:
        if around is None:
            self._outer = task
            if self._early:
                queue_callback(lambda: self._finish(number))
            else:
                queue_callback(lambda: queue_callback(lambda: self._finish(number)))
            return

        def in_the_task_around(_: object) -> None:
            if self._pass == number and self._outer is None:
                self._find_end(_node_around(), current_task(), number)

        for node, _ in around.next_functions:
            if node is not None:
                node.register_prehook(in_the_task_around)

    def _finish(self, number: int) -> None:
        owner = self._owner()
        if self._pass == number and owner is not None:
            self.forget()
            owner.end_pass()


def _node_around() -> Node | None:
    """Return the outer task's node that runs this task; None in an outermost task.

    Autograd provides no interface, but the Python function that called backward is on the stack.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
