"""Describe the record that each process of a run writes."""

from dataclasses import dataclass, field
from pathlib import Path
from pydoc import locate
from typing import Any

import numpy
import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass
class SeenBatch:
    hashes: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # in the data set; empty if unknown
    epoch: int = 0  # iteration over loaders, in a resume check

    def samples(self, by_index: bool) -> list[Any]:
        return self.indices if by_index else self.hashes


@dataclass
class SeenStep:
    optimizer: int = 0
    place: str = ""  # file:line of the call
    passes: list[str] = field(default_factory=list)  # file:line of each backward pass
    batches: list[SeenBatch] = field(default_factory=list)  # of each backward pass
    carried: bool = False  # the first pass found gradients of the previous step
    before: Tensors = field(default_factory=dict)  # gradients before clipping
    grads: Tensors = field(default_factory=dict)  # gradients that the optimizer reads
    params: Tensors = field(default_factory=dict)  # after the step
    own: list[str] = field(default_factory=list)  # parameters of this optimizer
    rates: list[float] = field(default_factory=list)  # of each parameter group
    schedules: int = 0  # earlier steps of all schedules
    state: dict[str, str] = field(default_factory=dict)  # marks of other state behind the loss
    gains: dict[int | None, float] = field(default_factory=dict)  # read by the script, by group

    @property
    def last_pass(self) -> str:
        return self.passes[-1] if self.passes else self.place


@dataclass
class SeenLoader:
    place: str
    reshuffles: bool  # the sampler shuffles by the epoch's number
    repeats: bool  # the sampler draws with replacement
    shuffles_all: bool  # the sampler shuffles all samples of the data set
    length: int | None = None  # batches of an epoch
    trains: bool = False
    epochs: list[list[SeenBatch]] = field(default_factory=list)
    rest: SeenBatch = field(default_factory=SeenBatch)  # omitted from the first epoch
    starts: list[int] = field(default_factory=list)  # backward passes before each epoch
    data: str = ""  # a few samples of the data set

    def orders(self, by_index: bool) -> list[list[Any]]:
        orders = []
        for epoch in self.epochs:
            order: list[Any] = []
            for batch in epoch:
                order += batch.samples(by_index)
            orders.append(order)
        return orders

    @property
    def indexed(self) -> bool:
        return list(map(len, self.orders(True))) == list(map(len, self.orders(False)))

    @property
    def batches(self) -> int:
        return sum(map(len, self.epochs))


@dataclass
class Recording:
    steps: list[SeenStep] = field(default_factory=list)
    backward_passes: int = 0
    start: Tensors = field(default_factory=dict)  # initial parameters and buffers
    loaders: dict[str, SeenLoader] = field(default_factory=dict)
    noise: list[str] = field(default_factory=list)  # kinds of replaced random numbers
    norms: bool = False  # batch norm computed local statistics
    complete: bool = False  # every optimizer made the requested steps
    grouped: bool = False  # a process group existed
    idle: bool = False  # an optimizer made no step
    sums: bool = False  # the script summed or gathered values before a backward pass
    blocks: bool = False  # manyhands.blocks steps the optimizer
    rule: bool = False  # a scaling rule of manyhands steps the optimizer
    cut: bool = False  # an epoch was shortened
    manual: bool = False  # steps without an optimizer of torch
    accelerate: bool = False  # Accelerate steps the schedule

    def training_loaders(self) -> dict[str, SeenLoader]:
        return {key: loader for key, loader in self.loaders.items() if loader.trains}

    def pass_samples(self, by_index: bool) -> list[list[Any]]:
        found = []
        for step in self.steps:
            found += [batch.samples(by_index) for batch in step.batches]
        return list(filter(None, found))

    def pass_ranges(self) -> list[tuple[int, int]]:
        """Return the first pass of each step and of the next step."""
        ranges = []
        first = 0
        for step in self.steps:
            end = first + len(step.passes)
            ranges.append((first, end))
            first = end
        return ranges


def read(file: Path) -> Any:
    """Load a file of a process. Batches may have classes of the script."""
    kinds: list[Any] = [type(numpy.dtype(code)) for code in numpy.typecodes["All"]]
    kinds += map(locate, torch.serialization.get_unsafe_globals_in_checkpoint(file))
    with torch.serialization.safe_globals(kinds):
        return torch.load(file, weights_only=True)
