"""Count what the start and a step cost each of N ranks: the tables of docs/benchmarks/scale.md.

    python benchmarks/scale.py    some minutes

Connections are made between threads, each with a store that counts what it is asked. Steps are
those of one rank in a dry run, and are checked against `mh.plan`.
"""

from __future__ import annotations

import gc
import os
import re
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pages
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

import manyhands as mh
from manyhands._ranks.dry_run import CountingStore, DryRun
from manyhands._ranks.groups import RollCall, connect
from manyhands.tools.plan._costs import round_cost
from manyhands.tools.plan._model import measure, planned_optimizers

SIZES, PAIRED = (8, 32, 128, 256), 128  # 256 ranks in pairs would need 65,000 descriptors
PATIENCE = timedelta(seconds=120)
LOAD = 9  # collectives of a load: `run_on_all`, and what it agrees on


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


def in_copies(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", copies(dist.get_world_size()), mesh_dim_names=("copy", "shard"))
    return mh.shard(model, AdamW(model.parameters()), level=3, mesh=mesh)


def copies(size: int) -> tuple[int, int]:
    return size // 8, 8


PARTS = {
    "DDP + AdaScale": under_rule,
    "OSS + DDP": sharded(1),
    "ShardedDataParallel": sharded(2),
    "FSDP": sharded(3),
    "DiLoCo, a round": in_blocks,
    "FSDP, 8 ranks a copy": in_copies,
}


def held_bytes() -> int:
    """The bytes of all tensors that this process has."""
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(memory.values())


def kinds(counted: DryRun) -> str:
    each = [f"{n} {kind} {counted.sent[kind] / 1e6:.1f}" for kind, n in counted.calls.items()]
    return ", ".join(sorted(each)) or "none"


def dry(level: int, name: str, size: int, build: Any = build) -> list[str]:
    """A row of the table of steps; an AssertionError if the plan says anything else."""
    gc.collect()
    before = held_bytes()
    with mh.dry_run(size) as counted:
        began = time.thread_time()
        model, optimizer = PARTS[name](build())
        made, times = time.thread_time() - began, []
        for _ in range(4):
            counted.clear()
            optimizer.zero_grad()
            began = time.thread_time()
            model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
            optimizer.step()
            times.append(time.thread_time() - began)
        gc.collect()
        held = held_bytes() - before
    rule = {"rule": "AdaScale"} if level == 0 else {}
    inner = {"optimizer": "sgd", "momentum": 0.9} if level in (0, 4) else {}
    given = {"mesh": copies(size)} if level == 5 else {"workers": size}
    plan = mh.plan(build, **given, **rule, **inner)
    row = plan.rows[{4: 0, 5: 4}.get(level, level)]
    expected = row.parameters + row.gradients + row.optimizer
    if level != 4:
        collectives, sent = row.collectives, row.sent
    else:
        sizes = measure(build(), planned_optimizers("sgd", {}, build()), 500_000)
        sent, collectives = round_cost(sizes, size)
        expected += 2 * 4 * plan.elements  # the anchor and the outer momentum
    found = counted.calls.total(), counted.sent.total()
    assert found[0] == collectives and abs(found[1] - sent) <= collectives, (name, found, sent)
    # On top of the plan: every rank's claims or reports, and the newest bucket.
    more = {0: 105 * size, 2: 5e6, 3: 8 * size, 4: 400 * size, 5: 8 * size}.get(level, 0) + 1000
    assert -1000 <= held - expected <= more, (name, size, held, expected)
    figures = f"{found[1] / 1e6:.1f}", f"{held / 1e6:.1f}", f"{expected / 1e6:.1f}"
    times = f"{made:.2f}", f"{1e3 * min(times):.0f}"
    return [name, f"{size:,}", kinds(counted), *figures, f"{counted.requests.total()}", *times]


def passed(what: str) -> int:
    """The bytes that this process has read ("rchar") or written ("wchar")."""
    return int(
        dict(each.split(": ") for each in open("/proc/self/io").read().split("\n") if each)[what]
    )


def checkpoint(size: int, folder: str, build: Any = build) -> list[list[str]]:
    """Rows of a save by the last rank and by rank 0, and of a load, all under FSDP."""
    plan, rows = mh.plan(build, workers=size).rows[3], []
    for name, rank in (("a save", size - 1), ("a save on rank 0", 0), ("a load", 0)):
        with mh.dry_run(size, rank) as counted:
            model, optimizer = sharded(3)(build())
            model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
            optimizer.step()
            given = {"model": model, "optimizer": optimizer}
            if name != "a load":
                mh.save(folder, **given)  # the first save asks for the folder's number as well
            counted.clear()
            what = "rchar" if name == "a load" else "wchar"
            bytes_before, began = passed(what), time.thread_time()
            if name == "a load":
                mh.load(folder, **given)
            else:
                mh.save(folder, **given)
            seconds, moved = time.thread_time() - began, passed(what) - bytes_before
        expected = plan.saved * (2 if name == "a load" else 1)  # compared first, then read
        if rank == 0:
            assert 0 <= moved - expected <= expected / 1000 + 4e6, (name, size, moved, expected)
        calls = {"a save": 3, "a save on rank 0": 2 * size + 2}.get(name, 1)
        alive = sum("alive" in key for key in counted.keys)  # every 5 s, on a slow machine
        assert calls <= counted.requests.total() <= calls + 9 * alive, (name, counted.requests)
        assert counted.calls.total() <= (LOAD if name == "a load" else 0), counted.calls
        messages = f"{counted.store_bytes / 1e3:.1f}"
        cells = f"{counted.calls.total()}", f"{calls:,}", f"{len(counted.keys) - alive}", messages
        rows.append([name, f"{size:,}", *cells, f"{moved / 1e6:.2f}", f"{1e3 * seconds:.0f}"])
    return rows


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
    steps = [
        dry(level, name, size)
        for level, name in enumerate(PARTS)
        for size in sizes
        if level < 5 or size > 8
    ]
    head = "a step of | ranks | collectives, and MB sent | sent, MB | held, MB | planned, MB"
    head += " | requests | start, s | step, ms"
    saves = "what | ranks | collectives | requests | keys | messages, kB | MB moved | CPU, ms"
    with tempfile.TemporaryDirectory() as folder:
        model = build()
        optimizer = AdamW(model.parameters())
        model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
        optimizer.step()
        mh.save(folder, model=model, optimizer=optimizer)
        del model, optimizer
        moved = [row for size in sizes for row in checkpoint(size, folder)]
    moved.sort(key=lambda row: row[0])
    tables = {
        "groups": pages.table("a group | ranks | requests | bytes | descriptors", groups),
        "steps": pages.table(head, steps),
        "saves": pages.table(saves, moved),
    }
    print(*tables.values(), sep="\n\n")
    page = pages.PAGES / "scale.md"
    for name, table in () if args.quick else tables.items():
        place = rf"(?s)(<!-- {name} -->\n).*?(?=<!-- end -->)"
        page.write_text(re.sub(place, rf"\1{table}\n", page.read_text()))


if __name__ == "__main__":
    main()
