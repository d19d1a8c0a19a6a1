"""Runs to one HTML file: a table with a row for each run, and a figure for each panel.

The file has everything in it, so that it opens without a network. plotly draws in the reader's
browser; `page.js` gives it the figures, and draws them again when the reader makes another choice.
"""

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

# Most colour-blind readers can tell these apart, on white and on black.
_COLOURS = ("#3d85c6", "#e07b00", "#1f9e77", "#c2569b", "#7d6bd6", "#b8960c", "#d1495b", "#2aa5bd")
_AXES = {"progress": "progress", "step": "steps", "time": "time"}
_HEIGHTS = {"best": "best fit", "all": "all values", "log": "log scale"}
_NO_VALUE = "–"

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

    A long curve is thinned out to about 2,000 points, in which a single spike stays visible. Each
    figure begins with the vertical scale on which its curves can be told apart, also if one of
    them diverges; on the page, the reader can choose all values or a log scale.
    """
    several = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    if not several:
        raise ValueError("write_report needs at least one run, got none.")
    read = [run if isinstance(run, Run) else read_record(run) for run in several]
    page = _page(read, title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name of a run may come from a path, which may hold bytes that are not text.
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
        switch=_switch("axis", "Curves against", {name: _AXES[name] for name in data["axes"]})
        + _switch("height", "Heights", _HEIGHTS)
        if shown
        else "",
        table=_summary_table(runs, labels),
        figures="\n".join(map(_figure_element, shown)) or "<p>These runs have no steps yet.</p>",
        plotly=get_plotlyjs(),
        # Only "<" could end the script element early, and JSON has another way to write it.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        script=(here / "page.js").read_text("utf-8"),
    )


def _figure(panel: Panel) -> Any:
    """Return a plotly figure. `page.js` adds the page's colours and the horizontal axis."""
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
        figure.update_yaxes(type="log", exponentformat="power")
    if panel.range is not None:
        figure.update_yaxes(range=panel.range)
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
    """Return the runs' names, with the file if two runs have the same name."""
    names = [run.name for run in runs]
    labels = [
        name if names.count(name) == 1 else f"{name} ({run.path})"
        for name, run in zip(names, runs, strict=True)
    ]
    return [
        label if labels.count(label) == 1 else f"{label} #{number}"
        for number, label in enumerate(labels, start=1)
    ]


def _figure_element(panel: Panel) -> str:
    """Return the element in which the script draws a figure."""
    meaning = f"<figcaption>{html.escape(panel.meaning)}</figcaption>" if panel.meaning else ""
    title = html.escape(panel.title)
    return (
        f'<figure><h2>{title}</h2>{meaning}<div class="plot" aria-label="{title}"></div></figure>'
    )


def _switch(name: str, legend: str, choices: dict[str, str]) -> str:
    """Return radio buttons, the first of which is chosen."""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" * (not index)}>'
        f"<span>{text}</span></label>"
        for index, (value, text) in enumerate(choices.items())
    )
    return f'<fieldset class="switch"><legend>{legend}</legend>{buttons}</fieldset>'


def _summary_table(runs: list[Run], labels: list[str]) -> str:
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


# -- the table: one row for each run -----------------------------------------------------------


def summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the headings, and for each run one cell for each heading."""
    own = list(dict.fromkeys(key for run in runs for key in run.own))
    headings = ["steps", "progress", "time", "average gain", "skipped", "not finite"]
    rows = [
        [
            _format_cell(_last_value(run, "step")),
            _format_cell(_last_value(run, "progress")),
            _format_duration(_last_value(run, "time")),
            _format_cell(_mean(run, "gain")),
            _format_cell(_last_value(run, "skipped")),
            _format_cell(_last_value(run, "nonfinite")),
            *(_format_cell(_last_value(run, key)) for key in own),
        ]
        for run in runs
    ]
    return headings + [f"last {key}" for key in own], rows


def _numbers_of(run: Run, column: str) -> list[float]:
    if column not in run.columns:
        return []
    return [value for value in numbers(run, column) if value is not None]


def _last_value(run: Run, column: str) -> float | None:
    values = _numbers_of(run, column)
    return values[-1] if values else None


def _mean(run: Run, column: str) -> float | None:
    values = [value for value in _numbers_of(run, column) if math.isfinite(value)]
    return sum(values) / len(values) if values else None


def _format_cell(value: float | None) -> str:
    if value is None:
        return _NO_VALUE
    # Counts stay whole, and large numbers are not written as 1.2e+05.
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _format_duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return _format_cell(seconds)
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
