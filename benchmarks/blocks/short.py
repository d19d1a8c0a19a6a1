"""Ten short runs of 4 workers, and the plain loop that trains them under many settings at once.

`simulate` needs no process group. The parameters of all settings and workers are stacked as
(settings, workers, ...): one backward pass has all gradients, and an inner optimizer that works
element by element steps all. `learning.run` trains the same on ranks, with the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from torch.nn.functional import avg_pool2d, mse_loss

LENGTH = 16  # characters in a sample


class Recurrent(nn.Module):
    """An LSTM (4 gates) or a GRU (3) of plain layers, which `vmap` can stack."""

    def __init__(self, inputs: int, outputs: int, gates: int, text: bool = False) -> None:
        super().__init__()
        self.gates, self.text = gates, text
        self.symbol = nn.Embedding(inputs, 24) if text else nn.Identity()
        self.seen = nn.Linear(24 if text else inputs, gates * 24)
        self.state, self.readout = nn.Linear(24, gates * 24), nn.Linear(24, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = torch.zeros(len(x), 24)
        found = []
        for seen in self.seen(self.symbol(x)).unbind(1):
            state = self.state(hidden)
            if self.gates == 4:
                keep, write, show, new = (seen + state).chunk(4, -1)
                memory = torch.sigmoid(keep + 1) * memory + torch.sigmoid(write) * torch.tanh(new)
                hidden = torch.sigmoid(show) * torch.tanh(memory)
            else:
                reset, keep = torch.sigmoid((seen + state)[:, :48]).chunk(2, -1)
                new = torch.tanh(seen[:, 48:] + reset * state[:, 48:])
                hidden = new + keep * (hidden - new)
            found.append(hidden)
        return self.readout(torch.stack(found, 1) if self.text else hidden)


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


class Taught:
    """What a teacher says about random numbers, with noise in training."""

    weights = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)) / 2

    def draw(self, count: int, generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 16, generator=generator)
        y = torch.tanh(x @ self.weights).prod(0).sum(1, keepdim=True)
        return x, y + noise * torch.randn(count, 1, generator=generator)


@dataclass(frozen=True)
class Short(Task):
    """A task whose end is told in points: % of labels, or of the variance that is explained."""

    length: int = LENGTH
    make: Callable[[Any], nn.Module] = lambda data: mlp(196, 10)

    def model(self, data: Any) -> nn.Module:
        return self.make(data)

    def draw(self, data: Any, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if isinstance(data, Taught):
            return data.draw(count, generator, noise=0.1)
        x, y = super().draw(data, count, generator)
        return (x, y) if self.is_text else (small(x), y)

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y) if y.is_floating_point() else loss_of(model, x, y)

    @torch.no_grad()
    def at_the_end(self, data: Any, model: nn.Module) -> float:
        if isinstance(data, Taught):
            x, y = data.draw(4000, torch.Generator().manual_seed(1), noise=0.0)
            return 100 * (1 - (mse_loss(model(x), y) / y.var()).item())
        if self.is_text:
            windows = data.test[: 1500 * (LENGTH + 1)].view(1500, -1)
            x, y = windows[:, :-1], windows[:, 1:]
        else:
            x, y = small(data.test[0][:4000]), data.test[1][:4000]
        return 100 * (model(x).argmax(-1) == y).double().mean().item()


def small(pictures: Tensor) -> Tensor:
    return avg_pool2d(pictures.view(-1, 28, 28), 2)


# The learning rates are for synchronous training: the lowest, to a factor of two, that end at most
# a point below the best (another seed).
SGD, ADAMW = {"inner": "SGD"}, {"inner": "AdamW"}
SHORT = {
    task.name: task
    for task in (
        Short("MLP, SGD", 8, 400, 0.04, mnist, **SGD),
        Short("MLP, AdamW", 8, 400, 8e-3, mnist, **ADAMW),
        Short("CNN, SGD", 8, 400, 0.08, mnist, **SGD, make=lambda _: cnn()),
        Short("CNN, AdamW", 8, 400, 0.016, mnist, **ADAMW, make=lambda _: cnn()),
        Short("LSTM, SGD", 8, 600, 0.1, mnist, **SGD, make=lambda _: Recurrent(14, 10, 4)),
        Short("GRU, AdamW", 8, 400, 0.032, mnist, **ADAMW, make=lambda _: Recurrent(14, 10, 3)),
        Short("transformer, AdamW", 8, 400, 0.016, mnist, **ADAMW, make=lambda _: Rows()),
        Short(
            *("text, LSTM, SGD", 4, 600, 1.0, shakespeare),
            **SGD,
            make=lambda data: Recurrent(data.symbols, data.symbols, 4, text=True),
        ),
        Short(
            *("text, transformer, AdamW", 4, 400, 0.032, shakespeare),
            **ADAMW,
            make=lambda data: Transformer(data.symbols, LENGTH, width=32, layers=1),
        ),
        Short(
            *("regression, SGD", 8, 800, 0.02, lambda _: Taught()),
            **SGD,
            make=lambda _: mlp(16, 1),
        ),
    )
}


class Setting(NamedTuple):
    """When 4 workers synchronize, and the outer step."""

    every: int
    warmup: int
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True

    def due(self, step: int, steps: int) -> bool:
        """Whether a sync round follows this step."""
        return step > self.warmup and (step % self.every == 0 or step == steps)


def simulate(task: Task, folder: Path, seed: int, settings: Sequence[Setting]) -> list[float]:
    """Where each setting ends."""
    torch.set_num_threads(1)
    data = task.load(folder)
    torch.manual_seed(seed)
    model = task.model(data)
    params = {
        name: param.detach().expand(len(settings), WORKERS, *param.shape).clone().requires_grad_()
        for name, param in model.named_parameters()
    }
    anchors = [param.detach()[:, 0].clone() for param in params.values()]
    memories = [torch.zeros_like(anchor) for anchor in anchors]
    optimizer = INNER[task.inner](params.values(), task.lr)
    generators = [torch.Generator().manual_seed(1000 * seed + w) for w in range(WORKERS)]

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(lambda x: functional_call(model, params, (x,)), x, y)

    losses = vmap(vmap(loss), (0, None, None))
    for step in range(1, task.steps + 1):
        optimizer.param_groups[0]["lr"] = task.lr * lr_at(step - 1, task.steps)
        drawn = [task.draw(data, task.batch, generator) for generator in generators]
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # the one that `vmap` knows
            losses(params, *map(torch.stack, zip(*drawn, strict=True))).sum().backward()
        together = torch.tensor([step <= setting.warmup for setting in settings])
        for param in params.values():
            param.grad[together] = param.grad[together].mean(1, keepdim=True)
        optimizer.step()
        for at, setting in enumerate(settings):
            for param, anchor, memory in zip(params.values(), anchors, memories, strict=True):
                if step == setting.warmup:
                    anchor[at] = param.data[at, 0]
                elif setting.due(step, task.steps):
                    step_outer(setting, param.data[at], anchor[at], memory[at])
    ends = []
    for at in range(len(settings)):
        model.load_state_dict({name: param.data[at, 0] for name, param in params.items()})
        ends.append(task.at_the_end(data, model))
    return ends


def step_outer(setting: Setting, workers: Tensor, anchor: Tensor, memory: Tensor) -> None:
    """Move the anchor, and all workers to it: Chen & Huo, 2016, and Douillard et al., 2023."""
    gradient = setting.lr * (anchor - workers.mean(0))
    memory.mul_(setting.momentum).add_(gradient)
    anchor.sub_(gradient + setting.momentum * memory if setting.nesterov else memory)
    workers.copy_(anchor.expand_as(workers))
