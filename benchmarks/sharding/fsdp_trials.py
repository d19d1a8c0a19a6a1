"""One training of the parity benchmark of sharded parameters, and the two that it is beside.

    whole    one process, the bare optimizer, the batches of all ranks as one
    parts    one process that does what all ranks do: each one's gradients by itself, then the mean

In lower precision the two differ: a gradient is rounded once for each batch. What ranks do is
`parts`, up to the order in which gradients are added up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import manyhands as mh
from sharding import models
from sharding.fsdp_contenders import BARE, nested
from sharding.trials import OPTIMIZERS, STEPS, Case, batches, everyone, run

SIZE = models.SIZES["one block"]
CHOSEN = ("SGD, momentum", "AdamW, fused", "LAMB")
LEAST = 10_000  # elements that auto_wrap wraps: the larger Linears, each by itself
HALF = {"mixed_precision": True, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}
DDP = "DDP"


class Cast(nn.Module):
    """Computes with the parameters in bfloat16, and keeps them as they are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, tokens: Tensor) -> Tensor:
        half = {name: p.to(torch.bfloat16) for name, p in self.inner.named_parameters()}
        return functional_call(self.inner, half, (tokens,))


def one_wrap(model: nn.Module, **options: Any) -> nn.Module:
    return mh.FSDP(model, **options)


def every_layer(model: nn.Module, **options: Any) -> nn.Module:
    return nested(model, lambda module: mh.FSDP(module, **options))


def by_size(model: nn.Module, **options: Any) -> nn.Module:
    with mh.enable_wrap(wrapper_cls=mh.FSDP, skip_params_check_for_root=True, **options):
        return mh.auto_wrap(model, min_num_params=LEAST)


OURS: dict[str, Callable[..., nn.Module]] = {
    "one wrap": one_wrap,
    "nested": every_layer,
    "auto_wrap": by_size,
}


def bare(model: nn.Module, bf16: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    module: Any = nested(model, lambda module: fully_shard(module, mp_policy=policy))

    @contextmanager
    def no_sync() -> Iterator[None]:
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    module.no_sync = no_sync
    return module


def trained(case: Case, way: str | None, parts: list[list[Tensor]]) -> Tensor:
    """All parameters after `STEPS` steps on these batches of each pass of a step."""
    model = models.decoder(SIZE)
    if way in OURS:
        wrapped = OURS[way](model, **(HALF if case.bf16 else {}))
    elif way == BARE:
        wrapped = bare(model, case.bf16)
    else:
        wrapped = Cast(model) if case.bf16 else model
        wrapped = DistributedDataParallel(wrapped) if way == DDP else wrapped
    run(case, wrapped, _optimizers(case, model, wrapped), parts, autocast=False)
    return _flat(wrapped)


def trained_by_parts(case: Case, ranks: list[list[list[Tensor]]]) -> Tensor:
    """The same in one process, with the batches of each rank."""
    model = models.decoder(SIZE)
    computed = Cast(model) if case.bf16 else model
    (optimizer,) = _optimizers(case, model, model)
    params = list(model.parameters())
    for number in range(STEPS):
        sums = [torch.zeros_like(param) for param in params]
        for parts in ranks:
            for tokens in parts:
                (computed(tokens[number % len(tokens)]) / case.passes).backward()
            for total, param in zip(sums, params, strict=True):
                total.add_(param.grad)
            optimizer.zero_grad()
        for total, param in zip(sums, params, strict=True):
            param.grad = total.div_(len(ranks))
        optimizer.step()
        optimizer.zero_grad()
    return _flat(model)


def _optimizers(case: Case, model: nn.Module, wrapped: nn.Module) -> list[Any]:
    ((kind, _, options),) = OPTIMIZERS[case.optimizer](model)
    return [kind(wrapped.parameters(), **options)]


def _flat(model: nn.Module) -> Tensor:
    """In the plain model's order, which wrapping leaves as it is."""
    params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([param.detach().reshape(-1) for param in params])


class Trials:
    """One rank; what it is beside is rank 0's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.beside: dict[Case, tuple[Tensor, Tensor]] = {}

    def __call__(self, order: dict[str, Any]) -> dict[str, Any]:
        """Train as ordered; how far from `whole` and `parts`, and a checksum to compare ranks."""
        case = Case(order["optimizer"], order["bf16"], order["passes"])
        ranks = [batches(SIZE, rank, case.passes) for rank in range(dist.get_world_size())]
        here = trained(case, order["way"], ranks[self.rank])
        found: dict[str, Any] = {"sum": zlib.crc32(bytes(here.view(torch.uint8).tolist()))}
        if self.rank == 0:
            if case not in self.beside:
                whole = trained(case, None, everyone(ranks))
                self.beside[case] = whole, trained_by_parts(case, ranks)
            whole, parts = self.beside[case]
            size = whole.square().mean().sqrt()
            found["whole"] = float((here - whole).abs().max() / size)
            found["parts"] = float((here - parts).abs().max() / size)
            found["plain"] = float((parts - whole).abs().max() / size)
        return found
