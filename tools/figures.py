"""Write the results of benchmarks into sentences of README, guides and benchmark pages.

    python tools/figures.py    # update all numbers from stored results

Each function of `BENCHMARKS` reads the results of a benchmark, and yields (page, sentence,
numbers). A sentence has a placeholder, {}, for each number. Words such as "lower" are asserted next
to the sentence. `tests/test_figures.py` fails if a page differs, or has a measured figure that is
in no sentence. To delete a benchmark, delete the function and the sentences.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"[-+−]?\d(?:[\d.,]*\d)?"

Row = dict[str, Any]


class Figure(NamedTuple):
    page: str
    sentence: str
    numbers: tuple[str, ...]


Figures = Iterator[Figure]


def figure(page: str, sentence: str, *numbers: object) -> Figure:
    """A sentence of a page, with formatted numbers."""
    assert sentence.count("{}") == len(numbers), f"{sentence}: {len(numbers)} numbers"
    return Figure(page, sentence, tuple(map(str, numbers)))


def pattern(sentence: str) -> re.Pattern[str]:
    """Return a pattern for a sentence with any numbers and line breaks."""
    parts = [re.sub(r"(?:\\\s)+", r"\\s+", re.escape(part)) for part in sentence.split("{}")]
    return re.compile(f"({NUMBER})".join(parts))


def stored(name: str) -> Any:
    """Return stored results: a dict, or a list of the lines of a .jsonl file."""
    path = ROOT / "benchmarks" / "results" / name
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else list(map(json.loads, text.splitlines()))


def of(rows: Iterable[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def one(rows: Iterable[Row], **wanted: object) -> Row:
    (row,) = of(rows, **wanted)
    return row


def between(values: Iterable[float]) -> tuple[str, str]:
    found = sorted(values)
    return f"{found[0]:.2f}", f"{found[-1]:.2f}"


def apart(ratios: Iterable[float]) -> tuple[str, str]:
    """Return by how many % the smallest and the largest ratio differ from 1."""
    found = sorted(ratios)
    return f"{100 * abs(found[0] - 1):.0f}", f"{100 * abs(found[-1] - 1):.0f}"


def more(values: Iterable[float], base: Iterable[float]) -> float:
    """Return by how many % a mean exceeds a second mean."""
    return 100 * (fmean(values) / fmean(base) - 1)


# -- scaling rules, ramp -------------------------------------------------------------------------


SEEDS = {f"{name}-sgd": 3 for name in ("mnist", "shakespeare", "digits")}
SEEDS |= {f"{name}-adamw": 10 for name in ("mnist", "shakespeare", "digits")}
SEEDS |= {f"{name}-{other}": 5 for name in ("mnist", "digits") for other in ("muon", "adadelta")}


class Cell:
    """Return the runs of a method for all seeds, as on the page of quality."""

    def __init__(self, workload: str, method: str, scale: int, budget: str) -> None:
        if method in ("AdaScale", "AdamScale") and budget == "steps":
            budget = "progress"
        wanted = {"workload": workload, "method": method, "scale": scale, "budget": budget}
        sgd = workload.endswith("sgd")  # other methods have separate files and seeds
        rows = of(stored("quality.jsonl" if sgd else "quality_adam.jsonl"), **wanted)
        assert len({row["seed"] for row in rows}) == SEEDS[workload], f"seeds: {wanted}"
        places = 3 if workload.startswith("shakespeare") else 2
        self.mean = fmean(row["score"] for row in rows)
        steps = fmean(row["steps"] for row in rows)
        self.steps = f"{steps:,.0f}"  # for tools/pictures.py
        self.samples = scale * steps
        self.shown = f"{self.mean:.{places}f}"


def base_of(workload: str) -> Cell:
    return Cell(workload, "plain", 1, "base")


def assert_rules_compared() -> None:
    """Assert the comparisons of rules in docs/scaling.md and docs/benchmarks/quality.md."""
    for data in ("mnist", "digits", "shakespeare"):
        name = f"{data}-adamw"
        base = base_of(name)
        ada, adam = (Cell(name, rule, 16, "progress") for rule in ("AdaScale", "AdamScale"))
        if data == "shakespeare":  # a loss
            assert ada.mean < base.mean < adam.mean
        else:
            assert ada.mean > base.mean > adam.mean
    for data in ("mnist", "digits"):
        name = f"{data}-muon"
        ada, root = (
            Cell(name, *rule)
            for rule in (("AdaScale", 16, "progress"), ("sqrt", 16, "AdaScale's steps"))
        )
        assert base_of(name).mean > root.mean > ada.mean


def quality_page() -> Figures:
    """Yield the handwritten sentences of docs/benchmarks/quality.md."""
    assert_rules_compared()
    page = "docs/benchmarks/quality.md"
    linear = "linear + warm-up"
    text = base_of("shakespeare-sgd")
    at_8, at_32 = (Cell("shakespeare-sgd", "AdaScale", scale, "steps") for scale in (8, 32))
    assert max(at_8.mean, at_32.mean) < text.mean
    for name in ("mnist-sgd", "digits-sgd"):
        for scale in (8, 32):
            assert abs(Cell(name, "AdaScale", scale, "steps").mean - base_of(name).mean) < 0.2
    yield figure(
        page,
        "close on Shakespeare ({} against {})",
        *(Cell("shakespeare-sgd", linear, 8, "steps").shown, at_8.shown),
    )
    early = {scale: Cell("mnist-sgd", "AdaScale", scale, "samples") for scale in (8, 32)}
    other = {scale: Cell("mnist-sgd", linear, scale, "samples") for scale in (8, 32)}
    assert all(other[scale].mean > early[scale].mean for scale in early)
    yield figure(
        page,
        "linear scaling is better on MNIST ({} against {} % at S = 32, {} against {} at S = 8)",
        *(cells[scale].shown for scale in (32, 8) for cells in (other, early)),
    )
    read = [Cell(f"{n}-sgd", "AdaScale", 32, "steps") for n in ("mnist", "shakespeare")]
    times = [
        cell.samples / base.samples
        for cell, base in zip(read, (base_of("mnist-sgd"), text), strict=True)
    ]
    yield figure(
        "README.md",
        "AdaScale takes fewer steps but reads more samples: with a batch 32 times as large, {} "
        "times as many (MNIST)",
        f"{times[0]:.1f}",
    )
    yield figure(
        page,
        "at S = 32 it reads {} times (MNIST) and {} times (Shakespeare) the samples of scale 1",
        *(f"{each:.1f}" for each in times),
    )


def cost() -> Figures:
    rows = stored("cost.json")["models"]["rows"]

    def cpu(variant: str) -> float:
        return float(one(rows, variant=f"manyhands {variant}")["cpu"]["value"])

    assert cpu("AdaScale") < cpu("AdamScale") < cpu("AdamScale, measure_every=1")
    yield figure(
        "docs/scaling.md",
        "an MLP of 10.5 M parameters under AdamScale took {} times the CPU time of plain DDP with "
        "every step measured, and {} times with one step in eight",
        *(f"{cpu(f'AdamScale{more}'):.2f}" for more in (", measure_every=1", "")),
    )


def gpu() -> Figures:
    rows = stored("gpu.json")["cost"]["16,384 tokens a pass, 2 passes a step"]

    def wall(variant: str) -> str:
        return f"{one(rows, variant=variant)['ratio']['value']:.3f}"

    yield figure(
        "docs/scaling.md",
        "with a GPT of 124 M parameters and 16,384 tokens per pass, a step under AdaScale "
        "took {} times as long as a plain step, and a step under AdamScale {} times",
        *(wall("AdaScale"), wall("AdamScale")),
    )
    result = stored("gpu.json")
    page = "docs/benchmarks/gpu.md"
    tests = result["tests"]
    yield figure(
        page, "In `tests/gpu`, {} tests passed and {} failed", tests["passed"], tests["failed"]
    )
    norms = result["trace"]["norms, ms of the device"]
    yield figure(page, "norms take {} ms of the device's time", f"{norms:.1f}")


def collapse() -> Figures:
    rows = stored("collapse.jsonl")
    scores = {
        (row["task"], row["setting"], row["limit"], row["seed"]): row["score"] for row in rows
    }
    numbers: list[int] = []
    for limit in ("limited", "not limited"):
        runs = [key for key in scores if key[2] == limit and key[1] != "1"]
        low = [key for key in runs if scores[key] < scores[key[0], "1", "limited", key[3]] - 7.0]
        numbers += [len(runs), len(low)]
    assert numbers[0] == numbers[2]
    yield figure(
        "docs/benchmarks/collapse.md",
        "Of {} runs, {} collapsed; without the limit {} of {}.",
        *(numbers[0], numbers[1], numbers[3], numbers[2]),
    )


def ramp() -> Figures:
    rows = stored("ramp.jsonl")
    best, disjoint, fewer, samples = {}, set(), [], []
    for name in sorted({row["workload"] for row in rows}):
        own = of(rows, workload=name)
        sign = -1.0 if name.startswith("shakespeare") else 1.0
        fixed = {b: of(own, way="fixed", batch=b) for b in {row["batch"] for row in own}}
        for overhead in (1.0, 4.0, 32.0):
            ours = of(own, way="ramp", overhead=overhead)
            times = {
                b: fmean(overhead * r["steps"] + r["samples"] for r in fixed[b]) for b in fixed
            }
            fastest = min(times, key=times.__getitem__)
            time = fmean(row["time"] for row in ours)
            best[name, overhead] = time / times[fastest]
            if max(sign * r["score"] for r in ours) < min(
                sign * r["score"] for r in fixed[fastest]
            ):
                disjoint.add((name, overhead))
        by_samples = of(own, way="samples")
        fewer.append(
            100 * (1 - fmean(r["steps"] for r in by_samples) / fmean(r["steps"] for r in fixed[1]))
        )
        samples.append(
            fmean(r["samples"] for r in by_samples) / fmean(r["samples"] for r in fixed[1])
        )
    low, high = between(best.values())
    assert (len(best), len(fixed), {row["seed"] for row in rows}) == (18, 8, {0, 1, 2})
    # docs/benchmarks/ramp.md names them.
    assert disjoint == {("shakespeare-sgd", 4.0), ("shakespeare-sgd", 32.0)}

    yield figure(
        "docs/ramp.md",
        "took [{} to {} times as long](benchmarks/ramp.md) as the best of eight fixed batches",
        *(low, high),
    )
    yield figure(
        "docs/ramp.md",
        "{} to {} % fewer steps, for {} to {} times the samples (six small workloads)",
        *(f"{min(fewer):.0f}", f"{max(fewer):.0f}", *between(samples)),
    )
    errors = [row["prediction_error"] for row in of(rows, way="ramp")]
    yield figure(
        "docs/benchmarks/ramp.md",
        "The median error of a run is {}% in the middle of {} runs, and {}% in the worst.",
        *(f"{100 * median(errors):.1f}", len(errors), f"{100 * max(errors):.1f}"),
    )


def time_to_loss() -> Figures:
    rows = stored("time_to_loss.jsonl")
    over, fixed = [], []
    for line, ranks in {(row["line"], row["ranks"]) for row in rows}:
        own = of(rows, line=line, ranks=ranks)
        ways = {row["way"] for row in own if not row["way"].startswith("DiLoCo")}
        seconds = {way: fmean(row["seconds"] for row in of(own, way=way)) for way in ways}
        ours = seconds.pop("DDP + AdaScale + Ramp")
        assert ways >= {f"DDP + AdaScale, {p}" for p in ("1 pass", "4 passes", "16 passes")}
        over.append(ours / min(seconds.values()))
        fixed.append(seconds["DDP + AdaScale, 1 pass"] / seconds["DDP"])
    assert (len(over), {row["seed"] for row in rows}) == (6, {0, 1, 2})
    page = "docs/benchmarks/time_to_loss.md"
    assert max(fixed) < 1 and min(over) < 1 < max(over)  # "less", "more"
    least, most = reversed(apart(fixed))
    sentence = f"[{{}} to {{}} % less time]({page}) (one MLP, three network speeds)"
    yield figure("README.md", sentence, least, most)
    yield figure("README.md", "|{} % less time than DDP ¹|", least)
    sentence = f"[{{}} % less to {{}} % more time]({page}) (three fixed batch sizes)"
    yield figure("README.md", sentence, *apart(over))
    yield figure("README.md", "|{} % more time than the best fixed batch ²|", apart(over)[1])
    yield figure(
        "docs/ramp.md",
        "took [{} to {} times as long](benchmarks/time_to_loss.md) as the best of three fixed "
        "batches",
        *between(over),
    )
    (target,) = {row["target"] for row in rows}
    yield figure(
        "docs/benchmarks/time_to_loss.md",
        "the loss on held-out samples is at most {}, which",
        f"{target:.3f}",
    )


# -- sharding ------------------------------------------------------------------------------------


def sharding_speed() -> Figures:
    over: dict[str, list[float]] = {"fused": [], "default": []}
    ahead: dict[tuple[str, str, str], tuple[float, float]] = {}  # by CPU time, of peers
    for title, found in stored("sharding-speed.json")["workloads"].items():
        for choice, values in over.items():
            ours = one(found["rows"], name="manyhands OSS + ShardedDataParallel", choice=choice)
            values.append(ours["wall"]["value"])
        for choice in over:
            same = {row["name"]: row for row in of(found["rows"], choice=choice)}
            ours = same.pop("manyhands OSS + ShardedDataParallel")["cpu"]
            assert ours["high"] >= 1  # else: slower than DDP
            for name, row in same.items():
                peer = not name.startswith(("manyhands", "DDP"))
                if peer and row["cpu"]["value"] > ours["value"]:
                    ahead[title, choice, name] = (row["cpu"]["value"], ours["value"])
    assert [len(values) for values in over.values()] == [4, 4]
    ((where, both),) = ahead.items()
    assert where[0].startswith("25M parameters, 4 ranks")
    assert where[1:] == ("fused", "fairscale, default buffer")
    yield figure(
        "docs/benchmarks/sharding-speed.md",
        "By CPU time, fairscale is ahead of manyhands in a single case: 25M parameters, 4 ranks, "
        "`AdamW(fused=True)` ({} and {} times DDP's speed)",
        *(f"{value:.3f}" for value in both),
    )
    yield figure(
        "README.md",
        "3. [{} to {} % more](docs/benchmarks/sharding-speed.md) with `AdamW(fused=True)`, and {} "
        "to {} % more with `AdamW()` (25 and 100 M parameters)",
        *(*apart(over["fused"]), *apart(over["default"])),
    )
    least = apart(over["fused"] + over["default"])[0]
    yield figure("README.md", "|{} % more tokens/s than DDP ³|", least)
    assert min(over["fused"] + over["default"]) > 1  # "more"


FSDP = "manyhands FSDP"


def fsdp_speed() -> Figures:
    kept = ", reshard_after_forward=False"
    rivals, peers, both = [], [], []
    for found in stored("fsdp-speed.json")["workloads"].values():
        named = {row["name"]: row for row in found["rows"]}
        rivals.append(named[FSDP]["rival"]["value"])
        for how in ("", kept):
            both.append(named[f"{FSDP}{how}"]["rival"]["value"])
            if f"fairscale FSDP{how}" in named:
                peers.append(
                    named[f"fairscale FSDP{how}"]["wall_ms"] / named[f"{FSDP}{how}"]["wall_ms"]
                )
    assert (len(rivals), len(peers)) == (6, 10)  # fairscale's did not fit with 100 M on 4 ranks
    assert between(both) == between(rivals)
    assert min(rivals) > 1  # "more"
    yield figure(
        "README.md",
        "4. [{} to {} % more](docs/benchmarks/sharding-speed.md) (10 to 100 M parameters)",
        *apart(rivals),
    )
    yield figure("README.md", "|{} % more tokens/s than `fully_shard` ⁴|", apart(rivals)[0])
    yield figure(
        "docs/fsdp.md",
        "it reaches {} to {} times the tokens per second of the same `fully_shard`, and {} to {} "
        "times fairscale's",
        *(*between(rivals), *between(peers)),
    )


def fsdp_memory() -> Figures:
    result = stored("fsdp-memory.json")
    rows, wrap = result["rows"], result["unit"]
    lean, most = (
        max(
            (row["most"] - 4 / row["ranks"] * rows[0]["parameters"]) / wrap
            for row in of(rows, name=name)
            if row["ranks"] > 1
        )
        for name in (f"{FSDP}, overlap=False", FSDP)
    )
    yield figure(
        "docs/fsdp.md",
        "the peak in a step then exceeds the memory after backward by {} wraps, instead of up to "
        "{} (25 M parameters, up to 4 ranks, [measured]",
        *(f"{lean:.1f}", f"{most:.1f}"),
    )
    off = [
        abs(row["planned"][key] / row[key] - 1) for row in rows for key in row.get("planned", ())
    ]
    page = "docs/benchmarks/sharding-memory.md"
    yield figure(
        page,
        "- up to {} wraps with FSDP, and up to {} with `overlap=False`",
        *(f"{most:.1f}", f"{lean:.1f}"),
    )
    yield figure(page, "Measured and planned bytes agree within {} %", f"{100 * max(off):.1f}")
    share = f"{wrap / rows[0]['parameters']:.3f}"
    yield figure(page, "the largest wrap has {} of the parameters", share)


def sharding_memory() -> Figures:
    from manyhands.sharding.zero._layout import bucket_size

    rows = stored("sharding-memory.json")["measured"]
    page, unit = "docs/benchmarks/sharding-memory.md", rows[0]["parameters"]
    yield figure(page, "in units of the parameters' {} MB", f"{unit / 1e6:.1f}")
    peak = []
    for row in of(rows, name="manyhands OSS + ShardedDataParallel"):
        if row["ranks"] > 1:
            formula = (1 + 3 / row["ranks"]) * unit  # after backward
            peak.append((row["most"] - formula) / (4 * bucket_size(row["ranks"], unit // 4)))
    yield figure(page, "- up to {} buckets with `OSS` and", f"{max(peak):.1f}")


def lora_memory() -> Figures:
    for row in stored("lora-memory.json")["rows"]:
        megabytes = (f"{row[part] / 1e6:.1f}" for part in ("base", "trained", "most"))
        yield figure("docs/recipes.md", f"| {row['level']} | {{}} | {{}} | {{}} |", *megabytes)


# -- blocks, crews -------------------------------------------------------------------------------


def codecs() -> Figures:
    """Compute the bytes of encoded values, sent once in H steps."""
    for name, sent, places in (
        ("bfloat16", "16 bits", 0),
        ("int8", "integers, with a scale per 256 values", 2),
        ("int4", "integers, with a scale per 64 values", 2),
        ("ternary", "-1, 0 or 1, with a scale per 256 values", 2),
    ):
        size = 4 * 32 / times_less(name, 32)
        row = f'| `"{name}"` | {sent} | {{}} | {{}}'
        numbers = [f"{size:.{places}f}", f"{times_less(name, 32):,.0f}"]
        if name == "ternary":
            row, numbers = f"{row}; {{}} at H = 160", [*numbers, f"{times_less(name, 160):,.0f}"]
        yield figure("docs/blocks.md", f"{row} |", *numbers)


def times_less(codec: str, every: int) -> float:
    """Return the ratio of bytes sent: DDP to blocks, for an equal number of steps."""
    import torch

    from manyhands.blocks.averaging._codec import CODECS

    elements = 10_000_000
    return 4 * every * elements / CODECS[codec].size(elements, torch.float32)


def blocks_quality() -> Figures:
    rows = stored("blocks-quality.jsonl")

    def losses(task: str, name: str) -> dict[int, float]:
        return {row["seed"]: row["loss"] for row in of(rows, task=task, name=name)}

    def excess(task: str, name: str, base: str = "synchronous") -> float:
        return more(losses(task, name).values(), losses(task, base).values())

    at_32 = "DiLoCo, H = 32"
    tasks = ("Shakespeare", "MNIST")
    rounded = [abs(excess(t, f"{at_32}, int{bits}", at_32)) for t in tasks for bits in (8, 4)]
    yield figure(
        "docs/blocks.md",
        'Compared with `"float32"`, `"int8"` and `"int4"` changed the loss by up to {} % (two '
        "small models,",
        f"{max(rounded):.1f}",
    )
    key = of(rows, name="DiLoCo, H = 160, ternary")[0]["key"]
    steps, warmup = int(key.split("/")[1]), int(re.search(r"'warmup': (\d+)", key)[1])
    assert warmup == steps / 4  # "a quarter" below
    times = times_less("ternary", 160)
    whole = f"{steps / (warmup + (steps - warmup) / times):.1f}"
    yield figure(
        "docs/blocks.md",
        "With H = 160, **a complete run sends only {} times less** than DDP if its first quarter "
        "is a synchronous warm-up",
        whole,
    )
    yield from two_phases(excess)


def two_phases(excess: Callable[[str, str], float]) -> Figures:
    """Yield runs with a round after each step of the first quarter, then with H = 32."""
    sent = 0.25 / times_less("int4", 1) + 0.75 / times_less("int4", 32)
    name = "DiLoCo, two phases, int4"
    text, digits, tuned = (excess(t, name) for t in ("Shakespeare", "MNIST", "fine-tuning"))
    after = excess("fine-tuning", f"pretrained with {name}")
    assert text < 0 and digits < 0  # "lower" in README.md
    yield figure(
        "docs/blocks.md",
        "**In two phases**, a complete run with AdamW sends {} times less than DDP.",
        f"{1 / sent:.1f}",
    )
    yield figure(
        "docs/blocks.md",
        "the loss changed by {} % on Shakespeare, {} % on MNIST, and {} % in fine-tuning",
        *(f"{text:+.1f}", f"{digits:+.1f}", f"{tuned:+.1f}"),
    )
    yield figure(
        "docs/blocks.md",
        "Fine-tuning [after such pretraining](benchmarks/blocks-quality.md#fine-tuning) ended {} % "
        "higher.",
        f"{after:.1f}",
    )
    yield figure("README.md", "|{} times less traffic than DDP ⁵|", f"{1 / sent:.1f}")
    yield figure(
        "README.md",
        "the [loss](docs/benchmarks/blocks-quality.md) was {} % lower on Shakespeare, and {} % "
        "lower on MNIST with a low learning rate",
        *(f"{-text:.1f}", f"{-digits:.1f}"),
    )


def short_runs() -> Figures:
    rows, synchronous = stored("blocks-short.jsonl"), "synchronous"
    tasks = sorted({row["task"] for row in rows})
    assert len(tasks) == 10  # "ten" below

    def ends(task: str, name: str) -> float:
        points = [row["points"][name] for row in of(rows, task=task, rate=1)]
        assert len(points) == 2, "two seeds"
        return fmean(points)

    def lost(name: str, rounds: int, share: int, tasks: list[str]) -> list[float]:
        """Return the ratio to synchronous training for each task."""
        key = f"{name}/{rounds}/{share}"
        return [ends(task, synchronous) - ends(task, key) for task in tasks]

    def span(each: list[list[float]]) -> tuple[str, str]:
        """Return the lowest and highest median."""
        medians = sorted(median(points) for points in each)
        return f"{medians[0]:.1f}", f"{medians[-1]:.1f}"

    every = (5, 10, 20, 40, 80)
    advised = []
    for name, inner in (("DiLoCo (1, 0.5)", "AdamW"), ("LocalSGD", "SGD")):
        kind = [task for task in tasks if inner in task]
        advised += [lost(name, rounds, 25, kind) for rounds in every]
    worst = max(max(points) for points in advised)
    defaults = [
        [lost(name, rounds, 0, tasks) for rounds in every]
        for name in ("DiLoCo, default (0.7, 0.9)", "BMUF, default")
    ]
    yield figure(
        "docs/blocks.md",
        "the median ended {} to {} points (% of labels or variance) below synchronous training "
        "with 5 to 80 rounds, and the worst task {} points. The defaults without warm-up ended {} "
        "to {} (DiLoCo) and {} to {} (BMUF) points below.",
        *(*span(advised), f"{worst:.1f}", *span(defaults[0]), *span(defaults[1])),
    )


def blocks_slow_link() -> Figures:
    result = stored("blocks-slow-link.json")
    rows = result["rows"]
    ours = rows["manyhands DiLoCo, int8, overlap=8"]["ms"]
    page, link = "docs/benchmarks/blocks-slow-link.md", result["link"]
    alone = rows["no communication"]["ms"]
    assert ours == min(row["ms"] for name, row in rows.items() if "overlap" in name)
    yield figure(
        page,
        "**{} s per step with manyhands DiLoCo, int8, overlap=8**; {} s without communication.",
        *(f"{ours / 1e3:.3f}", f"{alone / 1e3:.3f}"),
    )
    yield figure(
        page,
        "reaches {} Mbit/s in one direction and {} Mbit/s in both directions simultaneously; a "
        "byte returns after {} ms.",
        *(f"{link[key]:.1f}" for key in ("one_way", "both_ways", "round_trip_ms")),
    )


def blocks_faults() -> Figures:
    result = stored("blocks-faults.json")
    rows = result["rows"]
    row = rows["every 30 s"]
    kept = f"{100 * row['rate'] / rows['no faults']['rate']:.0f}"
    yield figure("README.md", "|{} % of the failure-free throughput ⁶|", kept)
    assert row["missing"] == 0
    hit = [rows["every 30 s"], rows["every 15 s"]]
    kill, stop = (max(t for row in hit for t in row[how]["delays"]) for how in ("kill", "stop"))
    page, base = "docs/benchmarks/blocks-faults.md", rows["no faults"]
    again = rows["no faults, other batches"]

    def changed(row: Row) -> str:
        return f"{100 * (row['loss'] / base['loss'] - 1):+.2f}"

    for run in rows.values():
        assert not run["missing"] and not run["differing"]  # "yes"
        assert run["finals"] == 1 and run["code"] == 0
    compared = sum(run["compared"] for run in rows.values())
    yield figure(page, "yes; {} states were compared.", f"{compared:,}")
    yield figure(
        page,
        "{} % with a fault every 30 s, {} % with a fault every 15 s ({} % without, on other "
        "batches).",
        *(changed(hit[0]), changed(hit[1]), changed(again)),
    )
    yield figure(page, "A block takes {} s without faults", f"{base['usual']:.2f}")
    yield figure(page, "steps, {} minutes without faults", f"{base['seconds'] / 60:.1f}")
    yield figure(page, "({} are used without faults)", f"{base['cores']:.2f}")

    yield figure(
        "docs/crew.md",
        "{} s after a kill that `manyhands run` sees, and up to {} s after a stop with `--stall 1`",
        *(f"{kill:.1f}", f"{stop:.1f}"),
    )


BENCHMARKS: tuple[Callable[[], Figures], ...] = (
    quality_page,
    cost,
    gpu,
    collapse,
    ramp,
    time_to_loss,
    sharding_speed,
    fsdp_speed,
    fsdp_memory,
    sharding_memory,
    lora_memory,
    codecs,
    blocks_quality,
    short_runs,
    blocks_slow_link,
    blocks_faults,
)


def main() -> int:
    missing = 0
    for page, sentence, numbers in (each for benchmark in BENCHMARKS for each in benchmark()):
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        found = list(pattern(sentence).finditer(text))
        if len(found) != 1:
            missing += 1
            print(f"{page}: {len(found)} times, and should be there once:\n    {sentence}")
            continue
        new = text
        for hole, number in reversed(list(enumerate(numbers, start=1))):
            new = new[: found[0].start(hole)] + number + new[found[0].end(hole) :]
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"{page}: {sentence.format(*numbers)}")
    return missing


if __name__ == "__main__":
    sys.exit(main() > 0)
