"""Loss scaling where each worker sees only its part of the gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from manyhands._comm import Workers
from manyhands.sharding._gradient import ShardedGradient
from manyhands.sharding._oss import OSS


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` whose workers all skip a step when one of them must.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = mh.OSS(model.parameters(), lr=0.1)
    >>> model = mh.ShardedDataParallel(model, optimizer)
    >>> scaler = mh.ShardedGradScaler()
    >>> scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    >>> _ = scaler.step(optimizer)
    >>> scaler.update()

    With gradients that are sharded an overflow shows on the worker that holds it alone. Here
    every worker is told, in one collective of one number a step.

    Args:
        device: where losses are, "cuda" or "cpu"; by default the GPU, if there is one.
        init_scale: the loss is multiplied with at first.
        growth_factor: by which the scale grows,
        growth_interval: after so many steps without an overflow in a row.
        backoff_factor: by which it shrinks after an overflow.
        enabled: whether to scale at all.
        process_group: the workers; by default those of the optimizer, or else all.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        if device is not None and not isinstance(device, str | torch.device):
            raise TypeError(
                f"device must be a name such as 'cuda' or 'cpu', got {device!r}. Give the scale by "
                "name: ShardedGradScaler(init_scale=...)."
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(
            str(device), init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = process_group

    # torch's `unscale_`, `step` and `update` come here for the gradients of an optimizer.
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        sharded = _sharding_of(optimizer)
        if sharded is not None:
            sharded.join_in()
        held = [
            part
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
            for part in _parts(param.grad)
        ]
        # What torch walks through: parameters, each with a gradient.
        stand_in: Any = SimpleNamespace(param_groups=[{"params": [_carrying(p) for p in held]}])
        found: dict[torch.device, Tensor] = super()._unscale_grads_(
            stand_in, inv_scale, found_inf, allow_fp16
        )
        group = self.process_group or (None if sharded is None else sharded.group)
        anywhere = torch.zeros_like(found_inf)
        for flag in found.values():
            anywhere = torch.maximum(anywhere, flag.to(anywhere.device))
        Workers.of(group).reduced(anywhere, largest=True)
        return {anywhere.device: anywhere}


def _sharding_of(optimizer: Any) -> OSS | None:
    while optimizer is not None and not isinstance(optimizer, OSS):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def _parts(grad: Tensor) -> list[Tensor]:
    """The tensors that this worker holds of a gradient."""
    if isinstance(grad, ShardedGradient):
        return [piece for piece in grad.pieces if piece.numel()]
    return [grad.to_local()] if hasattr(grad, "to_local") else [grad]  # a DTensor's share


def _carrying(grad: Tensor) -> Tensor:
    carrier = grad.detach()
    carrier.grad = grad
    return carrier
