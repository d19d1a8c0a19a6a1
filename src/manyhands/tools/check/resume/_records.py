"""Describe the record that each process of a resume check writes."""

from dataclasses import dataclass, field

from manyhands.tools.check._records import Tensors

Digests = dict[str, str]


@dataclass
class PassSamples:
    """The samples of one backward pass."""

    hashes: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # in the data set; empty if unknown
    epoch: int = 0  # iterations over loaders so far


@dataclass
class State:
    """Digests of the state before a step."""

    # Parameters of optimizers by their numbers, such as "0:3", and others by name.
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
    """One step of an optimizer on one rank."""

    optimizer: int = 0  # in the order in which they were made
    passes: list[PassSamples] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # of each parameter group
    schedules: list[int] = field(default_factory=list)  # steps of each schedule
    grads: Digests = field(default_factory=dict)
    params: Digests = field(default_factory=dict)  # after the step
    # Values of the first steps only.
    grad_values: Tensors = field(default_factory=dict)
    param_values: Tensors = field(default_factory=dict)

    def samples(self, by_index: bool) -> tuple[object, ...]:
        """Return the index or the hash of each sample."""
        found: list[object] = []
        for one in self.passes:
            found += one.indices if by_index else one.hashes
        return tuple(found)

    @property
    def epoch(self) -> int:
        return self.passes[0].epoch if self.passes else 0


@dataclass
class RankHistory:
    """The record of one process."""

    steps: list[RankStep] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)  # by the number of steps made
    ended: bool = False  # the script ended by itself
    grouped: bool = False  # a process group existed
    files: list[str] = field(default_factory=list)  # of all checkpoints that were written
    checkpoint: str = ""  # the file or folder of the latest
    read: list[str] = field(default_factory=list)  # files of the earlier run
