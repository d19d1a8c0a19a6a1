"""Write messages and progress to the terminal."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from inspect import signature
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def stop(command: str, *lines: str, code: int = 2) -> NoReturn:
    """End a command with a message on stderr."""
    message = "\n".join(map(printable, lines))
    typer.echo(f"manyhands {command}: {message}", err=True)
    raise typer.Exit(code)


def check_no_option(command: Callable[..., None], word: str) -> None:
    """End a command if the word in place of the script is an unknown option."""
    if not word.startswith("-"):
        return
    options = []
    for name in signature(command).parameters:
        if name not in ("script", "module"):
            options.append(f"--{name.replace('_', '-')}")
    message = f"there is no option {word}."
    for similar in get_close_matches(word.partition("=")[0], options, 1):
        message += f" Did you mean {similar}?"
    stop(command.__name__, f"{message} Write options before the script.")


def printable(text: str) -> str:
    r"""Escape characters that control a terminal.

    >>> print(printable("loss\x1b[2J"))
    loss\x1b[2J
    """
    shown = ""
    for character in text:
        if not character.isprintable():
            character = character.encode("unicode_escape").decode()
        shown += character
    return shown


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit by `sys.exit` on SIGTERM, so that a command ends processes and restores files."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def split_words(command: str, option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        stop(command, f"{option} cannot be split into words: {error}. Got {text!r}.")


@contextmanager
def show_progress(text: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Show a bar with the elapsed time on a terminal; yield a function that advances the bar.

    The bar pulses if `total` is None.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # `manyhands check` forks while a thread draws the bar, possibly with a lock on the file. Child
    # processes must not use this file, so the bar replaces neither sys.stdout nor sys.stderr.
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace") as file:
        bars = Progress(
            *columns,
            console=Console(file=file),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bars:
            yield partial(bars.advance, bars.add_task(escape(printable(text)), total=total))
