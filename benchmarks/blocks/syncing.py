"""Move a rank away from the others, and synchronize on request.

The inner optimizer does nothing, so a step of every contender is a synchronization, and only that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rounds import Spent, spent
from sharding.models import Size
from team import Work
from torch import Tensor
from torch.optim import Optimizer

from blocks import model
from blocks.contenders import REFERENCES, Contender
from sharding import memory

COMPARED = 3  # synchronizations before parameters are compared
SAMPLED = 16  # elements of each tensor that are compared


class Still(Optimizer):
    """An optimizer whose steps change nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Syncing:
    """One rank of a contender; every order is carried out by all ranks together."""

    def __init__(self, contender: Contender, size: Size, drifts: list[Tensor]) -> None:
        self.contender = contender
        self.size = size
        self.drifts = drifts
        self.params = model.parameters(size)
        for param, drift in zip(self.params, drifts, strict=True):
            param.grad = drift  # torch's averager leaves out what has none
        self.optimizer = contender.make(Still(self.params), 1, None)

    @torch.no_grad()
    def drift(self) -> None:
        """Move each rank in another direction, as the steps of a block do."""
        torch._foreach_add_(self.params, self.drifts)

    def compared(self) -> dict[str, Any]:
        """Return the distance from the formula written out, over the distance moved."""
        start = _sampled(self.params)
        for _ in range(COMPARED):
            self.drift()
            self.optimizer.step()
        found = _sampled(self.params)
        params = model.parameters(self.size)
        written_out = REFERENCES[self.contender.formula](Still(params), 1, None)
        for _ in range(COMPARED):
            with torch.no_grad():
                torch._foreach_add_(params, self.drifts)
            written_out.step()
        expected = _sampled(params)
        apart = (found - expected).norm() / (expected - start).norm()
        everyone = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, found)
        return {"apart": float(apart), "agree": all(torch.equal(found, x) for x in everyone)}

    def timed(self) -> Spent:
        """Return the costs of one synchronization."""
        self.drift()
        found = spent(self.optimizer.step)
        dist.barrier()
        return found


def _drifts(size: Size, rank: int) -> list[Tensor]:
    return model.gradients(model.parameters(size), rank)


def _sampled(params: list[Tensor]) -> Tensor:
    parts = [p.detach().reshape(-1) for p in params]
    return torch.cat([part[:: max(1, len(part) // SAMPLED)] for part in parts])


def syncing(contender: Contender, size: Size) -> Work:
    def work(rank: int) -> Callable[[dict[str, Any]], Any]:
        one = Syncing(contender, size, _drifts(size, rank))
        return lambda order: getattr(one, order["do"])()

    return work


def held(contender: Contender, size: Size) -> Work:
    """Measure the memory of the ranks, in units of the parameters."""
    return lambda rank: lambda _: _held(contender, size, rank)


def _held(contender: Contender, size: Size, rank: int) -> dict[str, float]:
    drifts = _drifts(size, rank)
    with memory.Held(drifts) as tensors:
        one = Syncing(contender, size, drifts)
        for _ in range(2):
            one.drift()
            one.optimizer.step()
        dist.barrier()  # gloo's thread has let go of the last tensor
        unit = sum(p.numel() * p.element_size() for p in one.params)
        kept = tensors.now() - unit
        tensors.most = 0
        one.optimizer.step()
        most = tensors.most - kept - unit
    resident = memory.growth(one.optimizer.step)
    return {"kept": kept / unit, "most": most / unit, "resident": resident / unit}
