"""Interfaces for the state of optimizers and their wrappers, for checkpoints and scaling.

docs/extending.md explains new shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from manyhands._arguments import flag, real, whole
from manyhands._optimizers.several import AND, optimizers_in
from manyhands._optimizers.wrappers import (
    OptimizerWrapper,
    params_of,
    refuse_join,
    unwrap,
)

Value = TypeVar("Value")
# A state dict or an entry, from any source: the reader must check the contents.
SavedState: TypeAlias = Mapping[str, Any]
BELOW = 2.0**53  # upper bound of counts, times and sizes; floats represent whole numbers exactly
SQUARES = 1e100  # upper bound of squares of float32 numbers, and of their sums


class SavedEntries:
    """Read plain values of a saved state, which may be damaged or have another version.

    A missing or invalid entry raises a ValueError. Read all entries before any change.
    """

    def __init__(self, saved: object, owner: str, inside: str = "") -> None:
        self._owner = owner
        self._inside = inside
        if not isinstance(saved, Mapping):
            raise self.wrong("", "a dict", saved)
        self.plain = saved

    def wrong(self, name: str, needed: str, came: object) -> ValueError:
        if isinstance(came, Tensor):
            came = (came.dtype, tuple(came.shape))
        where = f"{self._inside}.{name}".strip(".") or "it"
        return ValueError(
            f"the saved state of {self._owner} does not fit: {where} must be {needed}, got "
            f"{came!r:.80}."
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self.plain:
            raise self.wrong(name, "there", sorted(map(str, self.plain)))
        return self.plain[name]

    def expect(self, facts: Mapping[str, object]) -> None:
        for name, here in facts.items():
            came = self[name]
            if repr(came) != repr(here):  # `!=` does not support tensors
                raise self.wrong(name, f"{here!r}, as it is here", came)

    def has(self, name: str) -> bool:
        """Return whether a required entry is not None."""
        return self[name] is not None

    def part(self, name: str) -> SavedEntries:
        return SavedEntries(self[name], self._owner, f"{self._inside}.{name}".strip("."))

    def _read(self, read: Callable[..., Value], name: str, **bounds: Any) -> Value:
        try:
            return read(f"{self._inside}.{name}".strip("."), self[name], **bounds)
        except ValueError as error:
            text = f"the saved state of {self._owner} does not fit: {error!s:.200}"
            raise ValueError(text) from error

    def flag(self, name: str) -> bool:
        return self._read(flag, name)

    def real(
        self, name: str, least: float = 0.0, above: float | None = None, below: float = BELOW
    ) -> float:
        return self._read(real, name, least=least, above=above, below=below)

    def whole(self, name: str, least: int = 0) -> int:
        number = self._read(whole, name, least=least)
        if number >= BELOW:
            raise self.wrong(name, "below 2**53", number)
        return number

    def check_tensor(self, name: str, like: Tensor, *, finite: bool = True) -> None:
        """Raise unless an entry is a tensor like `like`."""
        found = self[name]
        same = isinstance(found, Tensor) and found.shape == like.shape
        same = same and found.is_complex() == like.is_complex()
        if not (same and found.is_floating_point() == like.is_floating_point()):
            raise self.wrong(name, f"a tensor of {like.dtype} and {tuple(like.shape)}", found)
        if finite and not found.isfinite().all():
            raise self.wrong(name, "finite", found)

    # -- lists, with the entries NAME[0], NAME[1] and so on ---------------------------------------

    def each(self, name: str, length: int | None = None) -> SavedEntries:
        """Return the entries of a list, of this length if given."""
        values = self[name]
        needed = "a list"
        if length is not None:
            needed = f"a list of {length}"
        if not isinstance(values, list | tuple) or length not in (None, len(values)):
            raise self.wrong(name, needed, values)
        named = {f"{name}[{i}]": value for i, value in enumerate(values)}
        return SavedEntries(named, self._owner, self._inside)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def parts(self, name: str) -> list[SavedEntries]:
        each = self.each(name)
        return [each.part(part) for part in each]

    def reals(
        self, name: str, length: int | None = None, least: float = 0.0, below: float = BELOW
    ) -> list[float]:
        each = self.each(name, length)
        return [each.real(number, least, below=below) for number in each]

    def floats(self, name: str, length: int) -> list[float]:
        """Return a list of floats, including NaN and infinity."""
        if not all(isinstance(value, float) for value in self.each(name, length).plain.values()):
            raise self.wrong(name, "a list of floats", self[name])
        return list(self[name])

    def wholes(self, name: str, length: int | None = None) -> list[int]:
        each = self.each(name, length)
        return [each.whole(number) for number in each]

    def pairs(self, name: str) -> list[tuple[int, float]]:
        pairs = []
        each = self.each(name)
        for number in each:
            pair = each.each(number, 2)
            first, second = pair
            pairs.append((pair.whole(first), pair.real(second)))
        return pairs

    def rows(self, name: str, length: int) -> list[list[float]]:
        each = self.each(name)
        return [each.reals(row, length, 0.0, SQUARES) for row in each]


@dataclass
class StatePart:
    """The state of a parameter, or of a range of elements, on this rank."""

    param: Tensor
    entries: Mapping[str, Any]
    start: int | None = None  # first element of the range, in memory order; None: no range


@dataclass
class OptimizerStatePart(StatePart):
    """A `StatePart` of an optimizer's state, with the position in the optimizer's state dict."""

    index: int = 0  # of the parameter, over all groups
    number: int = 0  # in the state dict
    shard: Tensor | None = None  # the tensor that the optimizer steps, if not the parameter

    @property
    def empty(self) -> bool:
        return not self.entries

    @property
    def like(self) -> Tensor:
        if self.shard is None:
            return self.param
        return self.shard


class ReplicatedState(Protocol):
    """Entries of a sharded optimizer's state, for every parameter, on every rank."""

    state: dict[Tensor, Any]  # by parameter and name

    def update(self) -> None:
        """Collect the current state. Called on every rank."""


class ShardedOptimizer(Optimizer):
    """Base class of an optimizer that steps a shard of the parameters on each rank.

    Attributes:
        optimizer_class: the user's optimizer class.
        optimizer_arguments: arguments of the class.
        group: the process group of the ranks; None for a single rank.
    """

    optimizer_class: type[Optimizer]
    optimizer_arguments: dict[str, Any]
    group: Any

    @property
    def optim(self) -> Any:
        """The plain optimizer with the state of this rank's shards."""
        raise NotImplementedError

    @property
    def shards_state(self) -> bool:
        raise NotImplementedError

    @property
    def state(self) -> Any:
        if self.optim is None:
            return {}
        return self.optim.state

    @state.setter
    def state(self, value: object) -> None:
        """Ignore the state that torch's constructor assigns."""

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Reject torch's `Join`."""
        raise refuse_join(type(self).__name__)

    def join_in(self) -> None:
        """Average gradients for which this rank had no backward pass."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Synchronize shards and parameters before state is loaded. Called on every rank."""
        raise NotImplementedError

    def save_parts(self, *, include_empty: bool) -> tuple[list[OptimizerStatePart], StateDict]:
        """Return this rank's state by parameter, with the state dict of `optim`.

        `include_empty` adds parameters without state.
        """
        raise NotImplementedError

    def load_parts(self, packed: StateDict) -> None:
        """Load a state dict of `optim`, with the options of the parameter groups."""
        raise NotImplementedError

    def replicate_state(self, names: Sequence[str]) -> ReplicatedState:
        """Return a replica of these entries."""
        raise NotImplementedError


class RuleParts(Protocol):
    """The interface of a scaling rule for checkpoints."""

    def scaling_state_dict(self) -> StateDict:
        """Return the rule's state. `previous` is a list by parameter, of gradients or None."""

    def check_scaling_state(self, entry: SavedState) -> object:
        """Parse a saved state without any change, or raise a ValueError."""

    def take_scaling_state(self, state: Any) -> None:
        """Restore a state from `check_scaling_state`."""


class BlocksParts(Protocol):
    """The interface of blocks for checkpoints. The outer state is equal on all replicas."""

    @property
    def peers(self) -> list[int]:
        """The ranks that average with this rank, one per replica, by global rank."""

    @property
    def layout(self) -> Sequence[object]:
        """The elements that this rank rounds and averages. Equal layouts have equal residuals."""

    @property
    def memories(self) -> int:
        """Number of outer memories."""

    @property
    def received_steps(self) -> int | None:
        """Steps of the run, if this worker has joined and received the outer state.

        None for an initial worker, and after a joiner's first step.
        """

    def outer_parts(self) -> list[StatePart]:
        """Return the outer state: "anchor", "memory.0" and so on, and optionally "residual".

        The entries are views of the blocks' memory. A residual belongs to this replica.
        """

    def save_counters(self) -> dict[str, Any]:
        """Return the plain values, which are equal on all replicas."""

    def check_counters(self, saved: Any) -> dict[str, Any] | None:
        """Return saved counters, or None; raise a ValueError if they are invalid."""

    def load_counters(
        self, saved: SavedState, unsaved: Iterable[Tensor], *, residuals: bool
    ) -> None:
        """Restore counters, after the outer state.

        `unsaved` parameters start a new anchor. Without `residuals`, residuals start at zero.
        """

    def begin(self) -> None:
        """Start from the current parameters, after loading state without blocks."""


@dataclass(frozen=True)
class OptimizerLayers:
    """An optimizer, with the rule and blocks around it, if any."""

    rule: RuleParts | None
    blocks: BlocksParts | None
    inner: Optimizer  # the optimizer with the state, such as a `ShardedOptimizer`

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerLayers:
        """Find rule and blocks in either order, even inside a trainer's proxy."""
        found: dict[str, Any] = {}
        chain = unwrap(optimizer)  # outermost first, so that inner layers replace a proxy
        for each in chain:
            # A weak reference to the rule. Wrappers forward getattr, so read the instance's dict.
            patched_by = each.__dict__.get("_manyhands_rule")
            if patched_by is not None and patched_by() is not None:
                found["rule"] = patched_by()
            if isinstance(each, OptimizerWrapper):
                found[each.layer] = each.state_parts()
        return cls(found.get("rule"), found.get("blocks"), chain[-1])

    @property
    def sharded(self) -> ShardedOptimizer | None:
        if isinstance(self.inner, ShardedOptimizer) and self.inner.shards_state:
            return self.inner
        return None

    @property
    def plain(self) -> Optimizer:
        """The optimizer of the user's class, with or without sharding."""
        return plain_optimizer(self.inner)

    @property
    def class_name(self) -> str:
        return AND.join([type(each).__name__ for each in optimizers_in(self.plain)])


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, ShardedOptimizer):
        plain: Optimizer = optimizer.optim
        return plain
    return optimizer


def state_parts(
    optimizer: Optimizer, *, include_empty: bool = False
) -> tuple[list[OptimizerStatePart], StateDict]:
    if isinstance(optimizer, ShardedOptimizer) and optimizer.shards_state:
        return optimizer.save_parts(include_empty=include_empty)
    packed = optimizer.state_dict()
    parts = []
    numbers = params_of(packed["param_groups"])
    for index, param in enumerate(params_of(optimizer.param_groups)):
        number = numbers[index]
        entries = packed["state"].get(number, {})
        if entries or include_empty:
            parts.append(OptimizerStatePart(param, entries, index=index, number=number))
    return parts, packed


def common_state(packed: SavedState) -> StateDict:
    numbers = set(params_of(packed["param_groups"]))
    return {key: value for key, value in packed["state"].items() if key not in numbers}


def is_elementwise(entry: str, value: Tensor, param: Tensor) -> bool:
    """Return whether an entry of a parameter's state has a value for each element."""
    # `step` is a single number, also for a parameter with a single element.
    return value.shape == param.shape and (value.dim() > 0 or entry != "step")


#: Options of the implementation of a step, which do not affect the result.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def options_of(group: Mapping[str, Value]) -> dict[str, Value]:
    options = dict(group)
    options.pop("params", None)
    options.pop("param_names", None)
    return options
