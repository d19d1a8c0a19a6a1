"""Ten short runs of 4 workers, and the plain loop that trains them under many settings at once.

`simulate` stacks the parameters of all settings and workers as (settings, workers, ...): one
backward pass makes all gradients, and the inner optimizer works element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quality.workloads import loss_of, mnist, shakespeare
from sharding.models import Block
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import avg_pool2d, mse_loss

from blocks.learning import INNER, WORKERS, Task, Transformer, lr_at
from manyhands.blocks import Outer

Setting = tuple[int, int, Outer]  # H, the steps of the warm-up, and the outer step


class Recurrent(nn.Module):
    """An LSTM (4 gates) or a GRU (3) of plain layers, which `vmap` can stack."""

    def __init__(self, inputs: int, outputs: int, gates: int, text: bool = False) -> None:
        super().__init__()
        self.gates = gates
        self.text = text
        self.symbol = nn.Embedding(inputs, 24) if text else nn.Identity()
        self.seen = nn.Linear(24 if text else inputs, gates * 24)
        self.state = nn.Linear(24, gates * 24)
        self.readout = nn.Linear(24, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(len(x), 24)
        memory = hidden
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
        self.row = nn.Linear(14, 32)
        self.place = nn.Parameter(torch.randn(14, 32) * 0.02)
        self.block = Block(32, heads=4, bias=True)
        self.readout = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.block(self.row(x) + self.place).mean(1))


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def cnn() -> nn.Module:
    maps = [nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(nn.Unflatten(1, (1, 14)), *maps, nn.Linear(64, 10))


def taught(count: int, generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
    """Draw random inputs, and a teacher's answers with noise."""
    weights = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)) / 2
    x = torch.randn(count, 16, generator=generator)
    y = torch.tanh(x @ weights).prod(0).sum(1, keepdim=True)
    return x, y + noise * torch.randn(count, 1, generator=generator)


@dataclass(frozen=True)
class Short(Task):
    """A task with a score in points: % of the labels, or of the explained variance."""

    length: int = 16
    make: Callable[[], nn.Module] = Rows

    def model(self, data: Any) -> nn.Module:
        return self.make()

    def draw(self, data: Any, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if data is None:
            return taught(count, generator, noise=0.1)
        x, y = super().draw(data, count, generator)
        return (x, y) if self.is_text else (avg_pool2d(x.view(-1, 28, 28), 2), y)

    def loss(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y) if y.is_floating_point() else loss_of(model, x, y)

    @torch.no_grad()
    def at_the_end(self, data: Any, model: nn.Module) -> float:
        if data is None:
            x, y = taught(4000, torch.Generator().manual_seed(1), noise=0.0)
            return max(0.0, 100 * (1 - (mse_loss(model(x), y) / y.var()).item()))  # not NaN
        if self.is_text:
            windows = data.test[: 1500 * 17].view(1500, 17)
            x = windows[:, :-1]
            y = windows[:, 1:]
        else:
            x = avg_pool2d(data.test[0][:4000].view(-1, 28, 28), 2)
            y = data.test[1][:4000]
        return 100 * (model(x).argmax(-1) == y).double().mean().item()


def short(
    name: str, lr: float, make: Callable[[], nn.Module], steps: int = 400, load: Any = mnist
) -> Short:
    """The rate is that of synchronous training: the lowest, to a factor of two, that ends at most
    a point below the best on another seed."""
    batch = 4 if load is shakespeare else 8
    return Short(name, batch, steps, lr, load, inner=name.rpartition(", ")[2], make=make)


SHORT = (
    short("MLP, SGD", 0.04, lambda: mlp(196, 10)),
    short("MLP, AdamW", 0.008, lambda: mlp(196, 10)),
    short("CNN, SGD", 0.08, cnn),
    short("CNN, AdamW", 0.016, cnn),
    short("LSTM, SGD", 0.1, lambda: Recurrent(14, 10, 4), 600),
    short("GRU, AdamW", 0.032, lambda: Recurrent(14, 10, 3)),
    short("transformer, AdamW", 0.016, Rows),
    short("text, LSTM, SGD", 1.0, lambda: Recurrent(65, 65, 4, text=True), 600, shakespeare),
    short("text, transformer, AdamW", 0.032, lambda: Transformer(65, 16, 32, 1), load=shakespeare),
    short("regression, SGD", 0.02, lambda: mlp(16, 1), 800, lambda _: None),
)


def simulate(task: Task, folder: Path, seed: int, settings: Sequence[Setting]) -> list[float]:
    """Train under all settings; a round follows each H-th step, and the last."""
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
        together = torch.tensor([step <= warmup for _, warmup, _ in settings])
        for param in params.values():
            grad = param.grad
            assert grad is not None
            grad[together] = grad[together].mean(1, keepdim=True)
        optimizer.step()
        for at, (every, warmup, outer) in enumerate(settings):
            due = step > warmup and (step % every == 0 or step == task.steps)
            for param, anchor, memory in zip(params.values(), anchors, memories, strict=True):
                if step == warmup:
                    anchor[at] = param.data[at, 0]
                elif due:
                    outer.step(anchor[at], anchor[at] - param.data[at].mean(0), [memory[at]])
                    param.data[at] = anchor[at]
    ends = []
    for at in range(len(settings)):
        model.load_state_dict({name: param.data[at, 0] for name, param in params.items()})
        ends.append(task.at_the_end(data, model))
    return ends
