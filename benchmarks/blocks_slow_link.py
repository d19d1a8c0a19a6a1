"""How fast do two hosts train over a slow network, and how much do they send?

    python benchmarks/blocks_slow_link.py              ten minutes; writes the page
    python benchmarks/blocks_slow_link.py --quick      a smoke test: a small model, writes nothing

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

from blocks.contenders import (  # noqa: E402
    ALONE,
    ALONE_AGAIN,
    DDP,
    DDP_HALVES,
    OVERLAPPED,
    PER_TENSOR,
    SLOW,
    Contender,
)
from blocks.model import QUICK, SIZE, Pretended, parameters  # noqa: E402
from sharding.models import Size  # noqa: E402
from slow_link import Link, NoSlowLink, Terms, probe, slow_link  # noqa: E402
from team import Team  # noqa: E402
from torch.optim import AdamW  # noqa: E402
from traffic import bytes_sent  # noqa: E402

import manyhands as mh  # noqa: E402

EVERY = 16  # steps of a block; a block that is not measured comes before
BLOCKS = 2
STEPWISE = 2  # steps of a contender that sends in every step: a few are enough
Row = dict[str, Any]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    if args.draw:
        draw(pages.read("blocks-slow-link"))
        return
    params = parameters(SIZE)
    result: dict[str, Any] = {
        **pages.conditions(),
        "elements": sum(p.numel() for p in params),
        "tensors": len(params),
        "terms": asdict(Terms()),
        "rows": {},
    }
    size, seconds = (QUICK, 0.02) if args.quick else (SIZE, 0.3)
    try:
        with slow_link(Terms()) as link:
            result["link"] = probe(link)
            print(result["link"], flush=True)
            for name, contender in SLOW.items():  # one after the other: each has all the network
                result["rows"][name] = measured(contender, size, seconds, link)
    except NoSlowLink as error:
        raise SystemExit(f"There is no slow link here: {error}") from error
    if not args.quick:
        pages.store("blocks-slow-link", result)
        draw(result)


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
    stepwise = contender in (DDP, DDP_HALVES)
    warm_up, blocks, length = (1, 1, STEPWISE) if stepwise else (EVERY, BLOCKS, EVERY)
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
    cpu, sent = time.process_time(), bytes_sent()
    walls = [train(length) for _ in range(blocks)]
    cpu, sent = time.process_time() - cpu, bytes_sent() - sent
    if isinstance(optimizer, mh.Blocks):
        optimizer.synchronize()  # what is under way arrives before processes end
    return {"wall": walls, "cpu": cpu / (blocks * length), "sent": sent / (blocks * length)}


def table(rows: dict[str, Row]) -> str:
    alone, ddp = rows[ALONE.name], rows[DDP.name]
    cells = [
        [
            name,
            f"{rows[name]['ms']:,.0f}",
            f"{rows[name]['ms'] - alone['ms']:,.0f}",
            f"{rows[name]['sent'] / 1e6:.2f}",
            f"{ddp['sent'] / rows[name]['sent']:.1f}" if rows[name]["sent"] else "",
        ]
        for name in SLOW
    ]
    head = "contender | ms a step | over no communication, ms | MB sent a step | DDP's over it"
    return pages.table(head, cells)


def verdict(rows: dict[str, Row]) -> str:
    best = min((c.name for c in OVERLAPPED), key=lambda name: rows[name]["ms"])
    seconds, alone = (rows[name]["ms"] / 1e3 for name in (best, ALONE.name))
    return f"**{seconds:.3f} s a step with {best}**; {alone:.3f} s without any communication."


PAGE = """# Two hosts and a slow network

Two ranks, each on a simulated host of its own, train {millions:.1f} M parameters in {tensors}
tensors over {rate:.0f} Mbit/s with a round trip of {round_trip:.0f} ms. A step "computes" by
sleeping for 300 ms, and then has the real step of `AdamW(fused=True)`. Blocks have H = 16 steps.
Measured on {machine}, with {versions}, gloo, one thread for each rank; load average {load}.

```bash
sudo python benchmarks/blocks_slow_link.py      # Linux, with /dev/net/tun
```

{verdict}

{table}

- A figure is the slower rank's time over 2 blocks after one that does not count (DDP: 2 steps after
  one). "{again}" is the first row a second time: the difference is noise.
- "{per_tensor}" is fairseq's block momentum as published, with one all-reduce for each tensor.

## The simulated network

A TCP connection ({link[congestion_control]}) gets {link[one_way]:.1f} Mbit/s in one direction and
{link[both_ways]:.1f} Mbit/s in each of both at once; a byte is back after
{link[round_trip_ms]:.1f} ms.

The hosts are network namespaces on one machine. A process carries the packets from one to the
other, at {rate:.0f} Mbit/s and {delay:.0f} ms later. One that would wait for more than
{queue:.0f} ms is dropped.
"""


def draw(result: dict[str, Any]) -> None:
    """Write the page of a run."""
    delay, queue = 1e3 * result["terms"]["delay"], 1e3 * result["terms"]["queue"]
    numbers = {"millions": result["elements"] / 1e6, "rate": result["terms"]["rate"] / 1e6}
    numbers |= {"delay": delay, "round_trip": 2 * delay, "queue": queue}
    parts = {"verdict": verdict(result["rows"]), "table": table(result["rows"])}
    parts |= {"again": ALONE_AGAIN.name, "per_tensor": PER_TENSOR.name}
    pages.write("blocks-slow-link", PAGE, result, **numbers, **parts)


if __name__ == "__main__":
    main()
