"""Runs in, means and spreads out, as Markdown and as a small JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality.plan import FIXED, settings
from quality.store import Store
from quality.workloads import Workload

Row = dict[str, Any]
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


@dataclass(frozen=True)
class Cell:
    """The same run with several seeds. `mean` and `spread` are over those that have a score."""

    seeds: int
    failures: tuple[str, ...]
    mean: float | None
    spread: float  # standard deviation over the seeds
    steps: float
    steps_spread: float

    def text(self, workload: Workload) -> str:
        places = 2 if workload.higher_is_better else 3
        values = "" if self.mean is None else f"{self.mean:.{places}f}"
        if self.seeds - len(self.failures) > 1:
            values += f" ± {self.spread:.{places}f}"
        return "; ".join(filter(None, (self.fate(), values)))

    def fate(self) -> str:
        """What became of the runs without a score."""
        kinds = " or ".join(sorted(set(self.failures)))
        some = f"{len(self.failures)} of {self.seeds} " if self.mean is not None else ""
        return some + kinds if kinds else ""

    def steps_text(self) -> str:
        spread = f" ± {self.steps_spread:,.0f}" if self.steps_spread >= 0.5 else ""
        return f"{self.steps:,.0f}{spread}"


def cell(workload: Workload, rows: Sequence[Row]) -> Cell | None:
    if not rows:
        return None
    failures = tuple(fate for row in rows if (fate := workload.failure(row["score"])))
    good = [row["score"] for row in rows if not workload.failure(row["score"])]
    steps = [row["steps"] for row in rows]
    return Cell(
        seeds=len(rows),
        failures=failures,
        mean=statistics.mean(good) if good else None,
        spread=_deviation(good),
        steps=statistics.mean(steps),
        steps_spread=_deviation(steps),
    )


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Results:
    """The finished runs of one workload at its present settings."""

    workload: Workload
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, workload: Workload, store: Store) -> Results:
        def ours(row: Row) -> bool:
            return row["workload"] == workload.name and row["settings"] == settings(workload)

        return cls(workload, tuple(filter(ours, store.rows.values())))

    def where(self, **wanted: Any) -> list[Row]:
        return [row for row in self.rows if all(row[k] == v for k, v in wanted.items())]

    def base(self) -> Cell | None:
        return cell(self.workload, self.where(budget="base"))

    def rows_of(self, method: str, scale: int, budget: str) -> list[Row]:
        """Of the comparison; under the budget "steps", AdaScale's are its own progress runs."""
        if method != self.workload.adaptive:
            return self.where(method=method, scale=scale, budget=budget)
        budget = "progress" if budget == "steps" else budget
        same = {"method": method, "scale": scale, "budget": budget}
        return self.where(**same, passes=scale, smoothing=None)

    def cell(self, method: str, scale: int, budget: str) -> Cell | None:
        return cell(self.workload, self.rows_of(method, scale, budget))


def methods(workload: Workload) -> list[str]:
    return [*FIXED, workload.adaptive]


# -- Markdown ---------------------------------------------------------------------------------


def markdown(workloads: Iterable[Workload], store: Store) -> str:
    parts = []
    for workload in workloads:
        results = Results.of(workload, store)
        if results.rows:
            parts += [comparison_table(results), *searched_table(results), *study_table(results)]
    return "\n".join(parts)


def comparison_table(results: Results) -> str:
    workload, base = results.workload, results.base()
    lines = [f"### {workload.title}\n"]
    if base is not None:
        lines.append(
            f"Scale 1 (batch {workload.batch}, lr {workload.lr:g}): **{base.text(workload)}** "
            f"{workload.metric.split(', ')[-1]} in {base.steps_text()} steps.\n"
        )
    columns = [(scale, budget) for scale in workload.scales for budget in ("samples", "steps")]
    heads = [_head(results, *column) for column in columns]
    lines += [_line(["", *heads]), _line(["---"] * (len(heads) + 1))]
    for method in methods(workload):
        cells = [results.cell(method, *column) for column in columns]
        texts = ["" if c is None else c.text(workload) for c in cells]
        if method == workload.adaptive:
            method = f"**{method}**"
            texts = [
                f"**{text}**" if budget == "steps" else text
                for text, (_, budget) in zip(texts, columns, strict=True)
            ]
        lines.append(_line([method, *texts]))
    return "\n".join(lines) + "\n"


def _head(results: Results, scale: int, budget: str) -> str:
    what = results.cell(results.workload.adaptive, scale, budget)
    steps = "" if what is None else f", {what.steps_text()} steps"
    return f"S = {scale} ({'A' if budget == 'samples' else 'B'}){steps}"


def searched_table(results: Results) -> list[str]:
    """A constant factor found by search, at as many steps as AdaScale took."""
    scale = max(results.workload.scales)
    found = sorted({row["method"] for row in results.rows if row["method"].startswith("×")})
    cells = {m: results.cell(m, scale, "steps") for m in sorted(found, key=lambda m: int(m[1:]))}
    if not cells:
        return []
    texts = [c.text(results.workload) if c else "" for c in cells.values()]
    lines = [
        f"S = {scale} (B) with other constant factors, warmed up as linear scaling's:\n",
        _line(["factor", *cells]),
        _line(["---"] * (len(cells) + 1)),
        _line([results.workload.metric, *texts]),
    ]
    return ["\n".join(lines) + "\n"]


def study_table(results: Results) -> list[str]:
    """How many gradients are measured per step, and how they are smoothed."""
    workload, scale = results.workload, max(results.workload.scales)
    progress = results.where(budget="progress", scale=scale)
    kinds = sorted({(row["passes"], _smoothing(row)) for row in progress})
    if len(kinds) < 2:
        return []
    lines = [
        f"S = {scale}, {workload.adaptive} to progress T, by gradients measured per step:\n",
        _line(["gradients per step", "smoothing", workload.metric, "steps"]),
        _line(["---"] * 4),
    ]
    for passes, smoothing in kinds:
        same = [r for r in progress if (r["passes"], _smoothing(r)) == (passes, smoothing)]
        by_default = " (default)" if any(row["smoothing"] is None for row in same) else ""
        seeds = {row["seed"]: row for row in same}
        c = cell(workload, list(seeds.values()))
        assert c is not None
        texts = [str(passes), f"{smoothing:g}{by_default}", c.text(workload), c.steps_text()]
        lines.append(_line(texts))
    return ["\n".join(lines) + "\n"]


def _smoothing(row: Row) -> float:
    """What was used: the library's default is spelled out."""
    default = round(max(1.0 - row["passes"] / 1000.0, 0.0), 6)
    return default if row["smoothing"] is None else row["smoothing"]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# -- files ------------------------------------------------------------------------------------


def write(workloads: Sequence[Workload], store: Store, path: Path) -> None:
    """`path` gets the means as JSON; beside it, the tables as Markdown."""
    summary = [entry for workload in workloads for entry in _entries(Results.of(workload, store))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, summary)) + "\n]\n")
    path.with_suffix(".md").write_text(markdown(workloads, store))


def into_page(text: str, page: Path) -> None:
    """Replace what stands between the page's two marks."""
    before, mark, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise ValueError(
            f"{page} needs the lines {BEGIN!r} and {END!r}, to write the tables between."
        )
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def _entries(results: Results) -> Iterable[Row]:
    names = ("workload", "settings", "method", "scale", "budget", "passes", "smoothing")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in results.rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    for same, rows in groups.items():
        c = cell(results.workload, rows)
        assert c is not None
        yield {
            **dict(zip(names, same, strict=True)),
            "metric": results.workload.metric,
            "seeds": c.seeds,
            "failed": list(c.failures),
            "mean": None if c.mean is None else round(c.mean, 4),
            "spread": None if c.mean is None else round(c.spread, 4),
            "steps": round(c.steps, 1),
            "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows), 1),
        }
