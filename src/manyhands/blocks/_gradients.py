"""The mean of all workers' gradients, for a warm-up in which they step together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.blocks._extras import rows_of
from manyhands.blocks._sync import Sync


def average_gradients(sync: Sync, params: Sequence[Tensor]) -> bool:
    """Set every gradient to the workers' mean; whether there is one to step along.

    A worker whose gradients are not finite is left out, and takes the others' mean. A parameter
    that has no gradient on any worker stays without.
    """
    with torch.no_grad():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        outcome = sync.hold(rows_of(grads))
        while outcome is None:  # undone: with those who are there now
            outcome = sync.hold(rows_of(grads))
        if not outcome.counted:
            return False
        for param, grad in zip(params, grads, strict=True):
            if param.grad is None and grad.any():
                param.grad = grad
    return True
