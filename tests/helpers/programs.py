"""Run a function on several ranks, as programs that end one by one, in whatever way.

    ended = run_programs(3, train, "AdaScale")
    assert [program.code for program in ended] == [0, 1, 1]
    assert "rank 0 has ended" in ended[1].said

`run_ranks` keeps its ranks alive until all are done. Here a rank that returns ends its process at
once, with code 0, and one that raises ends as Python does, by `sys.excepthook` and with code 1.
`RANK` and so on are set, for `mh.start()`. Exit functions are not called (`ending_script.py`).
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from manyhands._ranks import presence


@dataclass
class Ended:
    """How a rank has ended. The code of one that had to be killed is None."""

    code: int | None
    seconds: float
    said: str


def run_programs(
    size: int, fn: Callable[..., object], *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Ended]:
    """Call `fn(rank, *args, **kwargs)` in a process for each rank; return how each has ended."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="programs-") as name:
        outputs = [Path(name, str(rank)) for rank in range(size)]
        began = time.monotonic()
        processes = []
        for rank, output in enumerate(outputs):
            process = os.fork()
            if process == 0:
                _live(rank, size, port, output, partial(fn, rank, *args, **kwargs))
            processes.append(process)
        ended: dict[int, tuple[int | None, float]] = {}
        while len(ended) < size:
            time.sleep(0.01)
            seconds = time.monotonic() - began
            for rank, process in enumerate(processes):
                if rank in ended:
                    continue
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    ended[rank] = os.waitstatus_to_exitcode(status), seconds
                elif seconds > timeout:
                    ended[rank] = None, seconds
                    os.kill(process, signal.SIGUSR1)  # to show where it waits
                    time.sleep(0.2)
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
        return [Ended(*ended[rank], outputs[rank].read_text()) for rank in range(size)]


def _live(rank: int, size: int, port: int, output: Path, call: Callable[[], object]) -> NoReturn:
    """The life of a rank: it never returns into the test."""
    code = 1
    try:
        gc.freeze()
        os.setpgid(0, 0)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # pytest has replaced them, and what it says at a failure is its own.
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        for name in ("stdout", "stderr"):
            setattr(sys, f"__{name}__", getattr(sys, name))
        sys.excepthook = sys.__excepthook__
        presence._watched = 0  # a new program has not replaced the hook
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        torch.set_num_threads(1)
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        call()
        code = 0
    except BaseException:
        kind, error, trace = sys.exc_info()
        assert kind is not None and error is not None
        sys.excepthook(kind, error, trace)
    finally:
        os._exit(code)
