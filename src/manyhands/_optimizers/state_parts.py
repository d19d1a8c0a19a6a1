"""Define the state in parts and the layers that a wrapper offers to checkpoints and to scaling.

A checkpoint saves state under the parameters' names, and scaling reads the optimizer's moments.
Neither knows which sharding there is, nor how a rule or blocks keep their state. They ask for

    OptimizerLayers    rule and blocks around an optimizer, and the optimizer that has the state
    ShardedOptimizer   base class of an optimizer whose state is divided over ranks
    RuleParts          what a scaling rule adds to the optimizer's state
    BlocksParts        what blocks add to it
    StatePart          state of one parameter, or of the range of it that this rank holds
    SavedEntries       reads plain values of a saved state, and refuses what makes no sense

docs/extending.md says what a new sharding has to implement.
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
from manyhands._optimizers.uneven import refuse_join
from manyhands._optimizers.wrappers import OptimizerWrapper, ParamGroup, params_of, unwrap

Value = TypeVar("Value")
# A state dict, or an entry of one, from wherever: its reader checks what is in it.
SavedState: TypeAlias = Mapping[str, Any]
BELOW = 2.0**53  # no count, time or size of ours is larger; whole numbers are exact up to here
SQUARES = 1e100  # no square of a float32, nor a sum of many, is larger


class SavedEntries:
    """Reads plain values of a saved state: a file may be damaged, or of another version.

    An entry that is missing, of another type, not finite or out of range is a ValueError that names
    it. Read all entries before you change anything.
    """

    def __init__(self, saved: object, owner: str, inside: str = "") -> None:
        self._owner = owner
        self._inside = inside
        if not isinstance(saved, Mapping):
            raise self.wrong("", "a dict", saved)
        self.plain = saved

    def wrong(self, name: str, needed: str, came: object) -> ValueError:
        """Return the error for an entry that is not what is needed."""
        if isinstance(came, Tensor):
            came = (came.dtype, tuple(came.shape))  # not its numbers
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
        """Raise unless these entries are there, and the same as here."""
        for name, here in facts.items():
            came = self[name]
            if repr(came) != repr(here):  # (tensors cannot be compared by !=)
                raise self.wrong(name, f"{here!r}, as it is here", came)

    def has(self, name: str) -> bool:
        """Return whether an entry that has to be there is not None."""
        return self[name] is not None

    def part(self, name: str) -> SavedEntries:
        """Return the entries of a dict inside."""
        return SavedEntries(self[name], self._owner, f"{self._inside}.{name}".strip("."))

    def _read(self, read: Callable[..., Value], name: str, **bounds: Any) -> Value:
        """Read and check an entry; an error names the entry and whose state it is in."""
        try:
            return read(f"{self._inside}.{name}".strip("."), self[name], **bounds)
        except ValueError as error:
            text = f"the saved state of {self._owner} does not fit: {error!s:.200}"
            raise ValueError(text) from error

    def flag(self, name: str) -> bool:
        """Return True or False."""
        return self._read(flag, name)

    def real(
        self, name: str, least: float = 0.0, above: float | None = None, below: float = BELOW
    ) -> float:
        """Return a finite number within these bounds."""
        return self._read(real, name, least=least, above=above, below=below)

    def whole(self, name: str, least: int = 0) -> int:
        """Return a whole number."""
        number = self._read(whole, name, least=least)
        if number >= BELOW:
            raise self.wrong(name, "below 2**53", number)
        return number

    def check_tensor(self, name: str, like: Tensor, *, finite: bool = True) -> None:
        """Raise unless an entry is a tensor of the same shape and kind of numbers as another."""
        found = self[name]
        same = isinstance(found, Tensor) and found.shape == like.shape
        same = same and found.is_complex() == like.is_complex()
        if not (same and found.is_floating_point() == like.is_floating_point()):
            raise self.wrong(name, f"a tensor of {like.dtype} and {tuple(like.shape)}", found)
        if finite and not found.isfinite().all():
            raise self.wrong(name, "finite", found)

    # -- lists: their values are the entries NAME[0], NAME[1] and so on ---------------------------

    def each(self, name: str, length: int | None = None) -> SavedEntries:
        """Return the entries of a list, which has this length if one is given."""
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
        """Return the entries of each dict in a list."""
        each = self.each(name)
        return [each.part(part) for part in each]

    def reals(
        self, name: str, length: int | None = None, least: float = 0.0, below: float = BELOW
    ) -> list[float]:
        """Return a list of finite numbers within bounds."""
        each = self.each(name, length)
        return [each.real(number, least, below=below) for number in each]

    def floats(self, name: str, length: int) -> list[float]:
        """Return a list of floats, which may be NaN or infinite."""
        if not all(isinstance(value, float) for value in self.each(name, length).plain.values()):
            raise self.wrong(name, "a list of floats", self[name])
        return list(self[name])

    def wholes(self, name: str, length: int | None = None) -> list[int]:
        """Return a list of whole numbers."""
        each = self.each(name, length)
        return [each.whole(number) for number in each]

    def pairs(self, name: str) -> list[tuple[int, float]]:
        """Return a list of pairs of a whole number and a finite number."""
        pairs = []
        each = self.each(name)
        for number in each:
            pair = each.each(number, 2)
            first, second = pair
            pairs.append((pair.whole(first), pair.real(second)))
        return pairs

    def rows(self, name: str, length: int, least: float = 0.0) -> list[list[float]]:
        """Return a list of lists of finite numbers, each of this length."""
        each = self.each(name)
        return [each.reals(row, length, least, SQUARES) for row in each]


@dataclass
class StatePart:
    """State of one parameter on this rank: of a range of its elements, or of all that it holds."""

    param: Tensor
    entries: Mapping[str, Any]
    start: int | None = None  # the range begins at this element, in memory order; None: no range


@dataclass
class OptimizerStatePart(StatePart):
    """A `StatePart` of an optimizer's own state, and its place in the optimizer's state dict."""

    index: int = 0  # of the parameter, counted through all groups
    number: int | None = None  # in the state dict; None: kept until a frozen parameter is trained
    shard: Tensor | None = None  # what the optimizer steps, if it is not the parameter
    exact: Tensor | None = None  # the exact elements, if the parameter has rounded ones

    @property
    def empty(self) -> bool:
        return not self.entries and self.exact is None

    @property
    def like(self) -> Tensor:
        """A tensor with the layout of an entry that has one number for each element."""
        if self.shard is None:
            return self.param
        return self.shard


class ReplicatedState(Protocol):
    """Entries of a sharded optimizer's state, for every parameter, on every rank."""

    state: dict[Tensor, Any]  # the entries by parameter and name

    def update(self) -> None:
        """Collect the state as it is now. Called on every rank."""


class ShardedOptimizer(Optimizer):
    """Base class of an optimizer of which each rank steps a shard of the parameters.

    Attributes:
        optimizer_class: the class that the user asked for,
        optimizer_arguments: and the arguments for it.
        group: the process group of the ranks; None for one rank without.
    """

    optimizer_class: type[Optimizer]
    optimizer_arguments: dict[str, Any]
    group: Any

    @property
    def optim(self) -> Any:
        """The plain optimizer, which steps this rank's shards and has their state."""
        raise NotImplementedError

    @property
    def shards_state(self) -> bool:
        """Whether this rank has only a shard of the state, because there are other ranks."""
        raise NotImplementedError

    @property
    def state(self) -> Any:
        """The state of this rank's shards."""
        if self.optim is None:
            return {}
        return self.optim.state

    @state.setter
    def state(self, value: object) -> None:
        """Ignore the empty state that torch's constructor sets."""

    def join_hook(self, **kwargs: object) -> NoReturn:
        """Refuse torch's `Join`, which calls this when it is made."""
        raise refuse_join(type(self).__name__)

    def join_in(self) -> None:
        """Take part in averaging gradients, if this rank has had no backward pass for them."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Bring shards and parameters in line, before state is loaded. Called on every rank."""
        raise NotImplementedError

    def save_parts(self, *, include_empty: bool) -> tuple[list[OptimizerStatePart], StateDict]:
        """Return this rank's state by parameter, and the state dict of `optim` that it is in.

        With `include_empty`, parameters without state are included, to be loaded into.
        """
        raise NotImplementedError

    def load_parts(
        self, packed: StateDict, for_later: dict[int, dict[str, Any]], groups: Sequence[ParamGroup]
    ) -> None:
        """Load a state dict of `optim`, and the options of the parameter groups.

        `for_later` is the state of frozen parameters, by `OptimizerStatePart.index`.
        """
        raise NotImplementedError

    def replicate_state(self, names: Sequence[str]) -> ReplicatedState:
        """Return a replica of these entries of the state; `update()` fills it."""
        raise NotImplementedError


class RuleParts(Protocol):
    """What a checkpoint asks of a scaling rule."""

    def scaling_state_dict(self) -> StateDict:
        """Return the rule's state. `previous` is a list by parameter, of gradients or None."""

    def check_scaling_state(self, entry: SavedState) -> object:
        """Return a saved state, parsed; raise a ValueError if it does not fit. Change nothing."""

    def take_scaling_state(self, state: Any) -> None:
        """Continue from what `check_scaling_state` has returned."""


class BlocksParts(Protocol):
    """What a checkpoint asks of blocks. Their outer state is equal on all replicas."""

    @property
    def peers(self) -> list[int]:
        """The ranks that average with this one, one of each replica, among all processes."""

    @property
    def layout(self) -> Sequence[object]:
        """Which elements this rank rounds and averages. Equal layouts have equal residuals."""

    @property
    def memories(self) -> int:
        """The number of outer memories."""

    @property
    def received_steps(self) -> int | None:
        """The steps of the run, if this worker has just joined it and received its outer state.

        None on a worker that was there from the start, and after a joiner's first step.
        """

    def outer_parts(self) -> list[StatePart]:
        """Return the outer state: "anchor", "memory.0" and so on, and perhaps "residual".

        The entries are views of the blocks' own memory. A residual is this replica's own.
        """

    def save_counters(self) -> dict[str, Any]:
        """Return the plain values that all replicas have alike."""

    def check_counters(self, saved: Any) -> dict[str, Any] | None:
        """Return saved counters; raise a ValueError if they do not fit. None: saved without."""

    def load_counters(
        self, saved: SavedState, unsaved: Iterable[Tensor], *, residuals: bool
    ) -> None:
        """Continue from counters, after the outer state was filled.

        `unsaved` parameters had no anchor in the checkpoint: theirs begins here. Without
        `residuals`, these begin at zero.
        """

    def begin(self) -> None:
        """Continue from the parameters as they are, after a state that was saved without blocks."""


@dataclass(frozen=True)
class OptimizerLayers:
    """The rule and the blocks around an optimizer, if there are any, and the optimizer itself."""

    rule: RuleParts | None
    blocks: BlocksParts | None
    inner: Optimizer  # has the state; a `ShardedOptimizer` or any other

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerLayers:
        """Find the layers: rule and blocks in either order, perhaps inside a trainer's proxy."""
        found: dict[str, Any] = {}
        chain = unwrap(optimizer)  # outermost first, so that what a proxy is around replaces it
        for each in chain:
            # AdaptiveDataParallel does not wrap the optimizer; it patches its `step`, and leaves a
            # weak reference to the rule. Not by getattr, which wrappers forward.
            patched_by = each.__dict__.get("_manyhands_rule")
            if patched_by is not None and patched_by() is not None:
                found["rule"] = patched_by()
            if isinstance(each, OptimizerWrapper):
                found[each.layer] = each.state_parts()
        return cls(found.get("rule"), found.get("blocks"), chain[-1])

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """The optimizer, if this rank has only a shard of its state."""
        if isinstance(self.inner, ShardedOptimizer) and self.inner.shards_state:
            return self.inner
        return None

    @property
    def plain(self) -> Optimizer:
        """The optimizer of the class that the user asked for, whether it is sharded or not."""
        return plain_optimizer(self.inner)

    @property
    def class_name(self) -> str:
        return AND.join([type(each).__name__ for each in optimizers_in(self.plain)])


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps this rank's shards, or the optimizer itself."""
    if isinstance(optimizer, ShardedOptimizer):
        plain: Optimizer = optimizer.optim
        return plain
    return optimizer


def state_parts(
    optimizer: Optimizer, *, include_empty: bool = False
) -> tuple[list[OptimizerStatePart], StateDict]:
    """Return this rank's state by parameter, and the state dict that it is in."""
    # With `include_empty`, parameters without state are included.
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
    """Return the state under keys that are no parameter's, such as "global"."""
    numbers = set(params_of(packed["param_groups"]))
    return {key: value for key, value in packed["state"].items() if key not in numbers}


def options_of(group: Mapping[str, Value]) -> dict[str, Value]:
    """Return a parameter group without its parameters."""
    options = dict(group)
    options.pop("params", None)
    options.pop("param_names", None)
    return options
