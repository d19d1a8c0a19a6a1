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

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

peers.this_checkout()

import pages  # noqa: E402
import torch  # noqa: E402
from lines import page  # noqa: E402
from lines.training import DIGITS, MNIST, Task, target_loss, training  # noqa: E402
from lines.ways import LINES, WAYS, Enter, Line, Way  # noqa: E402
from slow_link import NoSlowLink, probe, slow_link  # noqa: E402
from team import Team  # noqa: E402

RESULTS = pages.RESULTS / "time_to_loss.jsonl"
RANKS = (2, 4)
SEEDS = 3
AVERAGED = ("cpu_seconds", "sent", "mean_passes")  # over the ranks; seconds are those of rank 0


@dataclass(frozen=True)
class Run:
    """One way to train, once."""

    line: str
    ranks: int
    way: str
    seed: int


def planned(
    lines: Sequence[str], ranks: Sequence[int], ways: Sequence[str], seeds: int
) -> Iterator[list[Run]]:
    """Yield the runs over one line: seed by seed, with each seed in another order of the ways."""
    for seed in range(seeds):
        turn = seed * 3 % max(1, len(ways))
        in_turn = [*ways[turn:], *ways[:turn]]
        for line in lines:
            yield [Run(line, n, way, seed) for way in in_turn for n in ranks]


def measure(run: Run, task: Task, folder: Path, way: Way, enter: Enter, target: float) -> Any:
    """Train once, in processes of its own; return the row."""
    conditions = pages.conditions()
    with Team(run.ranks, training(task, folder, way, run.seed, target), enter) as team:
        found = team.ask({})
    row = {**asdict(run), "target": target, **found[0]}
    row.update({name: fmean(rank[name] for rank in found) for name in AVERAGED})
    row["samples"] = sum(rank["samples"] for rank in found)
    row["reached"] = row["loss"] <= target
    return {**row, **conditions}


def run_all(groups: Iterator[list[Run]], folder: Path) -> None:
    """Add the runs that are missing to the results, one line each."""
    done = {
        Run(row["line"], row["ranks"], row["way"], row["seed"]) for row in pages.read_rows(RESULTS)
    }
    target = next((row["target"] for row in pages.read_rows(RESULTS)), None) or target_loss(
        MNIST, folder
    )
    for group in groups:
        missing = [run for run in group if run not in done]
        if not missing:
            continue
        line = LINES[missing[0].line]
        measure_line(line)
        with line.laid() as enter:
            for run in missing:
                row = measure(run, MNIST, folder, WAYS[run.way], enter(run.ranks), target)
                pages.add_row(RESULTS, row)
                print(page.said(row), flush=True)


def measure_line(line: Line) -> None:
    """Find out what the line gives, once."""
    found = pages.read("time_to_loss_lines")
    if line.terms is None or line.name in found:
        return
    with slow_link(line.terms) as link:
        found[line.name] = {**asdict(line.terms), **probe(link)}
    pages.store("time_to_loss_lines", found)


def quick() -> None:
    """Train on digits for a moment, over loopback and, where there may be one, over a line."""
    target = target_loss(DIGITS, Path(), seeds=(0,))

    def over(line: Line, ways: Sequence[str], enter: Callable[[int], Enter]) -> None:
        for way in ways:
            run = Run(line.name, 2, way, 0)
            print(page.said(measure(run, DIGITS, Path(), WAYS[way], enter(2), target)), flush=True)

    few = [way.name for way in WAYS.values() if way.ramp or way.passes == 4 or way.every == 16]
    for line, ways in ((LINES["loopback"], few), (LINES["1 Gbit/s"], [page.RAMP.name])):
        try:
            with line.laid() as enter:
                over(line, ways, enter)
        except NoSlowLink as error:
            print(f"{line.name} is left out: {error}")


def main() -> None:
    parser = pages.parser(__doc__, "mnist.npz")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Ranks are forked; what torch imports late is imported here, once.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    if given.quick:
        quick()
        return
    if not given.draw:
        if given.data is None:
            parser.error("--data FOLDER is needed: where mnist.npz is")
        try:
            run_all(planned(list(LINES), RANKS, list(WAYS), SEEDS), given.data)
        except NoSlowLink as error:
            raise SystemExit(f"There is no slow line here: {error}") from error
    text = page.page(pages.read_rows(RESULTS), pages.read("time_to_loss_lines"))
    (pages.PAGES / "time_to_loss.md").write_text(text)


if __name__ == "__main__":
    main()
