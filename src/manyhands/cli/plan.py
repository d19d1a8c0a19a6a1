"""`manyhands plan`: what each sharding costs a model, and the line to paste."""

from __future__ import annotations

import ast
import re
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manyhands.cli._terminal import import_object, stop
from manyhands.planning import Plan
from manyhands.planning import plan as make_plan

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="The function that builds the model, such as my_module:build_model.",
    ),
]
OptimizerName = Annotated[str, typer.Option(help="An optimizer of torch.optim.")]
OptimizerOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An option such as momentum=0.9; repeat for more."),
]
Workers = Annotated[int, typer.Option(min=1, help="Number of workers.")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of each worker, such as 24GiB.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="One worker's input, such as 8x3x224x224 or labels=8x128:int64, to measure "
        "activations; repeat for each argument of forward().",
    ),
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="Type of the parameters, such as bfloat16.")
]
Autocast = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="Type to which autocast casts in the forward pass."),
]
RuleName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A scaling rule, such as AdamScale.")
]
BlocksName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A method of blocks, such as DiLoCo.")
]
Backend = Annotated[str, typer.Option(metavar="nccl|gloo", help="Communication backend.")]
CodecName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A codec of sharded gradients: int8, int4 or fp4."),
]
LineRate = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="Each worker's line to the others, such as 50Mbit or 10Gbit/s."
    ),
]
PassSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Time of one pass on one worker, to compare with the line's."
    ),
]
Speed = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="What a worker computes in a second, such as 30TFLOP/s: gives the time of a pass.",
    ),
]


def plan(
    model: Model,
    optimizer: OptimizerName = "adamw",
    optimizer_option: OptimizerOptions = None,
    workers: Workers = 8,
    memory: Memory = None,
    input: Inputs = None,
    dtype: Dtype = None,
    autocast: Autocast = None,
    rule: RuleName = None,
    blocks: BlocksName = None,
    backend: Backend = "nccl",
    codec: CodecName = None,
    line: LineRate = None,
    pass_seconds: PassSeconds = None,
    speed: Speed = None,
) -> None:
    """Compare ways to train a model on several workers: bytes held, bytes sent, what fits.

    The model is built on torch's meta device, where tensors have no memory, so a laptop can plan a
    model of any size. With --line it also says what a step takes on the line between the workers,
    and whether to train at the small batch, with Ramp or in blocks. The exit code is 1 if nothing
    fits.
    """
    builder = import_object("plan", model)
    options = dict(map(_parse_option, optimizer_option or []))
    try:
        inputs = None if input is None else _parse_inputs(input)
        found = make_plan(
            builder,
            optimizer,
            workers,
            memory=memory,
            input=inputs,
            backend=backend,
            codec=codec,
            line=line,
            pass_seconds=pass_seconds,
            speed=speed,
            dtype=None if dtype is None else _parse_dtype("--dtype", dtype),
            autocast=None if autocast is None else _parse_dtype("--autocast", autocast),
            rule=rule,
            blocks=blocks,
            **options,
        )
    except (TypeError, ValueError) as error:
        stop("plan", *str(error).splitlines())
    _print_plan(found)
    if found.cheapest is None:
        raise typer.Exit(1)


def _parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        stop("plan", f"--optimizer-option takes NAME=VALUE, such as momentum=0.9, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # a bare word is text


def _parse_dtype(option: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        stop("plan", f"{option} takes a type of torch, such as bfloat16, got {name!r}.")
    return dtype


def _parse_inputs(texts: list[str]) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
    """Return the arguments of forward() in their order, or by their names."""
    pairs = [text.rpartition("=") for text in texts]
    names = [name for name, equals, _ in pairs if equals]
    if not names:
        return tuple(_parse_input(text) for text in texts)
    if len(set(names)) < len(texts) or not all(name.isidentifier() for name in names):
        stop(
            "plan",
            "--input with names needs a name for each argument of forward(), such as "
            f"--input input_ids=8x128:int64 --input labels=8x128:int64, got {', '.join(texts)}.",
        )
    return {name: _parse_input(shape) for name, _, shape in pairs}


def _parse_input(text: str) -> torch.Tensor:
    shape, colon, name = text.partition(":")
    dtype = getattr(torch, name, None) if colon else torch.float32
    if re.fullmatch(r"\d+([x,]\d+)*", shape) is None or not isinstance(dtype, torch.dtype):
        stop(
            "plan",
            f"--input takes a shape and optionally a dtype, such as 8x128:int64, got {text!r}.",
        )
    return torch.empty([int(size) for size in re.split("[x,]", shape)], dtype=dtype, device="meta")


def _print_plan(found: Plan) -> None:
    console = Console(highlight=False)
    heading, *lines = found.cells
    table = Table(title=found.title, title_justify="left")
    table.add_column("", no_wrap=True)
    best = found.cheapest
    for row, name in zip(found.rows, heading[1:], strict=True):
        style = "bold" if row is best else "" if row.available else "dim"
        table.add_column(_break_heading(name), justify="right", style=style)
    for line in lines:
        table.add_row(*line, end_section=line[0] in ("bytes per worker", "collectives"))
    console.print(table)
    for note in found.notes:
        console.print(escape(note), soft_wrap=True)
    console.print(f"\n[bold]{escape(found.verdict)}[/bold]", soft_wrap=True)
    if best is not None:
        console.print(f"\n{escape(best.code)}", soft_wrap=True)
    if found.advice:
        console.print("\n" + escape("\n".join(found.advice)), soft_wrap=True)


def _break_heading(name: str) -> str:
    """Return a heading on several lines, so that the table fits a narrow window."""
    return re.sub(r"(?<=Sharded)(?=Data)|(?<=\+) ", "\n", name)
