"""Wait for messages of the process group until they end or an abort ends the wait.

gloo may forget a message of a broken connection (torch 2.13 to 2.15). The message then ends with
the timeout of the group, after 30 minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

LOST = RuntimeError  # raised by collectives if a member is lost


class Messages:
    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self._fail = fail
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[Tensor], Tensor]] = {}  # each with its fallback

    def follow(self, message: Future[Any], local: Tensor) -> Future[Tensor]:
        """Return a future with the tensor of the message, or with `local` if a member is lost."""
        if local.device.type != "cpu":  # a future for other devices must follow their streams
            return message.then(partial(self._result_of, local))
        ended: Future[Tensor] = Future()
        with self._lock:
            self._waiting[id(ended)] = (ended, local)
        message.add_done_callback(partial(self._end, ended))
        return ended

    def wait(self, work: dist.Work, local: Tensor) -> None:
        self.follow(work.get_future(), local).wait()

    def end_all(self) -> None:
        """End all waits, after an abort. Messages of other devices end by themselves."""
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for ended, local in waiting:
            ended.set_result(local)

    def _end(self, ended: Future[Tensor], message: Future[Any]) -> None:
        with self._lock:
            found = self._waiting.pop(id(ended), None)
        if found is not None:
            ended.set_result(self._result_of(found[1], message))

    def _result_of(self, local: Tensor, message: Future[Any]) -> Tensor:
        try:
            result = message.value()
        except LOST as error:
            self._fail(error)
            return local
        tensor: Tensor = result[0] if isinstance(result, list) else result
        return tensor
