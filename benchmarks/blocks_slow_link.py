"""How fast do two hosts train over a slow network, and how much do they send?

    sudo python benchmarks/blocks_slow_link.py         ten minutes; writes the page

The hosts are network namespaces on this machine, joined at 50 Mbit/s with a round trip of 20 ms
(`slow_link.py`), which needs Linux, root and /dev/net/tun. Each has one rank of 10 M parameters
that sleeps for 300 ms where it would compute. `blocks/contenders.py` lists what is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import fmean
from typing import Any

import pages
import peers

peers.this_checkout()

from blocks.contenders import ALONE, DDP, DDP_HALVES, SLOW, Contender  # noqa: E402
from blocks.model import QUICK, SIZE, Pretended, parameters  # noqa: E402
from sharding.models import Size  # noqa: E402
from slow_link import Link, NoSlowLink, Terms, probe, slow_link  # noqa: E402
from team import Team  # noqa: E402
from torch.optim import AdamW  # noqa: E402
from traffic import bytes_sent  # noqa: E402

import manyhands as mh  # noqa: E402

EVERY = 16  # steps of a block; a block that is not measured comes before
BLOCKS = 2
# Not on the page.
LEFT_OUT = ("manyhands BMUF, bfloat16", "manyhands DiLoCo, bfloat16", "DDP, fp16 hook")
Row = dict[str, Any]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    if not args.draw:
        try:
            result = run(args.quick)
        except NoSlowLink as error:
            raise SystemExit(f"There is no slow link here: {error}") from error
        if args.quick:
            return
        pages.store("blocks-slow-link", result)
    result = pages.read("blocks-slow-link")
    pages.fill("blocks-slow-link", result, table=table(result["rows"]))


def run(quick: bool) -> dict[str, Any]:
    """Measure all contenders, one after the other: each has all the network."""
    params = parameters(SIZE)
    result: dict[str, Any] = {
        **pages.conditions(),
        "elements": sum(p.numel() for p in params),
        "tensors": len(params),
        "terms": asdict(Terms()),
        "rows": {},
    }
    size, seconds = (QUICK, 0.02) if quick else (SIZE, 0.3)
    with slow_link(Terms()) as link:
        result["link"] = probe(link)
        print(result["link"], flush=True)
        for name, contender in SLOW.items():
            result["rows"][name] = measured(contender, size, seconds, link)
    return result


def measured(contender: Contender, size: Size, seconds: float, link: Link) -> Row:
    """The slower rank's times, block by block; CPU and bytes of a rank on average."""

    def work(rank: int) -> Callable[[dict[str, Any]], Any]:
        return lambda _: trained(contender, size, seconds, rank)

    with Team(2, work, link.enter) as team:
        found = team.ask({})
    walls = [max(block) for block in zip(*(rank["wall"] for rank in found), strict=True)]
    row = {
        "ms": 1e3 * fmean(walls),
        "blocks": [1e3 * wall for wall in walls],
        "cpu_ms": 1e3 * fmean(rank["cpu"] for rank in found),
        "sent": fmean(rank["sent"] for rank in found),
    }
    print(f"{contender.name}: {row}", flush=True)
    return row


def trained(contender: Contender, size: Size, seconds: float, rank: int) -> dict[str, Any]:
    """Train on this rank; wall seconds of each block's steps, CPU seconds and bytes per step.

    The warm-up does not sleep. There is no barrier: what an overlapped synchronization still has
    under way when it ends, it has again when the last block ends.
    """
    warm_up, blocks, length = EVERY, BLOCKS, EVERY
    if contender in (DDP, DDP_HALVES):  # which send in every step: a few are enough
        warm_up, blocks, length = 1, 1, 2
    module = Pretended(size, rank)
    model = contender.wrap(module)
    inner = AdamW(module.parameters(), lr=1e-4, fused=True)
    optimizer = contender.make(inner, EVERY, module)

    def train(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - began) / steps

    train(warm_up)
    module.seconds = seconds
    cpu = time.process_time()
    sent = bytes_sent()
    walls = [train(length) for _ in range(blocks)]
    cpu = time.process_time() - cpu
    sent = bytes_sent() - sent
    if isinstance(optimizer, mh.Blocks):
        optimizer.synchronize()  # what is under way arrives before processes end
    return {"wall": walls, "cpu": cpu / (blocks * length), "sent": sent / (blocks * length)}


def table(rows: dict[str, Row]) -> str:
    alone = rows[ALONE.name]["ms"]
    ddp = rows[DDP.name]["sent"]
    cells = []
    for name in SLOW:
        if name in LEFT_OUT:
            continue
        milliseconds = rows[name]["ms"]
        sent = rows[name]["sent"]
        times = [f"{milliseconds:,.0f}", f"{milliseconds - alone:,.0f}"]
        cells.append([name, *times, f"{sent / 1e6:.2f}", f"{ddp / sent:.1f}" if sent else ""])
    head = "contender | ms a step | over no communication, ms | MB sent a step | DDP's over it"
    return pages.table(head, cells)


if __name__ == "__main__":
    main()
