"""Which way to train reaches a loss first, over which line between the ranks?

    sudo python benchmarks/time_to_loss.py --data FOLDER             every line; writes the page
    python benchmarks/time_to_loss.py --draw                         the page from the rows so far
    python benchmarks/time_to_loss.py --quick                        a smoke test: writes nothing

2 and 4 ranks train the MLP of `quality/workloads.py` on MNIST, at a constant rate, until the loss
on held-out samples is what one process at the small batch has after 85 % of its run. The ranks are
on one host (loopback), or one half of them on each of two hosts with a line between them: network
namespaces on this machine (`slow_link.py`), which need Linux, root and /dev/net/tun.

The time is real: other programs change it. Each run is one line in results/time_to_loss.jsonl, and
the same command goes on where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import peers

peers.this_checkout()

import pages  # noqa: E402
from slow_link import Link, NoSlowLink, probe  # noqa: E402
from team import Team  # noqa: E402
from ways import DIGITS, LINES, MNIST, OUTER, PLAIN, RAMP, WAYS, Rank, Task, target_of  # noqa: E402

RESULTS = pages.RESULTS / "time_to_loss.jsonl"
RANKS = (2, 4)
SEEDS = 3
Row = dict[str, Any]
AVERAGED = ("sent", "mean_passes")  # over the ranks; seconds are those of rank 0


@dataclass(frozen=True)
class Run:
    """One way to train, once."""

    line: str
    ranks: int
    way: str
    seed: int


def planned(
    lines: Sequence[str], ranks: Sequence[int], names: Sequence[str], seeds: int
) -> Iterator[list[Run]]:
    """Yield the runs over one line: seed by seed, with each seed in another order of the ways."""
    for seed in range(seeds):
        turn = seed * 3 % max(1, len(names))
        in_turn = [*names[turn:], *names[:turn]]
        for line in lines:
            yield [Run(line, n, way, seed) for way in in_turn for n in ranks]


def measure(run: Run, task: Task, folder: Path, link: Link | None, target: float) -> Any:
    """Train once, in processes of its own; return the row.

    The first half of the ranks is on the first host of a link, the others on the second.
    """
    way = WAYS[run.way]

    def enter(rank: int) -> None:
        if link is not None:
            link.enter(2 * rank // run.ranks)

    def work(rank: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda order: Rank(task, folder, way, run.seed, target, rank).train()

    conditions = pages.conditions()
    with Team(run.ranks, work, enter) as team:
        found = team.ask({})
    row = {**asdict(run), "target": target, **found[0]}
    row.update({name: fmean(rank[name] for rank in found) for name in AVERAGED})
    row["samples"] = sum(rank["samples"] for rank in found)
    row["reached"] = row["loss"] <= target
    missed = "" if row["reached"] else " (not reached)"
    about = f"{run.line}, {run.ranks} ranks, {run.way}, seed {run.seed}"
    print(f"{about}: {row['seconds']:.2f} s{missed}, {row['steps']:,} steps", flush=True)
    return {**row, **conditions}


def run_all(groups: Iterator[list[Run]], folder: Path) -> None:
    """Add the runs that are missing to the results, one line each."""
    rows = pages.read_rows(RESULTS)
    done = {Run(row["line"], row["ranks"], row["way"], row["seed"]) for row in rows}
    target = rows[0]["target"] if rows else target_of(MNIST, folder)
    for group in groups:
        missing = [run for run in group if run not in done]
        if not missing:
            continue
        line = LINES[missing[0].line]
        with line.laid() as link:
            if line.terms is not None:
                found = {line.name: {**asdict(line.terms), **probe(link)}}
                pages.store("time_to_loss_lines", pages.read("time_to_loss_lines") | found)
            for run in missing:
                pages.add_row(RESULTS, measure(run, MNIST, folder, link, target))


def quick() -> None:
    """Train on digits for a moment, over loopback and, where there may be one, over a line."""
    target = target_of(DIGITS, Path(), seeds=(0,))
    few = [way.name for way in WAYS.values() if way.ramp or way.passes == 4 or way.every == 16]
    for name, names in (("loopback", few), ("1 Gbit/s", [RAMP.name])):
        try:
            with LINES[name].laid() as link:
                for way in names:
                    measure(Run(name, 2, way, 0), DIGITS, Path(), link, target)
        except NoSlowLink as error:
            print(f"{name} is left out: {error}")


def main() -> None:
    given = pages.parser(__doc__, "mnist.npz").parse_args()
    if given.quick:
        quick()
        return
    if not given.draw:
        try:
            run_all(planned(list(LINES), RANKS, list(WAYS), SEEDS), given.data)
        except NoSlowLink as error:
            raise SystemExit(f"There is no slow line here: {error}") from error
    pages.write("time_to_loss", PAGE, parts(pages.read_rows(RESULTS)))


# -- the page --------------------------------------------------------------------------------------


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


PAGE = """# Time to a target loss over a slow network

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


{which}

{over_best_fixed}

{task.title}, learning rate {task.lr:g}, tuned at a small batch of {task.batch} samples. Every run
ends when the loss on held-out samples is at most {target:.3f}, which one process at the
small batch has after {small_steps} steps. Means over
{seeds} seeds, and the range. Measured on {machines}; the load average
before a run was at most {load:.1f}.

Seconds of 2 ranks, and the mean of the bytes sent:

{table}

- **DiLoCo** takes H local steps between two sync rounds, with an outer rate of {lr:g} and
  momentum {momentum:g}, chosen by trial. With *Ramp inside* each worker has a batch of
  its own.
- With 4 ranks two are on each host, and share the network.

{lines}

How the networks are made: [two hosts and a slow network](blocks-slow-link.md).
"""


def parts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the page's text has holes for."""
    machines = {f"{row['machine']}, with {row['versions']}" for row in rows}
    return {
        "which": which(rows),
        "over_best_fixed": over_best_fixed(rows),
        "task": MNIST.about,
        "target": rows[0]["target"],
        "small_steps": round(MNIST.at * MNIST.small_steps),
        "seeds": len({row["seed"] for row in rows}),
        "machines": " and ".join(sorted(machines)),
        "load": max(row["load"] for row in rows),
        "table": table(rows),
        "lines": lines_text(pages.read("time_to_loss_lines")),
        **OUTER,
    }


if __name__ == "__main__":
    main()
