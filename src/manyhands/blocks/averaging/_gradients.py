"""The mean of all workers' gradients, for a warm-up in which they step together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.blocks._sync import Sync
from manyhands.blocks.averaging._extras import numbered, rows_of


def average_gradients(sync: Sync, params: Sequence[Tensor]) -> bool:
    """Set every gradient to the workers' mean; whether there is one to step along.

    A worker whose gradients are not finite is left out, and takes the others' mean. A parameter
    that has no gradient on any worker stays without.
    """
    with torch.no_grad():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        some = torch.tensor([float(p.grad is not None) for p in params])  # then: on any worker
        rows = rows_of(numbered([*grads, some]))
        outcome = sync.hold(rows)
        while outcome is None:  # undone: with those who are there now
            outcome = sync.hold(rows)
        if not outcome.counted:
            return False
        for param, grad, has_one in zip(params, grads, some.tolist(), strict=True):
            if param.grad is None and has_one:
                param.grad = grad
    return True
