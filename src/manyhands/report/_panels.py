"""Which figures a page has, and which curves are in each. No drawing here.

First the user's own values, then the ones that every reader of a page wants, in the order of
`_WELL_KNOWN`, then whatever other sources gave. A figure that would be empty is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

from manyhands.record import Run


def thin(values: Sequence[float | None], most: int = 2000) -> list[int]:
    """The indices of about `most` values to draw; those that are None are never drawn.

    Where a piece holds a value that is not finite, its first one stays too: it is a gap.

    >>> thin([3.0, None, 1.0])
    [0, 2]
    >>> thin([0.0, 9.0, 0.0, 0.0, 0.0, 0.0, -5.0, 0.0], most=4)
    [0, 1, 4, 6, 7]
    """
    there = [index for index, value in enumerate(values) if value is not None]
    if len(there) <= most:
        return there
    keep = {there[0], there[-1]}
    pieces = max(1, most // 2)
    for piece in range(pieces):
        start, end = (len(there) * edge // pieces for edge in (piece, piece + 1))
        finite = []
        gap = None
        for index in there[start:end]:
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
    """At each value the mean over the nearest `window` (a share of all); None stays None.

    Values that are not finite are left out of every mean. At both ends the window shrinks, so
    that it lies as far to the left of its point as to the right.

    >>> running_mean([1.0, 2.0, None, 6.0, 7.0], window=0.75)
    [1.0, 3.0, None, 5.0, 7.0]
    """
    there: list[int] = []
    sums = [0.0]
    for index, value in enumerate(values):
        if value is not None and math.isfinite(value):
            there.append(index)
            sums.append(sums[-1] + value)
    reach = int(len(there) * window) // 2
    means: list[float | None] = [None] * len(values)
    for number, index in enumerate(there):
        near = min(reach, number, len(there) - 1 - number)
        start, end = number - near, number + near + 1
        means[index] = (sums[end] - sums[start]) / (end - start)
    return means


_DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")
_LONG = 200  # so many values are also drawn as their running mean
_WINDOW = 0.02  # of the run, for the running mean
_WIDE = 100.0  # a highest over a lowest value that asks for a logarithmic axis


@dataclass(frozen=True)
class Curve:
    """One line in a figure; `x` has one list for each axis the reader can choose."""

    run: int
    label: str
    dash: str
    x: dict[str, list[float | None]]
    y: list[float]
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """One figure: the values of one key, for all runs."""

    key: str
    title: str
    unit: str
    meaning: str = ""
    logarithmic: bool = False
    curves: tuple[Curve, ...] = ()


_WELL_KNOWN = (
    Panel(
        "gain",
        "Gain",
        "small-batch steps",
        "How many steps of the small batch one step was worth: 1 where more workers only repeat "
        "each other, the scale where each of them counts in full.",
    ),
    Panel(
        "noise_scale",
        "Noise scale",
        "small batches",
        "How many small batches must be averaged until signal and noise in the gradient are "
        "equal. Batches much larger than this are not worth their price.",
        logarithmic=True,
    ),
    Panel(
        "lr",
        "Learning rate",
        "learning rate",
        "Drawn through: the rate that was applied. Dotted: the rate of the small batch, as "
        "your schedule sets it.",
        logarithmic=True,
    ),
    Panel("scale", "Scale", "times the small batch", "How large a step's batch was."),
)
_NOT_DRAWN = {"step", "time", "progress", "factor", "sqr", "var", "workers", "passes"}
_NOT_DRAWN |= {"skipped", "nonfinite"}  # the table has them


def panels(runs: Sequence[Run], labels: Sequence[str], most_points: int = 2000) -> list[Panel]:
    """The figures for these runs, each with at least one curve."""
    own = list(dict.fromkeys(key for run in runs for key in run.own))
    drawn = _NOT_DRAWN.union(own, (panel.key for panel in _WELL_KNOWN))
    others = dict.fromkeys(key for run in runs for key in run.header["keys"] if key not in drawn)
    wanted = [_own_panel(key, runs) for key in own]
    wanted += _WELL_KNOWN
    wanted += [Panel(key, key.replace("_", " ").capitalize(), key) for key in others]
    filled = [_fill(panel, runs, labels, most_points) for panel in wanted]
    return [panel for panel in filled if panel.curves]


def axes(runs: Sequence[Run]) -> dict[str, str]:
    """What can stand on the horizontal axis, best first, and what to write under it."""
    having = [_progress(run) is not None for run in runs if run.lines]
    progress = "Progress, in steps of the small batch"
    if not all(having):
        progress += " (plain steps for a run without it)"
    names = {"step": "Optimizer steps", "time": "Seconds since the start"}
    return {"progress": progress, **names} if any(having) else names


def numbers(run: Run, column: str) -> list[float | None]:
    """A column with None for all that is not a number; other people's words end here."""
    return [_number(value) for value in run.column(column)]


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.copysign(math.inf, value > 0 or -1)


def _own_panel(key: str, runs: Sequence[Run]) -> Panel:
    is_long = any(_is_long(numbers(run, key)) for run in runs if key in run.columns)
    meaning = f"Faint: every value. In full colour: the mean over {_WINDOW:.0%} of the run."
    return Panel(key, key, key, meaning if is_long else "")


def _is_long(values: list[float | None]) -> bool:
    return sum(value is not None for value in values) > _LONG


def _fill(panel: Panel, runs: Sequence[Run], labels: Sequence[str], most: int) -> Panel:
    curves = tuple(
        curve
        for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        if run.lines
        for curve in _curves(panel.key, index, run, label, most)
    )
    curves = tuple(sorted(curves, key=lambda curve: not curve.faint))  # faint ones underneath
    heights = [y for curve in curves for y in curve.y if math.isfinite(y)]
    wide = bool(heights) and min(heights) > 0 and max(heights) > _WIDE * min(heights)
    meaning = panel.meaning
    if any(curve.dash not in ("solid", "dot") for curve in curves):
        meaning += " Dashes: further parameter groups."
    return replace(
        panel, curves=curves, meaning=meaning.strip(), logarithmic=panel.logarithmic and wide
    )


def _curves(key: str, index: int, run: Run, label: str, most: int) -> Iterator[Curve]:
    """All curves of one run in the figure of `key`."""

    def draw(
        groups: list[list[float | None]], label: str, dash: str = "", faint: bool = False
    ) -> Iterator[Curve]:
        for number, values in enumerate(groups):
            if kept := thin(values, most):
                yield Curve(
                    run=index,
                    label=label if len(groups) == 1 else f"{label}, group {number}",
                    dash=dash or _DASHES[number % len(_DASHES)],
                    x={axis: [x[at] for at in kept] for axis, x in positions.items()},
                    y=[values[at] for at in kept],  # type: ignore[misc]
                    faint=faint,
                )

    positions = _positions(run)
    groups = [numbers(run, column) for column in _columns(run, key)]
    factors = [numbers(run, column) for column in _columns(run, "factor")]
    if key == "lr" and factors:
        applied = [_product(rate, factor) for rate, factor in zip(groups, factors, strict=False)]
        yield from draw(_distinct(applied), label)
        yield from draw(_distinct(groups), f"{label}, small batch", dash="dot")
    elif key in run.own and any(_is_long(group) for group in groups):
        yield from draw(groups, label, faint=True)
        yield from draw([running_mean(group, _WINDOW) for group in groups], label)
    else:
        yield from draw(_distinct(groups), label)


def _columns(run: Run, key: str) -> list[str]:
    """`key` itself, or one column for each parameter group."""
    known = set(run.columns)
    groups = takewhile(known.__contains__, (f"{key}/{index}" for index in count()))
    return [*([key] if key in known else []), *groups]


def _distinct(groups: list[list[float | None]]) -> list[list[float | None]]:
    """Without groups that only repeat an earlier one."""
    return [group for index, group in enumerate(groups) if group not in groups[:index]]


def _positions(run: Run) -> dict[str, list[float | None]]:
    steps = numbers(run, "step")
    progress = _progress(run)
    return {
        "progress": steps if progress is None else progress,
        "step": steps,
        "time": numbers(run, "time"),
    }


def _progress(run: Run) -> list[float | None] | None:
    """None where no line has one."""
    values = numbers(run, "progress") if "progress" in run.columns else []
    return values if any(value is not None for value in values) else None


def _product(first: list[float | None], second: list[float | None]) -> list[float | None]:
    pairs = zip(first, second, strict=True)
    return [None if one is None or two is None else one * two for one, two in pairs]
