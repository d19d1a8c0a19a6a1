"""Describe the record of a process of a resume check."""

from dataclasses import dataclass, field
from typing import Any

from manyhands.tools.check._records import SeenBatch, Tensors

Digests = dict[str, str]


@dataclass
class State:
    """Digests of the state before a step."""

    # By the optimizers' numbers, such as "0:3", or by name.
    parameters: Digests = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of parameters
    trained: list[str] = field(default_factory=list)  # keys of parameters with gradients
    buffers: Digests = field(default_factory=dict)
    optimizer: Digests = field(default_factory=dict)  # by parameter and key
    scaler: dict[str, float] = field(default_factory=dict)
    random: Digests = field(default_factory=dict)  # by library
    averages: Digests = field(default_factory=dict)  # copies of the weights, by variable


@dataclass
class RankStep:
    optimizer: int = 0  # in order of creation
    passes: list[SeenBatch] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # of each parameter group
    schedules: list[int] = field(default_factory=list)  # steps of each schedule
    grads: Digests = field(default_factory=dict)
    params: Digests = field(default_factory=dict)  # after the step
    grad_values: Tensors = field(default_factory=dict)  # only of the first recorded steps

    def samples(self, by_index: bool) -> tuple[Any, ...]:
        found: list[Any] = []
        for batch in self.passes:
            found += batch.samples(by_index)
        return tuple(found)

    @property
    def epoch(self) -> int:
        return self.passes[0].epoch if self.passes else 0


@dataclass
class RankHistory:
    steps: list[RankStep] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)  # by the number of earlier steps
    ended: bool = False  # the script ended by itself
    grouped: bool = False  # a process group existed
    files: list[str] = field(default_factory=list)  # of all written checkpoints
    checkpoint: str = ""  # the file or folder of the latest checkpoint
    read: list[str] = field(default_factory=list)  # files of the earlier run
