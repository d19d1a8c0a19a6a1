"""Run the program `manyhands COMMAND ...`.

    check.py        does a script train on ranks what it trains on one?
    plan.py         which sharding a model needs, before training
    run.py          start the workers of a crew
    demo.py         train a small network at two batch sizes, and compare
    report.py       records to a page with figures, also while they grow
    checkpoint.py   show what a checkpoint holds, and convert it to plain files

Each command is a module with a function of the same name (or a `typer.Typer` with several), and one
entry in `COMMANDS`. typer reads the command's arguments off the function and its help off the
docstring. `CONTEXT_SETTINGS`, if a module has them, are passed to click.
`main` imports only the command that is called: `manyhands --help` needs no torch.

`stop`, `check_no_option`, `printable` and `import_object` are for the commands.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from manyhands._version import __version__

if TYPE_CHECKING:
    import typer

COMMANDS = {  # as each docstring begins
    "check": "Run a script on several ranks and as one process with the same data, and compare.",
    "checkpoint": "Show what a checkpoint of mh.save contains, or turn it into plain files.",
    "demo": "Train a small network with a batch and with 32 times that batch, and compare.",
    "plan": "Compare ways to train a model on several workers: bytes held, bytes sent, what fits.",
    "report": "Compare recorded runs on one page with figures. The page opens without a network.",
    "run": "Run a script in several workers, which may die and come back.",
}


def main() -> None:
    """Run the program `manyhands`: its entry point."""
    try:
        import typer  # noqa: F401
    except ImportError:
        if sys.argv[1:] == ["--version"]:
            return print(f"manyhands {__version__}")
        print(
            'The command line needs typer, which is not installed: pip install "manyhands[cli]"',
            file=sys.stderr,
        )
        sys.exit(1)
    try:
        app(loaded=sys.argv[1:2])()
    except KeyboardInterrupt:  # while torch is imported: a command that runs sees it first
        sys.exit(130)


def app(loaded: Collection[str] = tuple(COMMANDS)) -> typer.Typer:
    """Return the program, with every command. Those that are not `loaded` can only be listed."""
    import typer

    program = typer.Typer(
        name="manyhands", no_args_is_help=True, add_completion=False, rich_markup_mode="markdown"
    )

    # Without a callback, typer would not ask for the name of a program's only command.
    asked = typer.Option(False, "--version", help="Print the version.")

    @program.callback(invoke_without_command=True)
    def manyhands(version: bool = asked) -> None:
        """More workers for the PyTorch training loop you have."""
        if version:
            typer.echo(f"manyhands {__version__}")
            raise typer.Exit

    for name, summary in COMMANDS.items():
        if name not in loaded:
            program.command(name, help=summary)(lambda: None)
            continue
        module = import_module(f"manyhands.tools.cli.{name}")
        found = getattr(module, name)
        if isinstance(found, typer.Typer):  # has several commands
            program.add_typer(found, name=name)
        else:
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            program.command(name, context_settings=settings)(found)
    return program


def stop(command: str, *lines: str, code: int = 2) -> NoReturn:
    """End a command with a message that says what to do, and an exit code that is not 0."""
    import typer

    message = "\n".join(map(printable, lines))
    typer.echo(f"manyhands {command}: {message}", err=True)
    raise typer.Exit(code)


def check_no_option(command: str, word: str, options: Collection[str], where: str) -> None:
    """End a command if the word in the script's place is an option that does not exist."""
    if not word.startswith("-"):
        return
    message = f"there is no option {word}."
    for similar in get_close_matches(word.partition("=")[0], options, 1):
        message += f" Did you mean {similar}?"
    stop(command, f"{message} {where}")


def printable(text: str) -> str:
    r"""Spell out all characters that a terminal would obey: escapes, returns, direction marks.

    >>> print(printable("loss\x1b[2J"))
    loss\x1b[2J
    """
    shown = ""
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        shown += character
    return shown


def import_object(command: str, name: str) -> Any:
    """Return what MODULE:NAME stands for, as seen from the present folder."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        stop(
            command,
            f"{name!r} is not MODULE:FUNCTION, such as my_module:build_model for my_module.py.",
        )
    sys.path.insert(0, str(Path.cwd()))  # the program's own folder is there instead
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the module exists, and one that it imports is missing
        stop(
            command,
            f"there is no module {module!r}. Run the command in the folder that has "
            f"{error.name}.py, and leave out the .py.",
        )
    finally:
        sys.path.pop(0)
    for part in attribute.split("."):
        if not hasattr(found, part):
            message = f"{module} has no {attribute!r}."
            for similar in get_close_matches(part, dir(found), 1):
                message += f" Did you mean {similar!r}?"
            stop(command, message)
        found = getattr(found, part)
    return found
