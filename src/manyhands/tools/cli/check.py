"""Define `manyhands check`, which compares training on several ranks with one process."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.tools.cli import check_no_option, printable, stop

if TYPE_CHECKING:
    from manyhands.tools.check import Verdict
    from manyhands.tools.check.resume import ResumeRequest, ResumeVerdict

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}

# Options that may also follow the script, unless they were given before it.
VALUES = {"--ranks": (int, 2), "--steps": (int, 1), "--timeout": (float, 1)}  # type, minimum
FLAGS = ("--json", "--float64", "--native")
AFTER_RESUME = ("--resume-args", "--at", "--then")  # that may follow the script after --resume


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
    resume: Annotated[
        bool, typer.Option("--resume", help="Kill it after a checkpoint, and check resuming.")
    ] = False,
    at: Annotated[
        int | None, typer.Option(min=1, help="With --resume: steps before the checkpoint.")
    ] = None,
    then: Annotated[
        int | None, typer.Option(min=1, help="With --resume: processes of the resumed run.")
    ] = None,
    resume_args: Annotated[
        str | None, typer.Option(help="With --resume: further arguments of the resumed run.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", help="A module, as torchrun -m takes it: -m package.train.")
    ] = False,
) -> None:
    """Run a script on several ranks and as one process with the same data, and compare.

    Exit code 0: they train the same. 1: they differ, and the likely cause is printed. 2: there is
    no result, and the reason is printed. The options may follow the script. If the script has an
    option of the same name, give the command's before the script, or the script's after `--`.

    With --resume before the script, compare a run that is killed after a checkpoint and resumed
    with a run without interruption.
    """
    given: dict[str, float] = {}
    for key, value in {
        "--ranks": ranks,
        "--steps": steps,
        "--timeout": timeout,
        "--json": json,
        "--float64": float64,
        "--native": native,
    }.items():
        if value:
            given[key] = value
    resuming: dict[str, str] = {}
    for key, text in {"--at": at, "--then": then, "--resume-args": resume_args}.items():
        if text is not None:
            resuming[key] = str(text)
    words = list(script or [])
    if resume:
        words, resuming = take(words, resuming)
    elif resuming:
        stop("check", f"{', '.join(resuming)}: only with --resume, before the script.")
    arguments, options = divide(words, given)
    if {"--float64", "--native"} <= options.keys():
        stop("check", "give either --float64 or --native.")
    if resume and {"--float64", "--native"} & options.keys():
        stop("check", "--resume always uses the script's own precision.")
    precise = None
    if "--float64" in options:
        precise = True
    elif "--native" in options:
        precise = False
    name = ""
    if arguments:
        name = arguments.pop(0)
    if module or not Path(name).is_file():
        where = "Options stand before the script or after it."
        known = [*VALUES, *FLAGS, "--resume", *AFTER_RESUME]
        check_no_option("check", name, known, where)
    if not name or not (module or Path(name).is_file()):
        stop("check", f"{name or 'nothing'} is not a file. Give a Python script.")
    from manyhands.tools.check import check_script
    from manyhands.tools.check.resume import check_resume

    def terminate(*_: object) -> None:
        sys.exit(143)  # so that the check ends its processes, and puts files back

    verdict: Verdict | ResumeVerdict
    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        if resume:
            verdict = check_resume(request_of(name, arguments, module, options, resuming))
        else:
            verdict = check_script(
                name,
                arguments,
                ranks=int(options.get("--ranks", 2)),
                steps=int(options.get("--steps", 5)),
                float64=precise,
                seconds=float(options.get("--timeout", 300.0)),
                module=module,
            )
    finally:
        signal.signal(signal.SIGTERM, previous)
    if "--json" in options:
        typer.echo(verdict.as_json())
    else:
        typer.echo("\n".join(map(printable, verdict.as_text().splitlines())))
    raise typer.Exit(verdict.code)


def take(words: list[str], resuming: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Take the options of `--resume` out of the words that follow the script.

    >>> take(["train.py", "--lr", "1", "--at", "4"], {})
    (['train.py', '--lr', '1'], {'--at': '4'})
    """
    options = dict(resuming)
    rest: list[str] = []
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if word == "--":
            return [*rest, word, *words], options
        if key in AFTER_RESUME and key not in resuming and (equals or words):
            options[key] = value if equals else words.pop(0)
        else:
            rest.append(word)
    return rest, options


def request_of(
    script: str,
    arguments: list[str],
    module: bool,
    options: dict[str, float],
    resuming: dict[str, str],
) -> ResumeRequest:
    """Return the request of `manyhands check --resume`."""
    from manyhands.tools.check._processes import CheckedScript
    from manyhands.tools.check.resume import ResumeRequest

    numbers: dict[str, int] = {}
    for key in ("--at", "--then"):
        if key in resuming:
            if not resuming[key].isdecimal() or resuming[key] == "0":
                stop("check", f"{key} takes a number of at least 1, got {resuming[key]!r}.")
            numbers[key] = int(resuming[key])
    ranks = int(options["--ranks"]) if "--ranks" in options else None
    steps = int(options.get("--steps", 5))
    return ResumeRequest(
        CheckedScript(script, tuple(arguments), steps, float64=False, module=module),
        ranks=ranks,
        then=numbers.get("--then"),
        at=numbers.get("--at", 1),
        arguments=tuple(shlex.split(resuming.get("--resume-args", ""))),
        seconds=float(options.get("--timeout", 300.0)),
    )


def divide(arguments: list[str], given: dict[str, float]) -> tuple[list[str], dict[str, float]]:
    """Take the command's options out of the words that follow the script.

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
            if not equals:
                value = arguments.pop(0)
            kind, least = VALUES[key]
            try:
                options[key] = kind(value)
            except ValueError:
                stop("check", f"{key} takes a number, got {value!r}.")
            if not options[key] >= least:
                stop("check", f"{key} takes a number of at least {least}, got {value!r}.")
        elif word in FLAGS and word not in given:
            options[word] = True
        else:
            rest.append(word)
    return rest, options
