"""One line of JSON per finished run, appended at once: an interrupted benchmark continues."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quality.plan import Run
from quality.training import Outcome


@dataclass
class Store:
    path: Path

    def __post_init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # the line that an interruption cut off
                continue
            self.rows[row["key"]] = row

    def __contains__(self, run: Run) -> bool:
        return run.key in self.rows

    def __getitem__(self, run: Run) -> dict[str, Any]:
        return self.rows[run.key]

    def add(self, run: Run, outcome: Outcome) -> None:
        result = asdict(outcome)
        if run.seed > 0:  # curves are drawn of the first seed only, and the file stays small
            result["curve"] = []
        result["score"] = outcome.score if math.isfinite(outcome.score) else None
        result["cpu_seconds"] = round(outcome.cpu_seconds, 2)
        row = {"key": run.key, **asdict(run), **result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a") as file:
            file.write(("\n" if cut_off else "") + json.dumps(row) + "\n")
        self.rows[run.key] = row
