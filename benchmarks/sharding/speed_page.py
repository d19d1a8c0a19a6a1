"""Measure the contenders of a speed benchmark, store what was found, and write its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pages
from rounds import Ratio

from sharding.contenders import import_early
from sharding.speed import Contenders, Row, Workload, measured, restored

Result = dict[str, Any]
Rows = dict[str, list[Row]]  # by the title of the workload

HOW = """Ratios are of medians over rounds, with bootstrap intervals (95 %): **above 1 is faster.**
Contenders take turns, in an order drawn anew in each round, in processes of their own; groups that
do not fit in memory together run apart, each beside a DDP of its own. **"DDP again (A/A)" is DDP a
second time: its distance from 1 is noise.** Bytes are what a rank's sockets send in a step. Each
contender was first checked to train the same parameters as DDP."""


def run(
    doc: str | None,
    name: str,
    workloads: Sequence[Workload],
    quick: Sequence[Workload],
    contenders: Contenders,
    choices: Mapping[str, Any],
    write: Callable[[Result], None],
    rivals: Mapping[str, str] | None = None,
    more: Callable[[Workload], list[Row]] = lambda workload: [],
) -> None:
    """Parse the arguments, and measure the workloads or draw the page of what is stored."""
    parser = pages.parser(doc)
    parser.add_argument("--workload", action="append", metavar="NAME", help="only 25Mx2 and so on")
    args = parser.parse_args()
    if args.draw:
        write(pages.read(name))
        return
    import_early()
    result: Result = {**pages.conditions(), "workloads": {}}
    if args.workload:  # what is not measured again stays
        result["workloads"] = pages.read(name)["workloads"]
    for workload in quick if args.quick else workloads:
        if args.workload and workload.name not in args.workload:
            continue
        load = pages.conditions()["load"]
        rows = measured(workload, contenders, choices, workload.rounds, rivals) + more(workload)
        for row in rows:
            print(workload.title, row.name, row.choice, row.cpu, row.wall, row.sent, flush=True)
        if not args.quick:
            found = {"load": load, "rows": [asdict(row) for row in rows]}
            result["workloads"][workload.title] = found
            pages.store(name, result)
            write(result)


def rows_of(result: Result) -> Rows:
    """The rows of each workload."""
    return {
        title: [restored(row) for row in one["rows"]] for title, one in result["workloads"].items()
    }


def tables(result: Result, head: str, cells: Callable[[list[Row]], list[list[str]]]) -> str:
    """A table for each workload."""
    return "\n\n".join(
        f"## {title}\n\nLoad average before: {result['workloads'][title]['load']}\n\n"
        + pages.table(head, cells(rows))
        for title, rows in rows_of(result).items()
    )


def times(value: Ratio | None) -> str:
    """A ratio with its interval."""
    return "" if value is None else f"{value.value:.2f} ({value.low:.2f}–{value.high:.2f})"


def between(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
