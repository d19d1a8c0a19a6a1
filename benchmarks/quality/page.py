"""Turn the runs into means and spreads, tables and figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pages

from quality.plan import FIXED
from quality.workloads import Workload

Row = dict[str, Any]
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


@dataclass(frozen=True)
class Cell:
    """The same run with several seeds. `mean` and `spread` are over those that have a score."""

    workload: Workload
    rows: Sequence[Row]

    @property
    def good(self) -> list[float]:
        return [row["score"] for row in self.rows if not self.workload.failure(row["score"])]

    def __str__(self) -> str:
        places = 2 if self.workload.higher_is_better else 3
        values = ""
        if good := self.good:
            values = f"{statistics.mean(good):.{places}f}"
        if len(good) > 1:
            values += f" ± {statistics.stdev(good):.{places}f}"
        return "; ".join(filter(None, (self.fate(), values)))

    def fate(self) -> str:
        """What became of the runs without a score."""
        failed = [found for row in self.rows if (found := self.workload.failure(row["score"]))]
        some = f"{len(failed)} of {len(self.rows)} " if self.good else ""
        return some + " or ".join(sorted(set(failed))) if failed else ""

    def steps(self) -> str:
        steps = [row["steps"] for row in self.rows]
        spread = statistics.stdev(steps) if len(steps) > 1 else 0.0
        return f"{statistics.mean(steps):,.0f}" + (f" ± {spread:,.0f}" if spread >= 0.5 else "")


@dataclass(frozen=True)
class Results:
    """The finished runs of one workload."""

    workload: Workload
    rows: Sequence[Row]

    def cell(self, method: str, scale: int, budget: str) -> Cell:
        """Under the budget "steps", AdaScale's runs are its own progress runs."""
        if method == self.workload.adaptive and budget == "steps":
            budget = "progress"
        wanted = {"method": method, "scale": scale, "budget": budget}
        found = [row for row in self.rows if all(row[k] == v for k, v in wanted.items())]
        return Cell(self.workload, found)

    @property
    def base(self) -> Cell:
        return self.cell("plain", 1, "base")

    @property
    def methods(self) -> list[str]:
        return [*FIXED, self.workload.adaptive]


def results_of(workloads: Sequence[Workload], rows: Sequence[Row]) -> list[Results]:
    found = (Results(w, [row for row in rows if row["workload"] == w.name]) for w in workloads)
    return [results for results in found if results.rows]


def table(results: Results) -> str:
    workload, base = results.workload, results.base
    columns = [(scale, budget) for scale in workload.scales for budget in ("samples", "steps")]
    heads = [
        f"S = {scale} ({'A' if budget == 'samples' else 'B'}), "
        f"{results.cell(workload.adaptive, scale, budget).steps()} steps"
        for scale, budget in columns
    ]
    cells = [[m, *(results.cell(m, *column) for column in columns)] for m in results.methods]
    return (
        f"### {workload.title}\n\nScale 1 (batch {workload.batch}, lr {workload.lr:g}): "
        f"**{base}** {workload.metric.split(', ')[-1]} in {base.steps()} steps.\n\n"
        + pages.table(" | ".join(["method", *heads]), cells)
    )


def write(found: Sequence[Results]) -> None:
    """Replace the tables between the page's two marks, and the figures."""
    page = pages.PAGES / "quality.md"
    before, _, rest = page.read_text().partition(BEGIN)
    tables = "\n\n".join(table(results) for results in found)
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}")
    for optimizer in ("SGD", "AdamW"):
        draw(
            [r for r in found if r.workload.optimizer == optimizer], f"quality-{optimizer.lower()}"
        )


def draw(found: Sequence[Results], name: str) -> None:
    """A row per workload: every run at the largest scale, with budgets (A) and (B)."""
    figure, axes = pages.pyplot().subplots(
        len(found), 2, figsize=(8.4, 1.75 * len(found) + 0.3), sharex="row", sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for row, results in zip(axes, found, strict=True):
        for axis, budget in zip(row, ("samples", "steps"), strict=True):
            _draw_panel(axis, results, budget)
        low, high = sorted(row[0].get_xlim())  # better is to the right
        row[0].set_xlim((low, high) if results.workload.higher_is_better else (high, low))
    pages.save(figure, name)


def _draw_panel(axis: Any, results: Results, budget: str) -> None:
    workload, scale, base = results.workload, max(results.workload.scales), results.base
    axis.axvline(statistics.mean(base.good), color=pages.CONTROL, linewidth=1.2)
    names = results.methods[::-1]
    for y, method in enumerate(names):
        cell = results.cell(method, scale, budget)
        colour = pages.OURS if method == workload.adaptive else pages.OTHERS
        axis.plot(cell.good, [y] * len(cell.good), "o", color=colour, alpha=0.75, mew=0)
        if fate := cell.fate():
            axis.text(
                0.02, y, fate, transform=axis.get_yaxis_transform(), color=colour, va="center"
            )
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="y", color=pages.INK, alpha=0.25, linewidth=0.6)
    steps = results.cell(workload.adaptive, scale, budget).steps()
    letter = "(A) same samples" if budget == "samples" else f"(B) {workload.adaptive}'s steps"
    axis.set_title(f"{workload.title}, S = {scale}\n{letter}, {steps} steps", fontsize=9.5)
    axis.set_xlabel(f"{workload.metric}   (line: scale 1, {base.steps()} steps)")
