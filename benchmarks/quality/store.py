"""One line of JSON per finished run, appended at once: an interrupted benchmark continues."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import json_lines

from quality.plan import Run
from quality.training import Outcome


@dataclass
class Store:
    path: Path

    def __post_init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {
            row["key"]: row for row in json_lines.read(self.path)
        }

    def __contains__(self, run: Run) -> bool:
        return run.key in self.rows

    def __getitem__(self, run: Run) -> dict[str, Any]:
        return self.rows[run.key]

    def add(self, run: Run, outcome: Outcome) -> None:
        result = asdict(outcome)
        if run.seed > 0 or run.budget not in ("base", "progress"):  # the curves that are drawn
            result["curve"] = []
        result["score"] = round(outcome.score, 5) if math.isfinite(outcome.score) else None
        result["cpu_seconds"] = round(outcome.cpu_seconds, 2)
        row = {"key": run.key, **asdict(run), **result}
        json_lines.append(self.path, row)
        self.rows[run.key] = row

    def forget(self, workloads: Collection[str]) -> None:
        """Drop the workloads' results, of all settings."""
        self.rows = {k: row for k, row in self.rows.items() if row["workload"] not in workloads}
        lines = [json.dumps(row) + "\n" for row in self.rows.values()]
        if self.path.exists():
            self.path.write_text("".join(lines))
