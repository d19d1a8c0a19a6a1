"""Seconds and memory to save and load 100 M parameters; then kills and damaged files.

    python benchmarks/checkpoints.py            a quarter of an hour; writes the page
    python benchmarks/checkpoints.py --quick    a smoke test: a small model, writes nothing
    python benchmarks/checkpoints.py --size 25M --busy "a note"   smaller, with a note on the page

Checkpoints go to a folder beside --folder (by default the system's for temporary files).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from checkpointing import page  # noqa: E402
from checkpointing.contenders import CONTENDERS, Contender  # noqa: E402
from sharding.team import Team  # noqa: E402

from sharding import models  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "checkpoints.json"
RANKS = (2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    parser.add_argument("--size", default="100M", choices=sorted(models.SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--damaged", type=int, default=1000)
    parser.add_argument("--busy", default="", help="what the page should say of the machine")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    if args.draw:
        page.write(json.loads(RESULTS.read_text()))
        return
    if args.quick:
        args.size, args.rounds, args.kills, args.damaged = "tiny", 2, 4, 20
    # Ranks are forked; what torch imports late is imported here, once.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    torch.set_num_threads(1)
    size = models.SIZES[args.size]
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        rows = [row for n in RANKS for row in timed(n, size, args.rounds, Path(name))]
        print(page.table(rows))
        wrong = killed(args.kills, Path(name) / "killed")
        print(f"{args.kills} kills, {wrong} failures")
        not_refused = damaged(args.damaged, Path(name) / "damaged")
        print(f"{args.damaged} damaged, {len(not_refused)} not refused", *not_refused, sep="\n")
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "size": size.name,
        "bytes": 12 * sum(p.numel() for p in models.Decoder(size).parameters()),
        "rounds": args.rounds,
        "note": f"\n**{args.busy}**\n" if args.busy else "",
        "rows": rows,
        "kills": args.kills,
        "kills_wrong": wrong,
        "damaged": args.damaged,
        "damaged_wrong": not_refused,
    }
    if not args.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        page.write(result)


# -- seconds and memory ----------------------------------------------------------------------------


def timed(ranks: int, size: models.Size, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Each contender's seconds (the slowest rank's) and peaks (the largest), by round."""
    keys = ("save", "load", "save_peak", "load_peak")
    rows = [{"ranks": ranks, "name": c.name, **{key: [] for key in keys}} for c in CONTENDERS]
    for round_ in range(rounds):
        for place in range(len(CONTENDERS)):
            number = (place + round_) % len(CONTENDERS)
            path = folder / f"{ranks}-{number}"
            with Team(ranks, work(CONTENDERS[number], size, path)) as team:
                seen = team.ask({})
            shutil.rmtree(path)
            for key in keys:
                rows[number][key].append(max(rank[key] for rank in seen))
    return rows


def work(
    contender: Contender, size: models.Size, path: Path
) -> Callable[[int], Callable[[dict[str, Any]], Any]]:
    def begin(rank: int) -> Callable[[dict[str, Any]], Any]:
        torch.manual_seed(0)
        run = contender.make(models.Decoder(size))

        def answer(_: dict[str, Any]) -> dict[str, float]:
            finish, save, save_peak = measured(lambda: contender.save(run, path))
            if finish is not None:
                finish()
            _, load, load_peak = measured(lambda: contender.load(run, path))
            return {"save": save, "load": load, "save_peak": save_peak, "load_peak": load_peak}

        return answer

    return begin


def measured(do: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, the seconds, and by how many bytes the process grew at the most."""
    dist.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    result = do()
    seconds = time.perf_counter() - start
    return result, seconds, max(_status("VmHWM") - before, 0)


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


# -- kills and damage ------------------------------------------------------------------------------


def killed(times: int, path: Path) -> int:
    """How often the newest checkpoint could not be loaded after a kill, or was of no one step."""
    from helpers.damage import kill_while_saving

    choose, wrong = random.Random(0), 0
    for number in range(times):
        try:
            kill_while_saving(path, choose, wait=bool(number % 2), size=300)
        except Exception as error:
            wrong += 1
            print(f"kill {number}: {error!r}")
    return wrong


def damaged(times: int, folder: Path) -> list[str]:
    """What was not refused, of checkpoints with one file harmed."""
    import manyhands as mh
    from helpers.checkpoint_oracle import Setup
    from helpers.damage import damage_many
    from helpers.ranks import run_ranks
    from manyhands.checkpoint import _folder

    def write() -> None:
        mh.save(folder / "run", **Setup("OSS").train(2).given())

    folder.mkdir()
    run_ranks(2, write)
    (source,) = _folder.list_complete(folder / "run")
    return damage_many(Setup("plain", seed=3).train(1), source, folder, times)


if __name__ == "__main__":
    main()
