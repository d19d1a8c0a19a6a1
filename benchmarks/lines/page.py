"""The tables and the page of `time_to_loss.py`: rows in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import pages

from lines.training import MNIST
from lines.ways import LINES, OUTER, PLAIN, RAMP, WAYS

Row = dict[str, Any]


def said(row: Row) -> str:
    """Return a row as a line of text."""
    reached = "" if row["reached"] else " (not reached)"
    return (
        f"{row['line']}, {row['ranks']} ranks, {row['way']}, seed {row['seed']}: "
        f"{row['seconds']:.2f} s{reached}, {row['steps']:,} steps"
    )


def of(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def seconds_of(rows: Sequence[Row]) -> float | None:
    """Return the mean time to the loss over the seeds; None if one did not reach it."""
    if not rows or not all(row["reached"] for row in rows):
        return None
    return fmean(row["seconds"] for row in rows)


def fastest(rows: Sequence[Row], among: Callable[[str], bool]) -> tuple[str, float] | None:
    """Return the fastest way of those that `among` says, and its seconds."""
    times = {
        name: seconds
        for name in WAYS
        if among(name) and (seconds := seconds_of(of(rows, way=name))) is not None
    }
    return min(times.items(), key=lambda item: item[1]) if times else None


def ratio(rows: Sequence[Row]) -> float | None:
    """Return what a step costs besides its passes, in passes, as `Ramp` has measured it."""
    found = [r["fixed_ms"] / r["pass_ms"] for r in of(rows, way=RAMP.name) if "fixed_ms" in r]
    return median(found) if found else None


def _rounded(number: float) -> str:
    if number > 1_000:  # a pass's time is lost in the noise of the line's
        return "over 1,000"
    return f"{number:,.0f}" if number >= 9.95 else f"{number:.1f}"


# -- when to use which -------------------------------------------------------------------------


def which(rows: Sequence[Row]) -> str:
    """Return a row for each line and number of ranks."""
    head = "network | ranks | a / b | DDP at the small batch | fastest that averages in every step "
    lines = [f"| {head}| fastest in blocks |", "|---|--:|--:|--:|---|---|"]
    for line in LINES:
        for ranks in sorted({row["ranks"] for row in of(rows, line=line)}):
            own = of(rows, line=line, ranks=ranks)
            plain, a_to_b = seconds_of(of(own, way=PLAIN.name)), ratio(own)
            cells = [
                line,
                str(ranks),
                "" if a_to_b is None else _rounded(a_to_b),
                "" if plain is None else f"{plain:.2f} s",
                _best(fastest(own, lambda name: not WAYS[name].every), plain),
                _best(fastest(own, lambda name: WAYS[name].every > 0), plain),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _best(found: tuple[str, float] | None, plain: float | None) -> str:
    if found is None:
        return ""
    name, seconds = found
    times = "" if plain is None or name == PLAIN.name else f" ({plain / seconds:.1f} times DDP)"
    return f"{name}: {seconds:.2f} s{times}"


def over_best_fixed(rows: Sequence[Row]) -> str:
    """Say how far `Ramp` is from the best fixed batch, everywhere."""
    found = []
    for line in LINES:
        for ranks in sorted({row["ranks"] for row in of(rows, line=line)}):
            own = of(rows, line=line, ranks=ranks)
            ramp = seconds_of(of(own, way=RAMP.name))
            fixed = fastest(own, lambda name: not WAYS[name].every and not WAYS[name].ramp)
            if ramp is not None and fixed is not None:
                found.append((ramp / fixed[1], f"{line}, {ranks} ranks"))
    each = "; ".join(f"{where}: {times:.2f}" for times, where in found)
    return f"`Ramp`'s time over that of the best fixed batch, which had to be found: {each}."


# -- the tables --------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Return the seconds of 2 ranks by way and line, and the mean of what a rank has sent."""
    own = of(rows, ranks=2)
    lines = [line for line in LINES if of(own, line=line)]
    cells = [
        [
            name,
            *(_seconds_cell(of(own, way=name, line=line)) for line in lines),
            f"{fmean(row['sent'] for row in of(own, way=name)) / 1e6:,.1f}",
        ]
        for name in WAYS
        if of(own, way=name)
    ]
    return pages.table(" | ".join(["way", *lines, "MB sent by a rank"]), cells)


def _seconds_cell(found: Sequence[Row]) -> str:
    times = [row["seconds"] for row in found]
    if not times:
        return ""
    missed = sum(not row["reached"] for row in found)
    if missed:
        return f"not reached in {max(times):.0f} s ({missed} of {len(found)})"
    if len(times) == 1:
        return f"{times[0]:.2f}"
    return f"{fmean(times):.2f} ({min(times):.2f}–{max(times):.2f})"


def lines_text(lines: dict[str, Any]) -> str:
    """Say what each line gives."""
    return "\n".join(
        f"- **{name}**: TCP ({one['congestion_control']}) gets {one['one_way']:.0f} Mbit/s in one "
        f"direction, and {one['both_ways']:.0f} in each of both; a round trip takes "
        f"{one['round_trip_ms']:.1f} ms."
        for name, one in lines.items()
    )


# -- the page ----------------------------------------------------------------------------------


def page(rows: Sequence[Row], lines: dict[str, Any]) -> str:
    return BEGINNING + _figures(rows, lines)


BEGINNING = """# Time to a target loss over a slow network

Which reaches a loss first: few samples in many steps, or many samples in few steps? It depends on
the network between the ranks.

```bash
sudo python benchmarks/time_to_loss.py --data FOLDER    # with mnist.npz; Linux, /dev/net/tun
```

A step takes a + b × passes: a is its fixed cost, mainly sending gradients over the network, and b
one micro-batch forward and backward. Read both in `ramp.snapshot()` (`fixed_seconds`,
`pass_seconds`), and find the row with a similar a / b.

- **a / b below 1**: train at the small batch, under a rule such as AdaScale.
- **a / b of 1 to 32**: use `Ramp`, which sends gradients less often and finds the batch by itself.
- **a / b above 32**: train in blocks (`DiLoCo`).
- Blocks are faster below that, too, but the model at the end of a run may be worse
  ([the quality of blocks](blocks-quality.md)). The time to a loss early in a run does not show it.

"""


def _figures(rows: Sequence[Row], lines: dict[str, Any]) -> str:
    task = MNIST.about
    machines = " and ".join(sorted({f"{row['machine']}, with {row['versions']}" for row in rows}))
    return f"""
{which(rows)}

{over_best_fixed(rows)}

{task.title}, learning rate {task.lr:g}, tuned at a small batch of {task.batch} samples. Every run
ends when the loss on held-out samples is at most {rows[0]["target"]:.3f}, which one process at the
small batch has after {round(MNIST.at * MNIST.small_steps)} steps. Means over
{len({r["seed"] for r in rows})} seeds, and the range. Measured on {machines}; the load average
before a run was at most {max(row["load"] for row in rows):.1f}.

Seconds of 2 ranks, and the mean of the bytes sent:

{table(rows)}

- **DiLoCo** takes H local steps between two sync rounds, with an outer rate of {OUTER["lr"]:g} and
  momentum {OUTER["momentum"]:g}, chosen by trial. With *Ramp inside* each worker has a batch of
  its own.
- With 4 ranks two are on each host, and share the network.

{lines_text(lines)}

How the networks are made: [two hosts and a slow network](blocks-slow-link.md).
"""
