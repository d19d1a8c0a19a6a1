"""Measure what a step with a scaling rule costs, over the same step of bare DDP.

    python benchmarks/peers.py           once, to have fairscale and adaptdl in the comparison
    python benchmarks/cost.py            some minutes; writes the page
    python benchmarks/cost.py --models   only the two models under AdamW

Two ranks train every variant in turns, all in the same processes, from the same weights and on the
same batches. Collectives are counted in sixteen steps of each, afterwards.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import peers

peers.run_again_beside_peers()  # before torch, which this Python may not have

import pages  # noqa: E402
import torch  # noqa: E402
from rounds import Ratio, in_turns, ratio, restored, spent  # noqa: E402
from sharding.contenders import Trained  # noqa: E402
from team import Team  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from traffic import collectives  # noqa: E402
from variants import SETTLED, Make, Variant, adamw, around, bare, ruled, sgd  # noqa: E402

import manyhands as mh  # noqa: E402

RANKS = 2
COUNTED = 16  # steps of a turn, and of the count: two measured, one recomputes floors of moments


@dataclass(frozen=True)
class Row:
    """One variant on one workload: its cost per step, and over that of its base."""

    variant: str
    base: str
    cpu_ms: float  # of both ranks, all threads
    wall_ms: float
    cpu: Ratio
    wall: Ratio
    collectives: float
    sent_bytes: int  # of the tensors given to collectives


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--models", action="store_true", help="only the two models under AdamW")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    if args.draw or args.models:
        result = pages.read("cost")
    else:
        result = {**pages.conditions(), "rounds": args.rounds, "workloads": {}}
        for workload in WORKLOADS:
            rows = measured(workload, rounds, args.quick)
            result["workloads"][workload.title] = [asdict(row) for row in rows]
    if not args.draw:
        result["models"] = {**pages.conditions(), "rounds": rounds}
        rows = measured(MODELS, rounds, args.quick)
        result["models"]["rows"] = [asdict(row) for row in rows]
    shown = table(result["workloads"])
    models = table_of_models(result["models"]["rows"])
    print(shown, models, sep="\n\n")
    if not args.quick:
        pages.store("cost", result)
        parts = {f"models_{key}": result["models"][key] for key in ("rounds", "load")}
        pages.fill("cost", result, table=shown, models=models, **parts)


def measured(workload: Workload, rounds: int, quick: bool) -> list[Row]:
    variants = [one for one in workload.variants if peers.installed(one.needs)]

    def work(rank: int) -> Callable[[dict[str, Any]], Any]:
        steps = {variant.name: training(workload, variant, rank) for variant in variants}
        for variant in variants:
            for _ in range(2 if quick else variant.warm_up):
                steps[variant.name]()
        gc.collect()

        def answer(order: dict[str, Any]) -> Any:
            step = steps[order["variant"]]
            if order["timed"]:
                return spent(step, COUNTED)
            with collectives() as seen:
                for _ in range(COUNTED):
                    step()
            return seen

        return answer

    with Team(RANKS, work) as team:
        ask = {v.name: partial(team.ask, {"variant": v.name, "timed": True}) for v in variants}
        times = in_turns(ask, rounds)
        rows = []
        for variant in variants:
            seen = times[variant.name]
            base = times[variant.base]
            counted = team.ask({"variant": variant.name, "timed": False})[0]
            row = Row(
                variant.name,
                variant.base,
                cpu_ms=1e3 * median(seen["cpu"]),
                wall_ms=1e3 * median(seen["wall"]),
                cpu=ratio(seen["cpu"], base["cpu"]),
                wall=ratio(seen["wall"], base["wall"]),
                collectives=len(counted) / COUNTED,
                sent_bytes=sum(counted) // COUNTED,
            )
            rows.append(row)
    return rows


class Block(nn.Module):
    """A residual block of two convolutions; the shortcut has no parameters."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.added = channels - before

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        x = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(x)) + shortcut).relu()


def resnet20() -> nn.Module:
    """He et al.'s ResNet-20 for CIFAR: 0.27 M parameters in 59 tensors."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    before = 16
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        for position in range(3):
            layers.append(Block(before, channels, 1 if position else stride))
            before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    """10.5 M parameters, of which each is used a few times a step: reading them is the work."""
    sizes = pairwise((1024, 2048, 2048, 2048))
    hidden = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2048, 10))


def with_dead_units(make: Callable[[nn.Module], Trained]) -> Callable[[nn.Module], Trained]:
    """Make half of the hidden units dead: 3/4 of the large matrices have v = 0."""

    def make_with_dead_units(model: nn.Module) -> Trained:
        assert isinstance(model, nn.Sequential)
        with torch.no_grad():
            for layer in list(model)[:-1]:
                if isinstance(layer, nn.Linear):
                    layer.bias[::2] = -100.0
        return make(model)

    return make_with_dead_units


def fairscale(model: nn.Module) -> Trained:
    from fairscale.optim import AdaScale

    return bare(lambda model: AdaScale(sgd(model)))(model)


def adaptdl(rule: str, optimizer: Make) -> Callable[[nn.Module], Trained]:
    """adaptdl's statistics and rule on torch's DDP, without adaptdl's wrapper and data loader."""

    def make(model: nn.Module) -> Trained:
        from adaptdl.torch import gradient_noise_scale, scaling_rules

        ddp = DistributedDataParallel(model)
        inner = optimizer(model)
        noise = "GradientNoiseScale" if rule == "AdaScale" else "AdamGradientNoiseScale"
        ddp.gns = getattr(gradient_noise_scale, noise)(ddp, inner)
        getattr(scaling_rules, rule)().initialize(ddp, inner, patch_optimizer=True)
        return Trained(ddp, inner, inner.zero_grad)

    return make


@dataclass(frozen=True)
class Workload:
    """A model, its batch on each rank, and who trains it."""

    title: str
    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    variants: tuple[Variant, ...]


BARE_SGD = "DDP + SGD"
BARE_ADAMW = "DDP + AdamW(fused)"
WITH_SGD = (
    *around(BARE_SGD, sgd, mh.AdaScale, "manyhands AdaScale"),
    Variant("fairscale AdaScale", fairscale, BARE_SGD, "fairscale"),
    Variant("adaptdl AdaScale", adaptdl("AdaScale", sgd), BARE_SGD, "adaptdl"),
)
WITH_ADAMW = (
    *around(BARE_ADAMW, adamw, mh.AdamScale, "manyhands AdamScale"),
    Variant("adaptdl AdamScale", adaptdl("AdamScale", adamw), BARE_ADAMW, "adaptdl"),
)
ADAMW = (
    *around(BARE_ADAMW, adamw, mh.AdamScale, "manyhands AdamScale"),
    Variant("manyhands AdaScale", ruled(mh.AdaScale, adamw), BARE_ADAMW, warm_up=SETTLED),
)
DEAD_UNITS = ", dead units"
DEAD = [
    replace(
        variant,
        name=variant.name + DEAD_UNITS,
        base=variant.base + DEAD_UNITS,
        make=with_dead_units(variant.make),
    )
    for variant in ADAMW
]
MODELS = Workload("MLP of 10.5 M, batch 7", mlp, (7, 1024), (*ADAMW, *DEAD))
WORKLOADS = (
    Workload("ResNet-20, batch 8", resnet20, (8, 3, 32, 32), WITH_SGD),
    Workload("ResNet-20, batch 32", resnet20, (32, 3, 32, 32), WITH_SGD),
    Workload("MLP of 10.5 M, batch 7", mlp, (7, 1024), WITH_SGD + WITH_ADAMW),
)


def training(workload: Workload, variant: Variant, rank: int) -> Callable[[], None]:
    """One step of training as a function, from the same start for every variant."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # adaptdl: pkg_resources is deprecated
        trained = variant.make(workload.model())
    batches = _batches(workload, rank)
    position = 0

    def step() -> None:
        nonlocal position
        x, y = batches[position]
        position = (position + 1) % len(batches)
        trained.clear()
        F.cross_entropy(trained.model(x), y).backward()
        trained.optimizer.step()

    return step


def _batches(workload: Workload, rank: int, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(rank + 1)
    batches = []
    for _ in range(count):
        x = torch.randn(workload.inputs, generator=random)
        batches.append((x, torch.randint(0, 10, workload.inputs[:1], generator=random)))
    return batches


def table(workloads: dict[str, list[dict[str, Any]]]) -> str:
    """Return a line for each variant, with two columns for each workload."""
    head = ["variant"]
    lines: dict[str, list[str]] = {}
    for title, stored in workloads.items():
        for each in stored:
            row = restored(Row, each)
            line = lines.setdefault(row.variant, [row.variant])
            line += ["–"] * (len(head) - len(line))
            line.append(times(row, row.cpu_ms, row.cpu))
            line.append(times(row, row.wall_ms, row.wall))
        head += [f"{title}: CPU", "wall"]
    for line in lines.values():
        line += ["–"] * (len(head) - len(line))
    return pages.table(" | ".join(head), lines.values())


def table_of_models(stored: list[dict[str, Any]]) -> str:
    """Return a line for each variant, with the CPU times of both models."""
    lines: dict[str, list[str]] = {}
    for each in stored:
        row = restored(Row, each)
        variant = row.variant.removesuffix(DEAD_UNITS)
        lines.setdefault(variant, [variant]).append(times(row, row.cpu_ms, row.cpu))
    return pages.table(f"variant | {MODELS.title} | half of the units dead", lines.values())


def times(row: Row, milliseconds: float, value: Ratio) -> str:
    if row.variant == row.base:
        return f"{milliseconds:.1f} ms"
    return f"{value.value:.3f} ({value.low:.3f}–{value.high:.3f})"


if __name__ == "__main__":
    main()
