"""The command line: `manyhands COMMAND ...`.

    plan.py         which sharding a model needs, before training
    probe.py        the largest batch that loses nothing, from a checkpoint
    run.py          start the workers of a crew
    demo.py         train a small network at two batch sizes, and compare
    report.py       records to a page with figures
    watch.py        running jobs, on a live page or in the terminal
    checkpoint.py   show what a checkpoint holds, and convert it to plain files
    _terminal.py    errors, and text of a stranger's file, on a terminal

Each command is a module with a function of the same name (or a `typer.Typer` with several), and one
entry in `COMMANDS`. typer reads the command's arguments off the function and its help off the
docstring. `CONTEXT_SETTINGS`, if a module has them, are passed to click.
No command is imported before `main` runs, so `import manyhands` needs no typer.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

COMMANDS = [
    "checkpoint",
    "demo",
    "plan",
    "probe",
    "report",
    "run",
    "watch",
]


def main() -> None:
    """Run the program `manyhands`: its entry point."""
    try:
        import typer  # noqa: F401
    except ImportError:
        print(
            'The command line needs typer, which is not installed: pip install "manyhands[cli]"',
            file=sys.stderr,
        )
        sys.exit(1)
    app()()


def app() -> typer.Typer:
    """Return the program, with every command."""
    import typer

    program = typer.Typer(
        name="manyhands", no_args_is_help=True, add_completion=False, rich_markup_mode="markdown"
    )

    # Without a callback, typer would not ask for the name of a program's only command.
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
