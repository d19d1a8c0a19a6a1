"""Store what a benchmark has measured, and write the figures into the benchmark's page.

    args = pages.parser(__doc__, data="mnist.npz").parse_args()   # --quick, --draw, --data FOLDER
    result = pages.read("cost") if args.draw else {**pages.conditions(), "rows": measured(args)}
    if not args.quick:
        pages.store("cost", result)                               # benchmarks/results/cost.json
        pages.fill("cost", result, table=pages.table("variant | ms", cells))

A page of docs/benchmarks is written by hand, with marks around what a benchmark fills in:

    Measured on <!-- conditions -->2 cores, with torch 2.13.0<!-- end -->.

Results that grow by one row at a time are in a file of JSON lines instead. An interrupted benchmark
goes on with the missing rows (`read_rows`, `add_row`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"


def parser(description: str | None, data: str = "") -> argparse.ArgumentParser:
    """Return the arguments that every benchmark has; `data` names the files in --data."""
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
    """Describe the machine. Call this before the run, so that `load` is the load of others."""
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
    """Return the rows so far, without a line that an interruption cut off."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row, on a separate line even if an interruption has cut off the last one."""
    before = path.read_bytes() if path.exists() else b""
    with path.open("a") as file:
        if before and not before.endswith(b"\n"):
            file.write("\n")
        file.write(json.dumps(row) + "\n")


def fill(name: str, result: Mapping[str, Any] | None = None, /, **parts: object) -> None:
    """Replace the text between the marks of a page, and the conditions of the result."""
    page = PAGES / f"{name}.md"
    text = page.read_text()
    if result is not None and "machine" in result:
        known = {"conditions": f"{result['machine']}, with {result['versions']}"}
        parts = {**known, "load": result.get("load"), **parts}
    for part, value in parts.items():
        found = re.search(rf"(?s)<!-- {part} -->\s*(.*?)\s*<!-- end -->", text)
        if found:
            text = f"{text[: found.start(1)]}{value}{text[found.end(1) :]}"
        else:
            assert part in ("conditions", "load"), f"{page} has no mark <!-- {part} -->"
    page.write_text(text)


def table(head: str, rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Return a Markdown table. All columns but the first `left` of "name | ms | MB" align right."""
    columns = head.count("|") + 1
    rule = "|".join(["---"] * left + ["--:"] * (columns - left))
    lines = [f"| {head} |", f"|{rule}|"]
    for row in rows:
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)
