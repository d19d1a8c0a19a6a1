"""`manyhands check`: compare training on ranks with training in a single process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.tools._interpreters import AVAILABLE, start_interpreter
from manyhands.tools.cli._terminal import (
    check_no_option,
    exit_on_sigterm,
    printable,
    show_progress,
    split_words,
    stop,
)

if TYPE_CHECKING:
    from manyhands.tools.check import Verdict
    from manyhands.tools.check.resume import ResumeVerdict

EXCEPTIONS = ("batch-norm", "schedule", "learning-rate", "coupled-loss", "uneven-batches")
# Options that scripts rarely have: after the script, they are probably meant for the check.
RARE_OPTIONS = ("--ranks", "--then", "--allow", "--resume-args")

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
Steps = Annotated[int, typer.Option(min=1, help="Compared steps of each optimizer.")]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for the complete check.")]
Allow = Annotated[
    str,
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
    steps: Steps = 5,
    timeout: Timeout = 300.0,
    allow: Allow = "",
    json: Json = False,
    resume: Resume = False,
    at: At = None,
    then: Then = None,
    resume_args: ResumeArguments = None,
    module: Module = False,
) -> None:
    """Check that a script trains the same on several ranks as in a single process.

    With --resume, check that a killed script continues from a checkpoint without differences.
    Options come before the script.

    Exit codes: 0 equal, 1 different (prints the likely cause), 2 no result, 3 equal except for a
    known difference, such as batch norm.

    Example: `manyhands check --ranks 4 train.py`
    """
    for_resume = {"--at": at, "--then": then, "--resume-args": resume_args}
    misplaced = [option for option, value in for_resume.items() if value is not None]
    if misplaced and not resume:
        stop("check", f"{', '.join(misplaced)}: only with --resume.")
    if ranks == 1 and not resume:
        stop("check", "--ranks takes a number of at least 2, got '1'. --resume accepts 1.")
    allowed = allow.replace(",", " ").split()
    for exception in allowed:
        if exception not in EXCEPTIONS:
            stop("check", f"--allow takes some of {', '.join(EXCEPTIONS)}, got {exception!r}.")
    name, *arguments = script or [""]
    if module or not Path(name).is_file():
        _check_name(name, module)
    arguments = _check_arguments(arguments)
    if AVAILABLE:
        for number in range(then or ranks or 1) if resume else range(1, ranks or 2):
            start_interpreter(number)
    verdict: Verdict | ResumeVerdict
    with exit_on_sigterm(), show_progress(f"checking {name}, up to {timeout:g} s"):
        if resume:
            from manyhands.tools.check._job import CheckedScript
            from manyhands.tools.check.resume import ResumeRequest, check_resume

            checked = CheckedScript(name, tuple(arguments), steps, module=module)
            words = tuple(split_words("check", "--resume-args", resume_args or ""))
            request = ResumeRequest(checked, ranks, then, at or 1, words, timeout)
            verdict = check_resume(request)
        else:
            from manyhands.tools.check import check_script

            verdict = check_script(
                name,
                arguments,
                ranks=ranks or 2,
                steps=steps,
                seconds=timeout,
                module=module,
                allow=allowed,
            )
    if json:
        typer.echo(verdict.as_json())
    else:
        typer.echo("\n".join(map(printable, verdict.as_text().splitlines())))
    raise typer.Exit(verdict.code)


def _check_arguments(arguments: list[str]) -> list[str]:
    """Raise if an option of the check follows the script. Return the script's arguments."""
    for number, argument in enumerate(arguments):
        if argument == "--":
            return arguments[:number] + arguments[number + 1 :]
        option = argument.partition("=")[0]
        if option in RARE_OPTIONS:
            stop(
                "check",
                f"{option} follows the script. Write it before the script, or after -- if it is "
                "an option of the script.",
            )
    return arguments


def _check_name(name: str, module: bool) -> None:
    check_no_option(check, name)
    if not name:
        stop("check", "give a Python script, or a module with -m.")
    if not module:
        stop("check", f"{name} is not a file. Give a Python script.")
