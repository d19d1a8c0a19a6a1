"""manyhands' ways to synchronise: the only file here that knows their arguments.

Through sockets, as between hosts, unless otherwise said: `shared_memory=None` is how they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

import manyhands as mh

Make = Callable[[Optimizer, int, nn.Module | None], Any]


def local_sgd(shared_memory: bool | None = False, **options: Any) -> Make:
    return lambda optimizer, every, model: mh.LocalSGD(
        optimizer, every=every, model=model, shared_memory=shared_memory, **options
    )


def bmuf(lr: float, momentum: float, shared_memory: bool | None = False, **options: Any) -> Make:
    return lambda optimizer, every, model: mh.BMUF(
        optimizer,
        block_lr=lr,
        block_momentum=momentum,
        global_sync_iter=every,
        warmup_iterations=0,
        model=model,
        shared_memory=shared_memory,
        **options,
    )


def diloco(lr: float, momentum: float, **options: Any) -> Make:
    return lambda optimizer, every, model: mh.DiLoCo(
        optimizer,
        lr=lr,
        momentum=momentum,
        every=every,
        model=model,
        shared_memory=False,
        **options,
    )


def finish(optimizer: Any) -> None:
    """Let what is under way arrive, before processes end."""
    if isinstance(optimizer, mh.Blocks):
        optimizer.synchronize()
