"""`manyhands check`: compare training on ranks with training in a single process."""

from __future__ import annotations

import math
import shlex
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.tools.cli._terminal import check_no_option, printable, show_progress, stop

if TYPE_CHECKING:
    from manyhands.tools.check import Verdict
    from manyhands.tools.check.resume import ResumeVerdict

EXCEPTIONS = ("batch-norm", "schedule", "learning-rate", "coupled-loss", "uneven-batches")
FLAGS = ("--json", "--float64", "--native")
RESUME_OPTIONS = ("--at", "--then", "--resume-args")
NUMBERS = {  # type and minimum
    "--ranks": (int, 1),
    "--steps": (int, 1),
    "--timeout": (float, 1),
    "--at": (int, 1),
    "--then": (int, 1),
}

Script = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT.py|-m MODULE [ARGUMENTS]...",
        help="The training script or module, with its arguments.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Number of ranks. 1 is only for --resume. [default: 2]"),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Compared steps of each optimizer. [default: 5]")
]
Timeout = Annotated[
    float | None, typer.Option(min=1, help="Seconds for the complete check. [default: 300]")
]
Float64 = Annotated[
    bool,
    typer.Option("--float64", help="Do not fall back from float64 to the precision of the script."),
]
Native = Annotated[bool, typer.Option("--native", help="Run in the precision of the script.")]
Allow = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help=f"Differences to accept, separated by commas: {', '.join(EXCEPTIONS)}.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Check that the script resumes from its checkpoint.")
]
At = Annotated[
    int | None, typer.Option(min=1, help="With --resume: steps before the checkpoint. [default: 1]")
]
Then = Annotated[
    int | None, typer.Option(min=1, help="With --resume: number of ranks after the restart.")
]
ResumeArguments = Annotated[
    str | None,
    typer.Option(
        help="With --resume: additional arguments after the restart. `{checkpoint}` stands for the "
        "path of the checkpoint."
    ),
]
Module = Annotated[
    bool, typer.Option("-m", help="Run a module, as in `torchrun -m package.train`.")
]


def check(
    script: Script = None,
    ranks: Ranks = None,
    steps: Steps = None,
    timeout: Timeout = None,
    float64: Float64 = False,
    native: Native = False,
    allow: Allow = None,
    json: Json = False,
    resume: Resume = False,
    at: At = None,
    then: Then = None,
    resume_args: ResumeArguments = None,
    module: Module = False,
) -> None:
    """Check that a script trains the same on several ranks as in a single process.

    With --resume, check that a killed script continues from a checkpoint without differences.
    Options other than `-m` and `--resume` may also follow the script. If an option of the script
    has an equal name, write that option after `--`.

    Exit codes: 0 equal, 1 different (prints the likely cause), 2 no result, 3 equal except for a
    known difference, such as batch norm.

    Example: `manyhands check train.py --ranks 4`
    """
    given: dict[str, object] = {
        "--ranks": ranks,
        "--steps": steps,
        "--timeout": timeout,
        "--allow": allow,
        "--json": json,
        "--float64": float64,
        "--native": native,
        "--at": at,
        "--then": then,
        "--resume-args": resume_args,
    }
    before = {name: value for name, value in given.items() if value not in (None, False)}
    known = set(given)
    if not resume:
        known.difference_update(RESUME_OPTIONS)
        misplaced = sorted(before.keys() - known)
        if misplaced:
            stop("check", f"{', '.join(misplaced)}: only with --resume, before the script.")
    words, options = take_options(list(script or []), before, known)
    precisions = {"--float64", "--native"} & options.keys()
    if len(precisions) > 1:
        stop("check", "give either --float64 or --native.")
    if resume and precisions:
        stop("check", "--resume always uses the script's own precision.")
    name, *arguments = words or [""]
    if module or not Path(name).is_file():
        _check_name(name, module, [*given, "--resume"])
    # sys.exit() lets the check end processes and restore files.
    verdict: Verdict | ResumeVerdict
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if resume:
            verdict = _check_resume(name, arguments, module, options)
        else:
            verdict = _check_ranks(name, arguments, module, options)
    finally:
        signal.signal(signal.SIGTERM, previous)
    if "--json" in options:
        typer.echo(verdict.as_json())
    else:
        typer.echo("\n".join(map(printable, verdict.as_text().splitlines())))
    raise typer.Exit(verdict.code)


def _check_name(name: str, module: bool, options: Collection[str]) -> None:
    check_no_option("check", name, options, "Write options before the script.")
    if not name:
        stop("check", "give a Python script, or a module with -m.")
    if not module:
        stop("check", f"{name} is not a file. Give a Python script.")


def take_options(
    words: list[str], given: Mapping[str, Any], known: Collection[str]
) -> tuple[list[str], dict[str, Any]]:
    """Take the command's options out of the words after the script.

    An option in `given` was before the script, so after the script it belongs to the script.

    >>> take_options(["train.py", "--lr", "1", "--ranks", "4"], {}, ["--ranks"])
    (['train.py', '--lr', '1'], {'--ranks': '4'})
    >>> take_options(["train.py", "--steps", "9"], {"--steps": 5}, ["--steps"])
    (['train.py', '--steps', '9'], {'--steps': 5})
    """
    options = dict(given)
    rest: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--":
            return rest + words, options
        name, equals, value = word.partition("=")
        if name not in known or name in given or (name in FLAGS and equals):
            rest.append(word)
        elif name in FLAGS:
            options[name] = True
        elif equals:
            options[name] = value
        elif words:
            options[name] = words.pop(0)
        else:
            rest.append(word)
    return rest, options


def _number(options: Mapping[str, Any], name: str, default: Any) -> Any:
    if name not in options:
        return default
    kind, least = NUMBERS[name]
    try:
        number = kind(options[name])
    except ValueError:
        number = math.nan
    if not number >= least:  # also for NaN
        stop("check", f"{name} takes a number of at least {least}, got {options[name]!r}.")
    return number


def _check_ranks(
    name: str, arguments: list[str], module: bool, options: Mapping[str, Any]
) -> Verdict:
    ranks = _number(options, "--ranks", 2)
    if ranks < 2:
        stop("check", f"--ranks takes a number of at least 2, got '{ranks}'. --resume accepts 1.")
    steps = _number(options, "--steps", 5)
    seconds = _number(options, "--timeout", 300.0)
    allowed = options.get("--allow", "").replace(",", " ").split()
    for exception in allowed:
        if exception not in EXCEPTIONS:
            stop("check", f"--allow takes some of {', '.join(EXCEPTIONS)}, got {exception!r}.")
    float64 = None
    if "--float64" in options:
        float64 = True
    elif "--native" in options:
        float64 = False
    with show_progress(f"checking {name}, up to {seconds:g} s"):
        from manyhands.tools.check import check_script

        return check_script(
            name,
            arguments,
            ranks=ranks,
            steps=steps,
            float64=float64,
            seconds=seconds,
            module=module,
            allow=allowed,
        )


def _check_resume(
    name: str, arguments: list[str], module: bool, options: Mapping[str, Any]
) -> ResumeVerdict:
    ranks = _number(options, "--ranks", None)
    steps = _number(options, "--steps", 5)
    then = _number(options, "--then", None)
    at = _number(options, "--at", 1)
    seconds = _number(options, "--timeout", 300.0)
    with show_progress(f"checking that {name} resumes, up to {seconds:g} s"):
        from manyhands.tools.check._job import CheckedScript
        from manyhands.tools.check.resume import ResumeRequest, check_resume

        request = ResumeRequest(
            CheckedScript(name, tuple(arguments), steps, float64=False, module=module),
            ranks=ranks,
            then=then,
            at=at,
            arguments=tuple(shlex.split(options.get("--resume-args", ""))),
            seconds=seconds,
        )
        return check_resume(request)
