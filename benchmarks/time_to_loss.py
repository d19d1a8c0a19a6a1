"""Measure the time to a loss, of several ways to train over several lines between the ranks.

    sudo python benchmarks/time_to_loss.py --data FOLDER             every line; writes the page

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
from ways import DIGITS, LINES, MNIST, PLAIN, RAMP, WAYS, Rank, Task, target_of  # noqa: E402

RESULTS = pages.RESULTS / "time_to_loss.jsonl"
RANKS = (2, 4)
SEEDS = 3
Row = dict[str, Any]
IN_EVERY_STEP = [way.name for way in WAYS.values() if not way.every]
IN_BLOCKS = [way.name for way in WAYS.values() if way.every]
AVERAGED = ("sent", "mean_passes")  # over the ranks; seconds are those of rank 0


@dataclass(frozen=True)
class Run:
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
    rows = pages.read_rows(RESULTS)
    done = {Run(row["line"], row["ranks"], row["way"], row["seed"]) for row in rows}
    target = rows[0]["target"] if rows else target_of(MNIST, folder)
    for group in groups:
        missing = [run for run in group if run not in done]
        if not missing:
            continue
        line = LINES[missing[0].line]
        with line.laid() as link:
            if link is not None and line.terms is not None:
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
    pages.fill("time_to_loss", **parts(pages.read_rows(RESULTS)))


def of(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def seconds_of(rows: Sequence[Row]) -> float | None:
    """Return the mean time to the loss over the seeds; None if one did not reach it."""
    if not rows or not all(row["reached"] for row in rows):
        return None
    return fmean(row["seconds"] for row in rows)


def fastest(rows: Sequence[Row], names: Sequence[str]) -> tuple[str, float] | None:
    best = None
    for name in names:
        seconds = seconds_of(of(rows, way=name))
        if seconds is not None and (best is None or seconds < best[1]):
            best = (name, seconds)
    return best


def ratio(rows: Sequence[Row]) -> float | None:
    """Return the fixed cost of a step over that of a pass, as `Ramp` has measured it."""
    found = [r["fixed_ms"] / r["pass_ms"] for r in of(rows, way=RAMP.name) if "fixed_ms" in r]
    return median(found) if found else None


def which(rows: Sequence[Row]) -> str:
    head = "network | ranks | a / b | DDP | fastest with averages per step | fastest in blocks "
    lines = [f"| {head}| Ramp / best fixed batch |", "|---|--:|--:|--:|---|---|--:|"]
    for line, ranks, own in places(rows):
        plain = seconds_of(of(own, way=PLAIN.name))
        a_to_b = ratio(own)
        if a_to_b is None:
            shown = ""
        elif a_to_b > 1_000:  # a pass's time is lost in the noise of the line's
            shown = "over 1,000"
        else:
            shown = f"{a_to_b:,.0f}" if a_to_b >= 9.95 else f"{a_to_b:.1f}"
        cells = [
            line,
            str(ranks),
            shown,
            "" if plain is None else f"{plain:.2f} s",
            _best(fastest(own, IN_EVERY_STEP), plain),
            _best(fastest(own, IN_BLOCKS), plain),
            over_best_fixed(own),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def places(rows: Sequence[Row]) -> Iterator[tuple[str, int, list[Row]]]:
    """Yield each line and number of ranks, and their rows."""
    for line in LINES:
        for ranks in sorted({row["ranks"] for row in of(rows, line=line)}):
            yield line, ranks, of(rows, line=line, ranks=ranks)


def _best(found: tuple[str, float] | None, plain: float | None) -> str:
    if found is None:
        return ""
    name, seconds = found
    times = "" if plain is None or name == PLAIN.name else f" ({plain / seconds:.1f}×)"
    return f"{name}: {seconds:.2f} s{times}"


def over_best_fixed(own: Sequence[Row]) -> str:
    """Return the time of `Ramp` over the time of the best fixed batch."""
    ramp = seconds_of(of(own, way=RAMP.name))
    fixed = fastest(own, [name for name in IN_EVERY_STEP if not WAYS[name].ramp])
    return "" if ramp is None or fixed is None else f"{ramp / fixed[1]:.2f}"


def table(rows: Sequence[Row]) -> str:
    """Return the seconds of 2 ranks by way and line, and the mean of what a rank has sent."""
    own = of(rows, ranks=2)
    lines = [line for line in LINES if of(own, line=line)]
    cells = []
    for name in WAYS:
        found = of(own, way=name)
        if found:
            seconds = [_seconds_cell(of(found, line=line)) for line in lines]
            cells.append([name, *seconds, f"{fmean(row['sent'] for row in found) / 1e6:,.1f}"])
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
    return "\n".join(
        f"- **{name}**: TCP ({one['congestion_control']}) transfers {one['one_way']:.0f} Mbit/s in "
        f"one direction and {one['both_ways']:.0f} in both; a round trip takes "
        f"{one['round_trip_ms']:.1f} ms."
        for name, one in lines.items()
    )


def parts(rows: Sequence[Row]) -> dict[str, Any]:
    machines = {f"{row['machine']}, with {row['versions']}" for row in rows}
    return {
        "which": which(rows),
        "conditions": " and ".join(sorted(machines)),
        "load": f"{max(row['load'] for row in rows):.1f}",
        "table": table(rows),
        "lines": lines_text(pages.read("time_to_loss_lines")),
    }


if __name__ == "__main__":
    main()
