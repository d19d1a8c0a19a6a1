"""Count what the start and a step cost each of N ranks: the tables of docs/benchmarks/scale.md.

    python benchmarks/scale.py    some minutes

Connections are made between threads, each with a store that counts what it is asked. Steps are
those of one rank in a dry run, and are checked against `mh.plan`.
"""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import accumulate, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pages
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.optim import SGD, AdamW, Muon
from torch.profiler import ProfilerActivity, profile

import manyhands as mh
from manyhands._ranks.dry_run import CountingStore, DryRun
from manyhands._ranks.groups import connect
from manyhands._ranks.presence import RollCall
from manyhands.tools.plan._costs import round_cost
from manyhands.tools.plan._model import measure, planned_optimizers
from manyhands.tools.plan._order import PeakMemory, total_peak
from manyhands.tools.plan._plan import NAMES

SIZES = (8, 128)  # 256 ranks in pairs would need 65,000 descriptors
PATIENCE = timedelta(seconds=120)
LOAD = 10  # collectives of a load: `run_on_all`, agreements, and the name of a gloo group


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
    """Return the most requests and bytes of any rank, and the descriptors of each."""
    while any(thread.name == "manyhands end" for thread in threading.enumerate()):
        time.sleep(0.1)  # the groups before
    shared = dist.HashStore()
    together = threading.Barrier(size)
    numbers = [[0.0]] * size
    counted = [DryRun() for _ in range(size)]
    before = len(os.listdir("/proc/self/fd"))
    now: list[int] = []

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


def sharded(level: Any) -> Any:
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


@dataclass(frozen=True)
class Part:
    """One way to train, and what the plan says of it."""

    name: str
    make: Callable[[nn.Module], Any]
    row: int  # of the plan
    planned: Mapping[str, Any] = field(default_factory=dict)
    beyond: float = 0.0  # bytes beyond the plan: the newest bucket
    for_each_rank: int = 0  # bytes beyond the plan: claims and reports


WITH_SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9}
BLOCKS = Part("DiLoCo, a round", in_blocks, 0, WITH_SGD, for_each_rank=400)
COPIES = Part("FSDP, 8 ranks a copy", in_copies, 4, for_each_rank=8)
PARTS = (
    Part("DDP + AdaScale", under_rule, 0, {**WITH_SGD, "rule": "AdaScale"}, for_each_rank=105),
    Part("OSS + DDP", sharded(1), 1),
    Part("ShardedDataParallel", sharded(2), 2, beyond=5e6),
    Part("FSDP", sharded(3), 3, for_each_rank=8),
    BLOCKS,
    COPIES,
)


def held_bytes() -> int:
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(memory.values())


def step(part: Part, size: int) -> list[str]:
    """Return a row of the table of steps; raise an AssertionError if the plan differs."""
    gc.collect()
    before = held_bytes()
    with mh.dry_run(size) as counted:
        model, optimizer = part.make(build())
        times = []
        for _ in range(4):
            counted.clear()
            optimizer.zero_grad()
            began = time.thread_time()
            model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
            optimizer.step()
            times.append(time.thread_time() - began)
        gc.collect()
        held = held_bytes() - before
    ranks: dict[str, Any] = {"mesh": copies(size)} if part is COPIES else {"workers": size}
    plan = mh.plan(build, **ranks, **part.planned)
    row = plan.rows[part.row]
    expected = row.parameters + row.gradients + row.optimizer
    collectives = row.collectives
    sent = row.sent
    if part is BLOCKS:
        sizes = measure(build(), planned_optimizers("sgd", {}, build()), 500_000)
        sent, collectives = round_cost(sizes, size)
        expected += 2 * 4 * plan.elements  # the anchor and the outer momentum
    total = counted.sent.total()
    assert counted.calls.total() == collectives, (part.name, counted.calls, collectives)
    assert abs(total - sent) <= collectives, (part.name, total, sent)
    more = held - expected
    assert -1000 <= more <= part.beyond + part.for_each_rank * size + 1000, (part.name, size, more)
    name = f"{part.name}: {counted.calls.total()} collectives"
    megabytes = [f"{total / 1e6:.1f}", f"{held / 1e6:.1f}"]
    return [name, f"{size:,}", *megabytes, f"{1e3 * min(times):.0f}"]


TOKENS = 4, 64  # of a pass in the tables of peaks
RANKS = 4  # real processes


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.zeros(*TOKENS, dtype=torch.long)).sum().backward()
        optimizer.step()


def allocated_peak(level: int) -> int:
    """Return the peak of the bytes that torch's allocator reports to the profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model, optimizer = sharded(level)(build())
        began = time.time_ns()
        train(model, optimizer, 3)
    changes = []
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    changes.sort()
    totals = accumulate(nbytes for _, nbytes in changes)
    return max(total for total, (at, _) in zip(totals, changes, strict=True) if at > began)


def peak(level: int, size: int) -> list[str]:
    """Return a row of the table of peaks in dry runs."""
    found = [planned_peak(level, size, "nccl")]
    memory = PeakMemory()
    with mh.dry_run(size, fake=True), memory:
        model, optimizer = sharded(level)(build())
        memory.restart()
        train(model, optimizer, 3)
    found.append(memory.peak)
    if level == 3:
        with mh.dry_run(size, fake=True):
            model, optimizer = sharded(level)(build())
            train(model, optimizer, 2)
            with FSDPMemTracker(model.module, optimizer) as tracker:  # of a single step
                train(model, optimizer, 1)
        assert abs(total_peak(tracker) - memory.peak) < 2e5, (size, total_peak(tracker), found)
    with mh.dry_run(size):
        allocated = allocated_peak(level)
    assert 0.97 < allocated / memory.peak < 1.03, (level, size, allocated, found)
    # The plan adds the largest activations to gradient shards, which grow while those are freed.
    assert 0.9 < found[0] / memory.peak < 1.15, (level, size, found)
    return [NAMES[level], f"{size:,}", *(f"{each / 1e6:.1f}" for each in found)]


def planned_peak(level: int, size: int, backend: str) -> int:
    tokens = torch.empty(*TOKENS, dtype=torch.long, device="meta")
    return mh.plan(build, workers=size, input=tokens, backend=backend).rows[level].total


def on_gloo(level: int, folder: str, rank: int) -> int:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = allocated_peak(level)
    dist.barrier()
    dist.destroy_process_group()
    return found


def gloo_peak(level: int) -> list[str]:
    """Return a row of the table of peaks of real ranks."""
    with (
        tempfile.TemporaryDirectory() as folder,
        get_context("spawn").Pool(RANKS, maxtasksperchild=1) as pool,
    ):
        measured = max(pool.map(partial(on_gloo, level, folder), range(RANKS), chunksize=1))
    planned = planned_peak(level, RANKS, "gloo")
    return [NAMES[level], f"{planned / 1e6:.1f}", f"{measured / 1e6:.1f}"]


class Layer(nn.Module):
    """A layer of a Llama-like model of 70 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(8192) for _ in range(2)])
        self.query = nn.Linear(8192, 8192, bias=False)
        self.keys = nn.Linear(8192, 2048, bias=False)  # and values: 8 heads of 128
        self.out = nn.Linear(8192, 8192, bias=False)
        self.gate = nn.Linear(8192, 28672, bias=False)
        self.up = nn.Linear(8192, 28672, bias=False)
        self.down = nn.Linear(28672, 8192, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        query = self.query(y).unflatten(-1, (64, 128)).transpose(1, 2)
        keys, values = self.keys(y).unflatten(-1, (16, 128)).transpose(1, 2).chunk(2, 1)
        y = scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def build_large() -> nn.Module:
    layers = [Layer() for _ in range(80)]
    head = nn.Linear(8192, 128_256, bias=False)
    return nn.Sequential(nn.Embedding(128_256, 8192), *layers, nn.RMSNorm(8192), head)


def optimizers_of(model: nn.Module, kind: str) -> Any:
    if kind == "AdamW":
        return AdamW(model.parameters())
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for layer in model.children():
        for param in layer.parameters():
            (matrices if isinstance(layer, Layer) and param.dim() == 2 else others).append(param)
    return [Muon(matrices), AdamW(others)]


def large(level: Any, kind: str) -> list[str]:
    """Return a row for a step of 70 billion parameters as rank 0 of 8,192."""
    began = time.monotonic()
    memory = PeakMemory()
    with mh.dry_run(8192, fake=True) as counted, memory:
        model = build_large()
        model, optimizer = mh.shard(model, optimizers_of(model, kind), level=level)
        memory.restart()
        model(torch.zeros(1, 4096, dtype=torch.long)).sum().backward()
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()
        peak = memory.peak
        del model, optimizer
    seconds = time.monotonic() - began
    row = [f"{NAMES[level]}, {kind}", f"{seconds:.0f}", f"{time.process_time():.0f}"]
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tokens = torch.empty(1, 4096, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = build_large()
    planned = mh.plan(model, optimizers_of(model, kind), 8192, input=tokens).rows[level]
    sizes = [f"{each / 2**30:.1f}" for each in (planned.total, peak)]
    return [*row, f"{used / 2**30:.2f}", *sizes, f"{counted.calls.total():,}"]


def passed(what: str) -> int:
    """The bytes that this process has read ("rchar") or written ("wchar")."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counters = dict(line.split(": ") for line in lines)
    return int(counters[what])


def checkpoint(name: str, rank: int, size: int, folder: str) -> list[str]:
    """Return a row of a save or a load by a rank under FSDP, checked against the plan."""
    loads = name == "a load"
    with mh.dry_run(size, rank) as counted:
        model, optimizer = sharded(3)(build())
        model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
        optimizer.step()
        if not loads:
            mh.save(folder, model=model, optimizer=optimizer)  # asks for the folder's number
        counted.clear()
        call = mh.load if loads else mh.save
        what = "rchar" if loads else "wchar"
        moved = -passed(what)
        seconds = -time.thread_time()
        call(folder, model=model, optimizer=optimizer)
        seconds += time.thread_time()
        moved += passed(what)
    if rank == 0:
        saved = mh.plan(build, workers=size).rows[3].saved
        expected = 2 * saved if loads else saved  # compared first, then read
        assert 0 <= moved - expected <= expected / 1000 + 4e6, (name, size, moved, expected)
    calls = {"a save": 3, "a save on rank 0": 2 * size + 2, "a load": 1}[name]
    alive = sum("alive" in key for key in counted.keys)  # every 5 s, on a slow machine
    assert calls <= counted.requests.total() <= calls + 9 * alive, (name, counted.requests)
    assert counted.calls.total() <= (LOAD if loads else 0), counted.calls
    sizes = [f"{counted.store_bytes / 1e3:.1f}", f"{moved / 1e6:.2f}"]
    return [name, f"{size:,}", f"{calls:,}", *sizes, f"{1e3 * seconds:.0f}"]


def by_ranks(rows: list[list[str]], *columns: str) -> str:
    """Return a table with a line for each name, and a column for each value and number of ranks."""
    sizes = list(dict.fromkeys(row[1] for row in rows))
    lines: dict[str, list[str]] = {}
    for name, size, *values in rows:
        line = lines.setdefault(name, [name] + ["–"] * (len(sizes) * len(columns)))
        for position, value in enumerate(values):
            line[1 + position * len(sizes) + sizes.index(size)] = value
    head = [""]
    for column in columns:
        head += [f"{column}: {sizes[0]} ranks", *sizes[1:]]
    return pages.table(" | ".join(head), lines.values())


def main() -> None:
    args = pages.parser(__doc__).parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    starts = {"gloo's own": eager, "in a ring": ring, "in pairs": pairs, "a roll call": roll_call}
    sizes = (8,) if args.quick else (8, 1024, 8192)
    groups = []
    for (name, start), size in product(starts.items(), (4, 8) if args.quick else SIZES):
        groups.append([name, str(size), *(f"{number:,}" for number in count(start, size))])
    steps = []
    for part, size in product(PARTS, sizes):
        if part is not COPIES or size > 8:
            steps.append(step(part, size))
    saves = []
    with tempfile.TemporaryDirectory() as folder:
        model = build()
        optimizer = AdamW(model.parameters())
        model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
        optimizer.step()
        mh.save(folder, model=model, optimizer=optimizer)
        del model, optimizer
        for size in sizes:
            saves.append(checkpoint("a save", size - 1, size, folder))
            saves.append(checkpoint("a save on rank 0", 0, size, folder))
            saves.append(checkpoint("a load", 0, size, folder))
    saves.sort(key=lambda row: row[0])
    peaks = []
    for level, size in product(range(4), (8,) if args.quick else (8, 128)):
        peaks.append(peak(level, size))
    on_gloo_ranks = [gloo_peak(level) for level in (() if args.quick else range(4))]
    big = []
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # to measure memory
        for level, kind in product((2, 3), () if args.quick else ("AdamW", "Muon")):
            big.append(pool.apply(large, (level, kind)))
    tables = {
        "groups": by_ranks(groups, "requests", "bytes", "descriptors"),
        "steps": by_ranks(steps, "sent, MB", "held, MB", "CPU, ms"),
        "peaks": by_ranks(peaks, "plan", "dry run"),
        "gloo": pages.table(" | plan | allocated", on_gloo_ranks),
        "large": pages.table(
            " | seconds | CPU, s | process, GiB | plan, GiB | dry run, GiB | collectives", big
        ),
        "saves": by_ranks(saves, "requests", "messages, kB", "moved, MB", "CPU, ms"),
    }
    print(*tables.values(), sep="\n\n")
    if not args.quick:
        pages.fill("scale", **tables)


if __name__ == "__main__":
    main()
