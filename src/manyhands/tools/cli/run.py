"""`manyhands run`: start the workers of a crew."""

from __future__ import annotations

import errno
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from manyhands.tools.cli._terminal import check_no_option, stop

SECRET_VARIABLE = "MANYHANDS_SECRET"  # as in blocks/crew/_store.py, which needs torch

Script = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT.py [ARGUMENTS]...", help="The script of each worker, with its arguments."
    ),
]
Module = Annotated[
    str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead of a script.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Number of workers on this host.")]
Numbers = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST-LAST",
        help="Numbers of the workers on this host, if another host has workers, too.",
    ),
]
Expected = Annotated[
    int | None,
    typer.Option(min=1, help="Workers on all hosts, which the first sync round waits for."),
]
Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Serve the store at this address, for other hosts."),
]
Store = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Connect to the store of another host.")
]
Stall = Annotated[
    float, typer.Option(min=0.1, help="Seconds without a heartbeat until a worker is dropped.")
]
Patience = Annotated[
    str,
    typer.Option(
        metavar="SECONDS|auto",
        help="Longest wait for a slow worker; with auto, while its block is worth the wait.",
    ),
]
Quorum = Annotated[int, typer.Option(min=1, help="Smallest number of workers in a sync round.")]
Processes = Annotated[
    int,
    typer.Option(
        min=1,
        help="Processes per worker. The processes of a worker train one model, with DDP or FSDP.",
    ),
]
Restarts = Annotated[
    int, typer.Option(min=0, help="Restarts per hour of a worker that ends with an error.")
]
Grace = Annotated[
    float,
    typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL when the command is stopped."),
]
Fork = Annotated[
    bool,
    typer.Option(
        "--fork/--no-fork",
        help="Fork replacement workers from a process that has imported torch (Linux).",
    ),
]
Preload = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE", help="A module to import in that process; repeatable."),
]


def run(
    script: Script = None,
    module: Module = None,
    workers: Workers = None,
    numbers: Numbers = None,
    expected: Expected = None,
    listen: Listen = None,
    store: Store = None,
    stall: Stall = 5.0,
    patience: Patience = "600",
    quorum: Quorum = 1,
    processes: Processes = 1,
    restarts: Restarts = 3,
    grace: Grace = 30.0,
    fork: Fork = True,
    preload: Preload = None,
) -> None:
    """Run a script in several workers, and restart workers that die.

    Workers killed by a signal are always restarted. The exit code is 0 if all workers end with
    exit code 0. On several hosts, set MANYHANDS_SECRET to equal texts.

    Example: `manyhands run --workers 4 train.py`
    """
    arguments = _command_of(script or [], module)
    _check_hosts(store, listen, numbers)
    seconds = _parse_patience(patience, stall)
    worker_numbers = _parse_numbers(workers, numbers)
    # At each connection, torch asks a name server while the store does not answer. By default, the
    # C library repeats lost questions after 5 seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    from manyhands.blocks.crew import _crew, _launcher, _store
    from manyhands.errors import StoreLost

    if seconds is None:
        seconds = max(_crew.PATIENCE, stall)
    try:
        serving = store is None  # the launcher that serves the store ends last
        if store is None:
            host, port = _store.parse_address(listen or "127.0.0.1:0")
            _served, store = _store.serve_store(host, port)  # served while this variable lives
        launcher = _launcher.Launcher(
            [sys.executable, *arguments],
            worker_numbers,
            store,
            expected=expected,
            processes=processes,
            restarts=restarts,
            patience=seconds,
            grace=grace,
            fork=fork,
            preload=preload or (),
            environment={
                "MANYHANDS_STALL": f"{stall:g}",
                "MANYHANDS_PATIENCE": patience,
                "MANYHANDS_QUORUM": str(quorum),
            },
            serving=serving,
            secret=os.environ.get(SECRET_VARIABLE) or secrets.token_hex(),
        )
    except (OSError, ValueError, StoreLost) as error:
        stop("run", *_explain(error, listen).splitlines())
    raise typer.Exit(launcher.run())


def _explain(error: Exception, listen: str | None) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"another program listens at {listen}, perhaps the store of another run. Give "
            "--listen another port, or --store to add workers to that run."
        )
    return str(error)


def _parse_patience(patience: str, stall: float) -> float | None:
    """Return the seconds that the launcher waits; None for "auto"."""
    if patience == "auto":
        return None
    try:
        seconds = float(patience)
    except ValueError:
        stop("run", f"--patience is a number of seconds, or auto, got {patience}.")
    if not seconds >= stall:  # also for NaN
        stop("run", f"--patience must be at least --stall, which is {stall:g}, got {patience}.")
    return seconds


def _command_of(arguments: list[str], module: str | None) -> list[str]:
    if module is not None:
        return ["-m", module, *arguments]
    if not arguments:
        stop("run", "give a Python script, or a module with -m.")
    given = arguments[0]
    if not Path(given).is_file():
        check_no_option(run, given)
        stop("run", f"{given} is not a file. Give a Python script, or a module with -m.")
    return arguments


def _check_hosts(store: str | None, listen: str | None, numbers: str | None) -> None:
    if store is not None and listen is not None:
        stop("run", "--listen serves a store, and --store uses another host's: give only one.")
    if store is not None and numbers is None:
        stop("run", "--store needs --numbers, such as 4-7: no two workers may share a number.")
    if (store or listen) and not os.environ.get(SECRET_VARIABLE):
        # Hosts with different secrets ignore each other.
        stop(
            "run",
            f"all hosts of a run need the same secret. Set {SECRET_VARIABLE} on each host to a "
            'text such as the output of `python -c "import secrets; print(secrets.token_hex())"`.',
        )


def _parse_numbers(workers: int | None, numbers: str | None) -> list[int]:
    if numbers is None:
        if workers is None:
            stop("run", "give the number of workers, such as --workers 4.")
        return list(range(workers))
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", numbers)
    found: list[int] = []
    if match is not None:
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not found:
        stop("run", f"--numbers takes FIRST-LAST, such as 4-7, got {numbers!r}.")
    if workers not in (None, len(found)):
        stop("run", f"--workers {workers} and --numbers {numbers} contradict: leave one out.")
    return found
