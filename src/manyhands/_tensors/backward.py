"""Tell an owner when a backward pass begins, and when it is over.

Autograd does not call an optimizer's wrapper at `loss.backward()`; only hooks on parameters fire.
The first hook of a pass marks its beginning. A callback that autograd runs after its last node
marks the end. That callback queues itself again, so that it runs after DDP's, which waits for
the gradients to be reduced.

Words used here
    pass       one `loss.backward()` of the user's
    task       what autograd calls a graph task: one run of its engine
    nested     a task inside another: reentrant activation checkpointing runs backward within
               backward. Such a task is part of the pass around it. Its callbacks would run
               when *it* ends, so the callback is queued from a node of the task around it.
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
    """Who is told of backward passes."""

    def begin_pass(self) -> None:
        """React to a pass's first gradient, before it is added to any `.grad`."""

    def end_pass(self) -> None:
        """React to the end of a pass."""


class BackwardPasses:
    """Tells its owner when a backward pass begins, and when it is over.

    With `early`, the owner is told of the end before the owners of objects without it.
    """

    def __init__(self, owner: PassOwner, *, early: bool = False) -> None:
        # Weak, because the owner holds this object. In a cycle it would live, and its hooks would
        # measure and send, until the garbage collector comes by.
        self._owner = weakref.ref(owner)
        self._early = early
        self._pass: int | None = None  # the number of the pass, while one is open
        self.count = 0
        self.task: int | None = None  # the task in which a hook fired last
        self._outer: int | None = None  # the task whose end is the end of the pass

    @property
    def open(self) -> bool:
        return self._pass is not None

    @property
    def nested(self) -> bool:
        """Whether the task that runs is inside another, where a gradient may come in parts."""
        return self.task != self._outer

    def forget(self) -> None:
        """Note that no pass is open: it is over, or it raised an error and will never end."""
        self._pass = None
        self.task = None

    def enter(self, task: int) -> None:
        """Note that `task` runs. A hook calls this first, if its task is not the last one."""
        around = _node_around()
        if around is None and self._outer is not None and task != self._outer:
            self._pass = None  # an earlier pass raised an error and never ended; this is a new one
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
        """Queue the end of this pass in its outermost task."""
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
        """End pass `number` as its backward has ended, unless that was forgotten meanwhile."""
        owner = self._owner()
        if self._pass == number and owner is not None:
            self.forget()
            owner.end_pass()


def _node_around() -> Node | None:
    """Return the node of an outer task in which this task runs; None in an outermost one.

    Autograd has no call for it, but the Python function that called backward again is on the stack.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
