"""What a command writes to a terminal: an error that ends it, and text of a stranger's file."""

from __future__ import annotations

from typing import NoReturn

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
