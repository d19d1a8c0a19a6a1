"""What commands share: an error that ends them, a name from the command line, a safe text."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import typer


def stop(command: str, *lines: str, code: int = 2) -> NoReturn:
    """End a command with a message that says what to do, and an exit code that is not 0."""
    message = "\n".join(map(printable, lines))
    typer.echo(f"manyhands {command}: {message}", err=True)
    raise typer.Exit(code)


def printable(text: str) -> str:
    r"""Spell out all characters that a terminal would obey: escapes, returns, direction marks.

    >>> print(printable("loss\x1b[2J"))
    loss\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


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
            stop(command, f"{module} has no {attribute!r}.")
        found = getattr(found, part)
    return found
