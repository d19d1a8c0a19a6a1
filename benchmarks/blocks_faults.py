"""What do killed and stopped workers cost the others?

    python benchmarks/blocks_faults.py --data FOLDER --part 1    30 minutes; writes the page
    python benchmarks/blocks_faults.py --data FOLDER --part 2    an hour; goes on where it ended
    python benchmarks/blocks_faults.py --data FOLDER --quick    a smoke test of a minute

8 workers, started by `manyhands run`, train an LSTM on the characters of tinyshakespeare.txt.xz
(which FOLDER holds) inside `mh.DiLoCo` in a `mh.Crew`, without faults. Then they take the same
number of steps with a random worker killed or stopped every 30 s, and every 15 s. The last run has
no faults again, and other batches: how far apart two runs are by themselves. Then 16 workers with
slower steps, without faults and with one every 30 s. Part 2 compares what is kept with what the
faults themselves allow, three times each: 8 workers with a fault every 15 s, and 16 workers on two
hosts between which the line is cut, too (network namespaces; needs root, `ip` and `nsenter`), every
15 s and every 10 s. `faults/` has the workers' script, the faults, and the model that tells from
the measured recoveries what faults would cost thousands of workers.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pages
import peers

peers.this_checkout()
HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))  # for helpers.networks
os.environ["PYTHONPATH"] += f"{os.pathsep}{HERE}{os.pathsep}{HERE.parent / 'tests'}"  # of workers

from faults import harm, model  # noqa: E402
from faults.harm import KINDS, OF_ONE, Fault, LogLine, Plan, Trial  # noqa: E402
from faults.spent import CAUSES  # noqa: E402

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
NONE, AGAIN = "no faults", "no faults, other batches"
CREWS, DAYS, BLOCKS = (16, 64, 256, 1024, 4096, 10_000), (1, 7, 30), (60.0, 300.0)  # of the model
REGROUP = 0.001  # seconds for each worker
AGREES = 3.0  # points by which the model may be off
Rows = dict[str, dict[str, Any]]


def main() -> None:
    parser = pages.parser(__doc__, data="tinyshakespeare.txt.xz")
    parser.add_argument("--part", type=int, choices=(1, 2), default=1)
    args = parser.parse_args()
    if args.draw:
        draw(pages.read("blocks-faults"))
    elif args.quick:
        rows = run({NONE: QUICK, "every 5 s": replace(QUICK, interval=5.0)}, args.data)
        print(table(rows), spent({name: [row] for name, row in rows.items()}), sep="\n\n")
        say_unsound(rows)
    elif args.part == 1:
        plans = {f"every {s:g} s": replace(FULL, interval=s) for s in (30.0, 15.0)}
        plans = {NONE: FULL, **plans, AGAIN: replace(FULL, seed=1)}
        conditions = {**pages.conditions(), "cores": os.cpu_count(), "plan": asdict(FULL)}
        more = {NONE: SIXTEEN, "every 30 s": replace(SIXTEEN, interval=30.0)}
        rows, sixteen = run(plans, args.data), run(more, args.data)
        attacks = {name: [] for name in ATTACKS}
        attacks[FEW].append(rows["every 15 s"])
        result = {**conditions, "rows": rows, "sixteen": sixteen, "attacks": attacks}
        pages.store("blocks-faults", result)
        draw(result)
        say_unsound({**rows, **sixteen})
    else:
        result = pages.read("blocks-faults")
        for seed, (name, plan) in product(range(TIMES), ATTACKS.items()):
            rows = result["attacks"][name]
            if seed == len(rows):  # not those that were run already
                usual = base_of(plan, result)["usual"]
                rows += run({name: replace(plan, seed=seed)}, args.data, usual).values()
                pages.store("blocks-faults", result)
                print(attacked(result), flush=True)
        draw(result)
        runs = result["attacks"].items()
        say_unsound({f"{name}, {n}": row for name, rows in runs for n, row in enumerate(rows)})


def say_unsound(rows: Rows) -> None:
    if wrong := [name for name, row in rows.items() if not is_sound(row)]:
        raise SystemExit(f"workers differ, work is lost or the exit code is not 0: {wrong}")


def run(plans: dict[str, Plan], data: Path, usual: float = 0.0) -> Rows:
    """Run all plans; without a `usual` time of a block, the first shows it."""
    rows: Rows = {}
    for name, plan in plans.items():
        print(f"{name}: {plan.workers} workers, {plan.steps} steps", flush=True)
        trial = harm.run(plan, data)
        usual = usual or usual_block(kept_rounds(trial.log), plan.every)
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
    """A sync round that was kept."""

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
    found, before = [], 0
    for number, lines in sorted(by_number.items()):
        steps = min(line["steps"] for line in lines)
        length, before = steps - before, steps
        counted = frozenset(line["number"] for line in lines if line["own"] == length > 0)
        if counted:
            when = min(line["time"] for line in lines)
            found.append(KeptRound(number, when, steps, length, counted))
    return found


def usual_block(held: list[KeptRound], every: int) -> float:
    """Return the seconds of a block without faults."""
    return median(b.time - a.time for a, b in pairwise(held) if b.length == every)


def tally(trial: Trial, usual: float) -> dict[str, Any]:
    """Return the figures of a run; `usual` is the time of a block without faults."""
    log = trial.log
    held = kept_rounds(log)
    seconds = held[-1].time - held[0].time
    left = [line for line in log if line["event"] == "left"]
    result: dict[str, Any] = {
        "interval": trial.plan.interval,
        "seconds": seconds,
        "rounds": len(held),
        "rate": sum(m.length * len(m.counted) for m in held[1:]) / seconds,
        "allowed": harm.allowed(trial.plan, trial.faults, held[-1].time, seconds),
        "missing": missing(held, trial.faults, trial.plan.workers),
        "compared": sum(line["event"] != "loss" for line in log),
        "differing": differing(log),
        "finished": len({line["number"] for line in left}),
        "finals": len({line["final"] for line in left}),
        "loss": next((line["loss"] for line in log if line["event"] == "loss"), None),
        "code": trial.code,
        "cores": trial.cpu / trial.seconds,
        "spent": trial.spent,
    }
    for kind in KINDS:
        faults = [fault for fault in trial.faults if fault.kind == kind]
        result[kind] = {
            "count": len(faults),
            "delays": _known([delay(fault, held, usual) for fault in faults]),
            "back": _known([back(fault, held) for fault in faults]),
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


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# -- the page --------------------------------------------------------------------------------------


def table(rows: Rows) -> str:
    """One column for each run."""
    base = next(iter(rows.values()))
    lines: dict[str, Any] = {
        "killed, stopped": lambda r: f"{r['kill']['count']}, {r['stop']['count']}",
        "worker-steps that count, a second": lambda r: f"{r['rate']:.1f}",
        "throughput kept, %": lambda r: f"{100 * r['rate'] / base['rate']:.1f}",
        "sync rounds kept": lambda r: r["rounds"],
        "survivors' blocks missing": lambda r: f"{r['missing']:.0f}",
        "delay after a kill, s": lambda r: _spread(r["kill"]["delays"]),
        "delay after a stop, s": lambda r: _spread(r["stop"]["delays"]),
        "a killed worker counts again after, s": lambda r: _spread(r["kill"]["back"]),
        "a stopped worker counts again after, s": lambda r: _spread(r["stop"]["back"]),
        "states compared": lambda r: f"{r['compared']:,}",
        "rounds after which some differ": lambda r: r["differing"],
        "workers at the end, different results": lambda r: f"{r['finished']}, {r['finals'] - 1}",
        "loss, nats a character": lambda r: f"{r['loss']:.4f}",
    }
    cells = ([what, *map(form, rows.values())] for what, form in lines.items())
    return pages.table(" | ".join(["", *rows]), cells)


def attacked(result: dict[str, Any]) -> str:
    """A line for each attack, with the shares of all its runs."""
    cells = []
    for name, plan in ATTACKS.items():
        rows, base = result["attacks"][name], base_of(plan, result)["rate"]
        kept = [row["rate"] / base for row in rows]
        allowed = [row["allowed"] for row in rows]
        of_allowed = [a / b for a, b in zip(kept, allowed, strict=True)]
        shares = (", ".join(f"{100 * x:.1f}" for x in each) for each in (kept, allowed, of_allowed))
        times = {kind: [s for row in rows for s in row[kind]["back"]] for kind in KINDS}
        back = ", ".join(f"{median(each):.1f}" for each in times.values() if each)
        count = ", ".join(str(sum(row[kind]["count"] for row in rows)) for kind in times)
        wrong = f"{sum(r['missing'] for r in rows):.0f}, {sum(r['differing'] for r in rows)}"
        cells.append([name, count, *shares, back, wrong])
    head = "| kills, stops, cuts | kept, % | allowed, % | kept of allowed, % | back after, s"
    return pages.table(f"{head} | survivors' blocks missing, rounds that differ", cells)


def base_of(plan: Plan, result: dict[str, Any]) -> dict[str, Any]:
    """Return the run of as many workers without faults."""
    row: dict[str, Any] = result["rows" if plan.workers == FULL.workers else "sixteen"][NONE]
    return row


def spent(rows: dict[str, list[dict[str, Any]]]) -> str:
    """What the seconds of all workers went into, in percent; of several runs, the mean."""
    cells = (
        [what, *(f"{100 * fmean(r['spent'][cause] for r in each):.1f}" for each in rows.values())]
        for cause, what in CAUSES.items()
    )
    return pages.table(" | ".join(["% of all workers' seconds", *rows]), cells)


def _spread(values: list[float]) -> str:
    """Median, and the worst."""
    return f"{median(values):.1f}, {max(values):.1f}" if values else ""


def verdict(rows: Rows) -> str:
    """Each claim, and whether it holds."""
    faulty = {name: row for name, row in rows.items() if row["interval"]}
    lines = []
    for name, row in faulty.items():
        share = 100 * row["rate"] / rows[NONE]["rate"]
        lines.append(
            f"- **A fault {name}:** {share:.1f} % of the throughput is kept, with "
            f"{row['kill']['count']} kills and {row['stop']['count']} stops in "
            f"{row['seconds']:.0f} s."
        )
    sound = "yes" if all(map(is_sound, rows.values())) else "**no**"
    lines.append(
        "- **Bitwise the same state after each sync round and at the end, nothing lost by workers "
        f"that are not hit, exit code 0:** {sound}; {sum(r['compared'] for r in rows.values()):,} "
        "states were compared."
    )
    base = rows[NONE]["loss"]
    more = {name: f"{100 * (row['loss'] / base - 1):+.2f} %" for name, row in rows.items()}
    losses = ", ".join(f"{more[name]} with a fault {name}" for name in faulty)
    lines.append(
        f"- **Loss after equally many steps:** {losses} ({more[AGAIN]} without, on other batches)."
    )
    return "\n".join(lines)


def modelled(rows: Rows, workers: int, name: str) -> tuple[float, float]:
    """The share of the throughput that a run has kept, and that its model keeps, in percent."""
    row, usual = rows[name], rows[NONE]["usual"]
    kinds = [model.Recoveries.of(row[kind], usual) for kind in OF_ONE]
    shares = (
        model.kept(workers, usual, row["interval"], kinds, rounds=row["rounds"], seed=seed)
        for seed in range(50)
    )
    return 100 * row["rate"] / rows[NONE]["rate"], 100 * fmean(shares)


def larger(result: dict[str, Any]) -> dict[str, str]:
    """The model's tables: beside the runs, and for crews that were never run."""
    runs = [(8, result["rows"], name) for name, row in result["rows"].items() if row["interval"]]
    runs.append((16, result["sixteen"], "every 30 s"))
    shares = [(size, name, *modelled(rows, size, name)) for size, rows, name in runs]
    apart = max(abs(ran - told) for _, _, ran, told in shares)
    assert apart <= AGREES, f"the model is {apart:.1f} points off"
    row, usual = result["rows"]["every 30 s"], result["rows"][NONE]["usual"]
    kinds = [model.Recoveries.of(row[kind], usual) for kind in OF_ONE]
    cells = []
    for block in BLOCKS:
        for days in DAYS:
            rates = ((size, 86_400 * days / size) for size in CREWS)
            kept = [
                100 * model.kept(size, block, every, kinds, regroup=REGROUP * size)
                for size, every in rates
            ]
            cells.append([f"{block:g} s", days, *(f"{share:.1f}" for share in kept)])
    sizes = " | ".join(f"{size:,}" for size in CREWS)
    return {
        "beside": pages.table(
            "workers | a fault | run, % | model, %",
            [(size, name, f"{ran:.1f}", f"{told:.1f}") for size, name, ran, told in shares],
            left=2,
        ),
        "apart": f"{apart:.1f}",
        "crews": pages.table(f"block | days between faults of a worker | {sizes}", cells),
    }


PAGE = """# Workers that are killed and stopped

{workers} workers train an LSTM (93,000 parameters) on the characters of Shakespeare's plays, with
AdamW inside `mh.DiLoCo` (H = {every}, int8) in a `mh.Crew`, started by `manyhands run --workers
{workers} --stall {stall:g} --preload quality.workloads`. A block takes {usual:.2f} s without
faults. At set times a random worker is killed (SIGKILL; the command starts it again) or stopped
(SIGSTOP, for {asleep:g} s). Each run is of {steps:,} steps, {minutes:.1f} minutes without faults.
Measured on {machine}, with {versions}; load average {load}.

```bash
python benchmarks/blocks_faults.py --data FOLDER
```

{verdict}

{table}

- **Throughput** is the number of worker-steps in the mean of a kept round, over the time from the
  first round to the last. Restarts are included.
- Each step is padded by a sleep to {pace_ms:.0f} ms, so that a dead worker's share of the {cores}
  cores makes the others no faster ({used:.2f} are used without faults).
- **Delay** is the longer of the two blocks after a fault, over the usual time of one: median and
  worst, as for **counts again**, the time from the fault to the end of the first block that the
  worker contributes.
- **States** are SHA-1 sums of the anchor and the outer momentum, logged after each round.
- "{again}" differs from the first run by chance only.

## What the faults allow

The throughput is compared with what the faults themselves leave: a worker may be away for
{restart:g} s after each kill and stop, and for as long as a stop or cut lasts ({asleep:g} s).
Figures are in percent of the throughput without faults, one for each run. 16 workers are on two
hosts (network namespaces), 10 and 6. A sync round needs 9 of them (`--quorum 9`), a block is
{sixteen_every} steps of {sixteen_pace:g} s, and a cut drops all packets between the hosts. "Back
after" is the median time from a fault to the end of the first block that all its workers
contribute.

```bash
python benchmarks/blocks_faults.py --data FOLDER --part 2
```

{attacked}

Where the time of all workers went, from the start of their processes to their last step (means of
the runs; `benchmarks/faults/spent.py` measures it):

{spent}

## Thousands of workers

A model of discrete events takes from the runs how long a fault delays the others, and how long
its victim is away. Faults come at random times, and hit random workers. Throughput kept, in
percent, in the runs and in the model (mean of 50 seeds; at most {apart} points apart):

{beside}

The run with 16 workers has blocks of {sixteen_every} steps of {sixteen_pace:g} s, so that the cores
suffice.

**Simulated** with the recoveries of 8 workers and a fault every 30 s: throughput kept, in
percent, of crews in which each worker is killed or stopped once in so many days. Each round in
which a worker is lost or comes in is **assumed** to cost one regrouping, of {regroup_ms:.0f} ms
for each worker, beyond the measured delays.

{crews}

A fault costs its victim's block, so short blocks are better if faults are rare, and long ones if
a large crew regroups in most rounds.
"""


def draw(result: dict[str, Any]) -> None:
    """Write the page of a run."""
    rows, plan = result["rows"], result["plan"]
    base = rows[NONE]
    measured = {"minutes": base["seconds"] / 60, "usual": base["usual"], "used": base["cores"]}
    parts = {"verdict": verdict(rows), "table": table(rows), "again": AGAIN}
    parts = {**plan, **measured, **parts, "pace_ms": 1e3 * plan["pace"]}
    parts |= {**larger(result), "regroup_ms": 1e3 * REGROUP}
    of_attacks = {name: each for name, each in result["attacks"].items() if each}
    parts["spent"] = spent({NONE: [base], **of_attacks})
    parts["attacked"] = attacked(result)
    parts |= {"restart": harm.RESTART, "sixteen_pace": SIXTEEN.pace}
    parts["sixteen_every"] = SIXTEEN.every
    pages.write("blocks-faults", PAGE, result, **parts)


if __name__ == "__main__":
    main()
