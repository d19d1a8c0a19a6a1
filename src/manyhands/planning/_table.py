"""A plan as a reader sees it: rows, a table, sentences, and lines of code to paste.

`_plan.py` fills these in; the command `manyhands plan` and `print` show them. Nothing is computed
here beyond sums and comparisons. Sizes are written and read as people write them: "24GiB".
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from manyhands.planning._arguments import PlannedOptimizer
from manyhands.planning._line import LinePlan, PassPlan, format_rate, format_seconds
from manyhands.planning._model import pick_by_size
from manyhands.planning._sizes import ModelSizes

FSDP_NAME = "FullyShardedDataParallel"
DDP_CODE = "model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)"


@dataclass(frozen=True)
class Row:
    """One way to train, and its cost to the worker that holds most; sizes in bytes.

    `gradients` and `optimizer` are held after `backward` and after `step`; `in_flight` is the most
    that is held on top, while gradients are made and sent. `sent`, the mean over the workers, and
    `collectives` count one step. `activations` is None if no input was given, `fits` is None if no
    memory was given. `obstacle` says why the model cannot be trained in this way.

    `scaling` is what a scaling rule holds on top, `residuals` what a codec of the gradients keeps,
    and `blocks` the anchor and the outer step's memories. A row of blocks has `every` above 1: what
    it sends is that of a sync round, divided by the steps of a block.
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
    scaling: int = 0
    blocks: int = 0
    every: int = 1
    residuals: int = 0

    @property
    def available(self) -> bool:
        """Whether the model and its optimizers can be trained in this way."""
        return self.obstacle is None

    @property
    def total(self) -> int:
        """The sum of all bytes that are counted, for one worker."""
        held = self.parameters + self.gradients + self.residuals + self.optimizer
        on_top = self.scaling + self.blocks
        return held + on_top + self.in_flight + self.buffers + (self.activations or 0)


@dataclass(frozen=True)
class Plan:
    """The result of `mh.plan`: a row for each way to train. Print it to see the table.

    If nothing fits, `enough` is the number of workers on which the way that holds least would fit.
    If a line was given, `advice` says what a step takes on it, and which way to use there.

    >>> import torch, manyhands as mh
    >>> plan = mh.plan(torch.nn.Linear(1000, 1000), torch.optim.AdamW, workers=4, memory="1GiB")
    >>> plan.cheapest.name, len(plan.rows)
    ('DDP', 4)
    """

    rows: tuple[Row, ...]
    optimizer: str
    layout: str
    wraps: str
    elements: int
    workers: int
    memory: int | None
    enough: int | None = None
    line: LinePlan | None = None
    rule: str | None = None
    compute: PassPlan | None = None
    codec: str | None = None

    @property
    def cheapest(self) -> Row | None:
        """The way that fits and sends the fewest bytes; of equal ones the simplest.

        Blocks send less than any other way. They train otherwise, so the choice is yours.
        """
        # Rows are ordered from the simplest to the most sharded, and min() returns the first.
        together = [row for row in self.rows if row.every == 1]
        fitting = [row for row in together if row.available and row.fits is not False]
        return min(fitting, key=lambda row: row.sent, default=None)

    @property
    def title(self) -> str:
        """The model's size, its optimizers and the number of workers."""
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return f"{self.elements:,} parameters, {self.optimizer}, {workers}"

    @property
    def cells(self) -> list[list[str]]:
        """The table: a heading, and a line for each kind of cost with a cell for each way."""
        first = self.rows[0]
        lines: list[tuple[str, Callable[[Row], str]]] = [
            ("parameters", lambda row: format_bytes(row.parameters)),
            ("gradients", lambda row: format_bytes(row.gradients)),
            ("optimizer state", lambda row: format_bytes(row.optimizer)),
            ("in flight", lambda row: format_bytes(row.in_flight)),
        ]
        if any(row.residuals for row in self.rows):
            lines.append(("residuals", lambda row: format_bytes(row.residuals)))
        if self.rule is not None:
            lines.append((self.rule, lambda row: format_bytes(row.scaling)))
        if any(row.blocks for row in self.rows):
            lines.append(("anchor, momentum", lambda row: format_bytes(row.blocks)))
        if first.buffers:
            lines.append(("module buffers", lambda row: format_bytes(row.buffers)))
        if first.activations is not None:
            lines.append(("activations", lambda row: format_bytes(row.activations or 0)))
        lines += [
            ("bytes per worker", lambda row: format_bytes(row.total)),
            ("sent per step", lambda row: format_bytes(row.sent)),
            ("collectives", lambda row: f"{row.collectives:,}"),
        ]
        if (line := self.line) is not None:
            label = f"on {format_rate(line.rate)}"
            lines.append((label, lambda row: format_seconds(line.seconds(row.sent))))
            if (seconds := self.pass_seconds) is not None:
                label = "a step, about"  # without overlap, and without delays
                lines.append((label, lambda r: format_seconds(seconds + line.seconds(r.sent))))
        if self.memory is not None:
            lines.append((f"fits {format_bytes(self.memory)}", self._fits_cell))
        return [
            ["", *(row.name for row in self.rows)],
            *([label, *map(cell, self.rows)] for label, cell in lines),
        ]

    def _fits_cell(self, row: Row) -> str:
        assert self.memory is not None
        return "yes" if row.fits else f"{format_bytes(row.total - self.memory)} over"

    @property
    def notes(self) -> list[str]:
        """Sentences that explain the table."""
        notes = [self.layout, self.wraps]
        if self.rows[0].activations is None:
            notes.append("Activations are not counted: no input was given.")
        if self.compute is not None:
            notes.append(self.compute.note)
        if self.codec is not None and self.workers > 1:
            notes.append(
                f"Gradients that are sharded travel as {self.codec}; what it leaves out are the "
                "residuals. DDP sends gradients as they are."
            )
        if self.rule is not None and self.workers == 1:
            notes.append(
                f"{self.rule} on one worker: with one pass a step and a scale above 1 it compares "
                "consecutive gradients, and holds two more copies of the gradient."
            )
        for row in self.rows:
            if row.every > 1:
                sent = format_bytes(row.sent * row.every)
                notes.append(
                    f"{row.name}: a sync round sends {sent}, once in {row.every:,} steps. The "
                    "gradients are not averaged, so the model is not wrapped in DDP."
                )
        notes += [f"{row.name} cannot be used: {row.obstacle}" for row in self.rows if row.obstacle]
        return notes

    @property
    def pass_seconds(self) -> float | None:
        """The seconds of one pass, as given or as computed; None if unknown."""
        if self.line is not None and self.line.pass_seconds is not None:
            return self.line.pass_seconds
        return None if self.compute is None else self.compute.seconds

    @property
    def verdict(self) -> str:
        """The way to take, or how much memory is missing."""
        best = self.cheapest
        if best is not None:
            fits = "" if self.memory is None else f" that fits {format_bytes(self.memory)}"
            return f"The cheapest{fits}: {best.name}"
        assert self.memory is not None
        least = leanest([row for row in self.rows if row.every == 1])
        text = f"Nothing fits. {least.name} is {format_bytes(least.total - self.memory)} over, and "
        if self.enough is not None:
            text += f"would fit on {self.enough:,} workers."
        else:
            text += "no number of workers was found on which it would fit."
        return text

    @property
    def advice(self) -> list[str]:
        """What a step takes on the line, and whether to step together less often; [] without one.

        It is about the cheapest way that fits, or DDP if nothing does.
        """
        if self.line is None:
            return []
        row = self.cheapest or self.rows[0]
        return self.line.advise(row.name, row.sent, gradients_sent=self.rows[0].sent)

    def __str__(self) -> str:
        best = self.cheapest
        code = [] if best is None else ["", *(f"    {line}" for line in best.code.splitlines())]
        advice = ["", *self.advice] if self.advice else []
        return "\n".join(
            [self.title, "", *_align(self.cells), "", *self.notes, "", self.verdict, *code, *advice]
        )


def leanest(rows: Sequence[Row]) -> Row:
    """Return the row that holds least of those that can be used; of equal ones the most sharded."""
    # Rows are ordered by how much they shard, and min() returns the first.
    return min([row for row in rows if row.available][::-1], key=lambda row: row.total)


def _align(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in cells
    ]


# -- lines of code to paste, and explanations --------------------------------------------------


def names_and_code(
    optimizers: Sequence[PlannedOptimizer],
    several: bool,
    bucket_size: int | None,
    codec: str | None,
    wrap_code: str,
) -> tuple[list[str], list[str]]:
    """Return the names of the four ways, and the lines to paste for each."""
    size_option = "" if bucket_size is None else f", bucket_size={bucket_size}"
    if not optimizers[0].exists:
        oss = f"optimizer = {_oss_code(optimizers[0], size_option)}"
    elif several:
        again = f"mh.OSS(one.param_groups, optim=type(one){size_option})"
        oss = f"optimizers = [{again} for one in optimizers]"
    else:
        oss = f"optimizer = mh.OSS(optimizer.param_groups, optim=type(optimizer){size_option})"
    arguments = f"model, optimizer{'s' * several}{codec_option(codec)}"
    sharded = f"model = mh.ShardedDataParallel({arguments})"
    fully = _fsdp_code(optimizers, several, codec, wrap_code)
    return (
        ["DDP", "OSS + DDP", "OSS + ShardedDataParallel", FSDP_NAME],
        [DDP_CODE, f"{oss}\n{DDP_CODE}", f"{oss}\n{sharded}", fully],
    )


def codec_option(codec: str | None) -> str:
    return "" if codec is None else f', codec="{codec}"'


def _fsdp_code(
    optimizers: Sequence[PlannedOptimizer], several: bool, codec: str | None, wrap_code: str
) -> str:
    """Return FSDP's lines. Wrapping replaces the parameters, so optimizers are made anew."""
    if not optimizers[0].exists:
        one = optimizers[0]
        kind, options = _class_text(one), _options_text(one)
        if one.wants_whole_tensors:
            kind, options = "mh.WholeTensorOptimizer", f", optim={kind}{options}"
        return f"{wrap_code}\noptimizer = {kind}(model.parameters(){options})"
    if any(one.wants_whole_tensors for one in optimizers):  # some as they are, some made anew
        made = f"optimizer{'s' * several}"
        return f"model, {made} = mh.shard(model, {made}, level=3{codec_option(codec)})"
    again = (
        '[{**group, "params": [params[names[param]] for param in group["params"]]}\n'
        "     for group in one.param_groups]"
    )
    if several:
        made = f"optimizers = [\n    type(one)({again})\n    for one in optimizers\n]"
    else:
        groups = again.replace("one.", "optimizer.").replace("     for", "    for")
        made = f"optimizer = {_class_text(optimizers[0])}(\n    {groups}\n)"
    return (
        "names = {param: name for name, param in model.named_parameters()}\n"
        f"{wrap_code}\n"
        "params = dict(model.named_parameters())\n"
        f"{made}"
    )


def blocks_code(optimizers: Sequence[PlannedOptimizer], several: bool, method: str) -> str:
    """Return the lines to paste for blocks: they go around the plain optimizer."""
    if not optimizers[0].exists:
        one = optimizers[0]
        made = f"{_class_text(one)}(model.parameters(){_options_text(one)})"
        return f"optimizer = mh.{method}({made})"
    if several:
        return f"optimizers = [mh.{method}(one) for one in optimizers]"
    return f"optimizer = mh.{method}(optimizer)"


def wrap_code(model: nn.Module, wrap_size: int, codec: str | None) -> str:
    if model not in pick_by_size(model, wrap_size):  # such as attention, which is left whole
        return f"model = mh.{FSDP_NAME}(model{codec_option(codec)})"
    options = f"wrapper_cls=mh.{FSDP_NAME}, skip_params_check_for_root=True{codec_option(codec)}"
    options = options if codec is None else f"\n    {options}\n"
    return (
        f"with mh.enable_wrap({options}):\n"
        f"    model = mh.auto_wrap(model, min_num_params={wrap_size:_})"
    )


def _oss_code(one: PlannedOptimizer, size_option: str) -> str:
    return f"mh.OSS(model.parameters(), optim={_class_text(one)}{_options_text(one)}{size_option})"


def _class_text(one: PlannedOptimizer) -> str:
    name = one.kind.__name__
    return f"torch.optim.{name}" if getattr(torch.optim, name, None) is one.kind else name


def _options_text(one: PlannedOptimizer) -> str:
    """Return an optimizer's options as they are written after its parameters."""
    # The user's learning rate is not known here, so the code names it.
    rate = {} if "lr" not in inspect.signature(one.kind).parameters else {"lr": "lr"}
    texts = {**rate, **{key: repr(value) for key, value in one.arguments.items()}}
    return "".join(f", {key}={value}" for key, value in texts.items())


def explain_layouts(optimizers: Sequence[PlannedOptimizer]) -> str:
    sentences = []
    for elementwise, text in (
        (True, "updates each element by itself: every worker owns an equal shard."),
        (False, "needs whole tensors: each parameter has one owner, assigned by size."),
    ):
        kinds = dict.fromkeys(one.kind for one in optimizers if one.elementwise is elementwise)
        sentences += [f"{kind.__name__} {text}" for kind in kinds]
    return " ".join(sentences)


def explain_wraps(sizes: ModelSizes, wrap_size: int) -> str:
    number = sum(bool(wrap.params) for wrap in sizes.wraps)
    if number == 1:
        return f"{FSDP_NAME}: one wrap, around the model."
    return f"{FSDP_NAME}: {number:,} wraps, by auto_wrap(min_num_params={wrap_size:_})."


# -- sizes in bytes: "24GiB", "24 GB", "512MiB", or a plain number -----------------------------

UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
UNIT_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_bytes(size: float | str) -> int:
    """Return the number of bytes.

    >>> parse_bytes("1.5 KiB"), parse_bytes("24GB"), parse_bytes(512)
    (1536, 24000000000, 512)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", size.lower())
        if match is None or match[2] not in UNITS:
            raise ValueError(
                f'a size is a number and a unit, such as "24GiB", "24GB" or "512MiB", got {size!r}.'
            )
        size = float(match[1]) * UNITS[match[2]]
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f'a size is a number of bytes or a text such as "24GiB", got {size!r}.')
    if not (math.isfinite(size) and size > 0):
        raise ValueError(f"a size must be positive, got {size!r}.")
    return int(size)


def format_bytes(size: int) -> str:
    """Return three or four digits and a unit.

    >>> format_bytes(0), format_bytes(1536), format_bytes(24 * 2**30)
    ('0 B', '1.50 KiB', '24.0 GiB')
    """
    power, value = 0, float(size)
    while value >= 1023.5 and power < len(UNIT_NAMES) - 1:
        power, value = power + 1, value / 1024
    # The bounds are those at which rounding would give one digit more.
    digits = 0 if power == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {UNIT_NAMES[power]}"
