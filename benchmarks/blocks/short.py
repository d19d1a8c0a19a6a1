"""Ten short runs of 4 workers, and the plain loop that trains them under many outer steps at once.

`simulate` needs no process group. The parameters of all settings and workers are stacked as
(settings, workers, ...): a backward pass trains all of them, and an inner optimizer that works
element by element steps all of them. `learn` trains the same task on ranks, with the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blocks.learning import INNER, WORKERS, Task, Transformer, lr_at
from quality.workloads import loss_of, mnist, shakespeare
from sharding.models import Block
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import avg_pool2d

TEXT = 16  # characters in a sample


class Recurrent(nn.Module):
    """An LSTM or a GRU of plain layers, which `vmap` can stack; reads out at the end, or always."""

    def __init__(self, inputs: int, outputs: int, gates: int, always: bool = False) -> None:
        super().__init__()
        self.width, self.gates, self.always = 24, gates, always  # 4 gates: LSTM, 3: GRU
        self.symbol = nn.Embedding(inputs, self.width) if always else nn.Identity()
        self.seen = nn.Linear(self.width if always else inputs, gates * self.width)
        self.state = nn.Linear(self.width, gates * self.width)
        self.readout = nn.Linear(self.width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen(self.symbol(x))
        hidden = memory = torch.zeros_like(seen[:, 0, : self.width])
        found = []
        for now in seen.unbind(1):
            parts = zip(now.chunk(self.gates, -1), self.state(hidden).chunk(self.gates, -1))
            if self.gates == 4:
                keep, write, show, new = (a + b for a, b in parts)
                memory = torch.sigmoid(keep + 1) * memory + torch.sigmoid(write) * torch.tanh(new)
                hidden = torch.sigmoid(show) * torch.tanh(memory)
            else:
                (r, r_), (z, z_), (n, n_) = parts
                z, n = torch.sigmoid(z + z_), torch.tanh(n + torch.sigmoid(r + r_) * n_)
                hidden = n + z * (hidden - n)
            found.append(hidden)
        return self.readout(torch.stack(found, 1) if self.always else hidden)


class Rows(nn.Module):
    """A transformer of the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.place = nn.Linear(14, 32), nn.Parameter(torch.randn(14, 32) * 0.02)
        self.block, self.readout = Block(32, heads=4, bias=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.block(self.row(x) + self.place).mean(1))


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def cnn() -> nn.Module:
    maps = [nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 14)), *maps, nn.Linear(64, 10))


MODELS: dict[str, Any] = {
    "MLP": lambda symbols: mlp(196, 10),
    "CNN": lambda symbols: cnn(),
    "LSTM": lambda symbols: Recurrent(14, 10, gates=4),
    "GRU": lambda symbols: Recurrent(14, 10, gates=3),
    "transformer": lambda symbols: Rows(),
    "text, LSTM": lambda symbols: Recurrent(symbols, symbols, gates=4, always=True),
    "text, GRU": lambda symbols: Recurrent(symbols, symbols, gates=3, always=True),
    "text, transformer": lambda symbols: Transformer(symbols, TEXT, width=32, layers=1),
    "regression": lambda symbols: mlp(16, 1),
}


@dataclass(frozen=True)
class Short(Task):
    """A task whose end is told in points: % of labels, or of the variance that is explained."""

    def model(self, data: Any) -> nn.Module:
        return MODELS[self.name.rpartition(", ")[0]](getattr(data, "symbols", 0))

    def draw(self, data: Any, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if "regression" in self.name:
            x = torch.randn(count, 16, generator=generator)
            return x, taught(x) + 0.1 * torch.randn(count, 1, generator=generator)
        if "text" in self.name:
            starts = torch.randint(len(data.train) - TEXT, (count, 1), generator=generator)
            windows = data.train[starts + torch.arange(TEXT + 1)]
            return windows[:, :-1], windows[:, 1:]
        chosen = torch.randint(len(data.train[0]), (count,), generator=generator)
        return small(data.train[0][chosen]), data.train[1][chosen]

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean() if y.is_floating_point() else loss_of(model, x, y)

    @torch.no_grad()
    def at_the_end(self, data: Any, model: nn.Module) -> float:
        generator = torch.Generator().manual_seed(12345)
        if "regression" in self.name:
            x = torch.randn(4000, 16, generator=generator)
            y = taught(x)
            return 100 * (1 - ((model(x) - y).square().mean() / y.var()).item())
        if "text" in self.name:
            windows = data.test[: len(data.test) // 17 * 17].view(-1, TEXT + 1)[:1500]
            x, y = windows[:, :-1], windows[:, 1:]
        else:
            x, y = small(data.test[0][:4000]), data.test[1][:4000]
        return 100 * (model(x).argmax(-1) == y).double().mean().item()


def small(pictures: Tensor) -> Tensor:
    return avg_pool2d(pictures.view(-1, 28, 28), 2)


TEACHER = [torch.randn(16, 8, generator=torch.Generator().manual_seed(k)) / 4 for k in range(2)]


def taught(x: Tensor) -> Tensor:
    return (torch.tanh(2 * x @ TEACHER[0]) * torch.tanh(2 * x @ TEACHER[1])).sum(1, keepdim=True)


def nothing(_: Path) -> None:
    """The data of a regression are drawn."""


def short(name: str, inner: str, steps: int, lr: float, batch: int = 8) -> Short:
    load: Any = shakespeare if "text" in name else nothing if name == "regression" else mnist
    return Short(f"{name}, {inner}", batch, steps, lr, load, inner=inner)


SHORT = {
    task.name: task
    for task in (
        short("MLP", "SGD", 400, 0.04),
        short("MLP", "AdamW", 400, 0.008),
        short("CNN", "SGD", 400, 0.08),
        short("CNN", "AdamW", 400, 0.016),
        short("LSTM", "SGD", 600, 0.1),
        short("GRU", "AdamW", 400, 0.032),
        short("transformer", "AdamW", 400, 0.016),
        short("text, LSTM", "SGD", 600, 1.0, 4),
        short("text, transformer", "AdamW", 400, 0.032, 4),
        short("regression", "SGD", 800, 0.02),
    )
}


class Setting(NamedTuple):
    """Of a run of 4 workers; `grows`: in round k the momentum is at most (k - 1) / (k + 2)."""

    every: int
    warmup: int
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    grows: bool = False


def simulate(task: Any, folder: Path, seed: int, settings: list[Setting]) -> list[float]:
    """What each setting ends at, in points."""
    torch.set_num_threads(1)
    data = task.load(folder)
    torch.manual_seed(seed)
    model = task.model(data)
    stacked = {
        name: param.detach().expand(len(settings), WORKERS, *param.shape).clone().requires_grad_()
        for name, param in model.named_parameters()
    }
    anchors = [param.detach()[:, 0].clone() for param in stacked.values()]
    memories = [torch.zeros_like(anchor) for anchor in anchors]
    optimizer = INNER[task.inner](stacked.values(), task.lr)
    generators = [torch.Generator().manual_seed(1000 * seed + w) for w in range(WORKERS)]

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(lambda x: functional_call(model, params, (x,)), x, y)

    losses = vmap(vmap(loss), (0, None, None))
    for step in range(1, task.steps + 1):
        optimizer.param_groups[0]["lr"] = task.lr * lr_at(step - 1, task.steps)
        drawn = [task.draw(data, task.batch, generator) for generator in generators]
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # `vmap` does not know the other
            losses(stacked, *map(torch.stack, zip(*drawn, strict=True))).sum().backward()
        together = torch.tensor([step <= setting.warmup for setting in settings])
        for param in stacked.values():
            if together.any():
                param.grad[together] = param.grad[together].mean(1, keepdim=True)
        optimizer.step()
        for at, setting in enumerate(settings):
            into = step - setting.warmup
            due = step % setting.every == 0 or step == task.steps
            if into == 0 or (into > 0 and due):
                rounds = -(-step // setting.every) - setting.warmup // setting.every
                for param, anchor, memory in zip(stacked.values(), anchors, memories, strict=True):
                    values, start, moved = param.data[at], anchor[at], memory[at]
                    if into == 0:
                        start.copy_(values[0])
                        continue
                    step_outer(setting, rounds, values, start, moved)
    ends = []
    for at in range(len(settings)):
        model.load_state_dict({name: param.data[at, 0] for name, param in stacked.items()})
        ends.append(task.at_the_end(data, model))
    return ends


def step_outer(setting: Setting, rounds: int, values: Tensor, start: Tensor, moved: Tensor) -> None:
    momentum = setting.momentum
    if setting.grows:
        momentum = min(momentum, (rounds - 1) / (rounds + 2))
    gradient = start - values.mean(0)
    moved.mul_(momentum).add_(gradient, alpha=setting.lr)
    if setting.nesterov:
        start.sub_(setting.lr * gradient + momentum * moved)
    else:
        start.sub_(moved)
    values.copy_(start.expand_as(values))


ROUNDS = (5, 10, 20, 40, 80)
OUTER: dict[str, dict[str, Any]] = {
    "DiLoCo": {"lr": 0.7, "momentum": 0.9},  # the defaults
    "BMUF": {"momentum": 0.875, "nesterov": False},
    "mean": {},
    "0.3": {"momentum": 0.3},
    "0.5": {"momentum": 0.5},
    "0.8": {"momentum": 0.8},
    "grows": {"momentum": 0.9, "grows": True},
}


def settings(steps: int) -> dict[str, Setting]:
    """By "outer step, rounds, % of the steps in the warm-up"; all but the first in blocks."""
    found = {"synchronous": Setting(steps, steps)}
    for share in (0, 5, 10, 25):
        warmup = steps * share // 100
        for rounds in ROUNDS:
            every = max(1, round((steps - warmup) / rounds))
            for name, outer in OUTER.items():
                if share < 25 or name in ("mean", "0.5", "0.8"):
                    found[f"{name}, {rounds}, {share}"] = Setting(every, warmup, **outer)
    return found
