"""Compare the shardings of a model (`plan`), and print the table (`Plan`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._arguments import (
    format_bytes,
    format_rate,
    format_seconds,
    one_of,
    parse_bytes,
    parse_rate,
    real,
    whole,
)
from manyhands._optimizers.wrappers import unwrap
from manyhands.scaling._rule_base import ScalingRuleBase
from manyhands.scaling._rules import AdamScale, AdaScale, LEGWScale, LinearScale, SqrtScale
from manyhands.sharding.fsdp._places import why_indivisible
from manyhands.tools.plan._costs import Cost, ModelSizes, costs, hybrid_cost, round_cost, rule_cost
from manyhands.tools.plan._model import (
    OneOptimizer,
    PlannedOptimizer,
    activation_bytes,
    build_module,
    count_elements,
    measure,
    planned_optimizers,
    wrap_params,
    wrap_size_of,
)

RULES: tuple[type[ScalingRuleBase], ...] = (
    AdaScale,
    AdamScale,
    LinearScale,
    SqrtScale,
    LEGWScale,
)
FSDP_NAME = "FullyShardedDataParallel"
NAMES = ("DDP", "OSS + DDP", "OSS + ShardedDataParallel", FSDP_NAME)  # by level


@dataclass(frozen=True, kw_only=True)
class Row(Cost):
    """The cost of a sharding, in bytes of the worker with the highest memory.

    `parameters`, `gradients` and `optimizer` are in memory after `backward` and `step`. `in_flight`
    is the additional peak of a backward pass, `scaling` the memory of a scaling rule, and `saved`
    the size of a `mh.save`. `sent` (the mean over workers) and `collectives` are per step.
    `activations` is None without an input. `obstacle` is the reason why the sharding cannot train
    the model.

    `seconds` is the time of a step without overlap and without the optimizer:

        seconds = pass_seconds + 8 sent / network + latency collectives
    """

    name: str
    code: str
    buffers: int
    activations: int | None
    seconds: float | None
    obstacle: str | None
    memory: int | None

    @property
    def available(self) -> bool:
        return self.obstacle is None

    @property
    def fits(self) -> bool | None:
        """Whether a worker has enough memory; None if the memory is unknown."""
        if self.memory is None:
            return None
        return self.total <= self.memory

    @property
    def total(self) -> int:
        held = self.parameters + self.gradients + self.optimizer + self.scaling
        return held + self.in_flight + self.buffers + (self.activations or 0)

    def __repr__(self) -> str:
        held = format_bytes(self.total)
        return f"Row({self.name!r}, {held} per worker, {format_bytes(self.sent)} sent per step)"


@dataclass(frozen=True)
class Plan:
    """The result of `mh.plan`: a row per sharding. Printing the plan shows the table.

    >>> import torch, manyhands as mh
    >>> plan = mh.plan(torch.nn.Linear(1000, 1000), torch.optim.AdamW, workers=4, memory="1GiB")
    >>> plan.cheapest.name, len(plan.rows)
    ('DDP', 4)
    """

    rows: tuple[Row, ...]
    optimizer: str
    elements: int
    workers: int
    notes: tuple[str, ...]  # sentences that explain the table
    memory: int | None = None
    network: float | None = None  # bits per second
    rule: str | None = None

    @property
    def cheapest(self) -> Row | None:
        """The row that fits and sends the fewest bytes; if equal, the least sharded row."""
        best = None
        for row in self.rows:
            usable = row.available and row.fits is not False
            if usable and (best is None or row.sent < best.sent):
                best = row
        return best

    @property
    def title(self) -> str:
        counted = f"{self.elements:,} parameters, {self.optimizer}, {self.workers} worker"
        return counted + "s" * (self.workers > 1)

    @property
    def cells(self) -> list[list[str]]:
        cells = [["", *[row.name for row in self.rows]]]
        for label, name in (
            ("parameters", "parameters"),
            ("gradients", "gradients"),
            ("optimizer state", "optimizer"),
            ("in flight", "in_flight"),
            (f"{self.rule}", "scaling"),
            ("module buffers", "buffers"),
            ("activations", "activations"),
            ("bytes per worker", "total"),
            ("sent per step", "sent"),
            ("written by a save", "saved"),
        ):
            sizes = [getattr(row, name) or 0 for row in self.rows]
            if any(sizes):
                cells.append([label, *map(format_bytes, sizes)])
        cells.append(["collectives", *[f"{row.collectives:,}" for row in self.rows]])
        if self.network is not None:
            times = [format_seconds(row.seconds or 0) for row in self.rows]
            cells.append([f"at {format_rate(self.network)}", *times])
        if self.memory is not None:
            line = [f"fits {format_bytes(self.memory)}"]
            for row in self.rows:
                if row.fits:
                    line.append("yes")
                else:
                    line.append(f"{format_bytes(row.total - self.memory)} over")
            cells.append(line)
        return cells

    @property
    def verdict(self) -> str:
        best = self.cheapest
        if best is not None:
            if self.memory is None:
                return f"The cheapest: {best.name}"
            return f"The cheapest that fits {format_bytes(self.memory)}: {best.name}"
        usable = filter(attrgetter("available"), reversed(self.rows))
        least = min(usable, key=attrgetter("total"))  # if equal, the most sharded row
        over = format_bytes(least.total - (self.memory or 0))
        return f"Nothing fits. {least.name} is {over} over. Use more workers or a smaller input."

    def __str__(self) -> str:
        cells = self.cells
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [self.title, ""]
        for row in cells:
            aligned = [row[0].ljust(widths[0])]
            for cell, width in zip(row[1:], widths[1:], strict=True):
                aligned.append(cell.rjust(width))
            lines.append("  ".join(aligned))
        lines += ["", *self.notes, "", self.verdict]
        if self.cheapest is not None:
            lines += ["", f"    {self.cheapest.code}"]
        return "\n".join(lines)

    __repr__ = __str__  # a notebook shows the table


def plan(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: OneOptimizer | Sequence[Optimizer] = "adamw",
    workers: int = 8,
    *,
    memory: float | str | None = None,
    input: Tensor | Sequence[object] | Mapping[str, object] | None = None,
    backend: str = "nccl",
    network: float | str | None = None,
    latency: float = 0.0,
    pass_seconds: float = 0.0,
    rule: str | None = None,
    mesh: tuple[int, int] | None = None,
    **options: object,
) -> Plan:
    """Compare the shardings of a model on N workers: memory, communication, and fit.

    >>> import torch, manyhands as mh
    >>> def build_model():
    ...     return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(64)))
    >>> found = mh.plan(build_model, "adamw", workers=4, memory="500MiB")
    >>> found.cheapest.name
    'OSS + ShardedDataParallel'
    >>> print(found.cheapest.code)
    model, optimizer = mh.shard(model, optimizer, level=2)

    All numbers describe the worker with the highest memory. Temporary memory of operations, and
    copies made by `foreach` implementations of optimizers, are excluded.

    Args:
        model: a module on any device, or a function that builds a module. The function is called
            under `torch.device("meta")`, and again without it if that fails.
        optimizer: the name or class of an optimizer, an optimizer, or a list of optimizers.
        workers: the number of workers.
        memory: the memory of each worker, such as "24GiB".
        input: the input of a worker, to include activations: a tensor, a tuple or a dict of
            arguments. Meta tensors are sufficient. To plan for autocast, call `plan` inside
            `torch.autocast`.
        backend: "nccl" or "gloo", which differ in collectives and memory in flight.
        network: the bandwidth of each worker, in bits per second or as text such as "50Mbit", to
            include the `seconds` of a step.
        latency: the seconds that each collective adds.
        pass_seconds: the seconds of a forward and backward pass on a worker.
        rule: the name of a scaling rule to include, such as "AdamScale". By default the rule
            around an existing optimizer.
        mesh: the number of copies of the model and of workers per copy, to include level 3 on this
            mesh. The product is the number of workers.
        **options: options of the optimizer, such as momentum.
    """
    if mesh is not None:
        workers = math.prod([whole("mesh", each, least=2) for each in mesh])
    workers = whole("workers", workers, least=1)
    one_of("backend", backend, ("nccl", "gloo"))
    budget = None if memory is None else parse_bytes(memory)
    rate = None if network is None else parse_rate(network)
    latency = real("latency", latency, least=0)
    pass_seconds = real("pass_seconds", pass_seconds, least=0)
    around = _find_rule(rule, optimizer)
    module = build_module(model)
    optimizers = planned_optimizers(optimizer, options, module)
    wrap_size = wrap_size_of(module)
    sizes = measure(module, optimizers, wrap_size)
    activations = None if input is None else activation_bytes(module, input)
    obstacle = None
    if workers > 1:  # on a single worker FSDP shards nothing
        obstacle = wrapping_obstacle(module, wrap_size)
    made = "optimizer"
    if isinstance(optimizer, list | tuple):
        made = "optimizers"
    rows = []
    for name, how, cost in _ways(sizes, workers, mesh, backend == "gloo", around, optimizers):
        row = Row(
            **asdict(cost),
            name=name,
            code=f"model, {made} = mh.shard(model, {made}, {how}",
            buffers=sizes.buffers,
            activations=activations,
            seconds=rate and pass_seconds + 8 * cost.sent / rate + latency * cost.collectives,
            obstacle=obstacle if FSDP_NAME in name else None,
            memory=budget,
        )
        rows.append(row)
    return Plan(
        rows=tuple(rows),
        optimizer=" and ".join(dict.fromkeys([one.kind.__name__ for one in optimizers])),
        elements=count_elements(module),
        workers=workers,
        notes=_notes(rows, optimizers, sizes, wrap_size, workers),
        memory=budget,
        network=rate,
        rule=getattr(around, "__name__", None),
    )


def _ways(
    sizes: ModelSizes,
    workers: int,
    mesh: tuple[int, int] | None,
    gloo: bool,
    rule: type[ScalingRuleBase] | None,
    optimizers: Sequence[PlannedOptimizer],
) -> list[tuple[str, str, Cost]]:
    groups = []
    for one in optimizers:
        groups += one.all_options
    payload = (0, 0)
    if rule is not None:
        payload = rule_cost(len(groups), workers, gloo)
    replicas = 0  # of state entries, which the rule needs on every worker
    if rule is not None and issubclass(rule, AdamScale):
        replicas = 1
        if any(options.get("centered") for options in groups):
            replicas = 2
    ways = []
    for level, cost in enumerate(costs(sizes, workers, gloo, replicas)):
        ways.append((NAMES[level], f"level={level})", cost.with_messages(*payload)))
    if mesh is not None:
        name = f"{FSDP_NAME}, {mesh[0]} copies"
        how = f"level=3, mesh=mesh)  # of {mesh[0]} x {mesh[1]}"
        cost = hybrid_cost(sizes, mesh, gloo, replicas)
        ways.append((name, how, cost.with_messages(*payload)))
    return ways


def _find_rule(name: str | None, optimizer: object) -> type[ScalingRuleBase] | None:
    if name is None:
        if isinstance(optimizer, Optimizer):
            for layer in unwrap(optimizer, every_layer=True):
                if isinstance(layer, ScalingRuleBase):
                    return type(layer)
        return None
    rules = {rule.__name__: rule for rule in RULES}
    one_of("rule", name, list(rules))
    return rules[name]


def _notes(
    rows: Sequence[Row],
    optimizers: Sequence[PlannedOptimizer],
    sizes: ModelSizes,
    wrap_size: int,
    workers: int,
) -> tuple[str, ...]:
    layouts = set()
    for one in optimizers:
        name = one.kind.__name__
        if one.elementwise:
            layouts.add(f"{name} updates each element by itself: every worker owns an equal shard.")
        else:
            layouts.add(f"{name} needs whole tensors: each parameter has one owner.")
    wraps = sum(bool(wrap.params) for wrap in sizes.wraps)
    number = f"{wraps:,} wraps of at least {wrap_size:,} parameters"
    if wraps == 1:
        number = "one wrap"
    notes = [*sorted(layouts), f"{FSDP_NAME}: {number}."]
    sent, collectives = round_cost(sizes, workers)
    if collectives:
        notes.append(f"A round of DiLoCo sends {format_bytes(sent)} in {collectives} collectives.")
    if rows[0].activations is None:
        notes.append("Activations are not counted: no input was given.")
    for row in rows:
        if row.obstacle:
            notes.append(f"{row.name} cannot be used: {row.obstacle}")
    return tuple(notes)


def wrapping_obstacle(model: nn.Module, wrap_size: int | None) -> str | None:
    """Return the reason why FSDP cannot shard the model, or None.

    Without a `wrap_size`, the wraps are not checked.
    """
    for name, param in model.named_parameters():
        if problem := why_indivisible(param):
            return f"{name} {problem}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name or 'the model'} has sparse gradients. Create it with sparse=False."
    if wrap_size is None:
        return None
    for params, _ in wrap_params(model, wrap_size):
        dtypes = dict.fromkeys([str(param.dtype) for param in params if param.requires_grad])
        if len(dtypes) > 1:
            return (
                f"one wrap would contain parameters of {' and '.join(dtypes)}. "
                "Wrap the parameters of each dtype separately."
            )
    return None
