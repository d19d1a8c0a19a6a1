"""What a GPU says, in four parts of a few minutes each: `make gpu PART=2 PYTHON=...`

    python benchmarks/gpu.py --part 1                the tests on CUDA tensors (tests/gpu)
    python benchmarks/gpu.py --part 2                what a scaling rule adds to a step
    python benchmarks/gpu.py --part 3                sharding beside DDP, fully_shard and the peers
    python benchmarks/gpu.py --part 4                a profiler's trace of AdamScale's steps
    python benchmarks/gpu.py --draw                  the page, of the parts there are
    python benchmarks/gpu.py --part 2 --device cpu --quick    as far as it goes without a GPU

One process is a group of one rank on NCCL: the first card is all that it needs. Each part stores
what it found in benchmarks/results/gpu.json, or in the folder of `--out`.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # it need not be installed

import pages
import torch
import torch.distributed as dist
from rounds import Ratio, ratio, restored, shuffled
from sharding.contenders import (
    BARE,
    BARE_KEPT,
    CONTROL,
    DDP,
    FAIRSCALE,
    FSDP,
    FSDP_KEPT,
    OURS,
    Trained,
)
from sharding.models import Size
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import manyhands as mh
from sharding import contenders, models

GPT = Size("GPT of 124 M", 768, 12, 50_304, batch=8, context=1024)
LONG = Size("GPT of 124 M", 768, 12, 50_304, batch=16, context=1024)
SHORT = Size("GPT of 124 M", 768, 12, 50_304, batch=1, context=1024)
TINY = Size("tiny", 64, 2, 128, batch=2, context=16)
PASSES = 2  # of a step of `cost`: with one, on one rank, there is nothing to compare
COUNTED = 8  # steps in which synchronizations are counted
WARM_UP = 12  # steps of each variant; AdamScale's first five are plain
SETTLED = 520  # the averages look back over 500 steps with two small batches in each


Found = Iterator[tuple[str, list[dict[str, Any]]]]  # a workload's title, and its rows


@dataclass(frozen=True)
class Variant:
    """One way to train, and the one that its time is divided by."""

    name: str
    make: Callable[[nn.Module], Trained]
    base: str
    warm_up: int = WARM_UP  # steps before it is timed


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step, its ratio to the base's, and waits of the host for the device."""

    variant: str
    base: str
    ms: float
    ratio: Ratio
    waits: float  # in a step, as torch.cuda.set_sync_debug_mode counts them
    peak_mb: int  # the model's own memory and its steps'


# -- part 2: what a rule adds to a step ------------------------------------------------------------


def sgd(model: nn.Module) -> Any:
    return SGD(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> Any:
    return AdamW(model.parameters(), lr=1e-4, fused=True)


def ddp(optimizer: Any) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        made = optimizer(model)
        return Trained(DistributedDataParallel(model), made, made.zero_grad)

    return make


def ruled(rule: Any, optimizer: Any, passes: int, **options: Any) -> Callable[[nn.Module], Trained]:
    given = {"num_gradients_to_accumulate": passes, **options}
    return ddp(lambda model: rule(optimizer(model), **given))


def rules(settled: bool) -> list[Variant]:
    """Every step measured, and, if there is time to settle, one in four."""
    variants = []
    for base, rule, optimizer in (
        ("DDP + SGD", mh.AdaScale, sgd),
        ("DDP + AdamW(fused)", mh.AdamScale, adamw),
    ):
        every = f"{rule.__name__}, measure_every=1"
        variants += [
            Variant(base, ddp(optimizer), base),
            Variant(f"{base} again (A/A)", ddp(optimizer), base),
            Variant(every, ruled(rule, optimizer, PASSES, measure_every=1), base),
        ]
        if settled:
            variants += [Variant(rule.__name__, ruled(rule, optimizer, PASSES), base, SETTLED)]
    return variants


def cost(device: str, quick: bool, out: Path) -> Found:
    """What AdaScale and AdamScale add to the step of a GPT."""
    for size, rounds, steps in ((LONG, 14, 2), (GPT, 14, 4)):
        if quick:
            size, rounds = TINY, 2
        title = f"{size.batch * size.context:,} tokens a pass, {PASSES} passes a step"
        variants = rules(settled=not quick)  # a smoke test has no time to settle
        yield title, measured(variants, size, PASSES, device, rounds, steps)


# -- part 3: sharding ------------------------------------------------------------------------------


def sharding(device: str, quick: bool, out: Path) -> Found:
    """World size 1: what the wrappers add to a step, without anything to send."""
    base = {FSDP: BARE, FSDP_KEPT: BARE_KEPT}
    names = (DDP, CONTROL, OURS, contenders.WHOLE_GRADIENTS, BARE, FSDP, BARE_KEPT, FSDP_KEPT)
    known = {**contenders.CONTENDERS, **contenders.FSDP_CONTENDERS}
    peers = ("torch ZeroRedundancyOptimizer + DDP", "fairscale, default buffer", FAIRSCALE)
    variants = []
    for name in (*names, *peers):
        if not known[name].present:
            print(f"{name}: not installed")
            continue

        def make(model: nn.Module, name: str = name) -> Trained:
            trained = known[name].make(model)
            trained.choose("fused")
            return trained

        variants.append(Variant(name, make, base.get(name, DDP)))
    for size, rounds in ((GPT, 16), (SHORT, 24)):
        if quick:
            size, rounds = TINY, 2
        title = f"{size.batch * size.context:,} tokens a step"
        yield title, measured(variants, size, 1, device, rounds, steps=4, tied=False)


# -- how steps are measured ------------------------------------------------------------------------


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
    taken, steps_of = {}, {}
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
    by_name = {variant.name: variant for variant in variants}
    rows = [
        asdict(
            Row(
                name,
                by_name[name].base,
                1e3 * median(each),
                ratio(each, times[by_name[name].base]),
                waits(steps_of[name], device),
                taken[name] >> 20,
            )
        )
        for name, each in times.items()
    ]
    print(f"{size.batch * size.context:,} tokens, passes: {passes}\n{table(rows)}\n", flush=True)
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
    """How often the host waits for the device in a step."""
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


# -- parts 1 and 4 ---------------------------------------------------------------------------------


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
    """Four steps of AdamScale: what takes the device's time, and a file for Perfetto."""
    rule = ruled(mh.AdamScale, adamw, PASSES, measure_every=1)
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


# -- the page --------------------------------------------------------------------------------------

PAGE = """# On a GPU

Measured on one {machine}, with {versions}: one process on one card, in a group of one rank on NCCL.
Nothing has been measured on more than one GPU. So these figures say what the wrappers cost on a
card, and nothing about what sharding or larger batches gain.

```bash
make gpu PYTHON=/path/to/python PART=1   # then 2, 3 and 4; each takes a few minutes
```

## Tests

{tests} of `tests/gpu`: rules, `OSS`, `ShardedDataParallel`, FSDP, blocks, codecs, gradient scalers
with an overflow in float16, checkpoints, `torch.compile`, and two ranks on one GPU through gloo.

## What a scaling rule adds to a step

A GPT of 124 million parameters on `DistributedDataParallel`, under `torch.autocast` to bfloat16.
Ratios are medians over 14 rounds, with bootstrap intervals (95 %); all variants take turns in one
process. **"again (A/A)" is the base a second time:** its distance from 1 is noise. "Waits" is how
often the host waits for the device in a step, as `torch.cuda.set_sync_debug_mode` counts it.

{cost}

- By default one step in four is measured, once the averages have seen as many steps as they look
  back over (500, with two passes). The rows without `measure_every=1` show the steps after that.
- A measured step waits for the device once, for the gain. Meanwhile nothing is queued, and the
  optimizer's step starts late. AdamScale waits once more in sixteen steps, for the least second
  moments that count.
- Of a measured step of AdamScale {norms:.1f} ms of the device's time are its norms (`PART=4`), each
  pass's and the mean's.
- With 8,192 tokens the host is the limit: it needs longer to launch a pass than the device to
  compute it. The rule's hooks add to that, and times scatter.
- Two passes on one card are the worst case: every pass is measured, and the mean. With one pass on
  each of N ranks it is one pass, and an N-th of the mean.

## What sharding adds to a step

The same GPT without accumulation, with AdamW (`fused=True`): all that a group of one rank leaves of
sharding is what the wrappers themselves do. Ours leave out what has no use there: the copies into
and out of buckets that nobody sends, while the others make them. The base of FSDP's rows is
`fully_shard` with the same options. fairscale is version 0.4.13; DeepSpeed was not installed.

{sharding}
"""


def table(rows: list[dict[str, Any]]) -> str:
    return pages.table(
        "variant | ms | × base | waits | MB",
        [
            (
                row.variant,
                f"{row.ms:.2f}",
                "1" if row.variant == row.base else str(row.ratio),
                f"{row.waits:g}",
                f"{row.peak_mb:,}",
            )
            for row in (restored(Row, each) for each in rows)
        ],
    )


def write(result: dict[str, Any]) -> None:
    def tables(part: str) -> str:
        found = result[part].items()
        return "\n\n".join(f"### {title}\n\n{table(rows)}" for title, rows in found)

    counted = result["tests"]
    pages.write(
        "gpu",
        PAGE,
        result,
        tests=f"{counted['passed']} passed and {counted['failed']} failed",
        norms=result["trace"]["norms, ms of the device"],
        cost=tables("cost"),
        sharding=tables("sharding"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, action="append", choices=(1, 2, 3, 4))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="a smoke test; writes nothing")
    parser.add_argument("--draw", action="store_true", help="write the page of the stored results")
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
    if (
        kept
        and {part.__name__ for part in PARTS.values()} <= result.keys()
        and args.out == pages.RESULTS
    ):
        write(result)


if __name__ == "__main__":
    main()
