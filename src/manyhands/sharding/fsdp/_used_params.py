"""Which parameters got a gradient in a backward pass, on this rank and on any rank?

If ranks use different parameters, torch's engine can average zeros for a parameter that a rank did
not use. It then averages zeros for parameters that no rank used, too. An optimizer with momentum or
weight decay would move those, which it does not do on one rank. So each rank notes which full
parameters get a gradient. After each averaged pass one small all_reduce finds the parameters that
any rank used, and all others are left without a gradient.

The all_reduce also carries a checksum of the wraps that ran. If ranks ran different wraps, they
have averaged the gradients of one wrap with those of another, and every rank raises an error.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from manyhands._core.ranks import RankGroup
from manyhands.sharding.fsdp._places import Place


class UsedParameters:
    """The parameters of all wraps of a root that got a gradient, by number in their order."""

    def __init__(self, ranks: RankGroup, params: Callable[[], Sequence[Tensor]]) -> None:
        self._ranks = ranks
        self._params = params
        self._used_here: set[int] = set()
        self._order = 0  # a checksum of the wraps that ran, in their order
        self._had_gradient: list[bool] = []  # before the pass, from earlier passes
        # The full parameter, its node and the hook's handle. Autograd alone would free the node.
        self._watched: dict[int, tuple[Tensor, Any, Any]] = {}

    def watch(self, first: int, places: Sequence[Place]) -> None:
        """Note the gradients of the full parameters at these places, numbered from `first`.

        Call it in a forward, when they are gathered. The engine keeps a full parameter's tensor
        object, and changes only its memory, so each gets a hook once.
        """
        self._order = zlib.crc32(first.to_bytes(4, "little"), self._order)
        reference = weakref.ref(self)
        for number, (module, name) in enumerate(places, first):
            param = getattr(module, name)
            known = self._watched.get(number)
            if param.requires_grad and (known is None or known[0] is not param):
                node = get_gradient_edge(param).node
                handle = node.register_prehook(partial(_note, reference, number))
                self._watched[number] = param, node, handle

    def forget(self) -> None:
        """Forget the gradients noted so far, because they were dropped."""
        self._used_here.clear()
        self._order = 0

    def begin(self) -> None:
        """Prepare for the first averaged gradients of a pass."""
        self._had_gradient = [param.grad is not None for param in self._params()]

    def end(self) -> None:
        """Remove the gradients of parameters that no rank used, when all means have arrived."""
        # Not at the top: it imports torch's DTensor, which `import manyhands` must not do.
        from manyhands.sharding.fsdp._gradient import use_our_class

        params = self._params()
        trained = [n for n, param in enumerate(params) if param.requires_grad]
        flags = torch.zeros(len(params), dtype=torch.uint8)
        flags[list(self._used_here) if len(self._used_here) < len(params) else slice(None)] = 1
        # After the flags, the checksum's bytes b and 255 - b. The all_reduce yields the largest b,
        # and 255 minus the smallest b. They agree only if all ranks have the same b.
        order = torch.frombuffer(bytearray(self._order.to_bytes(4, "little")), dtype=torch.uint8)
        flags = torch.cat([flags, order, 255 - order]).to(params[0].device)
        self._ranks.start_all_reduce_max(flags).wait()
        self._order = 0
        some_unused = len(self._used_here) < len(trained)
        # Reading flags on a GPU would make the host wait for it, so only if they are needed anyway.
        readable = some_unused or flags.device.type == "cpu"
        if readable and not torch.equal(255 - flags[-4:], flags[-8:-4]):
            self.forget()
            raise RuntimeError(
                "ranks have run different wraps, or in another order, since the last averaged "
                "backward, so their gradients are wrong. Every rank must run the same wraps; "
                "within one wrap ranks may use different parameters."
            )
        if some_unused:
            for number, used in zip(trained, flags[trained].tolist(), strict=True):
                # A gradient from an earlier pass is kept: only zeros were added to it.
                if not used and not self._had_gradient[number]:
                    params[number].grad = None
        self._used_here.clear()
        for number in trained:
            use_our_class(params[number])


def _note(reference: weakref.ref[UsedParameters], number: int, grads: Any) -> None:
    used = reference()
    # Autograd passes None if the parameter took part in the forward and got no gradient.
    if used is not None and grads[0] is not None:
        used._used_here.add(number)
