"""Run a page of the documentation from top to bottom.

    run_page(ROOT / "docs" / "scaling.md", in_folder=tmp_path)

What a fence says is what is done with its code:

    python                   executed here; all of a page's blocks share their names
    python title="train.py"  written to that file
    diff title="train.py"    the new side (its "+" lines and what both sides have) likewise;
                             `old=True` takes the old side instead. A diff that begins with
                             "--- base.py" shows only what changes: see `apply_patch`
    sh                       its commands (torchrun, python and manyhands) are run in the folder
    text, right after sh     what the last command prints, up to 3 % in its numbers
    bash, anything else      for the reader

A command runs in *forks* of this process, which have torch imported and start in milliseconds; as
ranks.py does, but with nothing prepared: a script makes its process group by itself, from
what torchrun puts into the environment. `launch` starts a command as a user does, in seconds.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
TIMEOUT = 120  # seconds for one command
SEED = torch.random.initial_seed()  # that of a process which has just begun

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,  # importing it would put 70 MB into each fork
    reason='scikit-learn is missing: pip install "manyhands[cli]"',
)


@dataclass(frozen=True)
class Block:
    """One fenced block and where it stands."""

    page: Path
    line: int
    language: str
    title: str | None
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"

    def side(self, old: bool = False) -> str:
        """The code itself; of a diff one side."""
        return one_side(self.code, old) if self.language == "diff" else self.code


def apply_patch(patch: str, folder: Path) -> str:
    """Return the file that a unified diff makes of another file of the folder.

    The diff is written for readers: a hunk begins with a line "@@", without line numbers. The old
    side of each hunk must be in the file exactly once, and after the hunk before it.
    """
    header, *hunks = re.split(r"^@@.*\n", patch, flags=re.MULTILINE)
    base = re.fullmatch(r"--- (\S+)\n", header)
    assert base is not None and hunks, f"not a patch: {header!r}"
    text, at = (folder / base[1]).read_text(encoding="utf-8"), 0
    for hunk in hunks:
        old, new = one_side(hunk, old=True), one_side(hunk)
        assert text.count(old) == 1, f"{text.count(old)} times in {base[1]}:\n{old}"
        start = text.index(old)
        assert start >= at, f"out of order:\n{old}"
        text, at = text[:start] + new + text[start + len(old) :], start + len(new)
    return text


def one_side(diff: str, old: bool = False) -> str:
    """Return the old or the new lines of a diff."""
    lines = [line for line in diff.splitlines() if not line.startswith("+" if old else "-")]
    return "".join(line[1:] + "\n" for line in lines)


def write_file(block: Block, folder: Path, old: bool = False) -> None:
    """Write the file that a titled block shows."""
    assert block.title is not None
    if block.code.startswith("--- "):
        code = apply_patch(block.code, folder)
    else:
        code = block.side(old)
    (folder / block.title).write_text(code, encoding="utf-8")


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        language, title, code = match.groups()
        yield Block(page, text.count("\n", 0, match.start(3)) + 1, language, title, code)


def has_examples(page: Path) -> bool:
    return any(block.language in ("python", "diff", "sh") for block in blocks(page))


def run_page(page: Path, in_folder: Path, old: bool = False) -> dict[str, Any]:
    """Do all that the page says, and return the names that its Python made."""
    names: dict[str, Any] = {"__name__": "page"}
    before, printed = Path.cwd(), ""
    os.chdir(in_folder)
    try:
        for block in blocks(page):
            if block.language == "text" and printed:
                same_but_for_rounding(printed, block)
            printed = ""
            if block.title is not None:
                write_file(block, in_folder, old)
            elif block.language == "python":
                lines_above = "\n" * (block.line - 1)  # so that a traceback names the page's line
                exec(compile(lines_above + block.code, str(page), "exec"), names)
            elif block.language == "sh":
                for command in block.code.replace("\\\n", " ").splitlines():
                    printed = run_command(command, block)
    finally:
        os.chdir(before)
    return names


def same_but_for_rounding(printed: str, shown: Block) -> None:
    """Compare a command's output with the page's; other torch versions sum in another order."""
    number = re.compile(r"\d+(?:\.\d+)?")
    assert number.sub("#", printed.strip()) == number.sub("#", shown.code.strip()), shown.where
    found, expected = (list(map(float, number.findall(each))) for each in (printed, shown.code))
    assert found == pytest.approx(expected, rel=0.03), shown.where


def run_command(command: str, block: Block) -> str:
    """Run one command of a page, and return what it has printed."""
    match shlex.split(command):
        case ["torchrun", "--standalone", "--nproc-per-node", workers, script, *arguments]:
            code, output = in_forks(int(workers), script, *arguments)
        case ["python", script, *arguments]:
            code, output = in_forks(None, script, *arguments)
        case ["manyhands", *arguments]:
            code, output = in_forks(None, _manyhands, *arguments)
        case _:
            raise AssertionError(f"{block.where}: {command!r} is not run; ```bash is only shown")
    if code:
        raise AssertionError(f"{block.where}: {command}\n{output}")
    return output


def _manyhands() -> None:
    from manyhands.tools.cli import main

    main()


def in_forks(
    workers: int | None, program: str | Callable[[], None], *arguments: str
) -> tuple[int, str]:
    """Run a script in this folder, as `python` does, or so many, as `torchrun` does.

    Returns the exit code of the first that failed, or 0, and what all have printed.
    """
    port = free_port()
    told = [{}] if workers is None else [_told(rank, workers, port) for rank in range(workers)]
    return in_told_forks(told, program, *arguments)


def free_port() -> int:
    """A port that nobody listens to at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def in_told_forks(
    variables: Sequence[dict[str, str]], program: str | Callable[[], None], *arguments: str
) -> tuple[int, str]:
    """Run a program as `in_forks` does, one process for each dict of environment variables."""
    with tempfile.TemporaryFile() as output:
        processes = set()
        for told in variables:
            pid = os.fork()
            if pid == 0:
                _become(program, arguments, told, output.fileno())
            processes.add(pid)
        code = _first_failure(processes)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _told(rank: int, workers: int, port: int) -> dict[str, str]:
    """What torchrun tells a worker."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    return {
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",  # what dist.is_torchelastic_launched() looks for
    }


def _become(
    program: str | Callable[[], None], arguments: Sequence[str], told: dict[str, str], output: int
) -> NoReturn:
    """In a fork: be a process that has just been started with this program."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(told)
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        mock.patch.object(torch.multiprocessing, "spawn", in_more_forks).start()
        warnings.simplefilter("default")
        sys.argv = [program if isinstance(program, str) else program.__name__, *arguments]
        sys.path.insert(0, os.getcwd())
        for path in Path().glob("*.py"):
            sys.modules.pop(path.stem, None)  # another page's
        if "accelerate.state" in sys.modules:  # an earlier test may have initialized it
            sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
        if callable(program):
            program()
        else:
            runpy.run_path(os.path.abspath(program), run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        if told.get("RANK") == "0":  # others may still read from its store, which lasts until
            time.sleep(0.25)  # Python has ended: a fork skips that, and its exit handlers
        sys.stdout.flush()
        os._exit(code)


def in_more_forks(*args: Any, **kwargs: Any) -> Any:
    """torch.multiprocessing.spawn, without the seconds in which each process imports torch."""
    kwargs["start_method"] = "fork"
    return torch.multiprocessing.start_processes(*args, **kwargs)


def _first_failure(processes: set[int]) -> int:
    """Wait for all of them; one that fails, or takes too long, is the end of the others."""
    left, code, deadline = set(processes), 0, time.monotonic() + TIMEOUT
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.remove(pid)
                code = code or os.waitstatus_to_exitcode(status)
        if left and (code or time.monotonic() > deadline):
            code = code or -signal.SIGALRM
            for pid in left:
                os.kill(pid, signal.SIGKILL)  # not waited for yet, so it is still there
        time.sleep(0.01)
    return code


def launch(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with manyhands on its path.

    A short script may die at its very end, when a thread of gloo's drops its last tensor while the
    interpreter goes away (torch 2.13; without manyhands too). Such a run is repeated.
    """
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    for _ in range(4):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
        if "terminate called without an active exception" not in done.stderr:
            break
    return done
