"""What a probe has found: a row for each scale, the largest level one, a table and a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from manyhands.probe._verdict import Verdict

COLOURS = {"level": "#1f9e77", "worse": "#d1495b", "diverged": "#d1495b", "undecided": "#b8960c"}


@dataclass(frozen=True)
class ProbedScale:
    """One row: the branches of one scale.

    `scale` is in batches of the present size. `losses` are the held-out losses by repeat.
    `difference` is by how much they are above those of scale 1, and `low` and `high` are its
    one-sided bounds.
    """

    scale: int
    passes: int  # of a step, on each rank
    steps: int
    losses: tuple[float, ...]
    difference: float
    low: float
    high: float
    verdict: Verdict

    @property
    def loss(self) -> float:
        """The mean of the losses."""
        return fmean(self.losses)


@dataclass(frozen=True)
class ProbeResult:
    """The result of `probe_batch`. Print it to see the table.

    Attributes:
        rows: one for each scale; `rows[0]` is the present batch.
        largest: the largest scale that is level: the last before the first that is not.
        interval: `largest`, and the smallest scale that is surely worse; infinite if none is. The
            critical batch is between the two.
        margin: by how much a level branch may be behind: 0.954 times the spread of scale 1 from
            repeat to repeat.
        samples: the samples that all branches trained on, over all ranks; None if the
            micro-batches hold no tensor that has a first dimension.
        passes: what the probe cost on each rank, in backward passes. A forward pass over a
            held-out micro-batch counts as a third of one.
        confidence: that of every bound.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = mh.AdaScale(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> def loss(model, batch):
    ...     return (model(batch) - 1.0).square().mean()
    >>> batches = [torch.randn(8, 4) for _ in range(200)]
    >>> result = mh.probe_batch(
    ...     model, optimizer, loss, batches, scales=(1, 2), budget=400, held_out=8
    ... )
    >>> [row.steps for row in result.rows]
    [30, 15]
    >>> result.passes <= 400
    True
    """

    rows: tuple[ProbedScale, ...]
    largest: int
    interval: tuple[int, float]
    margin: float
    samples: int | None
    passes: int
    confidence: float

    @property
    def cells(self) -> list[list[str]]:
        """The table: a heading, and a line for each scale."""
        level = f"{100 * self.confidence:g} %"
        heading = ["scale", "steps", "loss", "behind scale 1", f"bounds, {level} each", "verdict"]
        return [heading, *(_cells_of(row) for row in self.rows)]

    @property
    def title(self) -> str:
        """What was compared, and what it cost."""
        samples = "" if self.samples is None else f", {self.samples:,} samples"
        return (
            f"{len(self.rows)} scales, {len(self.rows[0].losses)} repeats: "
            f"{self.passes:,} passes on each rank{samples}"
        )

    @property
    def conclusion(self) -> str:
        """The decision in words."""
        low, high = self.interval
        end = "no scale is surely worse" if math.isinf(high) else f"scale {high:g} is surely worse"
        if low == 1:
            return f"Keep the present batch: no larger one was shown to be level; {end}."
        return f"The largest level batch is {low} times the present one; {end}."

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in self.cells
        ]
        margin = f"A level branch is behind by less than {self.margin:.3g}."
        return "\n".join([self.title, "", *lines, "", margin, self.conclusion])

    def figure(self) -> Any:
        """Return a plotly figure: how far each scale is behind, its bounds, and the margin."""
        try:
            from plotly import graph_objects
        except ImportError as error:
            raise ImportError(
                "a figure is drawn with plotly, which is not installed: "
                'pip install "manyhands[cli]"'
            ) from error
        rows = [row for row in self.rows[1:] if math.isfinite(row.difference)]
        figure = graph_objects.Figure(
            layout={
                "template": "none",
                "title": {"text": self.conclusion},
                "xaxis": {"title": {"text": "scale"}, "type": "category"},
                "yaxis": {"title": {"text": "loss behind scale 1"}, "automargin": True},
            }
        )
        figure.add_hrect(y0=-self.margin, y1=self.margin, opacity=0.15, fillcolor="#3d85c6")
        figure.add_scatter(
            x=[str(row.scale) for row in rows],
            y=[row.difference for row in rows],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [row.high - row.difference for row in rows],
                "arrayminus": [row.difference - row.low for row in rows],
            },
            mode="markers",
            marker={"size": 9, "color": [COLOURS[row.verdict] for row in rows]},
            hovertext=[row.verdict for row in rows],
        )
        return figure


def _cells_of(row: ProbedScale) -> list[str]:
    known = row.verdict in ("level", "worse", "undecided") and math.isfinite(row.difference)
    return [
        f"{row.scale}",
        f"{row.steps:,}",
        f"{row.loss:.5g}",
        f"{row.difference:+.3g}" if known else "",
        f"{row.low:+.3g} to {row.high:+.3g}" if known else "",
        row.verdict,
    ]
