"""What is trained: data, model, base batch, base learning rate, length at scale 1.

The base learning rates are the best (to a factor of two) at scale 1 for one other seed.
Nothing is tuned for a method or a scale.
"""

from __future__ import annotations

import lzma
import math
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

MNIST = "mnist.npz"
SHAKESPEARE = "tinyshakespeare.txt.xz"


class Batches(Protocol):
    """An endless, seeded stream of base batches."""

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """The next `count` base batches as one batch."""


class Data(Protocol):
    def model(self) -> nn.Module: ...

    def batches(self, seed: int, size: int) -> Batches: ...

    def score(self, model: nn.Module) -> float: ...


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    load: Callable[[Path], Data]
    optimizer: str  # "SGD" (momentum 0.9), or a name of torch.optim
    lr: float
    batch: int  # samples in a base batch
    steps: int  # optimizer steps at scale 1
    scales: tuple[int, ...]
    metric: str  # "accuracy, %" or "bits/char"
    chance: float  # a score no better than this is worth no number
    per_pass: int = 32  # base batches that one pass takes without getting slower per sample
    needs: str | None = None  # a file in the data folder

    @property
    def adaptive(self) -> str:
        return "AdamScale" if self.optimizer == "AdamW" else "AdaScale"

    @property
    def higher_is_better(self) -> bool:
        return self.metric.startswith("accuracy")

    def failure(self, score: float | None) -> str | None:
        """Return the words in place of a score (None: not finite) that is no better than chance.

        Text that is predicted worse than by a uniform guess is worse than before training.
        """
        if score is None or (not self.higher_is_better and score >= self.chance):
            return "diverged"
        return "at chance" if self.higher_is_better and score <= self.chance else None

    def make_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
        if self.optimizer == "Muon":  # of matrices only: the biases stay at their first values
            params = [param for param in params if param.dim() == 2]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(params, lr=self.lr)
        return optimizer


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, -2), y.flatten())


@dataclass
class Pictures:
    """Rows of numbers with a class each, for a small multilayer perceptron."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    hidden: int

    def model(self) -> nn.Module:
        inputs = self.train[0].shape[1]
        return nn.Sequential(nn.Linear(inputs, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def batches(self, seed: int, size: int) -> Batches:
        return Epochs(*self.train, size, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        x, y = self.test
        return 100.0 * (model(x).argmax(dim=1) == y).double().mean().item()


class Epochs:
    """Every sample once per epoch, in a new order each time."""

    def __init__(self, x: Tensor, y: Tensor, size: int, generator: torch.Generator) -> None:
        self._x = x
        self._y = y
        self._size = size
        self._generator = generator
        self._order = torch.empty(0, dtype=torch.long)

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        wanted = count * self._size
        while len(self._order) < wanted:
            epoch = torch.randperm(len(self._x), generator=self._generator)
            self._order = torch.cat([self._order, epoch])
        now = self._order[:wanted]
        self._order = self._order[wanted:]
        return self._x[now], self._y[now]


@cache
def mnist(folder: Path) -> Pictures:
    with np.load(folder / MNIST) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}

    def split(name: str) -> tuple[Tensor, Tensor]:
        pixels = arrays[f"x_{name}"].flatten(1).float() / 255.0
        return (pixels - 0.1307) / 0.3081, arrays[f"y_{name}"].long()

    return Pictures(split("train"), split("test"), hidden=128)


@cache
def digits(_: Path) -> Pictures:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(pixels).float() / 16.0
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train = order[:1437]
    test = order[1437:]
    return Pictures((x[train], y[train]), (x[test], y[test]), hidden=64)


class CharacterLSTM(nn.Module):
    def __init__(self, symbols: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.readout = nn.Linear(hidden, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(self.embedding(x))[0])


@dataclass
class Text:
    """Characters as numbers; each window of `length` is read from an empty state."""

    train: Tensor
    test: Tensor
    symbols: int
    length: int = 48
    hidden: int = 128

    def model(self) -> nn.Module:
        return CharacterLSTM(self.symbols, self.hidden)

    def batches(self, seed: int, size: int) -> Batches:
        return Windows(self.train, self.length, size, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        count = (len(self.test) - 1) // self.length
        x = self.test[: count * self.length].view(count, self.length)
        y = self.test[1 : count * self.length + 1].view(count, self.length)
        nats = sum(
            loss_of(model, a, b).item() * len(a)
            for a, b in zip(x.split(256), y.split(256), strict=True)
        )
        return nats / count / math.log(2.0)


class Windows:
    def __init__(self, text: Tensor, length: int, size: int, generator: torch.Generator) -> None:
        self._text = text
        self._size = size
        self._generator = generator
        self._offsets = torch.arange(length + 1)

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        places = len(self._text) - len(self._offsets) + 1
        starts = torch.randint(places, (count * self._size, 1), generator=self._generator)
        windows = self._text[starts + self._offsets]
        return windows[:, :-1], windows[:, 1:]


@cache
def shakespeare(folder: Path) -> Text:
    with lzma.open(folder / SHAKESPEARE, "rt", encoding="utf-8") as file:
        text = file.read()
    symbols = sorted(set(text))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    codes = torch.tensor([number[symbol] for symbol in text])
    cut = len(codes) * 9 // 10
    return Text(codes[:cut], codes[cut:], len(symbols))


@cache
def python_code(_: Path) -> Text:
    """Return the starts of the largest modules of Python's standard library.

    ASCII has more characters than Shakespeare's 65 symbols, so some share a symbol.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda p: p.stat().st_size)
    text = "".join(file.read_text(encoding="utf-8")[:25_000] for file in files[-8:])
    codes = torch.tensor([ord(character) % 65 for character in text])
    cut = len(codes) * 8 // 10
    return Text(codes[:cut], codes[cut:], 65)


_MNIST: dict[str, Any] = {"load": mnist, "batch": 16, "steps": 3750, "needs": MNIST}
_SHAKESPEARE: dict[str, Any] = {
    "load": shakespeare,
    "batch": 16,
    "steps": 1500,
    "per_pass": 4,
    "needs": SHAKESPEARE,
}
_DIGITS: dict[str, Any] = {"load": digits, "batch": 8, "steps": 1500}
_ACCURACY: dict[str, Any] = {"metric": "accuracy, %", "chance": 20.0}
_BITS: dict[str, Any] = {"metric": "bits/char", "chance": math.log2(65)}
_SGD: dict[str, Any] = {"optimizer": "SGD", "scales": (8, 32)}
_ADAMW: dict[str, Any] = {"optimizer": "AdamW", "scales": (16,)}

WORKLOADS: tuple[Workload, ...] = (
    Workload("mnist-sgd", "MNIST, MLP, SGD", lr=0.01, **_MNIST, **_ACCURACY, **_SGD),
    Workload("shakespeare-sgd", "Shakespeare, LSTM, SGD", lr=2.0, **_SHAKESPEARE, **_BITS, **_SGD),
    Workload("mnist-adamw", "MNIST, MLP, AdamW", lr=0.002, **_MNIST, **_ACCURACY, **_ADAMW),
    Workload(
        "shakespeare-adamw", "Shakespeare, LSTM, AdamW", lr=0.015, **_SHAKESPEARE, **_BITS, **_ADAMW
    ),
    Workload("digits-sgd", "digits, MLP, SGD", lr=0.05, **_DIGITS, **_ACCURACY, **_SGD),
    Workload("digits-adamw", "digits, MLP, AdamW", lr=0.005, **_DIGITS, **_ACCURACY, **_ADAMW),
)

_MUON: dict[str, Any] = {**_ADAMW, "optimizer": "Muon"}
_ADADELTA: dict[str, Any] = {**_ADAMW, "optimizer": "Adadelta"}
OTHERS = (
    Workload("mnist-muon", "MNIST, MLP, Muon", lr=0.01, **_MNIST, **_ACCURACY, **_MUON),
    Workload("mnist-adadelta", "MNIST, MLP, Adadelta", lr=2.0, **_MNIST, **_ACCURACY, **_ADADELTA),
    Workload("digits-muon", "digits, MLP, Muon", lr=0.04, **_DIGITS, **_ACCURACY, **_MUON),
    Workload(
        "digits-adadelta", "digits, MLP, Adadelta", lr=4.0, **_DIGITS, **_ACCURACY, **_ADADELTA
    ),
)
