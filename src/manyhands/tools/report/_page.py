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
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from manyhands.tools.record import Run, read_record
from manyhands.tools.report._curves import WINDOW, WINDOWS, batch_size, numbers, samples
from manyhands.tools.report._follow import WorkerState
from manyhands.tools.report._panels import Panel, axes, panels

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Most colour-blind readers can tell these apart, on white and on black.
_COLOURS = ("#3d85c6", "#e07b00", "#1f9e77", "#c2569b", "#7d6bd6", "#b8960c", "#d1495b", "#2aa5bd")
_AXES = {"progress": "progress", "step": "steps", "samples": "samples", "time": "time"}
_HEIGHTS = {"best": "best fit", "all": "all values", "log": "log scale"}
_SMOOTHING = {**{str(window): name for name, window in WINDOWS.items()}, "0.0": "off"}
_NO_VALUE = "–"
# Parts of the names of values whose best is the highest; of all others the best is the lowest.
_HIGHER = ("acc", "score", "reward", "auc", "f1", "bleu", "precision", "recall", "psnr", "return")

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
    figure begins with the vertical scale on which its curves can be distinguished, also if one of
    them diverges; on the page, the reader can choose all values, a log scale, the smoothing, and
    what the curves stand against. A value that never changes is a row of a table.
    """
    several = [runs] if isinstance(runs, Run | str | os.PathLike) else list(runs)
    if not several:
        raise ValueError("write_report needs at least one run, got none.")
    read = [run if isinstance(run, Run) else read_record(run) for run in several]
    page = _render_page(read, title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name of a run may come from a path, which may hold bytes that are not text.
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def write_following(
    workers: Sequence[WorkerState], path: Path, title: str, reload: float | None
) -> None:
    """Replace the page at `path` by one with the states of the workers, in one step.

    A browser that loads the page meanwhile gets the old page or the new one. The page reloads
    itself after `reload` seconds.
    """
    runs = [worker.run for worker in workers if worker.run is not None]
    page = _render_page(runs, title, _worker_table(workers, runs, reload))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(page, encoding="utf-8", errors="replace")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _render_page(runs: list[Run], title: str, workers: str = "") -> str:
    """Return the page as HTML, with the script and all figures inside."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            'a report is drawn with plotly, which is not installed: pip install "manyhands[cli]"'
        ) from error
    found = panels(runs, labels := _labels_of_runs(runs))
    shown = [panel for panel in found if not panel.constant]
    smoothed = any(curve.window for panel in shown for curve in panel.curves)
    data = {
        "figures": [json.loads(_figure(panel).to_json(engine="json")) for panel in shown],
        "axes": axes(runs),
    }
    here = files(__package__)
    return Template((here / "page.html").read_text("utf-8")).substitute(
        title=html.escape(title),
        style=(here / "page.css").read_text("utf-8"),
        switch=_choice("axis", "Curves against", {n: _AXES[n] for n in _AXES if n in data["axes"]})
        + _choice("height", "Heights", _HEIGHTS)
        + _choice("smoothing", "Smoothing", _SMOOTHING, str(WINDOW)) * smoothed
        if shown
        else "",
        workers=workers,
        table=_summary_table(runs, labels),
        figures="\n".join(map(_figure_element, shown))
        + "<p>There are no steps yet.</p>" * (not found),
        constants=_constant_table([panel for panel in found if panel.constant], runs, labels),
        configuration=_configuration(runs, labels),
        plotly=get_plotlyjs(),
        # Only "<" could end the script element early, and JSON has another way to write it.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        script=(here / "page.js").read_text("utf-8"),
    )


def _figure(panel: Panel) -> Figure:
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
            meta={"run": curve.run, "x": curve.x, "window": curve.window},
            y=curve.y,
            mode="lines+markers" if len(curve.y) <= 40 else "lines",
            line={"color": _colour(curve.run), "dash": curve.dash, "width": 1.8},
            marker={"size": 5},
            opacity=0.25 if curve.window == 0.0 else 1.0,
            hovertemplate="%{y:.5g}",
        )
    return figure


def _colour(run: int) -> str:
    return _COLOURS[run % len(_COLOURS)]


def _labels_of_runs(runs: list[Run]) -> list[str]:
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
    positive = any(y > 0 for curve in panel.curves for y in curve.y)
    box = f'<input type="checkbox" name="log: {title}">'
    log = f'<label class="log">{box}log scale</label>' * positive
    return (
        f"<figure>{log}<h2>{title}</h2>{meaning}"
        f'<div class="plot" aria-label="{title}"></div></figure>'
    )


def _choice(name: str, legend: str, choices: dict[str, str], chosen: str | None = None) -> str:
    """Return radio buttons; if none is named, the first is chosen."""
    chosen = next(iter(choices)) if chosen is None else chosen
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" * (value == chosen)}>'
        f"<span>{text}</span></label>"
        for value, text in choices.items()
    )
    return f'<fieldset class="switch"><legend>{legend}</legend>{buttons}</fieldset>'


def _summary_table(runs: list[Run], labels: list[str]) -> str:
    """Return the table that a reader sees first: a row for each run, with a box to hide it."""
    headings, rows = summary(runs)
    head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in ["run", *headings])
    body = "\n".join(
        f'<tr><th scope="row"><label><input type="checkbox" checked value="{number}"'
        f' name="{html.escape(label)}">'
        f'<i style="background:{_colour(number)}"></i>{html.escape(label)}</label></th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for number, (label, cells) in enumerate(zip(labels, rows, strict=True))
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def _worker_table(workers: Sequence[WorkerState], runs: list[Run], reload: float | None) -> str:
    """Return a table of the states: a row for each worker, also for records without a run."""
    labels = {run.path: label for run, label in zip(runs, _labels_of_runs(runs), strict=True)}
    rows = []
    for worker in workers:
        label = labels.get(worker.path, str(worker.path))
        age = format_duration(worker.age, digits=2)
        left = format_duration(worker.left, digits=2)
        rows.append(
            f'<tr class="{worker.state}"><th scope="row">{html.escape(label)}</th>'
            f"<td>{worker.state}</td><td>{age}</td><td>{left}</td>"
            f"<td>{html.escape(worker.text)}</td></tr>"
        )
    headings = ("worker", "state", "age of the last line", "time left", "")
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    now = datetime.now().astimezone()
    reloads = "" if reload is None else f' data-reload="{reload}"'
    return (
        f'<section class="table workers" data-written="{now.timestamp()}"{reloads}><table>'
        f"<caption>Written {now.isoformat(' ', 'seconds')}<span></span></caption>"
        f"<thead><tr>{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></section>"
    )


def _constant_table(shown: Sequence[Panel], runs: list[Run], labels: list[str]) -> str:
    """Return a table of the values that never change: a row for each, a column for each run."""
    if not shown:
        return ""
    head = "".join(f'<th scope="col">{html.escape(label)}</th>' for label in labels)
    rows = []
    for panel in shown:
        cells = []
        for number in range(len(runs)):
            own = dict.fromkeys(
                _format_cell(curve.y[0]) + " (dotted)" * (curve.dash == "dot")
                for curve in panel.curves
                if curve.run == number
            )
            cells.append(f"<td>{html.escape(', '.join(own)) or _NO_VALUE}</td>")
        rows.append(
            f'<tr><th scope="row">{html.escape(panel.title)}'
            f"<small>{html.escape(panel.meaning)}</small></th>{''.join(cells)}</tr>"
        )
    return (
        '<section class="table constant"><table><thead><tr><th scope="col">always the same</th>'
        f"{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></section>"
    )


def _configuration(runs: list[Run], labels: list[str]) -> str:
    """Return what the records say of the runs' options, folded away."""
    parts = []
    for run, label in zip(runs, labels, strict=True):
        facts: dict[str, object] = {
            "date": run.header.get("date"),
            "torch": run.header.get("torch"),
        }
        facts |= {"workers": run.header.get("workers"), "batch_size": None}
        if (size := batch_size(run)) is not None:
            facts["batch_size"] = f"{size:g}"
        config = run.header.get("config")
        sources = run.header.get("sources")
        facts |= config if isinstance(config, dict) else {}
        rows = "".join(
            f'<tr><th scope="row">{html.escape(str(name))}</th>'
            f"<td>{html.escape(str(value))}</td></tr>"
            for name, value in facts.items()
            if value is not None
        )
        texts = [str(source) for source in sources] if isinstance(sources, list) else []
        pres = "".join(f"<pre>{html.escape(text)}</pre>" for text in texts)
        parts.append(f"<div><h3>{html.escape(label)}</h3><table>{rows}</table>{pres}</div>")
    return f"<details><summary>Configuration</summary><div>{''.join(parts)}</div></details>"


# -- the table: one row for each run -----------------------------------------------------------


def summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return the headings, and for each run one cell for each heading."""
    own = list(dict.fromkeys(key for run in runs for key in run.own))
    sized = [batch_size(run) is not None for run in runs]
    rate = "samples/s" if all(sized) else "per second" if any(sized) else "steps/s"
    headings = ["steps", "progress", "time", rate, "average gain", "skipped", "not finite"]
    rows = [
        [
            _format_cell(_last_value(run, "step")),
            _format_cell(_last_value(run, "progress")),
            format_duration(_last_value(run, "time")),
            _format_rate(run, "" if all(sized) or not any(sized) else " steps"),
            _format_cell(_mean(run, "gain")),
            _format_cell(_last_value(run, "skipped")),
            _format_cell(_last_value(run, "nonfinite")),
            *(
                cell
                for key in own
                for cell in (_format_cell(_last_value(run, key)), _best_cell(run, key))
            ),
        ]
        for run in runs
    ]
    named = [name for key in own for name in (f"last {key}", f"{_best_word(key)} {key}")]
    return headings + named, rows


def _best_word(key: str) -> str:
    return "highest" if any(part in key.lower() for part in _HIGHER) else "lowest"


def _best_cell(run: Run, key: str) -> str:
    """Return the best value, and the step that had it."""
    if key not in run.columns:
        return _NO_VALUE
    pairs = zip(numbers(run, key), (line["step"] for line in run.lines), strict=True)
    known = [(value, step) for value, step in pairs if value is not None and math.isfinite(value)]
    if not known:
        return _NO_VALUE
    choose = max if _best_word(key) == "highest" else min
    value, step = choose(known, key=lambda pair: pair[0])
    return f"{_format_cell(value)} at {step:,}"


def _format_rate(run: Run, unit: str) -> str:
    """Return samples a second, from the first line to the last; steps, if the batch is unknown."""
    if len(run.lines) < 2:
        return _NO_VALUE
    begin, *_, end = samples(run)
    if begin is None or end is None:
        begin = run.lines[0]["step"]
        end = run.lines[-1]["step"]
    else:
        unit = " samples" * bool(unit)
    seconds = run.lines[-1]["time"] - run.lines[0]["time"]
    return _format_cell((end - begin) / seconds) + unit if seconds > 0 else _NO_VALUE


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
    """Return a number as a cell shows it: four digits, counts in full."""
    if value is None:
        return _NO_VALUE
    # Counts stay whole, and large numbers are not written as 1.2e+05.
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_duration(seconds: float | None, digits: int = 3) -> str:
    """Return seconds as a reader takes them in.

    >>> format_duration(0.01234, 2), format_duration(75), format_duration(7500)
    ('0.012 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return _format_cell(seconds)
    if seconds < 60:
        return f"{seconds:.{digits}g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
