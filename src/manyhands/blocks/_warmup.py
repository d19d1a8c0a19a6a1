"""A shared warm-up: the first steps are taken along the mean of all workers' gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from manyhands.blocks._sync import Sync
from manyhands.blocks.averaging._extras import by_index, make_payloads


def average_gradients(sync: Sync, params: Sequence[Tensor]) -> bool:
    """Set every gradient to the workers' mean; return whether there is one to step along.

    A worker whose gradients are not finite is left out, and gets the others' mean. A parameter
    that has no gradient on any worker stays without one.
    """
    with torch.no_grad():
        # Workers may use different parameters, but have to send the same payload: zeros stand for
        # a missing gradient, and one more number per parameter says whether it is there.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        present = torch.tensor([float(p.grad is not None) for p in params])
        payloads = make_payloads(by_index([*grads, present]))
        result = sync.average_now(payloads)
        while result is None:  # a member was lost: repeat with those who are left
            result = sync.average_now(payloads)
        if not result.included:
            return False
        # `present` now holds the workers' mean: above 0 if any of them has a gradient.
        for param, grad, anywhere in zip(params, grads, present.tolist(), strict=True):
            if param.grad is None and anywhere:
                param.grad = grad
    return True
