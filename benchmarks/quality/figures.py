"""The runs as pictures that read on white and on black."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from quality.store import Store
from quality.tables import Results, methods
from quality.workloads import Workload

INK = "#808080"  # legible on both
ADAPTIVE = "#e0700a"
FIXED_COLOUR = "#3a8fd0"
BASE = "#2fa36b"
SCALE_COLOURS = {1: BASE, 8: FIXED_COLOUR, 16: ADAPTIVE, 32: ADAPTIVE}

STYLE: Any = {
    "svg.hashsalt": "quality",
    "svg.fonttype": "path",
    "savefig.transparent": True,
    "font.size": 9.5,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
}


def write(workloads: Sequence[Workload], store: Store, folder: Path) -> None:
    results = [r for r in (Results.of(w, store) for w in workloads) if r.rows]
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for optimizer in ("SGD", "AdamW"):
            some = [r for r in results if r.workload.optimizer == optimizer and r.base()]
            if some:
                _save(_ends(some), folder / f"quality-{optimizer.lower()}.svg")
        some = [r for r in results if r.workload.name in ("mnist-sgd", "shakespeare-sgd")]
        if some:
            _save(_courses(some), folder / "quality-progress.svg")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


# -- where the runs end -----------------------------------------------------------------------


def _ends(results: Sequence[Results]) -> Any:
    """A row per workload: every run at the largest scale, with budgets (A) and (B)."""
    figure, axes = plt.subplots(
        len(results), 2, figsize=(8.4, 1.75 * len(results) + 0.3), sharex="row", sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for row, result in zip(axes, results, strict=True):
        for ax, budget in zip(row, ("samples", "steps"), strict=True):
            _end_panel(ax, result, budget)
        _limit(row[0], result)
    return figure


def _end_panel(ax: Axes, results: Results, budget: str) -> None:
    workload = results.workload
    scale = max(workload.scales)
    base = results.base()
    assert base is not None and base.mean is not None
    ax.axvline(base.mean, color=BASE, linewidth=1.2)
    names = methods(workload)
    for y, method in enumerate(reversed(names)):
        rows = results.rows_of(method, scale, budget)
        colour = ADAPTIVE if method == workload.adaptive else FIXED_COLOUR
        good = [row["score"] for row in rows if not workload.failure(row["score"])]
        ax.plot(good, [y] * len(good), "o", color=colour, markersize=6, alpha=0.75, mew=0)
        cell = results.cell(method, scale, budget)
        if cell is not None and cell.failures:
            _note(ax, y, cell.fate(), _best(good, workload) if good else None, colour)
    ax.set_yticks(range(len(names)), list(reversed(names)))
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
    adaptive = results.cell(workload.adaptive, scale, budget)
    steps = "" if adaptive is None else f", {adaptive.steps:,.0f} steps"
    letter = "(A) same samples" if budget == "samples" else f"(B) {workload.adaptive}'s steps"
    ax.set_title(f"{workload.title}, S = {scale}\n{letter}{steps}")
    ax.set_xlabel(f"{workload.metric}   (line: scale 1, {base.steps:,.0f} steps)")


def _note(ax: Axes, y: float, text: str, after: float | None, colour: str) -> None:
    """At the left edge, or to the right of the best point."""
    where = (0.02, y) if after is None else (after, y)
    frame = ax.get_yaxis_transform() if after is None else ax.transData
    away = (0, 0) if after is None else (8, 0)
    ax.annotate(text, where, away, frame, "offset points", color=colour, va="center")


def _best(scores: Sequence[float], workload: Workload) -> float:
    return max(scores) if workload.higher_is_better else min(scores)


def _limit(ax: Axes, results: Results) -> None:
    """Leave room around the points; better is to the right."""
    low, high = ax.get_xlim()
    ax.set_xlim((low, high) if results.workload.higher_is_better else (high, low))


# -- how they get there -----------------------------------------------------------------------


def _courses(results: Sequence[Results]) -> Any:
    """A row per workload: loss against steps and against progress, and the gain."""
    figure, axes = plt.subplots(
        len(results), 3, figsize=(8.4, 2.35 * len(results)), squeeze=False, layout="constrained"
    )
    for row, result in zip(axes, results, strict=True):
        for scale, curve in _curves(result).items():
            steps, progress, loss, gain = zip(*curve, strict=True)
            style = {"color": SCALE_COLOURS[scale], "label": f"S = {scale}", "linewidth": 1.5}
            row[0].plot(steps, loss, **style)
            row[1].plot(progress, loss, **style)
            row[2].plot(progress, gain, **style)
        row[0].set(title=result.workload.title, ylabel="training loss", xlabel="optimizer steps")
        row[1].set(xlabel="progress")
        row[2].set(xlabel="progress", ylabel="gain")
        row[0].set_xscale("log")
        row[1].legend(frameon=False, labelcolor=INK)
    return figure


def _curves(results: Results) -> dict[int, list[Any]]:
    """Of the first seed, by scale: the base run's and AdaScale's."""
    method = results.workload.adaptive
    rows = results.where(budget="base", seed=0)
    for scale in results.workload.scales:
        rows += [row for row in results.rows_of(method, scale, "steps") if row["seed"] == 0]
    return {row["scale"]: row["curve"] for row in rows if row["curve"]}
