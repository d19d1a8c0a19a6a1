"""Which parameters has a backward pass given a gradient, on this worker and on any?

Where workers use different parameters, torch's engine can average zeros for those that one of
them did not use. It then does so for parameters that nobody used, too, and an optimizer with
momentum or weight decay would move them, which it does not on one worker. So each worker notes
which of the whole parameters get a gradient, the workers tell each other, in one small collective
after each averaged pass, and what nobody used is without a gradient afterwards. On it rides a
checksum of the wraps that ran: where workers run different ones, they have gathered and averaged
one worker's parameters with another's, and all raise an error.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from manyhands._core.ranks import RankGroup

Place = tuple[nn.Module, str]  # a module and the name of a parameter of its own


class UsedParameters:
    """Of the parameters of all wraps of a root, numbered in their order."""

    def __init__(self, workers: RankGroup, params: Callable[[], Sequence[Tensor]]) -> None:
        self._workers = workers
        self._params = params
        self._here: set[int] = set()
        self._order = 0  # a checksum of the wraps that ran
        self._before: list[bool] = []
        self._watched: dict[int, tuple[Tensor, Any, Any]] = {}

    def watch(self, first: int, places: Sequence[Place]) -> None:
        """Note the gradients of the whole parameters at these places, numbered from `first`.

        To be called in a forward, when they are there. The engine keeps a whole parameter's
        tensor object, and changes only its memory, so each is looked for once.
        """
        self._order = zlib.crc32(first.to_bytes(4, "little"), self._order)
        me = weakref.ref(self)
        for number, (module, name) in enumerate(places, first):
            param = getattr(module, name)
            known = self._watched.get(number)
            if param.requires_grad and (known is None or known[0] is not param):
                node = get_gradient_edge(param).node
                handle = node.register_prehook(partial(_note, me, number))
                self._watched[number] = param, node, handle

    def forget(self) -> None:
        """The gradients noted so far are of no use: they were dropped."""
        self._here.clear()
        self._order = 0

    def begin(self) -> None:
        """The first averaged gradients of a pass are about to come."""
        self._before = [param.grad is not None for param in self._params()]

    def end(self) -> None:
        """All averaged gradients of a pass have come."""
        from manyhands.sharding.fsdp._gradient import mark  # which imports torch's DTensor

        params = self._params()
        trained = [n for n, param in enumerate(params) if param.requires_grad]
        flags = torch.zeros(len(params), dtype=torch.uint8)
        flags[list(self._here) if len(self._here) < len(params) else slice(None)] = 1
        order = torch.frombuffer(bytearray(self._order.to_bytes(4, "little")), dtype=torch.uint8)
        flags = torch.cat([flags, order, 255 - order]).to(params[0].device)
        self._workers.start_all_reduce_max(flags).wait()
        self._order = 0
        some_unused = len(self._here) < len(trained)
        looked_at = some_unused or flags.device.type == "cpu"  # else the host would wait for a GPU
        if looked_at and not torch.equal(255 - flags[-4:], flags[-8:-4]):
            self.forget()
            raise RuntimeError(
                "workers have run different wraps, or in another order, since the last averaged "
                "backward, and their gradients are not to be used. Every worker must run the same "
                "wraps; within one wrap they may use different parameters."
            )
        if some_unused:
            for number, used in zip(trained, flags[trained].tolist(), strict=True):
                if not used and not self._before[number]:
                    params[number].grad = None
        self._here.clear()
        for number in trained:
            mark(params[number])


def _note(me: weakref.ref[UsedParameters], number: int, grads: Any) -> None:
    used = me()
    if used is not None and grads[0] is not None:
        used._here.add(number)
