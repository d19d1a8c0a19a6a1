"""Panels and a table to one HTML file, with everything in it."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from manyhands.record import Run, read_record
from manyhands.report._panels import Panel, axes, numbers, panels

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


# Told apart by most colour-blind readers, and legible on white and on black.
_COLOURS = ("#3d85c6", "#e07b00", "#1f9e77", "#c2569b", "#7d6bd6", "#b8960c", "#d1495b", "#2aa5bd")
_AXES = {"progress": "progress", "step": "steps", "time": "time"}

RunOrPath = Run | str | os.PathLike[str]


def write_report(
    runs: RunOrPath | Sequence[RunOrPath],
    path: str | os.PathLike[str],
    *,
    title: str = "Training runs",
) -> Path:
    """Write one HTML page that compares `runs`: records, or the paths of their files.

    >>> import tempfile, manyhands as mh
    >>> folder = tempfile.mkdtemp()
    >>> with mh.Record(folder + "/a.jsonl") as record:
    ...     record.step(loss=0.5)
    >>> page = write_report(folder + "/a.jsonl", folder + "/report.html")
    >>> page.name
    'report.html'

    A long curve is thinned out to about 2,000 points, in which a single spike stays visible.
    """
    several = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    if not several:
        raise ValueError("write_report needs at least one run, got none.")
    read = [run if isinstance(run, Run) else read_record(run) for run in several]
    page = _page(read, title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name taken from a path may hold bytes that are no text.
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def _page(runs: list[Run], title: str) -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            'a report is drawn with plotly, which is not installed: pip install "manyhands[cli]"'
        ) from error
    shown = panels(runs, labels := _labels(runs))
    data = {
        "figures": [json.loads(_figure(panel).to_json(engine="json")) for panel in shown],
        "axes": axes(runs),
    }
    here = files(__package__)
    return Template((here / "page.html").read_text("utf-8")).substitute(
        title=html.escape(title),
        style=(here / "page.css").read_text("utf-8"),
        switch=_switch(list(data["axes"])) if shown else "",
        table=_table(runs, labels),
        figures="\n".join(map(_place, shown)) or "<p>These runs have no steps yet.</p>",
        plotly=get_plotlyjs(),
        # In a script element only "<" could end it; in JSON it can be written so.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        script=(here / "page.js").read_text("utf-8"),
    )


def _figure(panel: Panel) -> Any:
    """A plotly figure. Its colours of paper and ink, and its horizontal axis, are the page's."""
    from plotly import graph_objects

    figure = graph_objects.Figure(
        layout={
            "template": "none",
            "showlegend": False,
            "hovermode": "x unified",
            "margin": {"l": 64, "r": 16, "t": 8, "b": 48},
            "xaxis": {"automargin": True},
            "yaxis": {"title": {"text": html.escape(panel.unit)}, "automargin": True},
        }
    )
    if panel.logarithmic:
        figure.update_yaxes(type="log", dtick=1, exponentformat="power")
    for curve in panel.curves:
        figure.add_scatter(
            name=html.escape(curve.label),  # plotly reads names as HTML
            meta={"run": curve.run, "x": curve.x},
            y=curve.y,
            mode="lines+markers" if len(curve.y) <= 40 else "lines",
            line={"color": _colour(curve.run), "dash": curve.dash, "width": 1.8},
            marker={"size": 5},
            opacity=0.25 if curve.faint else 1.0,
            **{"hoverinfo": "skip"} if curve.faint else {"hovertemplate": "%{y:.5g}"},
        )
    return figure


def _colour(run: int) -> str:
    return _COLOURS[run % len(_COLOURS)]


def _labels(runs: list[Run]) -> list[str]:
    """The runs' names, with the file where two have the same."""
    names = [run.name for run in runs]
    labels = [
        name if names.count(name) == 1 else f"{name} ({run.path})"
        for name, run in zip(names, runs, strict=True)
    ]
    return [
        label if labels.count(label) == 1 else f"{label} #{number}"
        for number, label in enumerate(labels, start=1)
    ]


def _place(panel: Panel) -> str:
    """Where the script puts a figure."""
    meaning = f"<figcaption>{html.escape(panel.meaning)}</figcaption>" if panel.meaning else ""
    title = html.escape(panel.title)
    return (
        f'<figure><h2>{title}</h2>{meaning}<div class="plot" aria-label="{title}"></div></figure>'
    )


def _switch(names: list[str]) -> str:
    choices = "".join(
        f'<label><input type="radio" name="axis" value="{name}"{" checked" * (not index)}>'
        f"<span>{_AXES[name]}</span></label>"
        for index, name in enumerate(names)
    )
    return f'<fieldset class="switch"><legend>Curves against</legend>{choices}</fieldset>'


def _table(runs: list[Run], labels: list[str]) -> str:
    headings, rows = summary(runs)
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in ["run", *headings])
    body = "\n".join(
        f'<tr><th scope="row"><label><input type="checkbox" checked value="{number}">'
        f'<i style="background:{_colour(number)}"></i>{html.escape(label)}</label></th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for number, (label, cells) in enumerate(zip(labels, rows, strict=True))
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
