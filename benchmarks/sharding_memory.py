"""What each rank holds, beside DDP and against the formulas, and how that grows to 1,024 ranks.

    python benchmarks/peers.py                      once, to have fairscale in the comparison
    python benchmarks/sharding_memory.py            a few minutes; writes the page and the figure
    python benchmarks/sharding_memory.py --quick    a smoke test: a small model, writes nothing

Every tensor's memory is counted while a decoder is trained by AdamW(fused=True) on 1, 2 and 4
ranks (`sharding/memory.py`), with so few tokens that activations are next to nothing. Larger worlds
are one rank of many in a process group that moves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

WITH_PEERS = peers.run_again_beside_peers()  # before torch, which this Python may not have

import torch  # noqa: E402
from sharding.contenders import CONTENDERS, CONTROL, OURS, SHARED, import_early  # noqa: E402
from sharding.team import Team  # noqa: E402

from sharding import memory, memory_page, models  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "sharding-memory.json"
RANKS = (1, 2, 4)
SIMULATED = (2, 8, 64, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        memory_page.write(json.loads(RESULTS.read_text()))
        return
    import_early()
    torch.set_num_threads(1)
    size = replace(models.SIZES["tiny" if args.quick else "25M"], batch=1, context=8)
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "size": size.name,
        "measured": measured(size),
        "simulated": simulated(size, SIMULATED[:3] if args.quick else SIMULATED),
    }
    print(memory_page.measured(result["measured"]))
    print(memory_page.simulated(result["simulated"]))
    if not args.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        memory_page.write(result)


def measured(size: models.Size) -> list[dict[str, Any]]:
    """Each contender on each number of ranks; of ranks that differ, the one that holds most."""
    rows = []
    for ranks in RANKS:
        for contender in CONTENDERS.values():
            if contender.name in (CONTROL, SHARED) or not contender.present:
                continue
            if contender.needs == "deepspeed" and (ranks == 1 or "overlap" in contender.name):
                continue
            with Team(ranks, memory.work(contender, size)) as team:
                seen = team.ask({})
            most = {key: max(rank[key] for rank in seen) for key in memory_page.BYTES}
            rows.append({"name": contender.name, "ranks": ranks, **most})
    return rows


def simulated(size: models.Size, worlds: tuple[int, ...]) -> list[dict[str, Any]]:
    """One rank of ours in worlds of growing size, with both kinds of collectives."""
    rows = []
    for ready_made in (False, True):
        for ranks in worlds:
            seen = memory.simulated(CONTENDERS[OURS], size, ranks, ready_made)
            started = Counter(name for name, _ in seen.collectives)
            row = {key: getattr(seen, key) for key in memory_page.BYTES}
            rows.append({"ranks": ranks, "ready_made": ready_made, "started": started, **row})
    return rows


if __name__ == "__main__":
    main()
