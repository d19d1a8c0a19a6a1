"""`manyhands plan`: compare the memory and communication of shardings, or the ranks of a script."""

from __future__ import annotations

import ast
import re
import sys
from difflib import get_close_matches
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manyhands.tools.cli._terminal import (
    exit_on_sigterm,
    printable,
    show_progress,
    split_words,
    stop,
)

if TYPE_CHECKING:
    import torch

    from manyhands.tools.plan import Plan

STEPS = 5

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="The function that builds the model, such as my_module:build_model.",
    ),
]
OptimizerName = Annotated[str, typer.Option(metavar="NAME", help="An optimizer of torch.optim.")]
OptimizerOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An option, such as momentum=0.9; repeatable."),
]
Workers = Annotated[
    int, typer.Option("--workers", "--ranks", min=1, help="Number of workers, or of ranks.")
]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of each worker, such as 24GiB.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="An input of forward(), such as 8x3x224x224 or labels=8x128:int64, to include "
        "activations; repeatable.",
    ),
]
Autocast = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="Dtype of autocast, such as bfloat16.")
]
RuleName = Annotated[
    str | None, typer.Option(metavar="NAME", help="A scaling rule to include, such as AdamScale.")
]
Backend = Annotated[str, typer.Option(metavar="nccl|gloo", help="Communication backend.")]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="Bandwidth of each worker, such as 10Gbit, to include step times."
    ),
]
Latency = Annotated[float, typer.Option(metavar="SECONDS", help="Latency of a collective.")]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="COPIESxWORKERS",
        help="Copies of the model and workers per copy, such as 64x16, to include level 3 on this "
        "mesh.",
    ),
]
PassSeconds = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time of a forward and backward pass on a worker."),
]
Script = Annotated[
    str | None,
    typer.Option(
        metavar="'SCRIPT.py [ARGUMENTS]...'",
        help="Instead of a model: a training script, to compare the collectives of three ranks.",
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="With --script: end before a later step.")]
Values = Annotated[
    bool, typer.Option("--values", help="With --script: allocate tensors, for scripts that read.")
]


def plan(
    model: Model = None,
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
    script: Script = None,
    steps: Steps = STEPS,
    values: Values = False,
) -> None:
    """Compare shardings of a model: memory, communication, and fit.

    The model is built on torch's meta device, without memory. Exit code 1: no sharding fits.

    With --script, run a script as ranks 0, 1 and N - 1 of N, without memory, and compare the order
    of collectives. Exit code 1: ranks would hang.

    Example: `manyhands plan my_module:build_model --workers 8 --memory 24GiB`

    Example: `manyhands plan --script train.py --ranks 8192`
    """
    if (model is None) == (script is None):
        stop("plan", "give either MODULE:FUNCTION, such as my_module:build_model, or --script.")
    if script is None and (values or steps != STEPS):
        stop("plan", "--values and --steps need --script.")
    if script is not None and (memory or input or rule or mesh or network or optimizer_option):
        stop("plan", "with --script, give only --ranks, --steps and --values.")
    if script is not None:
        _print_order(script, workers, steps, values)
        return
    assert model is not None
    options = dict(map(_parse_option, optimizer_option or []))
    shapes = _parse_inputs(input or [])
    grid = _parse_mesh(mesh)
    with show_progress(f"planning {model}"):
        builder = _import_object(model)
        import torch

        from manyhands.tools.plan import plan as make_plan

        casting = torch.autocast("cpu", _dtype(autocast or "bfloat16"), enabled=bool(autocast))
        try:
            with casting:
                found = make_plan(
                    builder,
                    optimizer,
                    workers,
                    memory=memory,
                    input=_make_inputs(shapes),
                    backend=backend,
                    network=network,
                    latency=latency,
                    pass_seconds=pass_seconds,
                    rule=rule,
                    mesh=grid,
                    **options,
                )
        except (TypeError, ValueError) as error:
            stop("plan", *str(error).splitlines())
    _print_plan(found)
    if found.cheapest is None:
        raise typer.Exit(1)


def _print_order(script: str, ranks: int, steps: int, values: bool) -> None:
    name, *arguments = split_words("plan", "--script", script) or [""]
    if not Path(name).is_file():
        stop("plan", f"--script takes a Python script with arguments, and {name!r} is not a file.")
    with exit_on_sigterm(), show_progress(f"running {name} as one of {ranks:,} ranks"):
        from manyhands.tools.plan._order import compare_order

        try:
            found = compare_order(name, arguments, world_size=ranks, steps=steps, fake=not values)
        except RuntimeError as error:
            stop("plan", *str(error).splitlines())
    typer.echo("\n".join(map(printable, str(found).splitlines())))
    if found.difference:
        raise typer.Exit(1)


def _import_object(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        stop(
            "plan",
            f"{name!r} is not MODULE:FUNCTION, such as my_module:build_model for my_module.py.",
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the module exists, but an import in the module fails
        stop(
            "plan",
            f"there is no module {module!r}. Run the command in the folder of {error.name}.py, and "
            "leave out the .py.",
        )
    finally:
        sys.path.pop(0)
    try:
        return attrgetter(attribute)(imported)
    except AttributeError as error:
        message = f"{module} has no {attribute!r}."
        for similar in get_close_matches(str(error.name), dir(error.obj), 1):
            message += f" Did you mean {similar!r}?"
        stop("plan", message)


def _parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        stop("plan", f"--optimizer-option takes NAME=VALUE, such as momentum=0.9, got {text!r}.")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value  # a string without quotes


def _parse_input(text: str) -> tuple[str, list[int], str]:
    """Return the name (or ""), shape and dtype of an input."""
    found = re.fullmatch(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?", text)
    if found is None:
        stop("plan", f"--input takes a shape and a dtype, such as 8x128:int64, got {text!r}.")
    return found[1] or "", list(map(int, found[2].split("x"))), found[3] or "float32"


def _parse_inputs(texts: list[str]) -> list[tuple[str, list[int], str]]:
    shapes = list(map(_parse_input, texts))
    named = {name for name, _, _ in shapes if name}
    if named and len(named) < len(shapes):
        given = ", ".join(texts)
        stop("plan", f"--input needs a name for each argument or for none, got {given}.")
    return shapes


def _parse_mesh(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        stop("plan", f"--mesh takes copies and workers per copy, such as 64x16, got {text!r}.")
    return int(found[1]), int(found[2])


def _make_inputs(shapes: list[tuple[str, list[int], str]]) -> Any:
    """Return meta tensors: a dict if the inputs have names, or a tuple. None: no inputs."""
    import torch

    found = {}
    for number, (name, sizes, dtype) in enumerate(shapes):
        found[name or number] = torch.empty(sizes, dtype=_dtype(dtype), device="meta")
    if shapes and not shapes[0][0]:
        return tuple(found.values())
    return found or None


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        stop("plan", f"torch has no type {name!r}. An example is bfloat16.")
    return dtype


def _print_plan(found: Plan) -> None:
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
        # A word per line, so that the table fits a narrow window.
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
