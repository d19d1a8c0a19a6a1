"""Measure what a step with a scaling rule costs, over the same step of bare DDP.

    python benchmarks/peers.py           once, to have fairscale and adaptdl in the comparison
    python benchmarks/cost.py            some minutes; writes the page
    python benchmarks/cost.py --quick    a smoke test: a few steps, writes nothing

Two ranks (gloo, one thread each) train every variant in turns, all in the same processes, from the
same weights and on the same batches, on each rank its own; `rounds.py` says how the times become
ratios. Collectives are counted in four steps of each, afterwards.
"""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import peers

peers.run_again_beside_peers()  # before torch, which this Python may not have

import pages  # noqa: E402
import torch  # noqa: E402
from rounds import Ratio, in_turns, ratio, restored, spent  # noqa: E402
from team import Team  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import SGD, AdamW  # noqa: E402
from traffic import collectives  # noqa: E402

import manyhands as mh  # noqa: E402

RANKS = 2
COUNTED = 4  # steps of a turn, and of the count: of four, one is measured by default


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
    args = parser.parse_args()
    if args.draw:
        result = pages.read("cost")
    else:
        result = {**pages.conditions(), "rounds": args.rounds, "workloads": {}}
        for workload in WORKLOADS:
            rows = measured(workload, 2 if args.quick else args.rounds, args.quick)
            result["workloads"][workload.title] = [asdict(row) for row in rows]
    tables = {
        title: [restored(Row, row) for row in rows] for title, rows in result["workloads"].items()
    }
    for title, rows in tables.items():
        print(f"\n{title}\n{table(rows)}")
    if not args.quick:
        pages.store("cost", result)
        shown = "\n\n".join(f"## {title}\n\n{table(rows)}" for title, rows in tables.items())
        pages.write("cost", PAGE, result, tables=shown)


def measured(workload: Workload, rounds: int, quick: bool) -> list[Row]:
    """A workload's variants as rows."""
    variants = [variant for variant in workload.variants if variant.present]

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
        counted = {v.name: team.ask({"variant": v.name, "timed": False})[0] for v in variants}
    return [
        Row(
            v.name,
            v.base,
            1e3 * median(times[v.name]["cpu"]),
            1e3 * median(times[v.name]["wall"]),
            ratio(times[v.name]["cpu"], times[v.base]["cpu"]),
            ratio(times[v.name]["wall"], times[v.base]["wall"]),
            len(counted[v.name]) / COUNTED,
            sum(counted[v.name]) // COUNTED,
        )
        for v in variants
    ]


# -- the models, and the ways to train each -------------------------------------------------------

Trained = tuple[nn.Module, Any]  # a DDP model, and whatever takes the optimizer's place
Make = Callable[[nn.Module], Any]
WARM_UP = 18  # more than AdamScale's five plain steps
# Two workers' averages look back over 500 steps. All are measured until they hold as many.
SETTLED = 520


class Block(nn.Module):
    """A residual block of two convolutions; the shortcut has no parameters."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride, self.added = stride, channels - before

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


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.01)


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-4, fused=True)


def bare(optimizer: Make) -> Callable[[nn.Module], Trained]:
    return lambda model: (DistributedDataParallel(model), optimizer(model))


def ours(rule: Any, optimizer: Make, **options: Any) -> Callable[[nn.Module], Trained]:
    return lambda model: (DistributedDataParallel(model), rule(optimizer(model), **options))


def fairscale_adascale(model: nn.Module) -> Trained:
    from fairscale.optim import AdaScale

    return DistributedDataParallel(model), AdaScale(sgd(model))


def adaptdl(rule: str, optimizer: Make) -> Callable[[nn.Module], Trained]:
    """adaptdl's statistics and rule on torch's DDP.

    Its own data-parallel class only runs inside its data loader; what that class and the loader
    add to a step is left out, in adaptdl's favour.
    """

    def make(model: nn.Module) -> Trained:
        from adaptdl.torch import gradient_noise_scale, scaling_rules

        ddp, inner = DistributedDataParallel(model), optimizer(model)
        noise = "GradientNoiseScale" if rule == "AdaScale" else "AdamGradientNoiseScale"
        ddp.gns = getattr(gradient_noise_scale, noise)(ddp, inner)
        getattr(scaling_rules, rule)().initialize(ddp, inner, patch_optimizer=True)
        return ddp, inner

    return make


@dataclass(frozen=True)
class Variant:
    """One way to train; `base` names what its cost is divided by."""

    name: str
    make: Callable[[nn.Module], Trained]
    base: str
    needs: str | None = None  # the peer that must be installed
    warm_up: int = WARM_UP  # steps that are not timed

    @property
    def present(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


@dataclass(frozen=True)
class Workload:
    """A model, its batch on each rank, and who trains it."""

    title: str
    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    variants: tuple[Variant, ...]


BARE_SGD, BARE_ADAMW = "DDP + SGD", "DDP + AdamW(fused)"
ADASCALE, ADAMSCALE = "manyhands AdaScale", "manyhands AdamScale"
EXACT = "measure_every=1"
WITH_SGD = (
    Variant(BARE_SGD, bare(sgd), BARE_SGD),
    Variant(f"{BARE_SGD} again (A/A)", bare(sgd), BARE_SGD),
    Variant(ADASCALE, ours(mh.AdaScale, sgd), BARE_SGD, warm_up=SETTLED),
    Variant(f"{ADASCALE}, {EXACT}", ours(mh.AdaScale, sgd, measure_every=1), BARE_SGD),
    Variant("fairscale AdaScale", fairscale_adascale, BARE_SGD, "fairscale"),
    Variant("adaptdl AdaScale", adaptdl("AdaScale", sgd), BARE_SGD, "adaptdl"),
)
WITH_ADAMW = (
    Variant(BARE_ADAMW, bare(adamw), BARE_ADAMW),
    Variant(f"{BARE_ADAMW} again (A/A)", bare(adamw), BARE_ADAMW),
    Variant(ADAMSCALE, ours(mh.AdamScale, adamw), BARE_ADAMW, warm_up=SETTLED),
    Variant(f"{ADAMSCALE}, {EXACT}", ours(mh.AdamScale, adamw, measure_every=1), BARE_ADAMW),
    Variant("adaptdl AdamScale", adaptdl("AdamScale", adamw), BARE_ADAMW, "adaptdl"),
)
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
        model, optimizer = variant.make(workload.model())
    batches = _batches(workload, rank)
    position = 0

    def step() -> None:
        nonlocal position
        x, y = batches[position]
        position = (position + 1) % len(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _batches(workload: Workload, rank: int, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(rank + 1)
    return [
        (
            torch.randn(workload.inputs, generator=random),
            torch.randint(0, 10, workload.inputs[:1], generator=random),
        )
        for _ in range(count)
    ]


# -- the page --------------------------------------------------------------------------------------

PAGE = """# What a scaling rule costs

A step with AdaScale or AdamScale is compared with the same step without it, with manyhands,
fairscale 0.4.13 and adaptdl 0.2.11. Measured on {machine}, with {versions}; two ranks on gloo, one
thread each. The load average before was {load}.

```bash
python benchmarks/peers.py   # once: an environment with the peers
python benchmarks/cost.py --rounds {rounds}
```

- **CPU time** is that of both ranks with all threads. It varies less than wall time, which is that
  of the slower rank. Ratios are medians over {rounds} rounds with bootstrap intervals (95 %); all
  variants take turns in the same two processes.
- **"again (A/A)" is the base a second time:** its distance from 1 is noise.
- **Collectives and bytes** are those of a mean step, DDP's own among them. Bytes are of the tensors
  that a rank gives to collectives.

{tables}

What the tables show:

- By default one step in four is measured, once the averages have seen as many steps as they look
  back over: 500 with two workers. The rows show the steps after that. In the three steps between,
  no norm is taken, and the ranks exchange their claims ([scaling](../scaling.md#what-it-costs)).
- A rule adds a nearly constant time to a small model's step: a hook per parameter, Python, and one
  collective of a few numbers. Its share falls with the length of the step, so the ResNet is shown
  at two batch sizes.
- The MLP at batch 7 is the worst case. Its 10.5 million gradients come from seven samples, so most
  of the step moves them through memory. A measured step reads them one and a half times more, and
  for AdamScale the second moments as well.
- adaptdl is measured without its data loader and its data-parallel class, which only runs inside
  that loader: its statistics and its rule sit on torch's DDP, in its favour.
- Nothing here was measured on a GPU or over a network.
"""


def table(rows: list[Row]) -> str:
    cells = [
        (
            *(row.variant, f"{row.cpu_ms:.1f}", times(row, row.cpu)),
            *(f"{row.wall_ms:.1f}", times(row, row.wall)),
            *(f"{row.collectives:g}", f"{row.sent_bytes:,}"),
        )
        for row in rows
    ]
    return pages.table("variant | CPU ms | × base | wall ms | × base | collectives | bytes", cells)


def times(row: Row, value: Ratio) -> str:
    if row.variant == row.base:
        return "1"
    return f"{value.value:.3f} ({value.low:.3f}–{value.high:.3f})"


if __name__ == "__main__":
    main()
