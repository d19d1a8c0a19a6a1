"""Write an HTML file with a table of all runs and a figure for each panel.

plotly draws in the reader's browser: `page.js` passes the figures to plotly after each choice of
the reader.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from manyhands.tools.record import Run, read_record
from manyhands.tools.report._curves import (
    WINDOW,
    WINDOWS,
    Values,
    batch_size,
    numbers,
    samples,
)
from manyhands.tools.report._follow import WorkerState
from manyhands.tools.report._panels import Panel, axes, own_keys, panels

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Colours that most colour-blind readers can distinguish, on white and on black.
_COLOURS = ("#3d85c6", "#e07b00", "#1f9e77", "#c2569b", "#7d6bd6", "#b8960c", "#d1495b", "#2aa5bd")
_AXES = {"progress": "progress", "step": "steps", "samples": "samples", "time": "time"}
_HEIGHTS = {"best": "best fit", "all": "all values", "log": "log scale"}
_SMOOTHING = {str(window): name for name, window in WINDOWS.items()} | {"0.0": "off"}
_NO_VALUE = "–"
_WITH_MARKERS = 40  # curves with at most this number of values have markers
# Substrings in the names of values for which higher is better.
_HIGHER = ("acc", "score", "reward", "auc", "f1", "bleu", "precision", "recall", "psnr", "return")

RunOrPath = Run | str | os.PathLike[str]


def write_report(
    runs: RunOrPath | Sequence[RunOrPath],
    path: str | os.PathLike[str],
    *,
    title: str = "Training runs",
) -> Path:
    """Write an HTML page that compares `runs`: records, or paths of records.

    >>> import tempfile, manyhands as mh
    >>> folder = tempfile.mkdtemp()
    >>> with mh.Record(folder + "/a.jsonl") as record:
    ...     record.step(loss=0.5)
    >>> page = write_report(folder + "/a.jsonl", folder + "/report.html")
    >>> page.name
    'report.html'

    Long curves are thinned to about 2,000 points, and single spikes stay visible. The initial
    vertical scale of a figure separates the curves, even if a run diverges. The reader can choose
    all values, a log scale, the smoothing and the horizontal axis. Values that never change are
    rows of a table.
    """
    if isinstance(runs, Run | str | os.PathLike):
        runs = [runs]
    if not runs:
        raise ValueError("write_report needs at least one run, got none.")
    read = []
    for run in runs:
        if not isinstance(run, Run):
            run = read_record(run)
        read.append(run)
    page = _render_page(read, title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run's name may come from a path that is not valid text.
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def write_following(
    workers: Sequence[WorkerState], path: Path, title: str, reload: float | None
) -> None:
    """Replace the page atomically by a page with the states of the workers.

    The page reloads after `reload` seconds.
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
    """Return the page as HTML, including scripts and figures."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            'a report needs plotly, which is not installed: pip install "manyhands[cli]"'
        ) from error
    labels = _labels_of_runs(runs)
    changing = []
    constant = []
    for panel in panels(runs, labels):
        if panel.constant:
            constant.append(panel)
        else:
            changing.append(panel)
    titles = axes(runs)
    boxes = [_figure_element(panel) for panel in changing]
    if not (changing or constant):
        boxes.append("<p>There are no steps yet.</p>")
    data = {
        "figures": [json.loads(_figure(panel).to_json(engine="json")) for panel in changing],
        "axes": titles,
    }
    here = files(__package__)
    return Template((here / "page.html").read_text("utf-8")).substitute(
        title=escape(title),
        style=(here / "page.css").read_text("utf-8"),
        switch=_choices(changing, {axis: _AXES[axis] for axis in titles}),
        workers=workers,
        table=_summary_table(runs, labels),
        figures="\n".join(boxes),
        constants=_constant_table(constant, labels),
        configuration=_configuration(runs, labels),
        plotly=get_plotlyjs(),
        # "<" could close the script element, but JSON can escape it.
        data=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        script=(here / "page.js").read_text("utf-8"),
    )


def _figure(panel: Panel) -> Figure:
    """Return a plotly figure. `page.js` adds colours and the horizontal axis."""
    from plotly import graph_objects

    figure = graph_objects.Figure(
        layout={
            "template": "none",
            "showlegend": False,
            "hovermode": "x unified",
            "margin": {"l": 64, "r": 16, "t": 8, "b": 48},
            "xaxis": {"automargin": True},
            "yaxis": {"title": {"text": escape(panel.unit)}, "automargin": True},
        }
    )
    if panel.logarithmic:
        figure.update_yaxes(type="log", exponentformat="power")
    if panel.range is not None:
        figure.update_yaxes(range=panel.range)
    for curve in panel.curves:
        mode = "lines"
        if len(curve.y) <= _WITH_MARKERS:
            mode = "lines+markers"
        opacity = 1.0
        if curve.window == 0.0:  # behind a running mean
            opacity = 0.25
        figure.add_scatter(
            name=escape(curve.label),  # plotly interprets names as HTML
            meta={"run": curve.run, "x": curve.x, "window": curve.window},
            y=curve.y,
            mode=mode,
            line={"color": _colour(curve.run), "dash": curve.dash, "width": 1.8},
            marker={"size": 5},
            opacity=opacity,
            hovertemplate="%{y:.5g}",
        )
    return figure


def _colour(run: int) -> str:
    return _COLOURS[run % len(_COLOURS)]


def _labels_of_runs(runs: list[Run]) -> list[str]:
    """Return distinct names: append the path, and a number if necessary."""
    names = [run.name for run in runs]
    paths = [run.path for run in runs]
    labels = []
    for number, run in enumerate(runs, start=1):
        label = run.name
        if names.count(label) > 1:
            label += f" ({run.path})"
            if paths.count(run.path) > 1:
                label += f" #{number}"
        labels.append(label)
    return labels


def _figure_element(panel: Panel) -> str:
    title = escape(panel.title)
    meaning = ""
    if panel.meaning:
        meaning = f"<figcaption>{escape(panel.meaning)}</figcaption>"
    log = ""
    if any(max(curve.y) > 0 for curve in panel.curves):
        box = f'<input type="checkbox" name="log: {title}">'
        log = f'<label class="log">{box}log scale</label>'
    return (
        f"<figure>{log}<h2>{title}</h2>{meaning}"
        f'<div class="plot" aria-label="{title}"></div></figure>'
    )


def _choices(shown: Sequence[Panel], axes: dict[str, str]) -> str:
    """Return the buttons above the figures."""
    if not shown:
        return ""
    choices = _choice("axis", "Curves against", axes, next(iter(axes)))
    choices += _choice("height", "Heights", _HEIGHTS, "best")
    # The values behind a running mean are the first curve.
    if any(panel.curves[0].window == 0.0 for panel in shown):
        choices += _choice("smoothing", "Smoothing", _SMOOTHING, str(WINDOW))
    return choices


def _choice(name: str, legend: str, choices: dict[str, str], chosen: str) -> str:
    buttons = ""
    for value, text in choices.items():
        attributes = f'type="radio" name="{name}" value="{value}"'
        if value == chosen:
            attributes += " checked"
        buttons += f"<label><input {attributes}><span>{text}</span></label>"
    return f'<fieldset class="switch"><legend>{legend}</legend>{buttons}</fieldset>'


# -- tables ----------------------------------------------------------------------------------------


def _table(headings: Iterable[str], rows: Iterable[str], caption: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "\n".join(rows)
    return f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def _row(heading: str, cells: Iterable[object], kind: str = "") -> str:
    """Return a table row. `heading` is HTML, and `cells` are text."""
    data = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
    return f'<tr{kind}><th scope="row">{heading}</th>{data}</tr>'


def _summary_table(runs: list[Run], labels: list[str]) -> str:
    """Return the first table: a row per run, with a checkbox to hide the run."""
    own = own_keys(runs)
    rate = "steps/s"
    if all(batch_size(run) is not None for run in runs):
        rate = "samples/s"
    headings = ["run", "steps", "progress", "time", rate, "average gain", "skipped", "not finite"]
    for key in own:
        headings += [f"last {key}", f"{_best_word(key)} {key}"]
    rows = []
    for number, run in enumerate(runs):
        done = numbers(run, "step")
        if rate == "samples/s":
            done = samples(run)
        cells = [
            _last_cell(run, "step"),
            _last_cell(run, "progress"),
            format_duration(_last_value(run, "time")),
            _rate_cell(run, done),
            _mean_cell(run, "gain"),
            _last_cell(run, "skipped"),
            _last_cell(run, "nonfinite"),
        ]
        for key in own:
            cells += [_last_cell(run, key), _best_cell(run, key)]
        label = escape(labels[number])
        box = f'<input type="checkbox" checked value="{number}" name="{label}">'
        dot = f'<i style="background:{_colour(number)}"></i>'
        rows.append(_row(f"<label>{box}{dot}{label}</label>", cells))
    return _table(headings, rows)


def _worker_table(workers: Sequence[WorkerState], runs: list[Run], reload: float | None) -> str:
    """Return the table of worker states, including records without a run."""
    labels = {}
    for run, label in zip(runs, _labels_of_runs(runs), strict=True):
        labels[run.path] = label
    rows = []
    for worker in workers:
        label = labels.get(worker.path, str(worker.path))
        age = format_duration(worker.age, digits=2)
        left = format_duration(worker.left, digits=2)
        cells = (worker.state, age, left, worker.text)
        rows.append(_row(escape(label), cells, f' class="{worker.state}"'))
    headings = ("worker", "state", "age of the last line", "time left", "")
    now = datetime.now().astimezone()
    caption = f"<caption>Written {now.isoformat(' ', 'seconds')}<span></span></caption>"
    attributes = f'class="table workers" data-written="{now.timestamp()}"'
    if reload is not None:
        attributes += f' data-reload="{reload}"'
    return f"<section {attributes}>{_table(headings, rows, caption)}</section>"


def _constant_table(shown: Sequence[Panel], labels: list[str]) -> str:
    """Return the table of values that never change: a row per value, a column per run."""
    if not shown:
        return ""
    rows = []
    for panel in shown:
        cells: list[dict[str, None]] = [{} for _ in labels]  # distinct values, in order
        for curve in panel.curves:
            cell = _format_cell(curve.y[0])
            if curve.dash == "dot":
                cell += " (dotted)"
            cells[curve.run][cell] = None
        heading = f"{escape(panel.title)}<small>{escape(panel.meaning)}</small>"
        rows.append(_row(heading, (", ".join(cell) or _NO_VALUE for cell in cells)))
    table = _table(["always the same", *labels], rows)
    return f'<section class="table constant">{table}</section>'


def _configuration(runs: list[Run], labels: list[str]) -> str:
    """Return the runs' options in a collapsed section."""
    parts = ""
    for run, label in zip(runs, labels, strict=True):
        facts: dict[str, object] = {}
        for name in ("date", "torch", "workers"):
            facts[name] = run.header.get(name)
        size = batch_size(run)
        if size is not None:
            facts["batch_size"] = f"{size:g}"
        config = run.header.get("config")
        if isinstance(config, dict):
            facts |= config
        rows = ""
        for name, value in facts.items():
            if value is not None:
                rows += _row(escape(str(name)), [value])
        parts += f"<div><h3>{escape(label)}</h3><table>{rows}</table>"
        sources = run.header.get("sources")
        if isinstance(sources, list):
            for source in sources:
                parts += f"<pre>{escape(str(source))}</pre>"
        parts += "</div>"
    return f"<details><summary>Configuration</summary><div>{parts}</div></details>"


# -- cells -----------------------------------------------------------------------------------------


def _best_word(key: str) -> str:
    if any(part in key.lower() for part in _HIGHER):
        return "highest"
    return "lowest"


def _best_cell(run: Run, key: str) -> str:
    """Return the best value, and the first step with this value."""
    finite = _finite_values(run, key)
    if not finite:
        return _NO_VALUE
    best = min(finite)
    if _best_word(key) == "highest":
        best = max(finite)
    step = run.lines[numbers(run, key).index(best)]["step"]
    return f"{_format_cell(best)} at {step:,}"


def _rate_cell(run: Run, done: Values) -> str:
    """Return the rate of `done` per second, from the first to the last line."""
    if len(run.lines) < 2:
        return _NO_VALUE
    seconds = run.lines[-1]["time"] - run.lines[0]["time"]
    if seconds <= 0:
        return _NO_VALUE
    return _format_cell((done[-1] - done[0]) / seconds)  # type: ignore[operator]


def _last_cell(run: Run, column: str) -> str:
    return _format_cell(_last_value(run, column))


def _last_value(run: Run, column: str) -> float | None:
    for value in reversed(numbers(run, column)):
        if value is not None:
            return value
    return None


def _mean_cell(run: Run, column: str) -> str:
    finite = _finite_values(run, column)
    if not finite:
        return _NO_VALUE
    return _format_cell(sum(finite) / len(finite))


def _finite_values(run: Run, column: str) -> list[float]:
    values = numbers(run, column)
    return [value for value in values if value is not None and math.isfinite(value)]


def _format_cell(value: float | None) -> str:
    """Return four digits, and counts and large numbers in full."""
    if value is None:
        return _NO_VALUE
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_duration(seconds: float | None, digits: int = 3) -> str:
    """Return a duration in seconds, minutes or hours.

    >>> format_duration(0.01234, 2), format_duration(75), format_duration(7500)
    ('0.012 s', '1 min 15 s', '2 h 05 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return _format_cell(seconds)
    if seconds < 60:
        return f"{seconds:.{digits}g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s"
