"""One rank of a contender: it trains on request, and returns what that took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sharding import models, traffic
from sharding.contenders import Contender

SAMPLED = 2000  # elements of parameters that are compared


class Training:
    """Steps of one contender; every order is carried out by all of its ranks together."""

    def __init__(self, contender: Contender, size: models.Size, rank: int) -> None:
        model = models.decoder(size)
        self.names = [name for name, _ in model.named_parameters()]
        self.trained = contender.make(model)
        self.batches = models.batches(size, rank)
        self.params = list(model.parameters())
        self.done = 0

    def step(self) -> None:
        loss = self.trained.model(self.batches[self.done % len(self.batches)])
        self.trained.backward(loss)
        self.trained.optimizer.step()
        self.trained.clear()
        self.done += 1

    def timed(self, choice: str, steps: int) -> dict[str, float]:
        """Wall and CPU seconds (of all threads) and bytes sent, per step."""
        self.trained.choose(choice)
        dist.barrier()
        wall, cpu, sent = time.perf_counter(), time.process_time(), traffic.bytes_sent()
        for _ in range(steps):
            self.step()
        self.trained.finish()
        dist.barrier()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        sent = traffic.bytes_sent() - sent
        return {"wall": wall / steps, "cpu": cpu / steps, "sent": sent / steps}

    def counted(self) -> list[tuple[str, int]]:
        """The collectives of a step."""
        with traffic.collectives() as seen:
            self.step()
            self.trained.finish()
        return seen

    def sample(self) -> list[float]:
        """Some elements of the parameters, spread over all of them."""
        if self.trained.state is not None:
            state = self.trained.state()
            whole = [state[name] for name in self.names]
        else:
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.params]
        flat = torch.cat([p.detach().reshape(-1)[:: max(1, p.numel() // 50)] for p in whole])
        return flat[:: max(1, len(flat) // SAMPLED)].tolist()


def training(contender: Contender, size: models.Size) -> Callable[[int], Callable[..., Any]]:
    """What a team's ranks do (`team.Work`)."""

    def work(rank: int) -> Callable[[dict[str, Any]], Any]:
        one = Training(contender, size, rank)

        def answer(order: dict[str, Any]) -> Any:
            return getattr(one, order["do"])(**order.get("with", {}))

        return answer

    return work
