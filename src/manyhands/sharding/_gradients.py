"""Clip sharded gradients and scale losses."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from manyhands._arguments import real
from manyhands._optimizers.state_parts import ShardedOptimizer
from manyhands._optimizers.wrappers import find_layer, params_of
from manyhands._ranks.ranks import RankGroup
from manyhands._ranks.sharded_gradient import local_parts, norm_of_slices
from manyhands._tensors.flat import accumulation_dtype, norm
from manyhands.sharding._agreement import GroupLike

Device: TypeAlias = str | torch.device | None


@torch.no_grad()
def clip(
    grads: Iterable[Tensor | None],
    slices: Iterable[Tensor | None],
    max_norm: float,
    norm_type: float,
    ranks: RankGroup,
    device: torch.device,
) -> Tensor:
    """Clip gradients, given this rank's slices; return the total norm."""
    norms = []
    for grad in slices:
        # An empty slice has no maximum norm.
        if grad is not None and grad.numel():
            norms.append(_norm_of_shard(grad, norm_type).to(device))
    values = torch.stack(norms) if norms else torch.zeros(1, device=device)
    # The norm of norms of equal order is the norm of all elements.
    here = norm_of_slices([values], norm_type, ranks.reducing_group)
    total = here.reduce(here)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # a tensor: no wait for the device
    for grad in grads:
        if grad is not None:
            grad.mul_(factor.to(grad.device))
    return total


def _norm_of_shard(grad: Tensor, norm_type: float) -> Tensor:
    if norm_type == 2.0:
        return norm(grad)
    return torch.linalg.vector_norm(grad, norm_type, dtype=accumulation_dtype(grad.dtype))


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for sharded gradients: all ranks skip a step with an overflow.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = mh.OSS(model.parameters(), lr=0.1)
    >>> model = mh.ShardedDataParallel(model, optimizer)
    >>> scaler = mh.ShardedGradScaler()
    >>> scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    >>> _ = scaler.step(optimizer)
    >>> scaler.update()

    Only the rank that stores an overflow can detect it. This class informs all ranks with an
    all_reduce of a single number per step.

    Unlike torch's class, this class unscales float16 gradients. Very small values are lost in
    float16: parameters in float32 under autocast train better.

    Args:
        init_scale: the initial loss scale.
        growth_factor: the factor by which the scale grows.
        backoff_factor: the factor by which the scale shrinks after an overflow.
        growth_interval: the number of steps without an overflow before the scale grows.
        enabled: whether to scale at all.
        process_group: the ranks; default: the optimizer's ranks, or else all.
        device: the device type of the losses, "cuda" or "cpu"; default: the GPU, if present.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: GroupLike | None = None,
        *,
        device: Device = None,
    ) -> None:
        real("init_scale", init_scale, above=0, why='Pass the device by name: device="cpu".')
        if device is None:
            device = "cpu"
            if torch.cuda.is_available():
                device = "cuda"
        super().__init__(
            str(device), init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = process_group

    @property
    def group(self) -> GroupLike | None:
        """fairscale's name for `process_group`; None stands for the optimizer's group."""
        return self.process_group

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's slices, and find an overflow on any rank."""
        sharded = find_layer(optimizer, ShardedOptimizer)
        # Other ranks wait for a rank without a backward pass.
        group = self.process_group
        if sharded is not None:
            sharded.join_in()
            group = group or sharded.group
        held: list[Tensor] = []
        for param in params_of(optimizer.param_groups):
            parts = local_parts(param.grad) if param.grad is not None else ()
            for part in parts:
                # torch replaces `carrier.grad` if it is a sparse float16 gradient.
                carrier = param
                if part is not param.grad:
                    carrier = part.detach()
                    carrier.grad = part
                held.append(carrier)
        stand_in: Any = SimpleNamespace(param_groups=[{"params": held}])
        # True: allow float16 gradients.
        found: dict[torch.device, Tensor] = super()._unscale_grads_(
            stand_in, inv_scale, found_inf, True
        )
        anywhere = torch.zeros_like(found_inf)
        for flag in found.values():
            anywhere = torch.maximum(anywhere, flag.to(anywhere.device))
        RankGroup.of(group).all_reduce(anywhere, largest=True)
        return {anywhere.device: anywhere}
