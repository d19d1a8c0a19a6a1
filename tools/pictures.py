#!/usr/bin/env python3
"""Draw the pictures of README.md and docs/ as SVG files.

    python tools/pictures.py            writes docs/figures/

Each function returns the elements of a picture. Colours of medium brightness without a background
are readable on white and dark pages (tests/test_pictures.py measures the contrast).
"""

from __future__ import annotations

import math
import runpy
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"

TEXT = "#7d8086"
BLUE = "#4c83d6"
ORANGE = "#cf6f1c"
GREEN = "#3f9360"
RED = "#d9534f"
COLOURS = (TEXT, BLUE, ORANGE, GREEN, RED)


def label(x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight} fill="{TEXT}">{text}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, filled: bool = True) -> str:
    fill = colour if filled else "none"
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" '
        f'fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 2.0) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
        f'stroke="{colour}" stroke-width="{width:g}" stroke-linecap="round"/>'
    )


def arrow(x: float, y: float, dx: float, dy: float, colour: str, width: float = 2.0) -> str:
    """Return an arrow from (x, y) by (dx, dy)."""
    tip, angle, head = (x + dx, y + dy), math.atan2(dy, dx), 4.0 + 2.0 * width
    sides = [
        (tip[0] - head * math.cos(angle + turn), tip[1] - head * math.sin(angle + turn))
        for turn in (0.45, -0.45)
    ]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in (tip, *sides))
    end = tip[0] - 0.8 * head * math.cos(angle), tip[1] - 0.8 * head * math.sin(angle)
    shaft = line(x, y, round(end[0], 1), round(end[1], 1), colour, width)
    return f'{shaft}<polygon points="{points}" fill="{colour}"/>'


def picture(title: str, description: str, height: int, elements: list[str]) -> str:
    """Return the SVG file, with a title and a description for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="15">',
            f"<title>{title}</title>",
            f"<desc>{description}</desc>",
            *elements,
            "</svg>\n",
        ]
    )


# -- AdaScale ------------------------------------------------------------------------------------


def gradients(
    x: float, y: float, angles: tuple[float, ...], length: float, step: float
) -> list[str]:
    """Return the gradients of four workers, and AdaScale's step along the mean."""
    turned = [(length * math.cos(angle), length * math.sin(angle)) for angle in angles]
    mean = [sum(values) / len(turned) for values in zip(*turned, strict=True)]
    return [
        *(arrow(x, y, round(dx, 1), round(dy, 1), BLUE, 1.8) for dx, dy in turned),
        arrow(x, y + 58, round(step * mean[0], 1), round(step * mean[1], 1), ORANGE, 4.0),
    ]


def how_far() -> str:
    return picture(
        "How far to step",
        "On the left, the gradients of four workers agree, and the step is as long as one "
        "gradient. On the right, they point in different directions, and the step is several "
        "times as long as their mean.",
        178,
        [
            label(20, 22, "The gradients agree: gain 1", bold=True),
            *gradients(20, 78, (-0.12, -0.04, 0.05, 0.13), 150.0, 1.0),
            label(20, 170, "a small batch would be enough"),
            label(360, 22, "The gradients are noisy: gain 3", bold=True),
            *gradients(400, 78, (-0.95, -0.4, 0.5, 0.85), 58.0, 3.0),
            label(360, 170, "a step is worth three small steps"),
            label(200, 81, "gradients"),
            label(200, 143, "step"),
            label(560, 81, "gradients"),
            label(560, 143, "step"),
        ],
    )


# -- sharding ------------------------------------------------------------------------------------

HELD = (  # memory of each of four workers, in units of the parameters; Adam has two moments
    ("DDP", 1.0, 1.0, 2.0),
    ("OSS + ShardedDataParallel", 1.0, 0.25, 0.5),
    ("FSDP", 0.25, 0.25, 0.5),
)


def who_holds() -> str:
    unit, left, elements = 98.0, 240.0, []
    for row, (name, *parts) in enumerate(HELD):
        x, y = left, 44.0 + 38.0 * row
        elements.append(label(left - 12, y + 18, name, "end"))
        for size, full, colour in zip(parts, HELD[0][1:], (BLUE, ORANGE, GREEN), strict=True):
            elements.append(box(x, y, full * unit, 26, colour, filled=False))
            elements.append(box(x, y, size * unit, 26, colour))
            x += full * unit + 6
    heads = (("parameters", 0.0), ("gradients", unit + 6), ("Adam's state", 2 * unit + 12))
    return picture(
        "Who holds what",
        "What one of four workers holds. With DDP: all parameters, all gradients and all of Adam's "
        "state. With OSS and ShardedDataParallel: all parameters, and a quarter of the rest. "
        "With FSDP: a quarter of everything.",
        186,
        [
            *(label(left + x, 28, text) for text, x in heads),
            *elements,
            label(left, 176, "filled: the part that each of four workers holds"),
        ],
    )


# -- blocks --------------------------------------------------------------------------------------


def timeline(y: float, steps: int, every: int, sync: float) -> list[str]:
    """Return the steps of two workers; after `every` steps, an exchange takes `sync`."""
    x, width, elements = 130.0, 17.0, []
    for step in range(1, steps + 1):
        elements += [box(x, y, width - 3, 20, BLUE), box(x, y + 26, width - 3, 20, BLUE)]
        x += width
        if step % every == 0:
            elements.append(box(x + 1, y, sync - 5, 46, ORANGE))
            x += sync
    return elements


def when_to_talk() -> str:
    return picture(
        "When to talk",
        "Two workers over time. With DDP every step is followed by an exchange, and ten steps fill "
        "the line. In blocks an exchange follows twelve steps, and 24 steps fit.",
        184,
        [
            label(118, 36, "DDP", "end"),
            *timeline(22.0, 10, 1, 36.0),
            label(118, 108, "blocks", "end"),
            *timeline(94.0, 24, 12, 60.0),
            box(130, 160, 14, 14, BLUE),
            label(152, 173, "a step of a worker"),
            box(320, 160, 14, 14, ORANGE),
            label(342, 173, "all workers communicate"),
        ],
    )


# -- Ramp ----------------------------------------------------------------------------------------

RAMP_FIXED = 4.0  # of a step, in passes


def progress_per_second(noise_scale: float, batch: float) -> float:
    """Return the value of a second in small steps, if a pass takes a second."""
    gain = (noise_scale + 1.0) / (noise_scale / batch + 1.0)
    return gain / (RAMP_FIXED + batch)


def ramp() -> str:
    left, right, bottom, top = 90.0, 650.0, 190.0, 30.0
    most = progress_per_second(100.0, math.sqrt(RAMP_FIXED * 100.0))

    def place(batch: float, value: float) -> tuple[float, float]:
        x = left + (right - left) * math.log2(batch) / 7.0
        return round(x, 1), round(bottom - (bottom - top) * value / most, 1)

    elements = [line(left, bottom, right, bottom, TEXT, 1.5)]
    for batch in (1, 2, 4, 8, 16, 32, 64, 128):
        x, _ = place(batch, 0.0)
        elements += [line(x, bottom, x, bottom + 5, TEXT, 1.5)]
        elements += [label(x, bottom + 22, str(batch), "middle")]
    for noise_scale, colour, name in ((4.0, BLUE, "early"), (100.0, ORANGE, "late in training")):
        batches = [2 ** (step / 8) for step in range(57)]
        points = [place(b, progress_per_second(noise_scale, b)) for b in batches]
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        elements.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        best = math.sqrt(RAMP_FIXED * noise_scale)
        x, y = place(best, progress_per_second(noise_scale, best))
        elements += [
            f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{colour}"/>',
            label(x, y - 12, f"{name}: {best:.0f}", "middle", bold=True),
        ]
    return picture(
        "The best batch grows",
        "Progress per second against the batch, at a step that costs four passes more than it has. "
        "Early in training, with a noise scale of 4, the best batch is 4. Late, with a noise scale "
        "of 100, it is 20.",
        250,
        [
            *elements,
            label(left, top - 8, "progress per second"),
            label(right, bottom + 48, "micro-batches in a step", "end"),
        ],
    )


# -- the death of a worker -----------------------------------------------------------------------


def a_death() -> str:
    rows = (22.0, 56.0, 90.0)
    elements = [label(118, y + 16, f"worker {number}", "end") for number, y in enumerate(rows)]
    for y in rows[:2]:
        elements += [box(130, y, 130, 22, BLUE), box(346, y, 130, 22, BLUE)]
    elements += [
        box(130, rows[2], 70, 22, BLUE),
        line(210, rows[2] + 4, 224, rows[2] + 18, RED, 3.0),
        line(210, rows[2] + 18, 224, rows[2] + 4, RED, 3.0),
        box(266, rows[0], 30, 56, RED, filled=False),
        box(304, rows[0], 34, 56, ORANGE),
        box(484, rows[0], 34, 56, ORANGE),
        arrow(532, rows[0] + 30, 0, 52, GREEN, 3.0),
        *(box(546, y, 120, 22, BLUE) for y in rows),
        box(130, 130, 14, 14, BLUE),
        label(152, 143, "local steps"),
        box(330, 130, 14, 14, ORANGE),
        label(352, 143, "a sync round that is kept"),
        box(130, 156, 14, 14, RED, filled=False),
        label(152, 169, "an undone sync round"),
        arrow(337, 155, 0, 18, GREEN, 2.0),
        label(352, 169, "the state, for the joiner"),
    ]
    return picture(
        "How a block survives a death",
        "Three workers over time. Worker 2 dies in a block. The sync round of the others is "
        "undone, and repeated without worker 2, with the same steps. Worker 2 starts again. "
        "After the next round it gets the state from another worker, and takes part.",
        178,
        elements,
    )


# -- steps and batch size ------------------------------------------------------------------------


def steps() -> str:
    """Return steps and accuracies of the quality benchmark, from tools/figures.py."""
    cell = runpy.run_path(str(Path(__file__).with_name("figures.py")))["Cell"]
    rows = (
        ("small batch", "plain", 1, "base", TEXT),
        ("8 times, AdaScale", "AdaScale", 8, "steps", BLUE),
        ("32 times, AdaScale", "AdaScale", 32, "steps", BLUE),
        ("32 times, linear", "linear + warm-up", 32, "steps", ORANGE),
    )
    elements, said, longest = [], [], 3750.0
    for row, (name, method, scale, budget, colour) in enumerate(rows):
        found = cell("mnist-sgd", method, scale, budget)
        y, width = 36.0 + 34.0 * row, 300.0 * float(found.steps.replace(",", "")) / longest
        elements += [label(178, y + 17, name, "end"), box(190, y, width, 24, colour)]
        elements.append(label(200 + width, y + 17, f"{found.steps} steps, {found.shown} %"))
        said.append(f"{name}: {found.steps} steps, {found.shown} % right.")
    return picture(
        "Steps to train at larger batches",
        "An MLP on MNIST with SGD, mean of three seeds. " + " ".join(said),
        180,
        [label(190, 22, "steps of training, and test accuracy at the end", bold=True), *elements],
    )


PICTURES = {
    "steps.svg": steps,
    "how-far.svg": how_far,
    "who-holds.svg": who_holds,
    "when-to-talk.svg": when_to_talk,
    "ramp.svg": ramp,
    "a-death.svg": a_death,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(FOLDER / name)
