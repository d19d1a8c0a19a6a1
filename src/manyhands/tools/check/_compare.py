"""What is recorded of a run, and how far two runs are apart: step by step, gradients first.

A distance is relative: of gradients to the largest gradient of the same parameter, of parameters to
how far the step moved them. Where a gradient is nothing but rounding (a key's bias in attention, a
bias before a norm), Adam makes a full step of it: these elements are left out.
"""

from dataclasses import dataclass, field
from pathlib import Path
from pydoc import locate
from typing import Any

import numpy
import torch
from torch import Tensor

ROUNDING = 1e-9  # a gradient this small, beside the largest, is rounding
FLOOR = 1e-2  # a parameter's scale is at least this part of the largest; a gradient's, its square
Tensors = dict[str, Tensor]


def read(file: Path) -> Any:
    """Load what a process of a run has written, batches of the script's own classes included."""
    kinds: list[Any] = [type(numpy.dtype(code)) for code in numpy.typecodes["All"]]
    kinds += map(locate, torch.serialization.get_unsafe_globals_in_checkpoint(file))
    with torch.serialization.safe_globals(kinds):
        return torch.load(file, weights_only=True)


@dataclass
class SeenStep:
    """One step of an optimizer."""

    optimizer: int = 0
    place: str = ""
    passes: list[str] = field(default_factory=list)  # where backward is called
    before: dict[str, Tensor] = field(default_factory=dict)  # gradients before they were clipped
    grads: dict[str, Tensor] = field(default_factory=dict)  # those that the optimizer steps with
    params: dict[str, Tensor] = field(default_factory=dict)  # after the step
    rates: list[float] = field(default_factory=list)
    schedules: int = 0  # how often schedules were stepped
    gains: dict[int | None, float] = field(default_factory=dict)  # of a scaling rule, if asked
    carried: bool = False  # the first pass found gradients of the step before
    samples: list[list[str]] = field(default_factory=list)  # hashes of each pass's samples
    indices: list[list[int]] = field(default_factory=list)  # theirs in the data set, if known
    own: list[str] = field(default_factory=list)  # parameters of this optimizer

    @property
    def made(self) -> str:
        """Return where the gradient was made."""
        return self.passes[-1] if self.passes else self.place


@dataclass
class SeenLoader:
    """What is known of a DataLoader."""

    place: str
    reshuffles: bool  # its sampler wants to know the epoch
    repeats: bool  # its sampler draws with replacement
    whole: bool  # it shuffles all samples of its data set
    length: int | None = None  # what len() said, if asked
    trains: bool = False
    epochs: list[list[list[str]]] = field(default_factory=list)  # hashes of what it gave
    indices: list[list[list[int]]] = field(default_factory=list)  # in its data set, if known
    starts: list[int] = field(default_factory=list)  # passes before each epoch
    data: str = ""  # a hash of a few of its samples, without noise

    def orders(self, by_index: bool) -> list[list[Any]]:
        """Return the samples of each epoch."""
        epochs: list[Any] = self.indices if by_index else self.epochs
        return [[sample for batch in epoch for sample in batch] for epoch in epochs]

    @property
    def indexed(self) -> bool:
        """Whether the index of every sample is known."""
        sizes = [[list(map(len, epoch)) for epoch in x] for x in (self.epochs, self.indices)]
        return sizes[0] == sizes[1]


@dataclass
class Recording:
    """All that one process writes."""

    steps: list[SeenStep] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    loaders: dict[str, SeenLoader] = field(default_factory=dict)
    noise: list[str] = field(default_factory=list)
    norms: bool = False  # batch norm with local statistics
    complete: bool = False
    grouped: bool = False  # there was a process group
    idle: bool = False  # an optimizer made no step
    blocks: bool = False  # ranks step on their own, and synchronize now and then
    rule: bool = False  # a scaling rule of this library multiplies the learning rates
    accelerate: bool = False  # whose schedules step once for each process

    def training_loaders(self) -> list[SeenLoader]:
        return [loader for loader in self.loaders.values() if loader.trains]


@dataclass
class Difference:
    """The first place where two runs differ."""

    step: int
    what: str  # "before" clipping, "grads" or "params"
    distances: dict[str, float]  # of all parameters, relative
    tolerance: float

    @property
    def names(self) -> list[str]:
        return [name for name, far in self.distances.items() if far > self.tolerance]


def compare(
    ranks: Recording, one: Recording, tolerance: float
) -> tuple[list[float], Difference | None]:
    """Return the largest distance of each step, and the first difference."""
    largest = list[float]()
    loose = dict[str, Tensor]()
    last = one.start
    for number, (a, b) in enumerate(zip(ranks.steps, one.steps, strict=False)):
        largest.append(0.0)
        for what in ("before", "grads", "params"):
            x = getattr(a, what)
            y = getattr(b, what)
            distances = apart(x, y, loose, last if what == "params" else None)
            largest[-1] = max([largest[-1], *distances.values()])
            if largest[-1] > tolerance:
                return largest, Difference(number, what, distances, tolerance)
        last = b.params
    return largest, None


def size(tensor: Tensor | None) -> float:
    return float(tensor.abs().max()) if tensor is not None and tensor.numel() else 0.0


def apart(a: Tensors, b: Tensors, loose: Tensors, last: Tensors | None = None) -> dict[str, float]:
    """Return each gradient's distance; or each parameter's, if `last` is where they were before."""
    if not a or not b:
        return {}
    moves = b if last is None else {name: b[name] - last[name] for name in b if name in last}
    largest = max(map(size, moves.values()), default=0.0) or 1e-30
    found = {}
    for name in moves if last is not None else dict.fromkeys([*b, *a]):
        x = a.get(name)
        y = b.get(name)
        if x is None or y is None or x.shape != y.shape:
            found[name] = 1.0 if size(x) or size(y) else 0.0
            continue
        far = x - y
        grain = 0.0
        floor = FLOOR * FLOOR
        if last is None:
            small = torch.maximum(x.abs(), y.abs()) < ROUNDING * largest
            loose[name] = small | loose.get(name, small)
        else:  # a rounding of the parameter itself is no difference either
            far = far.masked_fill(loose.get(name, torch.tensor(False)), 0.0)
            grain = 4 * torch.finfo(y.dtype).eps * size(y)
            floor = FLOOR
        distance = max(size(far) - grain, 0.0) / max(size(moves[name]), floor * largest)
        found[name] = distance if distance == distance else float("inf")
    return found
