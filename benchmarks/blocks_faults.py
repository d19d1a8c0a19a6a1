"""What do killed and stopped workers cost the others?

    python benchmarks/blocks_faults.py --data FOLDER    25 minutes; writes the page
    python benchmarks/blocks_faults.py --quick          a smoke test of a minute; writes nothing

8 workers, started by `manyhands run`, train an LSTM on the characters of tinyshakespeare.txt.xz
(which FOLDER holds) inside `mh.DiLoCo` in a `mh.Crew`, for --minutes without faults. Then they take
the same number of steps with a random worker killed or stopped every 30 s, and every 15 s. The last
run has no faults again, and other batches: how far apart two runs are by themselves. One more run
has all kinds of harm, every 10 s: also bad newcomers, strangers that write to the store, workers
that leave in mid-block, and a line between two hosts that is cut (--hostile: only this one).
`faults/` has the rest: the workers' script, the faults, and the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

peers.this_checkout()
os.environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).resolve().parent)  # for faults.worker

import torch  # noqa: E402
from faults import harm, page, tally  # noqa: E402
from faults.harm import Plan  # noqa: E402
from quality.workloads import SHAKESPEARE  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "blocks-faults.json"
FULL = Plan(
    workers=8, steps=0, every=16, batch=8, pace=0.09, lr=4e-3, stall=2.0, jitter=2.0, asleep=10.0
)
BLOCK = 1.5  # seconds of a block of FULL
QUICK = Plan(
    workers=4, steps=800, every=16, batch=4, pace=0.03, lr=4e-3, stall=1.0, jitter=1.0, asleep=3.0
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"where {SHAKESPEARE} is")
    parser.add_argument("--minutes", type=float, default=5.0, help="of a run without faults")
    parser.add_argument("--stall", type=float, help="of `manyhands run`; by default 2 s")
    parser.add_argument(
        "--interval", action="append", type=float, metavar="S", help="only this; writes nothing"
    )
    parser.add_argument("--hostile", action="store_true", help="only all kinds; writes nothing")
    parser.add_argument("--once", action="store_true", help="without the second fault-free run")
    parser.add_argument("--log", type=Path, help="keep the logs and what is printed, for a look")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        page.write(json.loads(RESULTS.read_text()))
        return
    if args.data is None and not args.quick:
        parser.error(f"--data is needed: a folder that holds {SHAKESPEARE}.")
    if args.data is not None and not (args.data / SHAKESPEARE).is_file():
        parser.error(f"{args.data} does not hold {SHAKESPEARE}.")
    plan = QUICK if args.quick else replace(FULL, steps=_steps(args.minutes))
    plan = replace(plan, stall=args.stall or plan.stall)
    intervals = args.interval or ([5.0] if args.quick else [30.0, 15.0])
    load = round(os.getloadavg()[0], 1)
    plans = {page.NONE: plan}
    if not args.hostile:
        plans |= {page.every(seconds): replace(plan, interval=seconds) for seconds in intervals}
    if args.quick or args.hostile or args.interval is None:
        every = (args.interval or [4.0 if args.quick else 10.0])[0]
        plans[page.HOSTILE] = replace(plan, interval=every, kinds=harm.ALL, apart=2)
    written = not (args.quick or args.hostile) and args.interval is None
    if written and not args.once:
        plans[page.AGAIN] = replace(plan, seed=1)
    rows = measured(plans, args.data, args.log)
    print(page.table(rows))
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "load": load,
        "cores": os.cpu_count(),
        "plan": asdict(plan),
        "rows": rows,
    }
    if written:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        page.write(result)
    if wrong := [name for name, row in rows.items() if not page.is_sound(row)]:
        raise SystemExit(f"workers differ, work is lost or the exit code is not 0: {wrong}")


def _steps(minutes: float) -> int:
    return round(60.0 * minutes / BLOCK) * FULL.every


def measured(plans: dict[str, Plan], data: Path | None, log: Path | None) -> dict[str, Any]:
    """One run after the other; the first shows how long a block takes without faults."""
    rows: dict[str, Any] = {}
    for name, plan in plans.items():
        print(f"{name}: {plan.workers} workers, {plan.steps} steps", flush=True)
        trial = harm.run(plan, data)
        if log is not None:
            log.mkdir(parents=True, exist_ok=True)
            kept = {**asdict(trial), "output": trial.output.splitlines()}
            (log / f"{name.replace(' ', '-')}.json").write_text(json.dumps(kept, indent=1) + "\n")
        if not rows:
            usual = tally.usual_block(tally.kept_rounds(trial.log), plan.every)
        rows[name] = {"usual": usual, **tally.tally(trial, usual)}
        print(f"  {page.summary(rows[name])}", flush=True)
        if trial.code:
            print(trial.output)
    return rows


if __name__ == "__main__":
    main()
