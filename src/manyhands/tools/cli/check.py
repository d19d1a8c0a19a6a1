"""`manyhands check`: does a script train on several ranks what it trains on one?"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.tools.cli import check_no_option, printable, stop

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}

# Options that may stand after the script, too, unless they were given before it; and their limits.
VALUES = {"--ranks": (int, 2), "--steps": (int, 1), "--timeout": (float, 1)}
FLAGS = {"--json": True, "--float64": True, "--native": True}


def check(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT.py|-m MODULE [ARGUMENTS]...",
            help="What is checked, with its arguments.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="Processes, as torchrun would start them. [2]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each optimizer. [5]")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1, help="Seconds for all runs together. [300]")
    ] = None,
    float64: Annotated[
        bool, typer.Option("--float64", help="Only in float64, or not at all.")
    ] = False,
    native: Annotated[
        bool, typer.Option("--native", help="In the script's own precision.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    module: Annotated[
        bool, typer.Option("-m", help="A module, as torchrun -m takes it: -m package.train.")
    ] = False,
) -> None:
    """Run a script on several ranks and as one process with the same data, and compare.

    Exit code 0: they train the same. 1: they differ, and the likely cause is said. 2: it could not
    be judged, and why. The options may follow the script; one that the script has, too, is given
    before it, or after `--`.
    """
    before = {"--ranks": ranks, "--steps": steps, "--timeout": timeout}
    given = {key: value for key, value in before.items() if value is not None}
    given |= {
        k: True for k, v in (("--json", json), ("--float64", float64), ("--native", native)) if v
    }
    arguments, options = divide(list(script or []), given)
    if {"--float64", "--native"} <= options.keys():
        stop("check", "give either --float64 or --native.")
    name = arguments.pop(0) if arguments else ""
    if module or not Path(name).is_file():
        where = "Options stand before the script or after it."
        check_no_option("check", name, [*VALUES, *FLAGS], where)
    if not (name if module else Path(name).is_file()):
        stop("check", f"{name or 'nothing'} is not a file. Give a Python script.")
    from manyhands.tools.check import check_script

    # So that a check which is stopped ends its processes, and puts files back.
    before_it = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        verdict = check_script(
            name,
            arguments,
            ranks=int(options.get("--ranks", 2)),
            steps=int(options.get("--steps", 5)),
            float64=True if "--float64" in options else False if "--native" in options else None,
            seconds=float(options.get("--timeout", 300.0)),
            module=module,
        )
    finally:
        signal.signal(signal.SIGTERM, before_it)
    if "--json" in options:
        typer.echo(verdict.as_json())
    else:
        typer.echo("\n".join(map(printable, verdict.as_text().splitlines())))
    raise typer.Exit(verdict.code)


def divide(arguments: list[str], given: dict[str, float]) -> tuple[list[str], dict[str, float]]:
    """Take this command's options out of what follows the script.

    >>> divide(["train.py", "--lr", "1", "--ranks", "4"], {})
    (['train.py', '--lr', '1'], {'--ranks': 4})
    >>> divide(["train.py", "--steps", "9"], {"--steps": 5})
    (['train.py', '--steps', '9'], {'--steps': 5})
    """
    options = dict(given)
    rest: list[str] = []
    while arguments:
        word = arguments.pop(0)
        key, equals, value = word.partition("=")
        if word == "--":
            return rest + arguments, options
        if key in VALUES and key not in given and (equals or arguments):
            text = value if equals else arguments.pop(0)
            kind, least = VALUES[key]
            try:
                options[key] = kind(text)
            except ValueError:
                stop("check", f"{key} takes a number, got {text!r}.")
            if not options[key] >= least:
                stop("check", f"{key} takes a number of at least {least}, got {text!r}.")
        elif word in FLAGS and word not in given:
            options[word] = True
        else:
            rest.append(word)
    return rest, options
