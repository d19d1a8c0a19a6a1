"""Write what a benchmark found: its results, its tables and its page.

    args = pages.parser(__doc__, data="mnist.npz").parse_args()   # --quick, --draw, --data FOLDER
    result = pages.read("cost") if args.draw else {**pages.conditions(), "rows": measured(args)}
    if not args.quick:
        pages.store("cost", result)                               # benchmarks/results/cost.json
        pages.write("cost", PAGE, result, table=pages.table("variant | ms", cells))

`PAGE` is the page's text with `{machine}`, `{versions}` and `{table}` in it. Results that grow by
one row at a time are in a file of JSON lines instead: an interrupted benchmark goes on with the
rows that are missing (`read_rows`, `add_row`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"


def parser(description: str | None, data: str = "") -> argparse.ArgumentParser:
    """The arguments that every benchmark has; `data` names the files that --data must hold."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    made.add_argument("--draw", action="store_true", help="write the page of the stored results")
    if data:
        about = f"the folder with {data} (data)"
        made.add_argument("--data", type=Path, default=Path("data"), metavar="FOLDER", help=about)
    return made


def conditions() -> dict[str, Any]:
    """What a page says about the machine: call it before the run, so that `load` is of others."""
    import torch  # not above: a script may first start again in the peers' environment

    return {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "load": round(os.getloadavg()[0], 1),
    }


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def store(name: str, result: Mapping[str, Any]) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows so far, without a line that an interruption cut off."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row, on a line of its own even if an interruption has cut off the last one."""
    before = path.read_bytes() if path.exists() else b""
    cut_off = bool(before) and not before.endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * cut_off + json.dumps(row) + "\n")


def write(name: str, template: str, result: Mapping[str, Any] | None = None, **parts: Any) -> None:
    """Fill the template with what was stored, and with the parts, and write it as a page."""
    (PAGES / f"{name}.md").write_text(template.format(**{**(result or {}), **parts}))


def table(head: str, rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table; `head` is "name | ms | MB", and all but the `left` first align right."""
    columns = head.count("|") + 1
    rule = "|".join(["---"] * left + ["--:"] * (columns - left))
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join([f"| {head} |", f"|{rule}|", *lines])
