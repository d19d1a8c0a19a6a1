"""Define `manyhands plan`, which compares the ways to train a model."""

from __future__ import annotations

import ast
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manyhands.tools.cli import import_object, stop
from manyhands.tools.plan import Plan
from manyhands.tools.plan import plan as make_plan

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
Autocast = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="Type to which autocast casts in the forward pass."),
]
RuleName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A scaling rule, such as AdamScale.")
]
Backend = Annotated[str, typer.Option(metavar="nccl|gloo", help="Communication backend.")]
Network = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Bandwidth of each worker, such as 50Mbit or 10Gbit/s."),
]
Latency = Annotated[float, typer.Option(metavar="SECONDS", help="Latency of a collective.")]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="COPIESxWORKERS",
        help="Copies of the model, and workers that each is sharded over, such as 64x16: plans "
        "level 3 on this mesh, too.",
    ),
]
PassSeconds = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time of one forward and backward pass on one worker."),
]


def plan(
    model: Model,
    optimizer: OptimizerName = "adamw",
    optimizer_option: OptimizerOptions = None,
    workers: Workers = 8,
    memory: Memory = None,
    input: Inputs = None,
    autocast: Autocast = None,
    rule: RuleName = None,
    backend: Backend = "nccl",
    network: Network = None,
    latency: Latency = 0.0,
    pass_seconds: PassSeconds = 0.0,
    mesh: Mesh = None,
) -> None:
    """Compare ways to train a model on several workers: bytes held, bytes sent, what fits.

    The model is built on torch's meta device, where tensors have no memory, so a laptop can plan a
    model of any size. With --network the table has the time of a step. The exit code is 1 if
    nothing fits.
    """
    builder = import_object("plan", model)
    options = dict(map(_parse_option, optimizer_option or []))
    inputs = None
    if input is not None:
        inputs = _parse_inputs(input)
    casting: AbstractContextManager[object] = nullcontext()
    if autocast is not None:
        casting = torch.autocast("cpu", _dtype(autocast))
    shape = None
    if mesh is not None:
        shape = _parse_mesh(mesh)
    try:
        with casting:
            found = make_plan(
                builder,
                optimizer,
                workers,
                memory=memory,
                input=inputs,
                backend=backend,
                network=network,
                latency=latency,
                pass_seconds=pass_seconds,
                rule=rule,
                mesh=shape,
                **options,
            )
    except (TypeError, ValueError) as error:
        stop("plan", *str(error).splitlines())
    _print_plan(found)
    if found.cheapest is None:
        raise typer.Exit(1)


def _parse_option(text: str) -> tuple[str, Any]:
    """Return name and value of an --optimizer-option."""
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        stop("plan", f"--optimizer-option takes NAME=VALUE, such as momentum=0.9, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # a bare word is text


def _dtype(name: str) -> torch.dtype:
    """Return torch's type of this name, or end the command."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        stop("plan", f"torch has no type {name!r}; one is bfloat16.")
    return dtype


def _parse_inputs(texts: list[str]) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
    """Return the arguments of forward() in their order, or by their names."""
    inputs = [_parse_input(text) for text in texts]
    named = {name: tensor for name, tensor in inputs if name}
    if not named:
        return tuple(tensor for _, tensor in inputs)
    if len(named) < len(texts):
        stop("plan", f"--input needs a name for each argument or for none, got {', '.join(texts)}.")
    return named


def _parse_input(text: str) -> tuple[str, torch.Tensor]:
    """Return name ("" without one) and tensor of an --input: shape and type, no values."""
    found = re.fullmatch(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?", text)
    if found is None:
        stop("plan", f"--input takes a shape and a type, such as 8x128:int64, got {text!r}.")
    sizes = [int(size) for size in found[2].split("x")]
    return found[1] or "", torch.empty(sizes, dtype=_dtype(found[3] or "float32"), device="meta")


def _parse_mesh(text: str) -> tuple[int, int]:
    """Return the two sizes of a --mesh."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
        stop("plan", f"--mesh takes copies and workers of each, such as 64x16, got {text!r}.")
    return int(sizes[0]), int(sizes[1])


def _print_plan(found: Plan) -> None:
    """Print the plan's table, with the cheapest way in bold, and the line to paste."""
    console = Console(highlight=False)
    (_, *names), *lines = found.cells
    table = Table(title=found.title, title_justify="left")
    table.add_column("", overflow="fold")
    best = found.cheapest
    for row, name in zip(found.rows, names, strict=True):
        style = "dim"
        if row is best:
            style = "bold"
        elif row.available:
            style = ""
        # A word on each line, so that the table fits a narrow window.
        heading = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[+,]) ", "\n", name)
        table.add_column(heading, justify="right", style=style, overflow="fold")
    for line in lines:
        table.add_row(*line, end_section=line[0] in ("bytes per worker", "collectives"))
    console.print(table)
    for note in found.notes:
        console.print(escape(note), soft_wrap=True)
    console.print(f"\n[bold]{escape(found.verdict)}[/bold]", soft_wrap=True)
    if best is not None:
        console.print(f"\n{escape(best.code)}", soft_wrap=True)
