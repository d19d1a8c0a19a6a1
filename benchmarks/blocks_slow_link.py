"""How fast do two hosts train over a slow line, and how much do they send?

    python benchmarks/blocks_slow_link.py              ten minutes; writes the page
    python benchmarks/blocks_slow_link.py --only int4  whose names contain it; into the page
    python benchmarks/blocks_slow_link.py --bytes      only the bytes at H = 100; into the page
    python benchmarks/blocks_slow_link.py --lines      a quarter of an hour: what overlap leaves of
                                                       three lines, one with losses; into the page
    python benchmarks/blocks_slow_link.py --quick      a smoke test: a small model, writes nothing

The hosts are network namespaces on this machine, joined at 50 Mbit/s with a round trip of 20 ms
(`slow_link/`), which needs Linux, root and /dev/net/tun. Each has one rank of 10 M parameters that
sleeps for 300 ms where it would compute. `blocks/contenders.py` lists what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import peers

peers.this_checkout()

import torch  # noqa: E402
from blocks.contenders import ALONE, BYTES, DDP, DDP_HALVES, HIDDEN, SLOW, Contender  # noqa: E402
from blocks.model import QUICK, SIZE, parameters  # noqa: E402
from blocks.stepping import stepping  # noqa: E402
from sharding.models import Size  # noqa: E402
from sharding.team import Team  # noqa: E402
from slow_link.hosts import NoSlowLink  # noqa: E402
from slow_link.probe import probe  # noqa: E402
from slow_link.relay import Link, slow_link  # noqa: E402
from slow_link.wire import Terms  # noqa: E402

from blocks import slow_page  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "blocks-slow-link.json"
LINES = {  # hosts, and what the line of each promises
    "2 hosts, 50 Mbit/s": (2, Terms()),
    "4 hosts, 50 Mbit/s": (4, Terms()),
    "2 hosts, 100 Mbit/s, 5 % of the packets lost": (2, Terms(rate=100e6, loss=0.05)),
}
ROUNDS = 3  # in each, every contender trains for two blocks
STEPWISE = (DDP.name, DDP_HALVES.name)  # they send in every step: a few steps are enough


@dataclass(frozen=True)
class Setting:
    """How long a contender trains, and what for."""

    size: Size
    every: int  # steps of a block
    warm_up: int  # blocks that are not measured
    blocks: int
    seconds: float  # that a step "computes"
    stepwise: int  # steps of a contender that sends in every step

    def order(self, contender: Contender) -> dict[str, Any]:
        """Return what each rank is to do."""
        if contender.name in STEPWISE:
            return {"warm_up": 1, "blocks": 1, "length": self.stepwise, "seconds": self.seconds}
        return {
            "warm_up": self.warm_up * self.every,
            "blocks": self.blocks,
            "length": self.every,
            "seconds": self.seconds,
        }


SLOW_LINE = Setting(SIZE, every=16, warm_up=1, blocks=2, seconds=0.3, stepwise=2)
LONG_BLOCKS = Setting(SIZE, every=100, warm_up=0, blocks=1, seconds=0.0, stepwise=3)
QUICK_LINE = Setting(QUICK, every=16, warm_up=1, blocks=1, seconds=0.02, stepwise=2)
QUICK_BLOCKS = Setting(QUICK, every=20, warm_up=0, blocks=1, seconds=0.0, stepwise=2)
WORLDS = (2, 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="only with this in the name"
    )
    parser.add_argument("--bytes", action="store_true", help="no slow line: only bytes at H = 100")
    parser.add_argument("--lines", action="store_true", help="only the comparison of lines")
    parser.add_argument("--draw", action="store_true", help="write the page of the last run again")
    args = parser.parse_args()
    if args.draw:
        slow_page.write(json.loads(RESULTS.read_text()))
        return
    # Ranks are forked; what torch imports late is imported here, once.
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    result = _begun(keep=args.bytes or args.lines or args.only is not None)
    try:
        if not args.bytes and not args.lines:
            over_slow_line(QUICK_LINE if args.quick else SLOW_LINE, args.only, result)
        if args.lines or (args.only is None and not args.bytes):
            result["lines"] = over_lines(
                QUICK_LINE if args.quick else SLOW_LINE, 1 if args.quick else ROUNDS
            )
            result["lines_load"] = round(os.getloadavg()[0], 1)
    except NoSlowLink as error:
        raise SystemExit(f"There is no slow link here: {error}") from error
    if args.bytes or (args.only is None and not args.lines):
        counted_bytes(QUICK_BLOCKS if args.quick else LONG_BLOCKS, args.only, result)
    if not args.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        slow_page.write(result)


def _begun(keep: bool) -> dict[str, Any]:
    """What will be written; what is not measured again stays."""
    params = parameters(SIZE)
    result: dict[str, Any] = {"link": {}, "rows": {}, "bytes": {str(n): {} for n in WORLDS}}
    if keep and RESULTS.exists():
        result = json.loads(RESULTS.read_text())
    about = {
        "machine": f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "elements": sum(p.numel() for p in params),
        "tensors": len(params),
        "load": round(os.getloadavg()[0], 1),
        "terms": asdict(Terms()),
    }
    return {**result, **about}


def _chosen(contenders: Iterable[Contender], only: list[str] | None) -> list[Contender]:
    return [c for c in contenders if only is None or any(part in c.name for part in only)]


def over_slow_line(setting: Setting, only: list[str] | None, result: dict[str, Any]) -> None:
    """One contender after the other: each has the line for itself."""
    with slow_link(Terms()) as link:
        result["link"] = probe(link)
        print(slow_page.line(result["link"]), flush=True)
        for contender in _chosen(SLOW.values(), only):
            result["rows"][contender.name] = row = _over(link, contender, setting)
            print(slow_page.row(contender.name, row), flush=True)


def _over(link: Link, contender: Contender, setting: Setting) -> dict[str, Any]:
    before = link.carried()
    with Team(2, stepping(contender, setting.size, setting.every), link.enter) as team:
        row = _summary(team.ask(setting.order(contender)))
    after = link.carried()
    return {**row, "dropped": after["dropped"] - before["dropped"]}


def over_lines(setting: Setting, rounds: int) -> dict[str, Any]:
    """What overlap leaves of each line: contenders take turns, so that all see the same machine."""
    found: dict[str, Any] = {}
    for name, (hosts, terms) in LINES.items():
        with slow_link(terms, hosts) as link, ExitStack() as stack:
            found[name] = {"link": probe(link), "rows": {}}
            teams = {
                contender: stack.enter_context(
                    Team(hosts, stepping(contender, setting.size, setting.every), link.enter)
                )
                for contender in HIDDEN
            }
            times: dict[str, list[float]] = {contender.name: [] for contender in HIDDEN}
            for _ in range(rounds):
                for contender, team in teams.items():
                    row = _summary(team.ask(setting.order(contender)))
                    times[contender.name].append(row["ms"])
                    found[name]["rows"][contender.name] = row
        for contender in HIDDEN:
            row = found[name]["rows"][contender.name]
            row["rounds"] = [
                ms / alone
                for ms, alone in zip(times[contender.name], times[ALONE.name], strict=True)
            ]
            row["ms"] = median(times[contender.name])
            print(f"{name}, {contender.name}: {row['ms']:.0f} ms, {row['rounds']}", flush=True)
    return found


def counted_bytes(setting: Setting, only: list[str] | None, result: dict[str, Any]) -> None:
    """What a rank sends in a step where blocks are long, between processes of one host."""
    for ranks in WORLDS:
        for contender in _chosen(BYTES.values(), only):
            with Team(ranks, stepping(contender, setting.size, setting.every)) as team:
                row = _summary(team.ask(setting.order(contender)))
            result["bytes"][str(ranks)][contender.name] = row["sent"]
            print(f"{ranks} ranks, {contender.name}: {row['sent']:,.0f} bytes a step", flush=True)


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The slower rank's times, block by block; CPU and bytes of a rank on average."""
    walls = [max(block) for block in zip(*(rank["wall"] for rank in ranks), strict=True)]
    return {
        "ms": 1e3 * fmean(walls),
        "blocks": [1e3 * wall for wall in walls],
        "cpu_ms": 1e3 * fmean(rank["cpu"] for rank in ranks),
        "sent": fmean(rank["sent"] for rank in ranks),
    }


if __name__ == "__main__":
    main()
