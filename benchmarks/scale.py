"""Count what the start and a step cost each of N ranks: the tables of docs/benchmarks/scale.md.

    python benchmarks/scale.py    some minutes

Connections are made between threads, each with a store that counts what it is asked. Steps are
those of one rank in a dry run, and are checked against `mh.plan`.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pages
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import manyhands as mh
from manyhands._core.dry_run import CountingStore, DryRun
from manyhands._core.groups import RollCall, connect
from manyhands.blocks.averaging._chunks import PARTS as SPLIT
from manyhands.blocks.averaging._payload import REPORT

SIZES, PAIRED = (8, 32, 128, 256), 128  # 256 ranks in pairs would need 65,000 descriptors
PATIENCE = timedelta(seconds=120)
ELEMENTS = 29_417_472  # of the model


def eager(store: Any, rank: int, size: int, gather: Any) -> Any:
    place = dist.PrefixStore(f"manyhands/{'_'.join(map(str, range(size)))}/1", store)
    return use(dist.ProcessGroupGloo(place, rank, size, PATIENCE), size)


def ring(store: Any, rank: int, size: int, gather: Any, pairs: bool = False) -> Any:
    lease = connect(store, range(size), rank, PATIENCE, gather, pairs=pairs)
    return lease, pairs or use(lease.group, size)


def roll_call(store: Any, rank: int, size: int, gather: Any) -> None:
    gather([0.0])
    RollCall(store, rank, size).wait("this")


pairs = partial(ring, pairs=True)


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


def build() -> nn.Module:
    """29 M parameters in float32: 117 MB."""
    layers = [nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True) for _ in range(8)]
    return nn.Sequential(nn.Embedding(4096, 512), *layers, nn.Linear(512, 4096))


def sharded(level: int) -> Any:
    return lambda model: mh.shard(model, AdamW(model.parameters()), level=level)


def under_rule(model: nn.Module) -> Any:
    model, optimizer = mh.shard(model, SGD(model.parameters(), momentum=0.9), level=0)
    return model, mh.AdaScale(optimizer)


def in_blocks(model: nn.Module) -> Any:
    return model, mh.DiLoCo(SGD(model.parameters(), momentum=0.9), every=1)


PARTS = {
    "DDP + AdaScale": under_rule,
    "OSS + DDP": sharded(1),
    "ShardedDataParallel": sharded(2),
    "FSDP": sharded(3),
    "DiLoCo, one round": in_blocks,
}


def dry(level: int, name: str, size: int) -> list[str]:
    """A row of the table of steps; an AssertionError if the plan says anything else."""
    with mh.dry_run(size) as counted:
        gc.collect()
        began = time.thread_time()
        model, optimizer = PARTS[name](build())
        made, start = time.thread_time() - began, f"{counted.requests.total()}"
        times = []
        for _ in range(4):
            counted.clear()
            optimizer.zero_grad()
            began = time.thread_time()
            model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
            optimizer.step()
            times.append(time.thread_time() - began)
        calls, sent = counted.calls, counted.sent.total()
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    rule = {"optimizer": "sgd", "momentum": 0.9, "rule": "AdaScale"} if level == 0 else {}
    planned = [(row.collectives, row.sent) for row in mh.plan(build, workers=size, **rule).rows]
    numbers = ELEMENTS + calls.total() * size * REPORT * SPLIT
    planned.append((calls.total(), round(2 * 4 * numbers * (size - 1) / size)))
    assert calls.total() == planned[level][0] and abs(sent - planned[level][1]) <= calls.total()
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(calls.items()))
    figures = f"{sent / 1e6:.1f}", f"{sum(held.values()) / 1e6:.0f}", start
    return [name, f"{size:,}", kinds, *figures, f"{made:.2f}", f"{1e3 * min(times):.0f}"]


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    kinds = {"gloo's own": eager, "in a ring": ring, "in pairs": pairs, "a roll call": roll_call}
    groups = [
        [name, size, *(f"{number:,}" for number in count(start, size))]
        for name, start in kinds.items()
        for size in ((4, 8) if args.quick else SIZES)
        if size <= PAIRED or start not in (eager, pairs)
    ]
    sizes = (8,) if args.quick else (8, 64, 1024, 8192)
    steps = [dry(level, name, size) for level, name in enumerate(PARTS) for size in sizes]
    head = "a step of | ranks | collectives | sent, MB | held, MB | requests | start, s | step, ms"
    tables = {
        "groups": pages.table("a group | ranks | requests | bytes | descriptors", groups),
        "steps": pages.table(head, steps),
    }
    print(*tables.values(), sep="\n\n")
    page = pages.PAGES / "scale.md"
    for name, table in () if args.quick else tables.items():
        place = rf"(?s)(<!-- {name} -->\n).*?(?=<!-- end -->)"
        page.write_text(re.sub(place, rf"\1{table}\n", page.read_text()))


if __name__ == "__main__":
    main()
