"""Run a page of the documentation from top to bottom.

    run_page(ROOT / "docs" / "scaling.md", in_folder=tmp_path)

What a fence says is what is done with its code:

    python                   executed here; all of a page's blocks share their names
    python title="train.py"  written to that file
    diff title="train.py"    the new side (its "+" lines and what both sides have) likewise;
                             `old=True` takes the old side instead
    sh                       its commands (of RUN only) are run in the folder
    bash, anything else      for the reader
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "manyhands": [sys.executable, "-c", "from manyhands.cli import main; main()"],
}
TIMEOUT = 120  # seconds for one command


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
        if self.language != "diff":
            return self.code
        other = "+" if old else "-"
        lines = [line for line in self.code.splitlines() if not line.startswith(other)]
        return "".join(line[1:] + "\n" for line in lines)


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
    before = Path.cwd()
    os.chdir(in_folder)
    try:
        for block in blocks(page):
            if block.title is not None:
                Path(block.title).write_text(block.side(old), encoding="utf-8")
            elif block.language == "python":
                lines_above = "\n" * (block.line - 1)  # so that a traceback names the page's line
                exec(compile(lines_above + block.code, str(page), "exec"), names)
            elif block.language == "sh":
                for command in block.code.replace("\\\n", " ").splitlines():
                    run_command(command, block)
    finally:
        os.chdir(before)
    return names


def run_command(command: str, block: Block) -> None:
    program, *arguments = shlex.split(command)
    if program not in RUN:
        raise AssertionError(f"{block.where}: {program!r} cannot be run; ```bash is only shown")
    done = launch([*RUN[program], *arguments], Path.cwd())
    if done.returncode:
        raise AssertionError(f"{block.where}: {command}\n{done.stdout}\n{done.stderr}")


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
