"""Run a function on several gloo ranks and get back what each of them returned.

    def total(x):
        t = torch.tensor(x * (dist.get_rank() + 1))
        dist.all_reduce(t)
        return t.item()

    assert run_ranks(4, total, 0.5) == [5.0, 5.0, 5.0, 5.0]

A test whose ranks return nothing is decorated with `on_ranks(4)` instead.

A rank is a *fork* of the test process, so it starts in milliseconds with everything imported,
sees closures and fixtures as they are, and draws from the same seed as every other rank. It has one
thread, the default process group, and the warning filters of the test (so a warning is an error).

Results travel through files, because a tensor on a queue dies with its sender. They are read back
with `weights_only=True`, so a function returns tensors, numbers, strings, None, and lists,
tuples and dicts of those; not a dataclass: return its fields.

The life of a rank, and what the parent does meanwhile:

    rank    fork ── join the group ── fn() ── save result ── tell ── wait ── leave the group ── exit
    parent                      wait until all have told, or one failed, or time is up ── release

A rank that is done waits until all are: were it to leave at once, a rank that still
waits for it in a collective would die of a lost connection instead of showing where it waits.

Not for CUDA: a fork cannot use a GPU that its parent has touched. Start such tests with torchrun.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

GRACE = 1.0  # seconds that the other ranks get once one has failed

RETURNED, RAISED, DIED, WAITING = "returned", "raised", "died", "waiting"


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not finish in time; the message tells all of it."""


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on each rank and return the results in rank order.

    Raises `RanksFailed` with the traceback of each rank that raised, and with the stack of each
    that still waits: `GRACE` seconds after another's failure, or after `timeout` seconds.
    """
    __tracebackhide__ = True
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}.")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "Ranks are forked, and a fork cannot use the GPU that this process has touched. "
            "Start the test's ranks with torchrun in a subprocess instead."
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ranks = [
            stack.enter_context(_Rank(rank, world_size, folder, fn, args, kwargs, timeout))
            for rank in range(world_size)
        ]
        _wait_for_all(ranks, timeout)
        if any(rank.state != RETURNED for rank in ranks):
            raise RanksFailed(_describe(ranks, timeout))
        for rank in ranks:
            rank.release()
        return [rank.result() for rank in ranks]


def raises_on_ranks(
    world_size: int,
    exception: type[BaseException] | tuple[type[BaseException], ...],
    fn: Callable[..., Any],
    *args: Any,
    match: str = "",
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[str]:
    """Assert that `fn` raises `exception` on *every* rank, its message matching `match`.

    Returns the messages in rank order. A rank that hangs while the others raise is a failure.
    """
    __tracebackhide__ = True

    def outcome() -> tuple[bool, str, str]:
        try:
            returned = fn(*args, **kwargs)
        except BaseException as error:
            right = isinstance(error, exception) and re.search(match, str(error)) is not None
            return right, str(error), traceback.format_exc()
        return False, "", f"returned {returned!r}\n"

    outcomes = run_ranks(world_size, outcome, timeout=timeout)
    wrong = [f"rank {rank}: {what}" for rank, (right, _, what) in enumerate(outcomes) if not right]
    if wrong:
        kinds = exception if isinstance(exception, tuple) else (exception,)
        wanted = " or ".join(kind.__name__ for kind in kinds)
        if match:
            wanted += f" matching {match!r}"
        raise RanksFailed(
            f"{len(wrong)} of {world_size} ranks did not raise {wanted}.\n\n" + "\n".join(wrong)
        )
    return [message for _, message, _ in outcomes]


def on_ranks(
    world_size: int | str,
    *,
    raises: type[BaseException] | tuple[type[BaseException], ...] | None = None,
    match: str = "",
    timeout: float = 60.0,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorate a test to run on each rank; `world_size` may be the name of its argument.

    With `raises`, the test passes if every rank raises that exception, as in `raises_on_ranks`.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_each(**given: Any) -> None:
            __tracebackhide__ = True
            ranks = given[world_size] if isinstance(world_size, str) else world_size
            if raises is None:
                results = run_ranks(ranks, test, timeout=timeout, **given)
                assert results == [None] * ranks, "a decorated test must return None"
            else:
                raises_on_ranks(ranks, raises, test, match=match, timeout=timeout, **given)

        return on_each

    return decorate


def as_under_torchrun(**more: str) -> None:
    """Set the variables of torchrun that trainers read, in a rank."""
    rank = str(dist.get_rank())
    size = str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", **more)


class _Rank:
    """One forked rank as the parent sees it; leaving the `with` block leaves no process behind."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        folder: Path,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> None:
        self.rank = rank
        self.state = WAITING
        self.result_file = folder / f"{rank}.pt"
        self.traceback_file = folder / f"{rank}.traceback"
        self.stack_file = folder / f"{rank}.stack"
        self.left_file = folder / f"{rank}.left"
        self.connection, self._far_end = multiprocessing.Pipe()

        def call() -> Any:
            store = dist.FileStore(str(folder / "store"), world_size)
            # A collective gives up after the parent did, so that the parent sees where it waits.
            limit = timedelta(seconds=2 * timeout + 10)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
            )
            return fn(*args, **kwargs)

        self.process: BaseProcess = multiprocessing.get_context("fork").Process(
            target=_live, args=(self, call, self._far_end), name=f"rank {rank}"
        )

    def __enter__(self) -> _Rank:
        self.process.start()
        self._far_end.close()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()

    def listen(self) -> None:
        """Take the one word that a rank says, or notice that it died without saying it."""
        try:
            self.state = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.state = DIED

    def release(self) -> None:
        """Let a rank that returned leave the group, and see it go."""
        self.connection.send("leave")

    def result(self) -> Any:
        self.process.join(30)
        # Three times in some fifty thousand forks a rank was done with everything and did not end,
        # once in a destructor of torch's after `destroy_process_group`: its stack was that of
        # `_live` alone. It is killed in `__exit__`.
        in_exit = self.process.exitcode is None and (
            self.left_file.exists() or re.fullmatch("Current thread.*\n", self._stack()) is not None
        )
        if self.process.exitcode != 0 and not in_exit:
            raise RanksFailed(
                f"rank {self.rank} returned, but leaving the process group "
                + (
                    f"took more than 30 s:\n{self._stack()}{self._system_state()}"
                    if self.process.exitcode is None
                    else f"ended it with exit code {self.process.exitcode}."
                )
            )
        try:
            return torch.load(self.result_file, weights_only=True)
        except Exception as error:  # whatever the file's reader makes of it
            raise TypeError(
                f"rank {self.rank} returned something that does not travel between ranks. Return "
                "tensors, numbers, strings, None, and lists, tuples and dicts of those."
            ) from error

    def story(self) -> str:
        """What became of this rank, for the error message."""
        if self.state == RAISED:
            return f"rank {self.rank} raised:\n{self.traceback_file.read_text()}"
        if self.state == DIED:
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            crash = _frames_of_rank(self.stack_file.read_text())
            found = f" ({how}):\n{crash}" if crash else f" without a traceback ({how}).\n"
            return f"rank {self.rank} died{found}"
        if self.state == WAITING:
            return f"rank {self.rank} was still waiting here:\n{self._stack()}"
        return f"rank {self.rank} returned.\n"

    def _system_state(self) -> str:
        """Return what Linux says of each thread: a rank may hang where no Python code runs."""
        lines = []
        for thread in sorted(Path(f"/proc/{self.process.pid}/task").glob("*")):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state = re.search(r"^State:\s*(.+)$", (thread / "status").read_text(), re.M)
                where = (thread / "wchan").read_text()
                lines.append(f"  thread {thread.name}: {state[1] if state else '?'}, in {where}\n")
        return "".join(lines)

    def _stack(self) -> str:
        """Ask a waiting rank for its stack; faulthandler answers even from inside a collective."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        until = time.monotonic() + 2.0
        stack = ""
        while " in _live\n" not in stack and time.monotonic() < until:
            time.sleep(0.01)
            stack = self.stack_file.read_text()
        if not stack:
            return "  (no answer to SIGUSR1)\n"
        return _frames_of_rank(stack)


def _frames_of_rank(stack: str) -> str:
    """Return the part of a stack that is the rank's, without this file's frames."""
    # Below _live stand the frames of pytest, which the rank inherited from its parent.
    frames = stack.partition(" in _live\n")[0].splitlines(keepends=True)
    return "".join(line for line in frames if f'"{__file__}"' not in line)


def _wait_for_all(ranks: list[_Rank], timeout: float) -> None:
    """Listen until every rank is done, or `timeout` passes, or `GRACE` after a failure."""
    deadline = time.monotonic() + timeout
    waiting = {rank.connection: rank for rank in ranks}
    while waiting:
        ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for connection in ready:
            rank = waiting.pop(connection)
            rank.listen()
            if rank.state != RETURNED:
                deadline = min(deadline, time.monotonic() + GRACE)


def _describe(ranks: list[_Rank], timeout: float) -> str:
    """First who raised, then who died, then who waited: causes before consequences."""
    stories: Iterator[str] = (
        rank.story()
        for state in (RAISED, DIED, WAITING, RETURNED)
        for rank in ranks
        if rank.state == state
    )
    failed = [rank for rank in ranks if rank.state in (RAISED, DIED)]
    if failed:
        title = f"{len(failed)} of {len(ranks)} ranks failed."
    else:
        late = sum(rank.state == WAITING for rank in ranks)
        title = f"{late} of {len(ranks)} ranks did not finish within {timeout:g} s."
    return f"{title}\n\n" + "\n".join(stories)


def _live(rank: _Rank, call: Callable[[], Any], connection: Connection) -> NoReturn:
    """The whole life of a forked rank, to `os._exit`: pytest's teardown is for the parent alone."""
    code = 1
    gc.freeze()  # what the parent has made is not looked through: its pages stay shared
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        stack_file = rank.stack_file.open("w")
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        faulthandler.enable(stack_file)  # for `_describe`, if the rank aborts
        try:
            torch.save(call(), rank.result_file)
            state = RETURNED
        except BaseException:
            rank.traceback_file.write_text(traceback.format_exc())
            state = RAISED
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(state)
        connection.recv()  # "leave"; a rank that failed is killed here
        dist.destroy_process_group()
        rank.left_file.touch()
        code = 0
    except EOFError:
        pass  # the parent is gone
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
