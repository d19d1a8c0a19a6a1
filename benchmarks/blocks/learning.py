"""Tasks to learn, by one worker at the whole batch or by several that synchronize now and then.

The workers are forks of this process, on gloo, and use the library as a user does. Each draws its
own samples; the one worker of the synchronous run draws as many in one batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from quality.workloads import loss_of, mnist, python_code, shakespeare
from sharding.models import Block, divided
from team import Team
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import manyhands as mh

WORKERS = 4
Method = dict[str, Any] | None  # options of blocks; None: one worker
INNER: dict[str, Callable[[Iterable[Tensor], float], Optimizer]] = {
    "SGD": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
    "AdamW": lambda params, lr: AdamW(params, lr=lr, betas=(0.9, 0.95)),
    # The learning rate of AdamW, because its steps have the length of AdamW's.
    "Muon": lambda params, lr: Muon(
        params, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw", momentum=0.95
    ),
}


class Transformer(nn.Module):
    """Causal, for characters; 0.6 M parameters."""

    def __init__(self, symbols: int, length: int, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads=4, bias=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        x = self.symbol(x) + self.place[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


@dataclass(frozen=True)
class Task:
    """A task to learn; `batch` is a worker's."""

    name: str
    batch: int
    steps: int
    lr: float
    load: Callable[[Path], Any]
    workers: int = WORKERS
    inner: str = "AdamW"  # the optimizer, one of `INNER`
    length: int = 64  # characters in a sample
    after: Task | None = None  # pretraining, which this task continues

    @property
    def is_text(self) -> bool:
        return self.load in (shakespeare, python_code)

    def model(self, data: Any) -> nn.Module:
        if self.is_text:
            return Transformer(data.symbols, self.length)
        return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))

    def draw(self, data: Any, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if self.is_text:
            last = len(data.train) - self.length - 1
            starts = torch.randint(last, (count, 1), generator=generator)
            windows = data.train[starts + torch.arange(self.length + 1)]
            return windows[:, :-1], windows[:, 1:]
        x, y = data.train
        chosen = torch.randint(len(x), (count,), generator=generator)
        return x[chosen], y[chosen]

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x, y)

    @torch.no_grad()
    def at_the_end(self, data: Any, model: nn.Module) -> float:
        """Return the loss on held-out data."""
        if self.is_text:
            count = (len(data.test) - 1) // 64
            x = data.test[: count * 64].view(count, 64)
            y = data.test[1 : count * 64 + 1].view(count, 64)
        else:
            x, y = data.test
        parts = zip(x.split(256), y.split(256), strict=True)
        return sum(loss_of(model, a, b).item() * len(a) for a, b in parts) / len(x)


TASKS = {
    "Shakespeare": Task("Shakespeare", batch=4, steps=1200, lr=2e-3, load=shakespeare),
    "MNIST": Task("MNIST", batch=16, steps=1200, lr=1e-3, load=mnist),
}


def lr_at(step: int, steps: int) -> float:
    """Of the whole: up in the first twentieth, then a cosine down to a tenth."""
    up = steps // 20
    if step < up:
        return (step + 1) / up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - up) / (steps - up)))


def learn(task: Task, folder: Path, seed: int, method: Method, start: Sequence[Any]) -> float:
    """Train on this worker, from the parameters `start`; return the loss on held-out data."""
    data = task.load(folder)
    torch.manual_seed(seed)
    model = task.model(data)
    for param, values in zip(model.parameters(), start, strict=False):
        param.data = torch.tensor(values)
    train(task, folder, seed, method, model)
    return task.at_the_end(data, model) if dist.get_rank() == 0 else 0.0


@cache
def pretrained(task: Task, folder: Path, method: str) -> list[Any]:
    """Return the parameters after training with seed 0; `method` is in JSON."""

    def work() -> list[Any]:
        torch.manual_seed(0)
        model = task.model(task.load(folder))
        train(task, folder, 0, json.loads(method), model)
        return [param.tolist() for param in model.parameters()] if dist.get_rank() == 0 else []

    return list(in_processes(task.workers, work)[0])


def train(task: Task, folder: Path, seed: int, method: Method, model: nn.Module) -> None:
    torch.set_num_threads(1)
    data = task.load(folder)
    workers = task.workers if method else 1
    rank = dist.get_rank() if method else 0
    inner = inner_optimizers(task, model)
    schedules = [LambdaLR(each, lambda step: lr_at(step, task.steps)) for each in inner]
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    count = task.batch * (task.workers // workers)
    phases = phases_of(task, method)
    blocks: list[Any] = []
    for step in range(task.steps):
        if step in phases:
            for each in blocks:
                each.synchronize()
            blocks = [in_blocks(each, **phases[step]) for each in inner]
        x, y = task.draw(data, count, generator)
        model.zero_grad()
        task.loss(model, x, y).backward()
        for each in (*(blocks or inner), *schedules):
            each.step()
    for each in blocks:
        each.synchronize()


def phases_of(task: Task, method: Method) -> dict[int, dict[str, Any]]:
    """Return the options by the first step: in the `first` steps, a round follows each step."""
    if not method:
        return {}
    later = dict(method)
    first = later.pop("first", 0)
    if not first:
        return {0: later}
    return {0: {**later, "every": 1, "lr": math.sqrt(task.workers), "momentum": 0.0}, first: later}


def inner_optimizers(task: Task, model: nn.Module) -> list[Optimizer]:
    """Return Muon for the matrices of the blocks and AdamW for the rest, or a single optimizer."""
    if task.inner != "Muon":
        return [INNER[task.inner](model.parameters(), task.lr)]
    matrices, rest = divided(model)
    return [INNER[task.inner](matrices, task.lr), INNER["AdamW"](rest, task.lr)]


def in_blocks(optimizer: Optimizer, kind: str, every: int, warmup: int, **options: Any) -> Any:
    """All begin together, under BMUF as well."""
    if kind == "BMUF":
        options.update(global_sync_iter=every, warmup_iterations=warmup, local_warmup=False)
        return mh.BMUF(optimizer, **options)
    return getattr(mh, kind)(optimizer, every=every, warmup=warmup, **options)


def run(task: Task, folder: Path, seed: int, method: Method, before: Method = None) -> float:
    """Learn in separate processes, after pretraining with the method `before`."""
    start: list[Any] = []
    if task.after:
        alike = {"kind": "LocalSGD", "every": 1, "warmup": task.after.steps}  # synchronous
        start = pretrained(task.after, folder, json.dumps(before or alike))
    workers = task.workers if method else 1
    return float(in_processes(workers, lambda: learn(task, folder, seed, method, start))[0])


def in_processes(workers: int, work: Callable[[], Any]) -> list[Any]:
    """Return what `work` returns on each rank of a gloo group of forks, in their order."""
    with Team(workers, lambda rank: lambda order: work()) as team:
        return team.ask({})
