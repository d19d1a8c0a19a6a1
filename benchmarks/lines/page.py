"""The tables and the page of `time_to_loss.py`: rows in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

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
    """Return the rows with these values.

    >>> of([{"ranks": 2}, {"ranks": 4}], ranks=4)
    [{'ranks': 4}]
    """
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

WHICH_HEADER = (
    "| line | ranks | a / b | DDP at the small batch | fastest that averages in every step "
    "| fastest in blocks |\n|---|--:|--:|--:|---|---|"
)


def which(rows: Sequence[Row]) -> str:
    """Return a line of the table for each line and number of ranks."""
    lines = [WHICH_HEADER]
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
    if not found:
        return ""
    each = "; ".join(f"{where}: {times:.2f}" for times, where in found)
    return f"`Ramp`'s time over that of the best fixed batch, which had to be found: {each}."


# -- the tables --------------------------------------------------------------------------------

HEADER = (
    "| ranks | way | seconds | DDP's over it | steps | samples | passes | MB sent by a rank "
    "| CPU s of a rank |\n|--:|---|--:|--:|--:|--:|--:|--:|--:|"
)


def table(rows: Sequence[Row]) -> str:
    """Return the table of one line: means over the seeds."""
    lines = [HEADER]
    for ranks in sorted({row["ranks"] for row in rows}):
        own = of(rows, ranks=ranks)
        plain = seconds_of(of(own, way=PLAIN.name))
        for name in WAYS:
            found = of(own, way=name)
            if not found:
                continue
            seconds = seconds_of(found)
            mean = {
                key: fmean(row[key] for row in found)
                for key in ("steps", "samples", "mean_passes", "sent", "cpu_seconds")
            }
            cells = [
                str(ranks),
                name,
                _seconds_cell(found),
                "" if plain is None or seconds is None else f"{plain / seconds:.1f}",
                f"{mean['steps']:,.0f}",
                f"{mean['samples']:,.0f}",
                f"{mean['mean_passes']:.1f}",
                f"{mean['sent'] / 1e6:,.1f}",
                f"{mean['cpu_seconds']:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _seconds_cell(found: Sequence[Row]) -> str:
    times = [row["seconds"] for row in found]
    missed = sum(not row["reached"] for row in found)
    if missed:
        return f"not reached in {max(times):.0f} s ({missed} of {len(found)})"
    if len(times) == 1:
        return f"{times[0]:.2f}"
    return f"{fmean(times):.2f} ({min(times):.2f}–{max(times):.2f})"


PREDICTIONS_HEADER = (
    "| line | ranks | a, ms | b, ms | a / b | predicted step, ms | actual step, ms "
    "| error of 20 steps |\n|---|--:|--:|--:|--:|--:|--:|--:|"
)


def predictions(rows: Sequence[Row]) -> str:
    """Return what `Ramp` measured, and what it predicted: medians over the seeds."""
    lines = [PREDICTIONS_HEADER]
    for line in LINES:
        for ranks in sorted({row["ranks"] for row in of(rows, line=line)}):
            found = of(rows, line=line, ranks=ranks, way=RAMP.name)
            found = [row for row in found if "fixed_ms" in row]
            if found:
                names = ("fixed_ms", "pass_ms", "predicted_ms", "actual_ms", "prediction_error")
                a, b, predicted, actual, error = (median(r[name] for r in found) for name in names)
                lines.append(
                    f"| {line} | {ranks} | {a:.2f} | {b:.2f} | {_rounded(ratio(found) or 0.0)} "
                    f"| {predicted:.1f} | {actual:.1f} | {error:.0%} |"
                )
    return "\n".join(lines)


def lines_text(lines: dict[str, Any]) -> str:
    """Say what each line gives."""
    return "\n".join(
        f"- **{name}**: a TCP connection ({one['congestion_control']}) gets {one['one_way']:.0f} "
        f"Mbit/s in one direction and {one['both_ways']:.0f} Mbit/s in each of both at once; a "
        f"byte is back after {one['round_trip_ms']:.1f} ms. At full rate the process that carries "
        f"the packets takes {100 * one['relay_cpu']:.0f} % of a core."
        for name, one in lines.items()
    )


# -- the page ----------------------------------------------------------------------------------


def page(rows: Sequence[Row], lines: dict[str, Any]) -> str:
    """Return the page; without rows it says what will be measured, and how."""
    return f"{BEGINNING}\n{_figures(rows, lines) if rows else NOTHING}"


BEGINNING = """# Time to a loss, over a line

Which way to train reaches a loss first: few samples in many steps, or many samples in few steps?
It depends on the line between the ranks.

```bash
sudo python benchmarks/time_to_loss.py --data FOLDER    # with mnist.npz; Linux, /dev/net/tun
```

A step takes a + b × passes. What a step costs besides its passes is a: mainly the gradients' way
over the line. One micro-batch forward and backward is b. Find a / b for your model with
`manyhands plan --line 50Mbit --pass-seconds SECONDS` ([planning](../plan.md)), or read
`fixed_seconds` and `pass_seconds` in `ramp.snapshot()`. Then look for the row with a similar a / b.

- **a / b below 1**: the line hardly matters. Train at the small batch, under a rule such as
  AdaScale, which makes the rate fit the number of ranks.
- **a / b of 1 to 32**: use `Ramp`. It pays for the line less often, and finds the batch by itself.
  Ranks stay equal after every step, and the learning rate is the one tuned at the small batch.
- **a / b above 32**: train in blocks (`DiLoCo`). Even with 32 passes in each step half of the time
  would be the line's.
- **Blocks also pay below that**, if you can tune them: the length of a block and the outer step
  are yours to choose, ranks differ between two sync rounds, and the model at the end of a run may
  be worse ([the quality of blocks](blocks-quality.md)). The time to a loss early in a run, as here,
  does not show that.

These are rules of thumb, with the measurements below to check them. The largest useful batch
depends on the noise of your gradients, not only on the line.
"""

NOTHING = """
Nothing is measured yet: this page has its tables when the command has run.
"""


def _figures(rows: Sequence[Row], lines: dict[str, Any]) -> str:
    task = MNIST.about
    tables = "\n\n".join(
        f"## {line}\n\n{table(found)}" for line in LINES if (found := of(rows, line=line))
    )
    machines = " and ".join(sorted({f"{row['machine']}, with {row['versions']}" for row in rows}))
    return f"""
{which(rows)}

{over_best_fixed(rows)}

{task.title}, with {task.lr:g} as the constant learning rate, tuned at a small batch of {task.batch}
samples. Each rank's micro-batches are small batches. Every run ends when the loss on held-out
samples is at most {rows[0]["target"]:.3f}, which one process at the small batch has after
{round(MNIST.at * MNIST.small_steps)} steps. The loss is the mean of those measured during the last
{MNIST.smooth_over:.0f} small-batch steps of progress. Means over {len({r["seed"] for r in rows})}
seed(s), and the range. Measured on {machines}; the load average before a run was at most
{max(row["load"] for row in rows):.1f}.

{tables}

- **DDP** has one micro-batch of {task.batch} samples on each rank, and the small batch's rate.
- **DDP + AdaScale** multiplies the rate by the gain. With several passes gradients are averaged in
  the last one. **Ramp** chooses the passes, up to a scale of 128.
- **DiLoCo** takes H local steps between two sync rounds; its outer step has the rate
  {OUTER["lr"]:g} and the momentum {OUTER["momentum"]:g}, chosen by trial ([notes](../notes.md)).
  It is evaluated after each sync round, so its time is a multiple of a block's. *Ramp inside* gives
  each worker a batch of its own, by its own noise and times, and AdaScale for one worker.
- Seconds are rank 0's, from the first step on, without evaluations: all ranks stop for them, and
  go on at the same moment. CPU time is that of all threads of a rank. Bytes are those that its
  sockets have sent.
- With 4 ranks two are on each host, and share the line. A ring of all ranks crosses it once in
  each direction. All ranks share the machine's cores, with the process that carries the packets.

## What Ramp measured and predicted

A prediction is made before each step, with a and b of that moment. The error is that of the sum
over 20 steps, its median over a run.

{predictions(rows)}

## The lines

{lines_text(lines)}

How they are made: [two hosts and a slow line](blocks-slow-link.md).
"""
