"""Who is compared in `cost.py`: two models, and the ways to train each.

Every variant starts from the same weights and is trained on the same batches, on each rank its
own. `make(model)` gives a DDP model and whatever takes the optimizer's place.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import manyhands as mh

Trained = tuple[nn.Module, Any]
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
    return nn.Sequential(
        nn.Linear(1024, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )


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


def adaptdl_adascale(model: nn.Module) -> Trained:
    from adaptdl.torch.gradient_noise_scale import GradientNoiseScale
    from adaptdl.torch.scaling_rules import AdaScale

    return _adaptdl(model, sgd(model), AdaScale(), GradientNoiseScale)


def adaptdl_adamscale(model: nn.Module) -> Trained:
    from adaptdl.torch.gradient_noise_scale import AdamGradientNoiseScale
    from adaptdl.torch.scaling_rules import AdamScale

    return _adaptdl(model, adamw(model), AdamScale(), AdamGradientNoiseScale)


def _adaptdl(model: nn.Module, optimizer: Any, rule: Any, noise: Any) -> Trained:
    """adaptdl's statistics and rule on torch's DDP.

    Its own data-parallel class only runs inside its data loader; what that class and the loader
    add to a step is left out, in adaptdl's favour.
    """
    ddp = DistributedDataParallel(model)
    ddp.gns = noise(ddp, optimizer)
    rule.initialize(ddp, optimizer, patch_optimizer=True)
    return ddp, optimizer


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
    Variant("adaptdl AdaScale", adaptdl_adascale, BARE_SGD, "adaptdl"),
)
WITH_ADAMW = (
    Variant(BARE_ADAMW, bare(adamw), BARE_ADAMW),
    Variant(f"{BARE_ADAMW} again (A/A)", bare(adamw), BARE_ADAMW),
    Variant(ADAMSCALE, ours(mh.AdamScale, adamw), BARE_ADAMW, warm_up=SETTLED),
    Variant(f"{ADAMSCALE}, {EXACT}", ours(mh.AdamScale, adamw, measure_every=1), BARE_ADAMW),
    Variant("adaptdl AdamScale", adaptdl_adamscale, BARE_ADAMW, "adaptdl"),
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
