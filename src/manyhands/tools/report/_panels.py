"""Choose the figures of a page, and their curves and vertical scales.

The order is: values of the user, values of `_WELL_KNOWN`, values of other sources. Values that
never change become rows of a table (`constant`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhands.tools.record import Run
from manyhands.tools.report._curves import (
    THROUGHPUT,
    Curve,
    batch_size,
    choose_scale,
    curves_of,
    progress_values,
    trim,
)

_WIDE = 100.0  # ratio of highest to lowest value from which figures may use a log scale


@dataclass(frozen=True)
class Panel:
    """A figure: the values of a key for all runs.

    `logarithmic` and `range` (None for all values) are the initial vertical scale. Without curves,
    `logarithmic` permits a log scale.
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
        return all(len(curve.y) > 1 and len(set(curve.y)) == 1 for curve in self.curves)


_WELL_KNOWN = (
    Panel(
        "gain",
        "Gain",
        "small-batch steps",
        "The number of small-batch steps that a step was worth: 1 if more workers only repeat each "
        "other, the scale if the work of each counts in full.",
    ),
    Panel(
        "noise_scale",
        "Noise scale",
        "small batches",
        "The number of small batches whose mean gradient contains equal signal and noise. Much "
        "larger batches are not worth their cost.",
        logarithmic=True,
    ),
    Panel(
        "lr",
        "Learning rate",
        "learning rate",
        "Solid: the applied rate. Dotted: the rate of the small batch, as set by the schedule.",
        logarithmic=True,
    ),
    Panel(
        "scale",
        "Scale",
        "times the small batch",
        "The batch size of a step. Dotted: the target of Ramp.",
    ),
    Panel(
        "efficiency",
        "Efficiency",
        "samples at scale 1",
        "The value of a sample in the batch; 1 is the value of a sample in the small batch.",
    ),
    Panel(
        "step_seconds",
        "Time of a step",
        "seconds",
        "Mean over ranks. Dotted: predicted by Ramp's fit.",
        logarithmic=True,
    ),
    Panel(
        THROUGHPUT,
        "Throughput",
        "a second",
        "Samples per second; steps per second for a run without batch_size.",
    ),
    Panel(
        "workers", "Workers", "workers", "Participating workers; in blocks, in the last sync round."
    ),
    Panel("rounds", "Sync rounds", "rounds", "Sync rounds of blocks so far."),
    Panel("every", "Length of a block", "steps", "The local steps between two sync rounds."),
    Panel(
        "distance",
        "Distance of a block",
        "length of the vector",
        "Distance between the workers' mean and the anchor after the last block.",
    ),
    Panel(
        "spread",
        "Spread of the workers",
        "length of the vector",
        "Distance between the workers and their mean at the end of the last block. A much "
        "larger spread than distance means that blocks are long for these learning rates.",
    ),
    Panel(
        "cosine",
        "Agreement of the workers",
        "cosine",
        "1: all workers moved in the same direction in the last block. 0: the directions were "
        "unrelated, and the mean is worth little more than a single worker.",
    ),
    Panel(
        "waited",
        "Waiting for sync rounds",
        "seconds",
        "Total wait of this worker's steps for sync rounds.",
    ),
    Panel(
        "undone",
        "Undone rounds",
        "rounds",
        "Sync rounds repeated after the loss of a worker.",
    ),
    Panel(
        "dropped",
        "Dropped steps",
        "steps",
        "Steps of this worker that no mean includes, because they were late or not finite.",
    ),
    Panel(
        "left_out",
        "Left out of a mean",
        "workers",
        "Number of times that a worker was excluded from a mean because of infinities or NaN.",
    ),
    Panel(
        "simple_noise_scale",
        "Simple noise scale",
        "samples",
        "NoiseScale's estimate: the batch whose mean gradient contains equal signal and noise.",
        logarithmic=True,
    ),
    Panel(
        "loading_seconds",
        "Time for loading",
        "seconds",
        "Waiting for batches, since the last line.",
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
_NOT_DRAWN |= {"skipped", "nonfinite"}  # in the table
_NOT_DRAWN |= {"target_scale", "predicted_seconds"}  # dotted curves of other figures
_NOT_DRAWN |= {"batch_scale", "batch_passes", "batch_reason", "fixed_seconds", "pass_seconds"}
_NOT_DRAWN |= {"simple_noise_scale_error"}


def panels(runs: Sequence[Run], labels: Sequence[str]) -> list[Panel]:
    own = own_keys(runs)
    wanted = [Panel(key, key, key, logarithmic=True) for key in own]
    wanted += _WELL_KNOWN
    drawn = {*_NOT_DRAWN, *(panel.key for panel in wanted)}
    for run in runs:
        for key in run.header["keys"]:
            if key not in drawn:
                drawn.add(key)
                wanted.append(unknown_panel(key))
    filled = []
    for panel in wanted:
        panel = _with_curves(panel, runs, labels, own=panel.key in own)
        if panel.curves:
            filled.append(panel)
    return filled


def own_keys(runs: Sequence[Run]) -> list[str]:
    keys: dict[str, None] = {}
    for run in runs:
        keys.update(dict.fromkeys(run.own))
    return list(keys)


def axes(runs: Sequence[Run]) -> dict[str, str]:
    """Return the titles of the horizontal axes, starting with the default axis."""
    begun = [run for run in runs if run.lines]
    with_progress = sum(progress_values(run) is not None for run in begun)
    with_samples = sum(batch_size(run) is not None for run in begun)
    titles = {}
    if with_progress:
        titles["progress"] = "Progress, in steps of the small batch"
        if with_progress < len(begun):
            titles["progress"] += " (plain steps for runs without it)"
    titles["step"] = "Optimizer steps"
    titles["time"] = "Seconds since the start"
    if with_samples:
        titles["samples"] = "Samples"
        if with_samples < len(begun):
            titles["samples"] += " (runs without batch_size are not drawn)"
    return titles


def unknown_panel(key: str) -> Panel:
    return Panel(key, key.replace("_", " ").capitalize(), key)


def _with_curves(panel: Panel, runs: Sequence[Run], labels: Sequence[str], own: bool) -> Panel:
    """Return the panel with curves of all runs."""
    faint: list[Curve] = []  # values behind a running mean
    curves: list[Curve] = []
    heights: list[float] = []
    for index, run in enumerate(runs):
        if not run.lines:
            continue
        for curve in curves_of(panel.key, index, run, labels[index]):
            heights += filter(math.isfinite, curve.y)
            if curve.window == 0.0:
                faint.append(curve)
            else:
                curves.append(curve)
    curves = faint + curves  # later curves are drawn on top
    heights.sort()
    notes = [panel.meaning]
    if faint:
        notes = ["Faint: all values. Full colour: the running mean, with the smoothing above."]
    if {curve.dash for curve in curves} - {"solid", "dot"}:
        notes.append("Dashes: further parameter groups.")
    logarithmic, shown = choose_scale([curve.y for curve in curves])
    if panel.logarithmic and heights and heights[0] > 0:
        low = heights[0]
        high = heights[-1]
        if own:
            # ignore outliers of the user's values
            low, high = trim(heights)
        if high > _WIDE * low:
            logarithmic = True
            shown = None
    if shown is not None:
        notes.append(
            f"Cut off: values from {heights[0]:.4g} to {heights[-1]:.4g}; "
            "“all values” above shows them."
        )
    return replace(
        panel,
        curves=tuple(curves),
        meaning=" ".join(notes).strip(),
        logarithmic=logarithmic,
        range=shown,
    )
