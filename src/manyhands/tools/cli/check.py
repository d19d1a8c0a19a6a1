"""Define `manyhands check`, which compares training on several ranks with one process."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.tools.cli import check_no_option, printable, stop

if TYPE_CHECKING:
    from manyhands.tools.check import Verdict
    from manyhands.tools.check.resume import ResumeVerdict

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}

# Options that may also follow the script, unless they were given before it.
VALUES = {"--ranks": (int, 1), "--steps": (int, 1), "--timeout": (float, 1)}  # type, minimum
ALLOW = "--allow"  # takes names, separated by commas
FLAGS = ("--json", "--float64", "--native")
AFTER_RESUME = ("--resume-args", "--at", "--then")  # that may follow the script after --resume


Script = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT.py|-m MODULE [ARGUMENTS]...",
        help="What is checked, with its arguments.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(min=1, help="Processes, as under torchrun. 1 is only for --resume. [2]"),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps of each optimizer. [5]")]
Timeout = Annotated[float | None, typer.Option(min=1, help="Seconds for all runs together. [300]")]
Float64 = Annotated[bool, typer.Option("--float64", help="Only in float64, or not at all.")]
Native = Annotated[bool, typer.Option("--native", help="In the script's own precision.")]
Allow = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Exceptions that count as equal, separated by commas: batch-norm, schedule, "
        "learning-rate, coupled-loss, uneven-batches.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Kill it after a checkpoint, and check resuming.")
]
At = Annotated[int | None, typer.Option(min=1, help="With --resume: steps before the checkpoint.")]
Then = Annotated[
    int | None, typer.Option(min=1, help="With --resume: processes of the resumed run.")
]
ResumeArguments = Annotated[
    str | None, typer.Option(help="With --resume: further arguments of the resumed run.")
]
Module = Annotated[
    bool, typer.Option("-m", help="A module, as torchrun -m takes it: -m package.train.")
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
    """Run a script on several ranks and as one process with the same data, and compare.

    Exit code 0: they train the same. 1: they differ, and the likely cause is printed. 2: there is
    no result, and the reason is printed. 3: they train the same with exceptions that are printed,
    such as batch norm. The options may follow the script. If the script has an option of the
    same name, give the command's before the script, or the script's after `--`.

    With --resume before the script, compare a run that is killed after a checkpoint and resumed
    with a run without interruption.
    """
    given = {
        "--ranks": ranks,
        "--steps": steps,
        "--timeout": timeout,
        "--json": json,
        "--float64": float64,
        "--native": native,
    }
    before = {key: value for key, value in given.items() if value}
    words, allowed = take(list(script or []), {ALLOW: allow} if allow else {}, [ALLOW])
    resuming = {"--at": at, "--then": then, "--resume-args": resume_args}
    told = {key: str(value) for key, value in resuming.items() if value is not None}
    if resume:
        words, told = take(words, told, AFTER_RESUME)
    elif told:
        stop("check", f"{', '.join(told)}: only with --resume, before the script.")
    words, options = divide(words, before)
    name, *arguments = words or [""]
    if not resume and options.get("--ranks") == 1:
        stop("check", "--ranks takes a number of at least 2, got '1'. --resume accepts 1.")
    check_precision(resume, options)
    if module or not Path(name).is_file():
        where = "Options stand before the script or after it."
        known = [*VALUES, ALLOW, *FLAGS, "--resume", *AFTER_RESUME]
        check_no_option("check", name, known, where)
        if not (module and name):
            stop("check", f"{name or 'nothing'} is not a file. Give a Python script.")

    def terminate(*_: object) -> None:
        sys.exit(143)  # so that the check ends its processes, and puts files back

    verdict: Verdict | ResumeVerdict
    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        if resume:
            verdict = judge_resume(name, arguments, module, options, told)
        else:
            verdict = judge(name, arguments, module, options, allowed.get(ALLOW, ""))
    finally:
        signal.signal(signal.SIGTERM, previous)
    if "--json" in options:
        typer.echo(verdict.as_json())
    else:
        typer.echo("\n".join(map(printable, verdict.as_text().splitlines())))
    raise typer.Exit(verdict.code)


def check_precision(resume: bool, options: dict[str, Any]) -> None:
    """Stop if options about the precision contradict each other."""
    precisions = {"--float64", "--native"} & options.keys()
    if len(precisions) > 1:
        stop("check", "give either --float64 or --native.")
    if resume and precisions:
        stop("check", "--resume always uses the script's own precision.")


def judge(
    name: str, arguments: list[str], module: bool, options: dict[str, Any], allow: str
) -> Verdict:
    """Check the ranks of a script."""
    from manyhands.tools.check import check_script

    float64 = None
    if "--float64" in options:
        float64 = True
    elif "--native" in options:
        float64 = False
    return check_script(
        name,
        arguments,
        ranks=int(options.get("--ranks", 2)),
        steps=int(options.get("--steps", 5)),
        float64=float64,
        seconds=float(options.get("--timeout", 300.0)),
        module=module,
        allow=allowed_names(allow),
    )


def allowed_names(text: str) -> list[str]:
    """Return the names of exceptions in a list that is separated by commas."""
    from manyhands.tools.check import EXCEPTIONS

    names = text.replace(",", " ").split()
    for name in names:
        if name not in EXCEPTIONS:
            stop("check", f"--allow takes some of {', '.join(EXCEPTIONS)}, got {name!r}.")
    return names


def take(
    words: list[str], given: dict[str, str], keys: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Take options with these names, unless given before, out of the words after the script.

    >>> take(["train.py", "--lr", "1", "--at", "4"], {}, ["--at"])
    (['train.py', '--lr', '1'], {'--at': '4'})
    """
    options = dict(given)
    rest: list[str] = []
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if word == "--":
            return [*rest, word, *words], options
        if key in keys and key not in given and (equals or words):
            options[key] = value if equals else words.pop(0)
        else:
            rest.append(word)
    return rest, options


def judge_resume(
    script: str,
    arguments: list[str],
    module: bool,
    options: dict[str, Any],
    resuming: dict[str, str],
) -> ResumeVerdict:
    """Check whether a script resumes."""
    from manyhands.tools.check._job import CheckedScript
    from manyhands.tools.check.resume import ResumeRequest, check_resume

    numbers: dict[str, int] = {}
    for key in ("--at", "--then"):
        if key in resuming:
            if not resuming[key].isdecimal() or resuming[key] == "0":
                stop("check", f"{key} takes a number of at least 1, got {resuming[key]!r}.")
            numbers[key] = int(resuming[key])
    ranks = int(options["--ranks"]) if "--ranks" in options else None
    steps = int(options.get("--steps", 5))
    request = ResumeRequest(
        CheckedScript(script, tuple(arguments), steps, float64=False, module=module),
        ranks=ranks,
        then=numbers.get("--then"),
        at=numbers.get("--at", 1),
        arguments=tuple(shlex.split(resuming.get("--resume-args", ""))),
        seconds=float(options.get("--timeout", 300.0)),
    )
    return check_resume(request)


def divide(arguments: list[str], given: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
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
