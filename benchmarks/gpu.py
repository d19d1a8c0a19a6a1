"""Test and measure on a GPU, in four parts of a few minutes each: `make gpu PART=2 PYTHON=...`

    python benchmarks/gpu.py --part 1                the tests on CUDA tensors (tests/gpu)
    python benchmarks/gpu.py --part 2                what a scaling rule adds to a step
    python benchmarks/gpu.py --part 3                sharding beside DDP, fully_shard and the peers
    python benchmarks/gpu.py --part 4                a profiler's trace of AdamScale's steps
    python benchmarks/gpu.py --part 2 --device cpu --quick    as far as it goes without a GPU

One process is a group of one rank on NCCL, on the first card. Each part stores the results in
benchmarks/results/gpu.json, or in the folder of `--out`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # it need not be installed

import pages
import torch
import torch.distributed as dist
from rounds import Ratio, ratio, restored, shuffled
from sharding.contenders import BARE, BARE_KEPT, CONTROL, DDP, FSDP, FSDP_KEPT, Trained
from sharding.models import Size
from torch import nn
from variants import WARM_UP, Variant, adamw, around, ruled, sgd

import manyhands as mh
from sharding import contenders, models

GPT = Size("GPT of 124 M", 768, 12, 50_304, batch=8, context=1024)
LONG = Size("GPT of 124 M", 768, 12, 50_304, batch=16, context=1024)
SHORT = Size("GPT of 124 M", 768, 12, 50_304, batch=1, context=1024)
TINY = Size("tiny", 64, 2, 128, batch=2, context=16)
PASSES = 2  # of a step of `cost`: with one, on one rank, there is nothing to compare
COUNTED = 8  # steps in which synchronizations are counted


Found = Iterator[tuple[str, list[dict[str, Any]]]]  # a workload's title, and its rows


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step, its ratio to the base's, and waits of the host for the device."""

    variant: str
    base: str
    ms: float
    ratio: Ratio
    waits: float  # in a step, as torch.cuda.set_sync_debug_mode counts them
    peak_mb: int  # the model's own memory and its steps'


def cost(device: str, quick: bool, out: Path) -> Found:
    """Measure the cost of AdaScale and AdamScale in a step of a GPT."""
    for size, rounds, steps in ((LONG, 14, 2), (GPT, 14, 4)):
        if quick:
            size, rounds = TINY, 2
        title = f"{size.batch * size.context:,} tokens a pass, {PASSES} passes a step"
        passes = {"num_gradients_to_accumulate": PASSES}
        variants = [
            *around("DDP + SGD", sgd, mh.AdaScale, "AdaScale", **passes),
            *around("DDP + AdamW(fused)", adamw, mh.AdamScale, "AdamScale", **passes),
        ]
        if quick:  # a smoke test has no time to settle
            variants = [one for one in variants if one.warm_up == WARM_UP]
        yield title, measured(variants, size, PASSES, device, rounds, steps)


def sharding(device: str, quick: bool, out: Path) -> Found:
    """Measure the cost of the wrappers with a single rank, without anything to send."""
    base = {FSDP: BARE, FSDP_KEPT: BARE_KEPT}
    states = (DDP, CONTROL, contenders.OURS, contenders.WHOLE_GRADIENTS)
    parameters = (BARE, FSDP, BARE_KEPT, FSDP_KEPT)
    peers = ("torch ZeroRedundancyOptimizer + DDP", "fairscale, default buffer", "fairscale FSDP")
    known = {**contenders.CONTENDERS, **contenders.FSDP_CONTENDERS}
    variants = []
    for name in (*states, *parameters, *peers):
        if known[name].present:
            variants.append(Variant(name, partial(fused, known[name]), base.get(name, DDP)))
        else:
            print(f"{name}: not installed")
    for size, rounds in ((GPT, 16), (SHORT, 24)):
        if quick:
            size, rounds = TINY, 2
        title = f"{size.batch * size.context:,} tokens a step"
        yield title, measured(variants, size, 1, device, rounds, steps=4, tied=False)


def fused(contender: contenders.Contender, model: nn.Module) -> Trained:
    trained = contender.make(model)
    trained.choose("fused")
    return trained


def measured(
    variants: list[Variant],
    size: Size,
    passes: int,
    device: str,
    rounds: int,
    steps: int,
    tied: bool = True,
) -> list[dict[str, Any]]:
    """All variants in turns, in an order drawn anew in each round; a round is `steps` of each."""
    taken = {}
    steps_of = {}
    for variant in variants:
        before = allocated(device)
        steps_of[variant.name] = training(variant, size, passes, device, tied)
        for number in range(variant.warm_up):
            steps_of[variant.name](number < variant.warm_up - WARM_UP)
        taken[variant.name] = allocated(device, peak=True) - before
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(rounds):
        for name in shuffled(list(times), number):
            times[name].append(seconds(steps_of[name], steps, device) / steps)
    rows = []
    for variant in variants:
        seen = times[variant.name]
        row = Row(
            variant.name,
            variant.base,
            ms=1e3 * median(seen),
            ratio=ratio(seen, times[variant.base]),
            waits=waits(steps_of[variant.name], device),
            peak_mb=taken[variant.name] >> 20,
        )
        rows.append(asdict(row))
    title = f"{size.batch * size.context:,} tokens"
    print(table({title: rows}, "time", "waits", "MB"), flush=True)
    return rows


def training(
    variant: Variant, size: Size, passes: int, device: str, tied: bool
) -> Callable[..., None]:
    """A step of training: autocast to bfloat16, and all passes but the last without a reduction.

    A short one, to warm up, has a single sequence.
    """
    with torch.device(device):
        model = models.decoder(size)
    if tied:  # the GPT's logits are its embedding
        model.logits.weight = model.tokens.weight
    trained = variant.make(model)
    wrapped = trained.model
    batches = [tokens.to(device) for tokens in models.batches(size, rank=0)]
    no_sync = getattr(wrapped, "no_sync", nullcontext)
    done = 0

    def step(short: bool = False) -> None:
        nonlocal done
        for a in range(passes):
            with no_sync() if a < passes - 1 else nullcontext():
                with torch.autocast(device, dtype=torch.bfloat16):
                    tokens = batches[done % len(batches)]
                    loss = wrapped(tokens[:1] if short else tokens)
                (loss / passes).backward()
            done += 1
        trained.optimizer.step()
        trained.clear()

    return step


def seconds(step: Callable[..., None], count: int, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return time.perf_counter() - start


def waits(step: Callable[..., None], device: str) -> float:
    """Count the host's waits for the device in a step."""
    if device == "cpu":
        return 0.0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        seen.clear()  # that the mode is a prototype
        for _ in range(COUNTED):
            step()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen) / COUNTED


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device: str, peak: bool = False) -> int:
    if device == "cpu":
        return 0
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most if peak else torch.cuda.memory_allocated()


@contextmanager
def group_of_one(device: str) -> Iterator[None]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        if device == "cuda":
            at = torch.device("cuda", 0)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=at
            )
        else:
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def tests(device: str, quick: bool, out: Path) -> Iterator[tuple[str, int]]:
    """The tests of tests/gpu; a failure ends this program with 1, after the numbers are stored."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "--device", device, "-q"]
    command += ["-p", "no:benchmark"]  # a plugin that some machines have; it warns beside xdist
    if not quick:
        command += ["--numprocesses", str(min(10, os.cpu_count() or 1)), "--durations=5"]
    command += ["-k", "codec"] if quick else []
    environ = {**os.environ, "PYTHONPATH": str(pages.ROOT / "src")}
    done = subprocess.run(command, cwd=pages.ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
    yield from {"failed": 0, **{what: int(number) for number, what in counts}}.items()
    if done.returncode:
        sys.exit("Tests failed.")


def trace(device: str, quick: bool, out: Path) -> Iterator[tuple[str, float]]:
    """Profile four steps of AdamScale; write a file for Perfetto."""
    passes = {"num_gradients_to_accumulate": PASSES}
    rule = ruled(mh.AdamScale, adamw, measure_every=1, **passes)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    step = training(Variant("", rule, ""), TINY if quick else GPT, PASSES, device, tied=True)
    for _ in range(WARM_UP):
        step()
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(4):
            step()
        synchronize(device)
    profiler.export_chrome_trace(str(out / "gpu-trace.json.gz"))
    by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))
    waiting = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
    events = profiler.key_averages()
    yield from ((e.key, e.count / 4) for e in events if e.key in waiting)
    if device == "cuda":
        norms = [e for e in events if e.key.startswith("aten::_foreach")]
        yield "norms, ms of the device", sum(e.self_device_time_total for e in norms) / 4e3


PARTS = {1: tests, 2: cost, 3: sharding, 4: trace}


def cells(row: Row) -> dict[str, str]:
    ratio = f"{row.ratio.value:.3f} ({row.ratio.low:.3f}–{row.ratio.high:.3f})"
    return {
        "time": f"{row.ms:.2f} ms" if row.variant == row.base else ratio,
        "waits": f"{row.waits:g}",
        "MB": f"{row.peak_mb:,}",
    }


def table(found: dict[str, list[dict[str, Any]]], *columns: str) -> str:
    """Return a table of the workloads side by side."""
    head = ["variant"]
    lines: dict[str, list[str]] = {}
    for title, rows in found.items():
        tokens = title.partition(" tokens")[0]
        head += [f"{tokens} tokens: {columns[0]}", *columns[1:]]
        for stored in rows:
            row = restored(Row, stored)
            shown = cells(row)
            line = lines.setdefault(row.variant, [row.variant])
            line.extend(shown[column] for column in columns)
    return pages.table(" | ".join(head), lines.values())


def write(result: dict[str, Any]) -> None:
    costs = table(result["cost"], "time", "waits")
    pages.fill("gpu", result, cost=costs, sharding=table(result["sharding"], "time", "MB"))


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--part", type=int, action="append", choices=(1, 2, 3, 4))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=pages.RESULTS, help="where results are stored")
    args = parser.parse_args()
    stored = args.out / "gpu.json"
    result: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    if args.draw:
        write(result)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} finds no GPU. Name a Python with a CUDA build of it, "
            "2.11 or later: make gpu PYTHON=/path/to/python"
        )
    kept = args.device == "cuda" and not args.quick
    result.update(pages.conditions())
    if args.device == "cuda":
        result["machine"] = torch.cuda.get_device_name()
    for part in args.part or (1, 2, 3, 4):
        start = time.perf_counter()
        with nullcontext() if part == 1 else group_of_one(args.device):
            for what, found in PARTS[part](args.device, args.quick, args.out):
                result.setdefault(PARTS[part].__name__, {})[what] = found
                if kept:  # as results come: a later one may not come at all
                    stored.write_text(json.dumps(result, indent=1) + "\n")
        print(f"part {part}: {time.perf_counter() - start:.0f} s", flush=True)
    complete = {part.__name__ for part in PARTS.values()} <= result.keys()
    if kept and complete and args.out == pages.RESULTS:
        write(result)


if __name__ == "__main__":
    main()
