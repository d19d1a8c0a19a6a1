"""Which figures a page has, which curves are in each, and on which scale. No drawing here.

First come the user's own values, then the values that every reader of a page wants, in the order
of `_WELL_KNOWN`, then the values of other sources. A figure that would be empty is left out, and
one in which nothing changes is a row of a table instead (`constant`).

A long or uneven curve is drawn as a reader can take it in:

    thin           Cut the curve into equal chunks, and keep the lowest and the highest value of
                   each: a single spike in a million steps stays visible, which every tenth value
                   would not ensure.
    running_mean   The course of a noisy curve: the mean of the values around each one.
    choose_scale   One run that diverges must not flatten all other curves of its figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise, takewhile
from statistics import median_low

from manyhands.record import Run

_DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
_LONG = 200  # a curve of more values is also drawn as its running mean
WINDOWS = {"0.5 %": 0.005, "2 %": 0.02, "10 %": 0.1}  # of the run, for the running mean
WINDOW = 0.02  # that a page begins with
_FEWER = 4  # a running mean needs so many times fewer points
_CHUNKS = 200  # in each of which the throughput is measured
_WIDE = 100.0  # highest over lowest value from which a well-known figure has a log scale


@dataclass(frozen=True)
class Curve:
    """One line in a figure; `x` has one list for each axis the reader can choose.

    `window` is that of a running mean, 0 for the values that it smooths, and None for a curve that
    is always drawn.
    """

    run: int
    label: str
    dash: str
    x: dict[str, list[float | None]]
    y: list[float]
    window: float | None = None


@dataclass(frozen=True)
class Panel:
    """One figure: the values of one key, for all runs.

    `logarithmic` and `range` are the vertical scale that a page begins with; a range of None shows
    all values. In `_WELL_KNOWN`, `logarithmic` permits a log scale, and the values decide.
    """

    key: str
    title: str
    unit: str
    meaning: str = ""
    logarithmic: bool = False
    range: tuple[float, float] | None = None
    curves: tuple[Curve, ...] = ()

    @property
    def constant(self) -> bool:
        """Whether no curve of several values changes."""
        several = all(len(curve.y) > 1 for curve in self.curves)
        return several and all(set(curve.y) == {curve.y[0]} for curve in self.curves)


THROUGHPUT = "throughput"  # a column that is computed
_WELL_KNOWN = (
    Panel(
        "gain",
        "Gain",
        "small-batch steps",
        "The number of small-batch steps that one step was worth: 1 if more workers only repeat "
        "each other, the scale if each of them counts in full.",
    ),
    Panel(
        "noise_scale",
        "Noise scale",
        "small batches",
        "The number of small batches whose mean gradient has as much signal as noise. Batches much "
        "larger than this are not worth their price.",
        logarithmic=True,
    ),
    Panel(
        "lr",
        "Learning rate",
        "learning rate",
        "Solid: the rate that was applied. Dotted: the rate of the small batch, as your schedule "
        "sets it.",
        logarithmic=True,
    ),
    Panel(
        "scale",
        "Scale",
        "times the small batch",
        "The size of a step's batch. Dotted: the size that Ramp moves towards.",
    ),
    Panel(
        "efficiency",
        "Efficiency",
        "samples at scale 1",
        "What a sample of the batch was worth: 1 is as much as in the small batch.",
    ),
    Panel(
        "step_seconds",
        "Time of a step",
        "seconds",
        "On the slowest rank. Dotted: as Ramp's fit predicts it.",
        logarithmic=True,
    ),
    Panel(
        THROUGHPUT,
        "Throughput",
        "a second",
        "Samples a second; steps a second for a run whose record has no batch_size.",
    ),
    Panel(
        "workers",
        "Workers",
        "workers",
        "How many took part. With blocks: in the last sync round.",
    ),
    Panel("rounds", "Sync rounds", "rounds", "How many sync rounds of blocks there were so far."),
    Panel(
        "every",
        "Length of a block",
        "steps",
        "The local steps between two sync rounds.",
    ),
    Panel(
        "distance",
        "Distance of a block",
        "length of the vector",
        "How far the workers' mean moved from the anchor in the last block.",
    ),
    Panel(
        "spread",
        "Spread of the workers",
        "length of the vector",
        "How far the workers were from their mean at the end of the last block. Much more than the "
        "distance: the blocks are long for these learning rates.",
    ),
    Panel(
        "cosine",
        "Agreement of the workers",
        "cosine",
        "1: all workers moved the same way in the last block. 0: their ways were unrelated, and "
        "their mean is little more than one worker's work.",
    ),
    Panel(
        "waited",
        "Waiting for sync rounds",
        "seconds",
        "How long the steps of this worker have waited for sync rounds, in all.",
    ),
    Panel(
        "undone",
        "Undone rounds",
        "rounds",
        "Sync rounds that were repeated because a worker was lost in them.",
    ),
    Panel(
        "dropped",
        "Dropped steps",
        "steps",
        "Steps of this worker that are in no mean: they came too late, or were not finite.",
    ),
    Panel(
        "left_out",
        "Left out of a mean",
        "workers",
        "How often a worker's numbers were not finite, and were left out of a round's mean.",
    ),
    Panel(
        "simple_noise_scale",
        "Simple noise scale",
        "samples",
        "NoiseScale's estimate: the batch whose mean gradient has as much signal as noise.",
        logarithmic=True,
    ),
    Panel(
        "loading_seconds",
        "Time for loading",
        "seconds",
        "The wait for batches, since the last line.",
    ),
    Panel(
        "compute_seconds",
        "Time for passes",
        "seconds",
        "Forward and backward passes, since the last line.",
    ),
    Panel(
        "sync_seconds",
        "Time for other ranks",
        "seconds",
        "From the end of the passes to the optimizer's step, since the last line.",
    ),
    Panel(
        "update_seconds",
        "Time for the optimizer",
        "seconds",
        "The optimizer's step, since the last line.",
    ),
)
# drawn dotted in the figure of another value, and what the curve is called there
_DOTTED = {"scale": ("target_scale", "target"), "step_seconds": ("predicted_seconds", "predicted")}
_NOT_DRAWN = {"step", "time", "progress", "factor", "sqr", "var", "passes", "members"}
_NOT_DRAWN |= {"skipped", "nonfinite"}  # the table has them
_NOT_DRAWN |= {"batch_scale", "batch_passes", "batch_reason", "fixed_seconds", "pass_seconds"}
_NOT_DRAWN |= {"simple_noise_scale_error"}
_NOT_DRAWN |= {column for column, _ in _DOTTED.values()}


def panels(runs: Sequence[Run], labels: Sequence[str], most_points: int = 2000) -> list[Panel]:
    """Return the figures for these runs, each with at least one curve."""
    own = list(dict.fromkeys(key for run in runs for key in run.own))
    drawn = _NOT_DRAWN.union(own, (panel.key for panel in _WELL_KNOWN))
    others = dict.fromkeys(key for run in runs for key in run.header["keys"] if key not in drawn)
    wanted = [_own_panel(key, runs) for key in own]
    wanted += _WELL_KNOWN
    wanted += [_unknown_panel(key) for key in others]
    filled = [_with_curves(panel, runs, labels, most_points) for panel in wanted]
    return [panel for panel in filled if panel.curves]


def describe_column(key: str, *, own: bool) -> dict[str, object]:
    """Return how a live page shows a column: its title and meaning, and its place among all."""
    known = {panel.key: (order, panel) for order, panel in enumerate(_WELL_KNOWN)}
    order, panel = known.get(key, (len(known), _unknown_panel(key)))
    if own:
        order, panel = 0, Panel(key, key, key)
    drawn = own or key not in _NOT_DRAWN.union({"rounds_seconds", "rounds", "waited"})
    meaning = panel.meaning.partition(" Dotted: ")[0]  # a live page draws one curve
    meaning = "The rate of the small batch, as your schedule sets it." if key == "lr" else meaning
    return {"title": panel.title, "meaning": meaning, "own": own, "order": order, "drawn": drawn}


def axes(runs: Sequence[Run]) -> dict[str, str]:
    """Return the horizontal axes that a reader can choose, the best first, with their titles."""
    with_progress = [_progress_values(run) is not None for run in runs if run.lines]
    progress = "Progress, in steps of the small batch"
    if not all(with_progress):
        progress += " (plain steps for a run without it)"
    names = {"step": "Optimizer steps", "time": "Seconds since the start"}
    with_samples = [batch_size(run) is not None for run in runs if run.lines]
    if any(with_samples):
        names["samples"] = "Samples" + " (a run without batch_size is not drawn)" * (
            not all(with_samples)
        )
    return {"progress": progress, **names} if any(with_progress) else names


def batch_size(run: Run) -> float | None:
    """Return the samples of a small batch, if the record says so; a stranger may say anything."""
    return _positive(run.header.get("batch_size"))


def _positive(value: object) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**53
    return float(value) if known else None  # type: ignore[arg-type]


def samples(run: Run) -> list[float | None]:
    """Return how many samples were seen up to each line: None without a batch size.

    A step has `scale` small batches; without a scale it has one of each worker.
    """
    size = batch_size(run)
    if size is None:
        return [None] * len(run.lines)
    workers = _positive(run.header.get("workers")) or 1.0
    scales = numbers(run, "scale") if "scale" in run.columns else [None] * len(run.lines)
    seen, before = 0.0, 0
    found: list[float | None] = []
    for line, scale in zip(run.lines, scales, strict=True):
        known = scale is not None and math.isfinite(scale)
        seen += (line["step"] - before) * size * (scale if known else workers)
        before = line["step"]
        found.append(seen)
    return found


def throughput(run: Run) -> tuple[list[int], list[float]]:
    """Return the rate in equal chunks of the run, and the index of each chunk's last line."""
    if len(run.lines) < 2:
        return [], []
    done, times = samples(run), numbers(run, "time")
    if done[0] is None:
        done = numbers(run, "step")
    last = len(run.lines) - 1
    edges = sorted({last * edge // _CHUNKS for edge in range(_CHUNKS + 1)})
    indices, rates = [], []
    for start, end in pairwise(edges):
        seconds = times[end] - times[start]  # type: ignore[operator]
        if seconds > 0:
            indices.append(end)
            rates.append((done[end] - done[start]) / seconds)  # type: ignore[operator]
    return indices, rates


def numbers(run: Run, column: str) -> list[float | None]:
    """Return a column with None for every value that is not a number.

    A record may come from a stranger. No text of its values gets past this function.
    """
    return [_to_number(value) for value in run.column(column)]


def _to_number(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.copysign(math.inf, value > 0 or -1)


def _own_panel(key: str, runs: Sequence[Run]) -> Panel:
    is_long = any(_is_long(numbers(run, key)) for run in runs if key in run.columns)
    meaning = "Faint: all values. Full colour: their running mean, as the smoothing above says."
    return Panel(key, key, key, meaning if is_long else "")


def _unknown_panel(key: str) -> Panel:
    return Panel(key, key.replace("_", " ").capitalize(), key)


def _is_long(values: list[float | None]) -> bool:
    return sum(value is not None for value in values) > _LONG


def _with_curves(panel: Panel, runs: Sequence[Run], labels: Sequence[str], most: int) -> Panel:
    curves = tuple(
        curve
        for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        if run.lines
        for curve in _curves(panel.key, index, run, label, most)
    )
    curves = tuple(sorted(curves, key=lambda curve: curve.window != 0))  # faint ones underneath
    meaning = panel.meaning
    if any(curve.dash not in ("solid", "dot") for curve in curves):
        meaning += " Dashes: further parameter groups."
    heights = [y for curve in curves for y in curve.y if math.isfinite(y)]
    logarithmic, shown = choose_scale([curve.y for curve in curves])
    own = panel.key in {key for run in runs for key in run.own}
    if (panel.logarithmic or own) and heights and min(heights) > 0:
        # a value of the user's may have a single odd one; ours begin on a log scale for any
        low, high = _trim(sorted(heights)) if own else (min(heights), max(heights))
        logarithmic, shown = (True, None) if high > _WIDE * low else (logarithmic, shown)
    if shown is not None:
        meaning += (
            f" Cut off: values from {min(heights):.4g} to {max(heights):.4g}; "
            "“all values” above shows them."
        )
    return replace(
        panel, curves=curves, meaning=meaning.strip(), logarithmic=logarithmic, range=shown
    )


def _curves(key: str, index: int, run: Run, label: str, most: int) -> Iterator[Curve]:
    """Yield all curves of one run in the figure of `key`."""

    def draw(
        groups: list[list[float | None]], label: str, dash: str = "", window: float | None = None
    ) -> Iterator[Curve]:
        for number, values in enumerate(groups):
            if kept := thin(values, most // _FEWER if window else most):
                yield Curve(
                    run=index,
                    label=label if len(groups) == 1 else f"{label}, group {number}",
                    dash=dash or _DASHES[number % len(_DASHES)],
                    x={axis: [x[at] for at in kept] for axis, x in positions.items()},
                    y=[values[at] for at in kept],  # type: ignore[misc]
                    window=window,
                )

    positions = _positions(run)
    if key == THROUGHPUT and key not in run.columns:
        known = dict(zip(*throughput(run), strict=True))
        if known:
            yield from draw([[known.get(at) for at in range(len(run.lines))]], label)
        return
    groups = [numbers(run, column) for column in _group_columns(run, key)]
    factors = [numbers(run, column) for column in _group_columns(run, "factor")]
    if key == "lr" and factors:
        applied = [_product(rate, factor) for rate, factor in zip(groups, factors, strict=False)]
        # The rate in use is the schedule's, for the small batch, times the rule's factor.
        yield from draw(_distinct(applied), label)
        yield from draw(_distinct(groups), f"{label}, small batch", dash="dot")
    elif key in run.own and any(_is_long(group) for group in groups):
        yield from draw(groups, label, window=0.0)
        for window in WINDOWS.values():
            yield from draw([running_mean(each, window) for each in groups], label, window=window)
    else:
        yield from draw(_distinct(groups), label)
        column, name = _DOTTED.get(key, ("", ""))
        if column in run.columns:
            yield from draw([numbers(run, column)], f"{label}, {name}", dash="dot")


def _group_columns(run: Run, key: str) -> list[str]:
    """Return `key` itself, or one column for each parameter group."""
    known = set(run.columns)  # a list would be searched anew for each group
    groups = takewhile(known.__contains__, (f"{key}/{index}" for index in count()))
    return [*([key] if key in known else []), *groups]


def _distinct(groups: list[list[float | None]]) -> list[list[float | None]]:
    """Drop groups that repeat an earlier one: equal curves would cover each other."""
    return [group for index, group in enumerate(groups) if group not in groups[:index]]


def _positions(run: Run) -> dict[str, list[float | None]]:
    steps = numbers(run, "step")
    progress = _progress_values(run)
    return {
        "progress": steps if progress is None else progress,
        "step": steps,
        "time": numbers(run, "time"),
        "samples": samples(run),
    }


def _progress_values(run: Run) -> list[float | None] | None:
    """Return the progress of each line, or None if no line has one."""
    values = numbers(run, "progress") if "progress" in run.columns else []
    return values if any(value is not None for value in values) else None


def _product(first: list[float | None], second: list[float | None]) -> list[float | None]:
    pairs = zip(first, second, strict=True)
    return [None if one is None or two is None else one * two for one, two in pairs]


# -- one curve, in plain numbers; None is a line of the record without the value -------------------

_TRIMMED = 0.02  # of a curve's values, at either end, do not count towards the range
_FEWEST = 20  # values of a curve from which any are trimmed; a short curve is drawn whole
_FLATTENED = 4.0  # times as high as the trimmed curves: from here on, values are cut off
_FLAT = 0.1  # of the figure's height: a typical curve lower than this asks for a log scale
_SPREAD = 10.0  # highest over lowest value from which a log scale separates the curves


def thin(values: Sequence[float | None], most: int = 2000) -> list[int]:
    """Return the indices of about `most` values to draw, without those that are None.

    If a chunk holds a value that is not finite, its first one stays too: it is a gap.

    >>> thin([3.0, None, 1.0])
    [0, 2]
    >>> thin([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, -5.0, 0.0], most=4)
    [0, 1, 4, 6, 7]
    """
    present = [index for index, value in enumerate(values) if value is not None]
    if len(present) <= most:
        return present
    keep = {present[0], present[-1]}
    chunks = max(1, most // 2)  # two values of each are kept
    for chunk in range(chunks):
        start, end = (len(present) * edge // chunks for edge in (chunk, chunk + 1))
        finite = []
        gap = None
        for index in present[start:end]:
            if math.isfinite(values[index]):  # type: ignore[arg-type]
                finite.append(index)
            elif gap is None:
                gap = index
                keep.add(gap)
        if finite:
            keep.add(min(finite, key=values.__getitem__))  # type: ignore[arg-type]
            keep.add(max(finite, key=values.__getitem__))  # type: ignore[arg-type]
    return sorted(keep)


def running_mean(values: Sequence[float | None], window: float) -> list[float | None]:
    """Return at each value the mean over the nearest `window` of all values; None stays None.

    `window` is a fraction of the curve. Values that are not finite are left out of every mean. At
    both ends the window shrinks, so that it reaches as far to the left of its value as to the
    right.

    >>> running_mean([1.0, 2.0, None, 6.0, 7.0], window=0.75)
    [1.0, 3.0, None, 5.0, 7.0]
    """
    present: list[int] = []
    sums = [0.0]  # of the first n values: a window's sum is a difference of two
    for index, value in enumerate(values):
        if value is not None and math.isfinite(value):
            present.append(index)
            sums.append(sums[-1] + value)
    reach = int(len(present) * window) // 2
    means: list[float | None] = [None] * len(values)
    for number, index in enumerate(present):
        near = min(reach, number, len(present) - 1 - number)
        start, end = number - near, number + near + 1
        means[index] = (sums[end] - sums[start]) / (end - start)
    return means


def choose_scale(curves: Sequence[Sequence[float]]) -> tuple[bool, tuple[float, float] | None]:
    """Return whether a figure of these curves wants a log scale, and the range to show, or None.

    A short spike is cut off. A run that has diverged for long is shown beside the others on a log
    scale. Curves that a linear scale shows well get neither.

    >>> choose_scale([[1.0 + 0.01 * step for step in range(100)] + [80.0]])
    (False, (1.0, 2.91))
    >>> choose_scale([[1.0, 2.0, 1.5]] * 3 + [[1.0, 70.0, 80.0]])
    (True, None)
    >>> choose_scale([[2.0, 1.0, 0.5]])
    (False, None)
    """
    finite = [sorted(filter(math.isfinite, curve)) for curve in curves]
    finite = [values for values in finite if values]
    if not finite:
        return False, None
    lowest, highest = min(v[0] for v in finite), max(v[-1] for v in finite)
    trimmed = [_trim(values) for values in finite]
    low, high = min(low for low, _ in trimmed), max(high for _, high in trimmed)
    height = high - low
    # The typical curve decides, so one that diverges does not hide that all others are flat.
    typical = median_low(top - bottom for bottom, top in trimmed)
    if lowest > 0 and highest > _SPREAD * lowest and 0 < typical < _FLAT * height:
        return True, None
    if not (0 < _FLATTENED * height < highest - lowest < math.inf):
        return False, None
    # At most one height more on each side: a curve's steep beginning stays in sight.
    bottom, top = max(lowest, low - height), min(highest, high + height)
    return False, (float(f"{bottom:.6g}"), float(f"{top:.6g}"))


def _trim(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest of sorted values, without the outermost at either end."""
    cut = math.ceil(_TRIMMED * len(values)) if len(values) >= _FEWEST else 0
    return values[cut], values[-1 - cut]
