"""Which figures a page has, which curves are in each, and on which scale. No drawing here.

First come the user's own values, then the values that every reader of a page wants, in the order
of `_WELL_KNOWN`, then the values of other sources. A figure that would be empty is left out, and
one in which nothing changes is a row of a table instead (`constant`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.tools.record import Run
from manyhands.tools.report._curves import (
    DOTTED,
    THROUGHPUT,
    Curve,
    batch_size,
    choose_scale,
    curves_of,
    is_long,
    numbers,
    progress_values,
    trim,
)

_WIDE = 100.0  # highest over lowest value from which a well-known figure has a log scale


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
        "workers", "Workers", "workers", "How many took part. With blocks: in the last sync round."
    ),
    Panel("rounds", "Sync rounds", "rounds", "How many sync rounds of blocks there were so far."),
    Panel("every", "Length of a block", "steps", "The local steps between two sync rounds."),
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
_NOT_DRAWN = {"step", "time", "progress", "factor", "sqr", "var", "passes", "members"}
_NOT_DRAWN |= {"skipped", "nonfinite"}  # the table has them
_NOT_DRAWN |= {"batch_scale", "batch_passes", "batch_reason", "fixed_seconds", "pass_seconds"}
_NOT_DRAWN |= {"simple_noise_scale_error"}
_NOT_DRAWN |= {column for column, _ in DOTTED.values()}


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


def axes(runs: Sequence[Run]) -> dict[str, str]:
    """Return the horizontal axes that a reader can choose, the best first, with their titles."""
    with_progress = [progress_values(run) is not None for run in runs if run.lines]
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


def _own_panel(key: str, runs: Sequence[Run]) -> Panel:
    smoothed = any(is_long(numbers(run, key)) for run in runs if key in run.columns)
    meaning = "Faint: all values. Full colour: their running mean, as the smoothing above says."
    return Panel(key, key, key, meaning if smoothed else "")


def _unknown_panel(key: str) -> Panel:
    # The drift of one of several optimizers, such as cosine_Muon.
    measure, _, optimizer = key.partition("_")
    for panel in _WELL_KNOWN:
        if optimizer and panel.key == measure in ("distance", "spread", "cosine"):
            return replace(panel, key=key, title=f"{panel.title}: {optimizer}")
    return Panel(key, key.replace("_", " ").capitalize(), key)


def _with_curves(panel: Panel, runs: Sequence[Run], labels: Sequence[str], most: int) -> Panel:
    """Return a panel with the curves of all runs, on a log scale if that shows more of them."""
    curves = tuple(
        curve
        for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        if run.lines
        for curve in curves_of(panel.key, index, run, label, most)
    )
    curves = tuple(sorted(curves, key=lambda curve: curve.window != 0))  # faint ones underneath
    meaning = panel.meaning
    if any(curve.dash not in ("solid", "dot") for curve in curves):
        meaning += " Dashes: further parameter groups."
    heights = [y for curve in curves for y in curve.y if math.isfinite(y)]
    logarithmic, shown = choose_scale([curve.y for curve in curves])
    own = panel.key in {key for run in runs for key in run.own}
    if (panel.logarithmic or own) and heights and min(heights) > 0:
        # A single odd number among a user's values does not decide; any of ours does.
        low, high = trim(sorted(heights)) if own else (min(heights), max(heights))
        logarithmic, shown = (True, None) if high > _WIDE * low else (logarithmic, shown)
    if shown is not None:
        meaning += (
            f" Cut off: values from {min(heights):.4g} to {max(heights):.4g}; "
            "“all values” above shows them."
        )
    return replace(
        panel, curves=curves, meaning=meaning.strip(), logarithmic=logarithmic, range=shown
    )
