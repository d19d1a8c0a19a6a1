"""The table at the top of a page: one row for each run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from manyhands.record import Run
from manyhands.report._panels import numbers

NOTHING = "–"


def summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The headings, and for each run one cell for each of them."""
    own = list(dict.fromkeys(key for run in runs for key in run.own))
    headings = ["steps", "progress", "time", "average gain", "skipped", "not finite"]
    rows = [
        [
            _number(_last(run, "step")),
            _number(_last(run, "progress")),
            _duration(_last(run, "time")),
            _number(_average(run, "gain")),
            _number(_last(run, "skipped")),
            _number(_last(run, "nonfinite")),
            *(_number(_last(run, key)) for key in own),
        ]
        for run in runs
    ]
    return headings + [f"last {key}" for key in own], rows


def _values(run: Run, column: str) -> list[float]:
    if column not in run.columns:
        return []
    return [value for value in numbers(run, column) if value is not None]


def _last(run: Run, column: str) -> float | None:
    values = _values(run, column)
    return values[-1] if values else None


def _average(run: Run, column: str) -> float | None:
    values = [value for value in _values(run, column) if math.isfinite(value)]
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return _number(seconds)
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
