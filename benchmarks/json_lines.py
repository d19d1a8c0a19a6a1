"""Results as one JSON object a line, so that an interrupted benchmark goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row, on a line of its own even if an interruption has cut off the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    cut_off = bool(before) and not before.endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * cut_off + json.dumps(row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows so far, without a line that an interruption cut off."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
