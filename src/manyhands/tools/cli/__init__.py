"""The program `manyhands`.

    check.py         compare ranks with a single process
    plan.py          compare shardings
    run.py           start the workers of a crew
    demo.py          train with small and large batches
    report.py        draw records
    checkpoint.py    show or convert a checkpoint
    _consolidate.py  convert a checkpoint
    _terminal.py     messages and progress

typer reads arguments from signatures, and help from docstrings. Commands import torch only after
checking their arguments, so help, usage errors and shell completion are fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from manyhands._version import __version__

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the program."""
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
    app()()


def app() -> typer.Typer:
    import typer

    from manyhands.tools.cli.check import check
    from manyhands.tools.cli.checkpoint import checkpoint
    from manyhands.tools.cli.demo import demo
    from manyhands.tools.cli.plan import plan
    from manyhands.tools.cli.report import report
    from manyhands.tools.cli.run import run

    program = typer.Typer(name="manyhands", no_args_is_help=True, rich_markup_mode="markdown")
    version_option = typer.Option(False, "--version", help="Print the version.")

    @program.callback(invoke_without_command=True)
    def manyhands(version: bool = version_option) -> None:
        """Scale an existing PyTorch training loop.

        Example: `manyhands check train.py`
        """
        if version:
            typer.echo(f"manyhands {__version__}")
            raise typer.Exit

    # Options after the script belong to the script.
    with_script = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    program.command(context_settings=with_script)(check)
    program.add_typer(checkpoint, name="checkpoint")
    program.command()(demo)
    program.command()(plan)
    program.command()(report)
    program.command(context_settings=with_script)(run)
    return program
