"""How fast is a step with sharded optimizer state and gradients, over DDP's?

    python benchmarks/peers.py                             once, to have the peers as well
    python benchmarks/sharding_speed.py                    twenty minutes; writes the page
    python benchmarks/sharding_speed.py --workload 25Mx2   one of them; writes it into the page
    python benchmarks/sharding_speed.py --quick            a smoke test; writes nothing

AdamW on a decoder of 25 M and of 100 M parameters, on 2 and 4 ranks of this machine (gloo, one
thread each). `sharding/contenders.py` lists who is compared, `sharding/team.py` says why each has
processes of its own. `rounds.py` says how times become ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import torch  # noqa: E402
from sharding.contenders import (  # noqa: E402
    CHOICES,
    CONTENDERS,
    CONTROL,
    DDP,
    OURS,
    OVERLAP,
    SHARED,
    WHOLE_GRADIENTS,
    import_early,
)
from sharding.speed import Workload, measured  # noqa: E402

from sharding import speed_page  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "sharding-speed.json"

ALL = tuple(CONTENDERS)
ZERO = tuple(name for name in ALL if CONTENDERS[name].needs == "deepspeed")
REST = tuple(name for name in ALL if name not in ZERO)
PEERS = tuple(name for name in REST if not CONTENDERS[name].ours and name not in (DDP, CONTROL))
THIRDS = (  # what fits into 24 GB together
    (DDP, CONTROL, OURS, OVERLAP, SHARED),
    (DDP, WHOLE_GRADIENTS, *PEERS[:1]),
    (DDP, *PEERS[1:]),
)
BESIDE_ZERO = (DDP, OURS, OVERLAP, *ZERO)
AS_IT_COMES = (DDP, OURS, "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2")
WORKLOADS = (
    Workload("25M", 2, rounds=12, steps=2, groups=(REST, BESIDE_ZERO)),
    Workload("25M", 4, rounds=8, steps=2, groups=(REST, BESIDE_ZERO)),
    Workload("100M", 2, rounds=7, steps=1, groups=(REST, AS_IT_COMES), one_ddp=True),
    Workload("100M", 4, rounds=5, steps=1, groups=THIRDS, one_ddp=True),
)
QUICK = (Workload("tiny", 2, rounds=2, steps=1, groups=(ALL,)),)
RIVALS = dict.fromkeys((DDP, *PEERS, *ZERO), OURS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument(
        "--workload", action="append", metavar="NAME", help="25Mx2 and the like, and no others"
    )
    parser.add_argument("--rounds", type=float, default=1.0, help="times as many rounds")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        speed_page.write(json.loads(RESULTS.read_text()))
        return
    import_early()
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "workloads": {},
    }
    if args.workload and RESULTS.exists():  # what is not measured again stays
        result["workloads"] = json.loads(RESULTS.read_text())["workloads"]
    for workload in QUICK if args.quick else WORKLOADS:
        if args.workload and workload.name not in args.workload:
            continue
        load = round(os.getloadavg()[0], 1)
        rounds = max(2, round(workload.rounds * args.rounds))
        rows = measured(workload, CONTENDERS, CHOICES, rounds, RIVALS)
        print(f"\n{workload.title}\n{speed_page.table(rows)}", flush=True)
        if not args.quick:
            measurement = {"load": load, "rows": [asdict(row) for row in rows]}
            result["workloads"][workload.title] = measurement
            RESULTS.write_text(json.dumps(result, indent=1) + "\n")
            speed_page.write(result)


if __name__ == "__main__":
    main()
