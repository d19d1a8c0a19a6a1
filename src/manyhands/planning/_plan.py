"""The four ways to train a model on N workers, side by side, and the cheapest that fits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from manyhands.planning._activations import saved_bytes
from manyhands.planning._costs import Cost, Job, costs
from manyhands.planning._model import (
    Chosen,
    built,
    chosen,
    described,
    picked_by_size,
    units,
)
from manyhands.planning._sizes import in_bytes, shown
from manyhands.sharding.fsdp._optimizer_guard import NEED_WHOLE

UNIT = 10**8  # elements that are a wrap of FSDP's by themselves, or a 50th of a smaller model
MOST_WORKERS = 2**13  # that are tried, where none of the ways fits
BACKENDS = ("nccl", "gloo")

FULLY = "FullyShardedDataParallel"
DDP = "model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)"


@dataclass(frozen=True)
class Row:
    """One way to train, and what it costs the worker that has most; sizes in bytes.

    `gradients` and `optimizer` are what a worker holds after `backward` and after `step`;
    `in_flight` is what comes on top at most, while gradients are made and sent. `sent`, the mean
    over the workers, and `collectives` are those of one step. `activations` are None where they
    were not measured, `fits` where no memory was given. `obstacle` is why a way cannot be taken.
    """

    name: str
    parameters: int
    gradients: int
    optimizer: int
    in_flight: int
    buffers: int
    activations: int | None
    sent: int
    collectives: int
    fits: bool | None
    obstacle: str | None
    code: str

    @property
    def available(self) -> bool:
        """Whether the model and its optimizers can be trained in this way."""
        return self.obstacle is None

    @property
    def total(self) -> int:
        """Bytes per worker, of all that is counted."""
        held = self.parameters + self.gradients + self.optimizer
        return held + self.in_flight + self.buffers + (self.activations or 0)


@dataclass(frozen=True)
class Plan:
    """What `mh.plan` found: a row for each way to train; `print` it.

    `enough` is the number of workers with which the most sharded way would fit, where none does.
    """

    rows: tuple[Row, ...]
    optimizer: str
    layout: str
    wraps: str
    elements: int
    workers: int
    memory: int | None
    enough: int | None = None

    @property
    def cheapest(self) -> Row | None:
        """The way that fits and sends the fewest bytes; of equal ones the simplest."""
        fitting = [row for row in self.rows if row.available and row.fits is not False]
        return min(fitting, key=lambda row: row.sent, default=None)

    @property
    def title(self) -> str:
        """What was planned."""
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return f"{self.elements:,} parameters, {self.optimizer}, {workers}"

    @property
    def cells(self) -> list[list[str]]:
        """The table: a heading, and a line for each kind of cost with a cell for each way."""
        first = self.rows[0]
        lines: list[tuple[str, Callable[[Row], str]]] = [
            ("parameters", lambda row: shown(row.parameters)),
            ("gradients", lambda row: shown(row.gradients)),
            ("optimizer state", lambda row: shown(row.optimizer)),
            ("in flight", lambda row: shown(row.in_flight)),
        ]
        if first.buffers:
            lines.append(("module buffers", lambda row: shown(row.buffers)))
        if first.activations is not None:
            lines.append(("activations", lambda row: shown(row.activations or 0)))
        lines += [
            ("bytes per worker", lambda row: shown(row.total)),
            ("sent per step", lambda row: shown(row.sent)),
            ("collectives", lambda row: f"{row.collectives:,}"),
        ]
        if self.memory is not None:
            lines.append((f"fits {shown(self.memory)}", self._fit))
        return [
            ["", *(row.name for row in self.rows)],
            *([label, *map(cell, self.rows)] for label, cell in lines),
        ]

    def _fit(self, row: Row) -> str:
        assert self.memory is not None
        return "yes" if row.fits else f"{shown(row.total - self.memory)} over"

    @property
    def notes(self) -> list[str]:
        """What has to be known to read the table."""
        notes = [self.layout, self.wraps]
        if self.rows[0].activations is None:
            notes.append("Activations are not counted: no input was given.")
        notes += [
            f"{row.name} cannot be taken: {row.obstacle}" for row in self.rows if row.obstacle
        ]
        return notes

    @property
    def verdict(self) -> str:
        """Which way to take; or what is missing."""
        best = self.cheapest
        if best is not None:
            fits = "" if self.memory is None else f" that fits {shown(self.memory)}"
            return f"The cheapest{fits}: {best.name}"
        assert self.memory is not None
        least = _most_sharded(self.rows)
        said = f"Nothing fits. {least.name} is {shown(least.total - self.memory)} over, and "
        if self.enough is not None:
            said += f"would fit on {self.enough:,} workers."
        else:
            said += "no number of workers was found on which it would fit."
        return said

    def __str__(self) -> str:
        best = self.cheapest
        code = [] if best is None else ["", *(f"    {line}" for line in best.code.splitlines())]
        return "\n".join(
            [self.title, "", *_columns(self.cells), "", *self.notes, "", self.verdict, *code]
        )


def plan(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Any = "adamw",
    workers: int = 8,
    *,
    memory: float | str | None = None,
    input: Any = None,
    backend: str = "nccl",
    bucket_size: int | None = None,
    **options: Any,
) -> Plan:
    """Compare the ways to train a model on some workers: bytes held, bytes sent, what fits.

    >>> import torch, manyhands as mh
    >>> def build_model():
    ...     return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(64)))
    >>> found = mh.plan(build_model, "adamw", workers=4, memory="500MiB")
    >>> found.cheapest.name
    'OSS + ShardedDataParallel'
    >>> print(found.cheapest.code)
    optimizer = mh.OSS(model.parameters(), optim=torch.optim.AdamW, lr=lr)
    model = mh.ShardedDataParallel(model, optimizer)

    The numbers are those of the layout that the library will use, for the worker that has most.
    For `FullyShardedDataParallel` the model is wrapped as in the row's `code`. Not counted: what
    operations need while they run, and what the optimizer's `foreach` implementation copies
    within a step.

    Args:
        model: a module, on any device, or a function that builds one. A function is called
            under `torch.device("meta")`, so that no memory is needed (or, if that fails, as it is).
        optimizer: the name or the class of an optimizer, a `functools.partial` of it, or the
            optimizer that you have; a list of them, if there are several.
        workers: how many.
        memory: of each worker, as in "24GiB".
        input: one worker's input, to measure activations: a tensor, a tuple of the forward's
            arguments, or a dict of them. Meta tensors will do, only shapes matter.
        backend: "nccl" or "gloo"; it decides the number of collectives and the buckets in flight.
        bucket_size: elements that travel together, as for `OSS`.
        **options: the optimizer's, such as momentum.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be a number of at least 1, got {workers!r}.")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}.")
    room = None if memory is None else in_bytes(memory)
    module = built(model)
    optimizers = chosen(optimizer, options, module)
    elements = sum(param.numel() for param in module.parameters())
    unit_size = _rounded_down(min(UNIT, max(1, elements // 50)))
    job = described(module, optimizers, unit_size)
    activations = None if input is None else saved_bytes(module, input)
    names, codes = _ways(
        optimizers, isinstance(optimizer, list | tuple), bucket_size, _wrapping(module, unit_size)
    )
    obstacles = (None, None, None, _obstacle(optimizers, module, unit_size))

    def rows(count: int) -> tuple[Row, ...]:
        found = costs(job, count, bucket_size, backend == "gloo")
        return tuple(
            _row(name, cost, job, activations, room, obstacle if count > 1 else None, code)
            for name, cost, obstacle, code in zip(names, found, obstacles, codes, strict=True)
        )

    here = rows(workers)
    fits = room is None or any(row.available and row.fits for row in here)
    return Plan(
        here,
        " and ".join(dict.fromkeys(one.kind.__name__ for one in optimizers)),
        _layouts(optimizers),
        _wraps(job, unit_size),
        elements,
        workers,
        room,
        None if fits or room is None else _enough(rows, workers, room),
    )


def _row(
    name: str,
    cost: Cost,
    job: Job,
    activations: int | None,
    room: int | None,
    obstacle: str | None,
    code: str,
) -> Row:
    row = Row(
        name,
        cost.parameters,
        cost.gradients,
        cost.optimizer,
        cost.in_flight,
        job.buffers,
        activations,
        cost.sent,
        cost.collectives,
        None,
        obstacle,
        code,
    )
    return row if room is None else Row(**{**vars(row), "fits": row.total <= room})


def _obstacle(optimizers: Sequence[Chosen], model: nn.Module, unit_size: int) -> str | None:
    """Why FSDP cannot train this on several workers."""
    for kind in dict.fromkeys(one.kind for one in optimizers):
        if issubclass(kind, NEED_WHOLE):
            return f"{kind.__name__} needs whole tensors."
    for name, param in model.named_parameters():
        if param.dim() == 0:
            return f"{name} is a scalar, which cannot be divided; make it a tensor of one element."
    for params, _ in units(model, unit_size):
        dtypes = dict.fromkeys(str(param.dtype) for param in params if param.requires_grad)
        if len(dtypes) > 1:
            return (
                f"parameters that would be in one wrap are {' and '.join(dtypes)}. "
                "Wrap those of one type by themselves."
            )
    return None


def _most_sharded(rows: Sequence[Row]) -> Row:
    return [row for row in rows if row.available][-1]


def _enough(rows: Callable[[int], tuple[Row, ...]], workers: int, room: int) -> int | None:
    """The fewest workers with which the most sharded way fits: doubled, then halved between."""
    low, high = workers, 2 * workers
    before, after = _most_sharded(rows(low)), _most_sharded(rows(high))
    while not after.fits:
        whole = after.total - after.gradients - after.optimizer - after.in_flight
        stuck = whole > room and after.parameters == before.parameters
        if stuck or after.total >= before.total or high >= MOST_WORKERS:
            return None
        low, high = high, 2 * high
        before, after = after, _most_sharded(rows(high))
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        if _most_sharded(rows(middle)).fits:
            high = middle
        else:
            low = middle
    return high


# -- words -------------------------------------------------------------------------------------


def _ways(
    optimizers: Sequence[Chosen], several: bool, bucket_size: int | None, wrapping: str
) -> tuple[list[str], list[str]]:
    """Names of the four ways, and the lines to paste for each."""
    sized = "" if bucket_size is None else f", bucket_size={bucket_size}"
    if not optimizers[0].made:
        oss = f"optimizer = {_new(optimizers[0], sized)}"
    elif several:
        again = f"mh.OSS(one.param_groups, optim=type(one){sized})"
        oss = f"optimizers = [{again} for one in optimizers]"
    else:
        oss = f"optimizer = mh.OSS(optimizer.param_groups, optim=type(optimizer){sized})"
    sharded = f"model = mh.ShardedDataParallel(model, optimizer{'s' * several})"
    fully = _fully(optimizers, several, wrapping)
    return (
        ["DDP", "OSS + DDP", "OSS + ShardedDataParallel", FULLY],
        [DDP, f"{oss}\n{DDP}", f"{oss}\n{sharded}", fully],
    )


def _fully(optimizers: Sequence[Chosen], several: bool, wrapping: str) -> str:
    """FSDP's: the parameters are others once they are wrapped, and optimizers are made again."""
    if not optimizers[0].made:
        one = optimizers[0]
        return f"{wrapping}\noptimizer = {_name(one)}(model.parameters(){_written(one)})"
    again = (
        '[{**group, "params": [params[names[param]] for param in group["params"]]}\n'
        "     for group in one.param_groups]"
    )
    if several:
        made = f"optimizers = [\n    type(one)({again})\n    for one in optimizers\n]"
    else:
        groups = again.replace("one.", "optimizer.").replace("     for", "    for")
        made = f"optimizer = {_name(optimizers[0])}(\n    {groups}\n)"
    return (
        "names = {param: name for name, param in model.named_parameters()}\n"
        f"{wrapping}\n"
        "params = dict(model.named_parameters())\n"
        f"{made}"
    )


def _wrapping(model: nn.Module, unit_size: int) -> str:
    if model not in picked_by_size(model, unit_size):  # such as attention, which is left whole
        return f"model = mh.{FULLY}(model)"
    return (
        f"with mh.enable_wrap(wrapper_cls=mh.{FULLY}, skip_params_check_for_root=True):\n"
        f"    model = mh.auto_wrap(model, min_num_params={unit_size:_})"
    )


def _new(one: Chosen, sized: str) -> str:
    return f"mh.OSS(model.parameters(), optim={_name(one)}{_written(one)}{sized})"


def _name(one: Chosen) -> str:
    name = one.kind.__name__
    return f"torch.optim.{name}" if getattr(torch.optim, name, None) is one.kind else name


def _written(one: Chosen) -> str:
    """An optimizer's options, as they are written after its parameters."""
    rate = {} if "lr" not in inspect.signature(one.kind).parameters else {"lr": "lr"}
    given = {**rate, **{key: repr(value) for key, value in one.given.items()}}
    return "".join(f", {key}={value}" for key, value in given.items())


def _layouts(optimizers: Sequence[Chosen]) -> str:
    said = []
    for even, text in (
        (True, "updates each element by itself: every worker has an equal share."),
        (False, "looks at whole tensors: each parameter has one owner, dealt out by size."),
    ):
        names = dict.fromkeys(one.kind.__name__ for one in optimizers if one.even is even)
        said += [f"{name} {text}" for name in names]
    return " ".join(said)


def _wraps(job: Job, unit_size: int) -> str:
    number = sum(bool(unit.weights) for unit in job.units)
    if number == 1:
        return f"{FULLY}: one wrap, around the model."
    return f"{FULLY}: {number:,} wraps, by auto_wrap(min_num_params={unit_size:_})."


def _rounded_down(number: int) -> int:
    """To one digit and zeros."""
    power = 10 ** (len(str(number)) - 1)
    return number // power * power


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in cells
    ]
