"""Measure what killed and stopped workers cost a crew.

    python benchmarks/blocks_faults.py --data FOLDER --part 1    30 minutes; writes the page
    python benchmarks/blocks_faults.py --data FOLDER --part 2    an hour; goes on where it ended

Part 1: 8 workers without faults, with a random worker killed or stopped every 30 s and every 15 s,
and without faults on other batches; 16 workers with slower steps. Part 2, three times each: 8
workers, and 16 workers on two hosts between which the line is cut, too (network namespaces; needs
root, `ip` and `nsenter`). `faults/` has the workers' script and the faults.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import pages
import peers

peers.this_checkout()
HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))  # for helpers.networks
os.environ["PYTHONPATH"] += f"{os.pathsep}{HERE}{os.pathsep}{HERE.parent / 'tests'}"  # of workers

from faults import harm  # noqa: E402
from faults.harm import KINDS, Fault, LogLine, Plan, Trial  # noqa: E402

FULL = Plan(
    workers=8, steps=3200, every=16, batch=8, pace=0.09, lr=4e-3, stall=1.0, jitter=2.0, asleep=10.0
)
QUICK = Plan(
    workers=4, steps=800, every=16, batch=4, pace=0.03, lr=4e-3, stall=1.0, jitter=1.0, asleep=3.0
)
SIXTEEN = replace(FULL, workers=16, steps=1000, every=8, pace=0.2)
CUT = replace(SIXTEEN, steps=3000, interval=15.0, far=6)
FEW = "8 workers, kill or stop every 15 s"  # its first run is of part 1
ATTACKS = {
    FEW: replace(FULL, interval=15.0),
    "16 workers, kill, stop or cut every 15 s": CUT,
    "16 workers, kill, stop or cut every 10 s": replace(CUT, steps=1000, interval=10.0),
}
TIMES = 3  # with other faults
NONE = "no faults"
Rows = dict[str, dict[str, Any]]


def main() -> None:
    parser = pages.parser(__doc__, data="tinyshakespeare.txt.xz")
    parser.add_argument("--part", type=int, choices=(1, 2), default=1)
    args = parser.parse_args()
    if args.draw:
        draw(pages.read("blocks-faults"))
    elif args.quick:
        rows = run({NONE: QUICK, "every 5 s": replace(QUICK, interval=5.0)}, args.data)
        print(table(rows))
        say_unsound(rows)
    elif args.part == 1:
        plans = {f"every {s:g} s": replace(FULL, interval=s) for s in (30.0, 15.0)}
        plans = {NONE: FULL, **plans, "no faults, other batches": replace(FULL, seed=1)}
        conditions = {**pages.conditions(), "cores": os.cpu_count(), "plan": asdict(FULL)}
        more = {NONE: SIXTEEN, "every 30 s": replace(SIXTEEN, interval=30.0)}
        rows = run(plans, args.data)
        sixteen = run(more, args.data)
        attacks: dict[str, list] = {name: [] for name in ATTACKS}
        attacks[FEW].append(rows["every 15 s"])
        result = {**conditions, "rows": rows, "sixteen": sixteen, "attacks": attacks}
        pages.store("blocks-faults", result)
        draw(result)
        say_unsound({**rows, **sixteen})
    else:
        result = pages.read("blocks-faults")
        for seed, (name, plan) in product(range(TIMES), ATTACKS.items()):
            done = result["attacks"][name]
            if seed == len(done):  # not those that were run already
                usual = base_of(plan, result)["usual"]
                done += run({name: replace(plan, seed=seed)}, args.data, usual).values()
                pages.store("blocks-faults", result)
                print(attacked(result), flush=True)
        draw(result)
        for name, runs in result["attacks"].items():
            say_unsound({f"{name}, {number}": row for number, row in enumerate(runs)})


def say_unsound(rows: Rows) -> None:
    wrong = [name for name, row in rows.items() if not is_sound(row)]
    if wrong:
        raise SystemExit(f"workers differ, work is lost or the exit code is not 0: {wrong}")


def run(plans: dict[str, Plan], data: Path, usual: float = 0.0) -> Rows:
    """Run all plans; without a `usual` time of a block, the first shows it."""
    rows: Rows = {}
    for name, plan in plans.items():
        print(f"{name}: {plan.workers} workers, {plan.steps} steps", flush=True)
        trial = harm.run(plan, data)
        if not usual:
            rounds = pairwise(kept_rounds(trial.log))
            usual = median(b.time - a.time for a, b in rounds if b.length == plan.every)
        rows[name] = {"usual": usual, **tally(trial, usual)}
    return rows


def is_sound(row: dict[str, Any]) -> bool:
    """Return whether no worker differs, no survivor has lost a step, and the run has ended well."""
    lost = row["missing"] or row["differing"]
    return not lost and row["finals"] == 1 and row["code"] == 0


# -- what a run has kept and lost, from its log and the list of its faults ------------------------
#
# counts          a worker's block counts if the worker held the sync round at its end, and
#                 contributed all steps since the round before
# work            worker-steps that count: the sum over rounds of steps x workers that count
# missing         blocks (of one worker) that do not count. A victim's: there was a fault of the
#                 worker from one block before until it counts again. A survivor's: all others
# delay           of a fault: the longer of the two blocks after it, over the usual one. Of two,
#                 because a worker may be hit when the others have all that they need of it
# back            of a fault: until the worker's block counts again


@dataclass(frozen=True)
class KeptRound:
    number: int
    time: float  # when the first worker had its result
    steps: int
    length: int  # steps of its block
    counted: frozenset[int]  # workers


def kept_rounds(log: list[LogLine]) -> list[KeptRound]:
    """Return the rounds in which any block counts, in order."""
    by_number: dict[int, list[LogLine]] = defaultdict(list)
    for line in log:
        if line["event"] in ("round", "left"):
            by_number[line["rounds"]].append(line)
    found = []
    before = 0
    for number, lines in sorted(by_number.items()):
        steps = min(line["steps"] for line in lines)
        length = steps - before
        before = steps
        counted = frozenset(line["number"] for line in lines if line["own"] == length > 0)
        if counted:
            when = min(line["time"] for line in lines)
            found.append(KeptRound(number, when, steps, length, counted))
    return found


def tally(trial: Trial, usual: float) -> dict[str, Any]:
    log = trial.log
    held = kept_rounds(log)
    seconds = held[-1].time - held[0].time
    left = [line for line in log if line["event"] == "left"]
    counted = sum(m.length * len(m.counted) for m in held[1:])
    losses = [line["loss"] for line in log if line["event"] == "loss"]
    result: dict[str, Any] = {
        "interval": trial.plan.interval,
        "seconds": seconds,
        "rounds": len(held),
        "rate": counted / seconds,
        "allowed": harm.allowed(trial.plan, trial.faults, held[-1].time, seconds),
        "missing": missing(held, trial.faults, trial.plan.workers),
        "compared": sum(line["event"] != "loss" for line in log),
        "differing": differing(log),
        "finished": len({line["number"] for line in left}),
        "finals": len({line["final"] for line in left}),
        "loss": losses[0] if losses else None,
        "code": trial.code,
        "cores": trial.cpu / trial.seconds,
    }
    for kind in KINDS:
        faults = [fault for fault in trial.faults if fault.kind == kind]
        delays = [delay(fault, held, usual) for fault in faults]
        backs = [back(fault, held) for fault in faults]
        result[kind] = {
            "count": len(faults),
            "delays": [seconds for seconds in delays if seconds is not None],
            "back": [seconds for seconds in backs if seconds is not None],
        }
    return result


def missing(held: list[KeptRound], faults: list[Fault], workers: int) -> float:
    """Return the blocks of survivors that do not count."""
    full = max(m.length for m in held)
    found = 0.0
    for place, kept in enumerate(held):
        for number in set(range(workers)) - kept.counted:
            before = [p for p in range(place) if number in held[p].counted]
            since = held[max(before[-1] - 1, 0)].time if before else 0.0
            later = (m.time for m in held[place:] if number in m.counted)
            until = next(later, float("inf"))
            if not any(number in f.numbers and since <= f.time <= until for f in faults):
                found += kept.length / full
    return found


def differing(log: list[LogLine]) -> int:
    """Return the rounds after which members or joiners had different bits."""
    states = defaultdict(set)
    for line in log:
        states[line["rounds"]].add((line["steps"], line["state"]))
    return sum(len(seen) > 1 for seen in states.values())


def delay(fault: Fault, held: list[KeptRound], usual: float) -> float | None:
    after = [p for p, m in enumerate(held) if m.time > fault.time][:2]
    blocks = [held[p].time - held[p - 1].time for p in after if p]
    return max(blocks) - usual if blocks else None


def back(fault: Fault, held: list[KeptRound]) -> float | None:
    """Return the seconds until all its workers count again, if one has missed a round."""
    after = [m for m in held if m.time > fault.time]
    missed = next((p for p, m in enumerate(after) if not fault.numbers <= m.counted), None)
    if missed is None:
        return None
    counts = (m.time for m in after[missed:] if fault.numbers <= m.counted)
    until = next(counts, None)
    return None if until is None else until - fault.time


def table(rows: Rows) -> str:
    base = next(iter(rows.values()))
    lines: dict[str, Any] = {
        "throughput kept, %": lambda r: f"{100 * r['rate'] / base['rate']:.1f}",
        "delay after a kill, s": lambda r: _spread(r["kill"]["delays"]),
        "delay after a stop, s": lambda r: _spread(r["stop"]["delays"]),
        "a killed worker counts again after, s": lambda r: _spread(r["kill"]["back"]),
        "a stopped worker counts again after, s": lambda r: _spread(r["stop"]["back"]),
    }
    cells = ([what, *map(form, rows.values())] for what, form in lines.items())
    return pages.table(" | ".join(["", *rows]), cells)


def attacked(result: dict[str, Any]) -> str:
    cells = []
    for name, plan in ATTACKS.items():
        rows = result["attacks"][name]
        base = base_of(plan, result)["rate"]
        kept = ", ".join(f"{100 * row['rate'] / base:.1f}" for row in rows)
        allowed = ", ".join(f"{100 * row['allowed']:.1f}" for row in rows)
        share = ", ".join(f"{100 * row['rate'] / base / row['allowed']:.1f}" for row in rows)
        counts = []
        backs = []
        for kind in KINDS:
            counts.append(str(sum(row[kind]["count"] for row in rows)))
            times = [seconds for row in rows for seconds in row[kind]["back"]]
            if times:
                backs.append(f"{median(times):.1f}")
        wrong = f"{sum(r['missing'] for r in rows):.0f}, {sum(r['differing'] for r in rows)}"
        cells.append([name, ", ".join(counts), kept, allowed, share, ", ".join(backs), wrong])
    head = "| kills, stops, cuts | kept, % | allowed, % | kept of allowed, % | back after, s"
    return pages.table(f"{head} | survivors' blocks missing, rounds that differ", cells)


def base_of(plan: Plan, result: dict[str, Any]) -> dict[str, Any]:
    """Return the run of as many workers without faults."""
    row: dict[str, Any] = result["rows" if plan.workers == FULL.workers else "sixteen"][NONE]
    return row


def _spread(values: list[float]) -> str:
    return f"{median(values):.1f}, {max(values):.1f}" if values else ""


def draw(result: dict[str, Any]) -> None:
    pages.fill(
        "blocks-faults",
        result,
        table=table(result["rows"]),
        attacked=attacked(result),
    )


if __name__ == "__main__":
    main()
