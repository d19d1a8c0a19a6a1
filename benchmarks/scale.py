"""Count what the start costs each of N ranks, and write the table on docs/benchmarks/scale.md.

    python benchmarks/scale.py    a minute

Ranks are threads. Each has a store of its own around a common one, which counts what it is asked.
"""

from __future__ import annotations

import os
import re
import threading
import time
from datetime import timedelta
from typing import Any

import pages
import torch
import torch.distributed as dist

from manyhands._core.dry_run import CountingStore, DryRun
from manyhands._core.groups import RollCall, connect

SIZES, PAIRED = (8, 32, 128, 256), 128  # 256 ranks in pairs would need 65,000 descriptors
PATIENCE = timedelta(seconds=120)


def eager(store: Any, rank: int, size: int, gather: Any) -> Any:
    place = dist.PrefixStore(f"manyhands/{'_'.join(map(str, range(size)))}/1", store)
    return use(dist.ProcessGroupGloo(place, rank, size, PATIENCE), size)


def ring(store: Any, rank: int, size: int, gather: Any) -> Any:
    lease = connect(store, range(size), rank, PATIENCE, gather)
    return lease, use(lease.group, size)


def pairs(store: Any, rank: int, size: int, gather: Any) -> Any:
    return connect(store, range(size), rank, PATIENCE, gather, pairs=True)


def roll_call(store: Any, rank: int, size: int, gather: Any) -> None:
    gather([0.0])
    RollCall(store, rank, size).wait("this")


def use(group: Any, size: int) -> Any:
    for _ in range(3):
        group.allgather([[torch.empty(4) for _ in range(size)]], [torch.ones(4)]).wait()
        group.allreduce([torch.ones(4)]).wait()
    return group


def count(start: Any, size: int) -> tuple[int, int, int]:
    """The most requests and bytes of any of so many ranks, and the descriptors of each."""
    while any(thread.name == "manyhands end" for thread in threading.enumerate()):
        time.sleep(0.1)  # the groups before
    shared, together, numbers = dist.HashStore(), threading.Barrier(size), [[0.0]] * size
    counted = [DryRun() for _ in range(size)]
    before, now = len(os.listdir("/proc/self/fd")), []

    def live(rank: int) -> None:
        def gather(own: list[float]) -> list[list[float]]:
            numbers[rank] = own
            together.wait()
            return list(numbers)

        kept = start(CountingStore(shared, counted[rank]), rank, size, gather)
        together.wait()
        now.append(len(os.listdir("/proc/self/fd")))
        together.wait()
        del kept

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    requests = max(each.requests.total() for each in counted)
    return requests, max(each.store_bytes for each in counted), round((max(now) - before) / size)


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    kinds = {"gloo's own": eager, "in a ring": ring, "in pairs": pairs, "a roll call": roll_call}
    rows = [
        [name, size, *(f"{number:,}" for number in count(start, size))]
        for name, start in kinds.items()
        for size in ((4, 8) if args.quick else SIZES)
        if size <= PAIRED or start not in (eager, pairs)
    ]
    table = pages.table("a group | ranks | requests | bytes | descriptors", rows)
    print(table)
    if not args.quick:
        page, place = pages.PAGES / "scale.md", r"(?s)(<!-- groups -->\n).*?(?=<!-- end -->)"
        page.write_text(re.sub(place, rf"\1{table}\n", page.read_text()))


if __name__ == "__main__":
    main()
