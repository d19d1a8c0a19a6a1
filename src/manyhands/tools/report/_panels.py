"""Choose the figures of a page, the curves in each figure, and the vertical scales.

The user's own values come first, then the values that every reader of a page wants, in the order of
`_WELL_KNOWN`, then the values of other sources. A figure without values is left out. A figure in
which no value changes becomes a row of a table (`constant`).
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

_WIDE = 100.0  # highest over lowest value from which a well-known figure has a log scale


@dataclass(frozen=True)
class Panel:
    """One figure: the values of one key, for all runs.

    `logarithmic` and `range` are the page's first vertical scale; a range of None shows all values.
    Before the curves are there, `logarithmic` permits a log scale.
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
        return all(len(curve.y) > 1 and len(set(curve.y)) == 1 for curve in self.curves)


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
_NOT_DRAWN |= {"target_scale", "predicted_seconds"}  # dotted in other figures
_NOT_DRAWN |= {"batch_scale", "batch_passes", "batch_reason", "fixed_seconds", "pass_seconds"}
_NOT_DRAWN |= {"simple_noise_scale_error"}


def panels(runs: Sequence[Run], labels: Sequence[str]) -> list[Panel]:
    """Return the figures for these runs, each with at least one curve."""
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
    """Return the keys of the users' own values, each once."""
    keys: dict[str, None] = {}
    for run in runs:
        keys.update(dict.fromkeys(run.own))
    return list(keys)


def axes(runs: Sequence[Run]) -> dict[str, str]:
    """Return the horizontal axes that a reader can choose, the best first, with their titles."""
    begun = [run for run in runs if run.lines]
    with_progress = sum(progress_values(run) is not None for run in begun)
    with_samples = sum(batch_size(run) is not None for run in begun)
    titles = {}
    if with_progress:
        titles["progress"] = "Progress, in steps of the small batch"
        if with_progress < len(begun):
            titles["progress"] += " (plain steps for a run without it)"
    titles["step"] = "Optimizer steps"
    titles["time"] = "Seconds since the start"
    if with_samples:
        titles["samples"] = "Samples"
        if with_samples < len(begun):
            titles["samples"] += " (a run without batch_size is not drawn)"
    return titles


def unknown_panel(key: str) -> Panel:
    """Return a figure for a key of another source."""
    # The drift of one of several optimizers, such as cosine_Muon.
    measure, _, optimizer = key.partition("_")
    for panel in _WELL_KNOWN:
        if optimizer and panel.key == measure in ("distance", "spread", "cosine"):
            return replace(panel, key=key, title=f"{panel.title}: {optimizer}")
    return Panel(key, key.replace("_", " ").capitalize(), key)


def _with_curves(panel: Panel, runs: Sequence[Run], labels: Sequence[str], own: bool) -> Panel:
    """Return a panel with the curves of all runs, on a log scale if that shows more of them."""
    faint: list[Curve] = []  # the values under a running mean
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
        notes = ["Faint: all values. Full colour: their running mean, as the smoothing above says."]
    if {curve.dash for curve in curves} - {"solid", "dot"}:
        notes.append("Dashes: further parameter groups.")
    logarithmic, shown = choose_scale([curve.y for curve in curves])
    if panel.logarithmic and heights and heights[0] > 0:
        low = heights[0]
        high = heights[-1]
        if own:
            # A single odd number among a user's values does not decide.
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
