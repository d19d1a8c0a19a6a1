"""The command line: `manyhands COMMAND ...`.

Each command is a module of this package with a function of the same name (or a `typer.Typer` of
several), and one entry in `COMMANDS`. Its arguments are the function's, its help is the docstring
(typer reads both), and its `CONTEXT_SETTINGS`, if it has any, are click's.
Nothing is imported before `main` runs, so `import manyhands` needs no typer.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

COMMANDS = [
    "checkpoint",
    "demo",
    "plan",
    "report",
    "run",
]


def main() -> None:
    """The entry point of the program `manyhands`."""
    try:
        import typer  # noqa: F401
    except ImportError:
        print(
            'The command line needs typer, which is not installed: pip install "manyhands[cli]"',
            file=sys.stderr,
        )
        sys.exit(1)
    app()()


def app() -> Any:
    """The program, as a `typer.Typer` with every command."""
    import typer

    program = typer.Typer(
        name="manyhands", no_args_is_help=True, add_completion=False, rich_markup_mode="markdown"
    )

    # With a callback a single command, too, is called by its name.
    @program.callback()
    def manyhands() -> None:
        """More workers for the PyTorch training loop you have."""

    for name in COMMANDS:
        module = import_module(f"manyhands.cli.{name}")
        found = getattr(module, name)
        if isinstance(found, typer.Typer):  # has commands of its own
            program.add_typer(found, name=name)
        else:
            settings = getattr(module, "CONTEXT_SETTINGS", None)
            program.command(name, context_settings=settings)(found)
    return program
