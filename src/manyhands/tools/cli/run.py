"""Define `manyhands run`, which starts the workers of a run, and restarts workers that die."""

from __future__ import annotations

import errno
import os
import re
import secrets
import sys
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from manyhands.blocks.crew import _launcher
from manyhands.blocks.crew._crew import AUTO, PATIENCE
from manyhands.blocks.crew._store import SECRET_VARIABLE, parse_address, serve_store
from manyhands.errors import StoreLost
from manyhands.tools.cli import check_no_option, stop

# Arguments after the script are passed to it, even if they look like options of ours.
CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


Script = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT.py [ARGUMENTS]...", help="What each worker runs."),
]
Module = Annotated[
    str | None, typer.Option("-m", metavar="MODULE", help="Run a module, not a script.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="Workers on this host, numbered from 0.")]
Numbers = Annotated[
    str | None,
    typer.Option(
        metavar="FIRST-LAST", help="The numbers of the workers on this host, if not from 0."
    ),
]
Expected = Annotated[
    int | None,
    typer.Option(min=1, help="Workers of all hosts that the first sync round waits for."),
]
Listen = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Serve the store here, for other hosts too.")
]
Store = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Use the store that another host serves.")
]
Stall = Annotated[
    float, typer.Option(min=0.1, help="Seconds without a heartbeat after which a worker is lost.")
]
Patience = Annotated[
    str,
    typer.Option(
        metavar="SECONDS|auto",
        help="Seconds that a slow worker is waited for at most; auto: while its block is worth it.",
    ),
]
Quorum = Annotated[int, typer.Option(min=1, help="Workers that a sync round needs; fewer wait.")]
Processes = Annotated[
    int,
    typer.Option(
        min=1,
        help="Processes of each worker, which train one model together (DDP, FSDP): they get "
        "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of their own group.",
    ),
]
Grace = Annotated[
    float, typer.Option(min=0, help="Seconds from SIGTERM to SIGKILL, when the command is stopped.")
]
Restarts = Annotated[
    int, typer.Option(min=0, help="Restarts of a worker with an error, in an hour.")
]

Fork = Annotated[
    bool,
    typer.Option(
        "--fork/--no-fork",
        help="Whether a worker that died is forked from a process that has torch imported (Linux).",
    ),
]
Preload = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE", help="What that process imports in addition; may be repeated."),
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
    grace: Grace = _launcher.STOP_GRACE,
    fork: Fork = True,
    preload: Preload = None,
) -> None:
    """Run a script in several workers, which may die and come back.

    A worker that is killed by a signal is always started again. The exit code is 0 if all workers
    ended with 0. Several hosts need one secret, in the environment variable MANYHANDS_SECRET.
    """
    arguments = script or []
    _check_script(arguments, module)
    _check_hosts(store, listen, numbers)
    patience_seconds = _parse_patience(patience, stall)
    worker_numbers = _parse_numbers(workers, numbers)
    # Where it is not set: torch asks a name server at each new connection to the store, which
    # does not answer meanwhile. If its answer is lost, the C library asks again after 5 seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    if module is not None:
        arguments = ["-m", module, *arguments]
    try:
        serving = store is None  # the launcher that serves the store ends last
        if store is None:
            host, port = parse_address(listen or "127.0.0.1:0")
            _served, store = serve_store(host, port)  # served while this variable lives
        launcher = _launcher.Launcher(
            [sys.executable, *arguments],
            worker_numbers,
            store,
            expected=expected,
            processes=processes,
            restarts=restarts,
            patience=patience_seconds,
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
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            stop(
                "run",
                f"another program listens at {listen}, perhaps the store of another run. Give "
                "--listen another port, or --store to add workers to that run.",
            )
        stop("run", *str(error).splitlines())
    raise typer.Exit(launcher.run())


def _parse_patience(patience: str, stall: float) -> float:
    """Return the seconds; end the command unless it is "auto" or at least the stall."""
    if patience == AUTO:
        return max(PATIENCE, stall)
    try:
        seconds = float(patience)
    except ValueError:
        stop("run", f"--patience is a number of seconds, or auto, got {patience}.")
    if not seconds >= stall:  # as for nan
        stop("run", f"--patience must be at least --stall, which is {stall:g}, got {patience}.")
    return seconds


def _check_script(arguments: list[str], module: str | None) -> None:
    given = arguments[0] if arguments else "nothing"
    if module is None and not (arguments and Path(given).is_file()):
        names = [f"--{n}" for n in signature(run).parameters if n not in ("script", "module")]
        check_no_option("run", given, names, "Options come before the script.")
        stop("run", f"{given} is not a file. Give a Python script, or a module with -m.")


def _check_hosts(store: str | None, listen: str | None, numbers: str | None) -> None:
    """End the command if the options for several hosts do not fit together."""
    if store is not None and listen is not None:
        stop("run", "--listen serves a store and --store uses another host's: give only one.")
    if store is not None and numbers is None:
        stop("run", "--store needs --numbers, such as 4-7: each worker has a number of its own.")
    if (store or listen) and not os.environ.get(SECRET_VARIABLE):
        # Otherwise each host would draw its own, and ignore what the others write.
        stop(
            "run",
            f"the hosts of a run need one secret: set {SECRET_VARIABLE} to the same text on each, "
            'such as `python -c "import secrets; print(secrets.token_hex())"` prints.',
        )


def _parse_numbers(workers: int | None, numbers: str | None) -> list[int]:
    """Return the numbers of this host's workers, from either option."""
    if numbers is None:
        if workers is None:
            stop("run", "how many workers? Such as --workers 4.")
        return list(range(workers))
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", numbers)
    found: list[int] = []
    if match is not None:
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not found:
        stop("run", f"--numbers takes FIRST-LAST, such as 4-7, got {numbers!r}.")
    if workers not in (None, len(found)):
        stop("run", f"--workers {workers} and --numbers {numbers} do not fit: leave one out.")
    return found
