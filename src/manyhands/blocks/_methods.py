"""`LocalSGD`, `DiLoCo`, `SlowMo` and `BMUF`: `Blocks` with the outer steps of these papers.

Each method passes `**options` to `Blocks`. Type checkers and editors read the option names and
types from a TypedDict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypedDict

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from manyhands._arguments import flag, real, whole
from manyhands.blocks._anchor import Average, BlockMomentum, Outer, SlowMomentum
from manyhands.blocks._optimizer import Blocks
from manyhands.blocks._schedule import Every
from manyhands.blocks.crew._crew import Crew

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in `typing` from Python 3.11 on


class CommonOptions(TypedDict, total=False):
    """Options of `Blocks` with equal names in all methods."""

    codec: str
    overlap: int
    mix: float | None
    fragments: int
    state: str
    buffers: str
    anchor_on_host: bool
    model: nn.Module | None
    inner_group: dist.ProcessGroup | None
    crew: Crew | None
    shared_memory: bool


class BlockOptions(CommonOptions, total=False):
    """Options of `Blocks` with different names or defaults in BMUF."""

    warmup: int
    local_warmup: bool
    process_group: dist.ProcessGroup | None


def _momentum(name: str, value: object) -> float:
    why = "At 1 or above, the effect of a block would never fade."
    return real(name, value, least=0, below=1, why=why)


class LocalSGD(Blocks):
    """Blocks without an outer optimizer: the next anchor is the workers' mean.

        anchor = mean of the workers' parameters

    R. McDonald, K. Hall, G. Mann, "Distributed Training Strategies for the Structured Perceptron",
    NAACL 2010. The name: S. Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019,
    arXiv:1805.09767.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = mh.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=8)

    See `Blocks` for further options and common behavior.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int | Every = 16,
        **options: Unpack[BlockOptions],
    ) -> None:
        super().__init__(optimizer, Average(), every=every, **options)


class DiLoCo(Blocks):
    """Blocks with an outer SGD with Nesterov momentum, which steps along the mean difference.

        gradient = anchor - mean of the workers' parameters
        velocity = momentum * velocity + lr * gradient
        anchor -= lr * gradient + momentum * velocity

    A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    arXiv:2311.08105.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> optimizer = mh.DiLoCo(optimizer, every=100, codec="int4", overlap=10, fragments=4)

    `lr` and `momentum` default to the paper's values. `lr` in `param_groups` is the inner learning
    rate. See `Blocks` for further options and common behavior.

    Args:
        lr: the outer optimizer's learning rate.
        momentum: the outer optimizer's momentum.
    """

    _names: ClassVar[Mapping[str, str]] = {
        "outer.lr": "outer_lr",
        "outer.momentum": "outer_momentum",
    }

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        every: int | Every = 100,
        **options: Unpack[BlockOptions],
    ) -> None:
        lr = real("lr", lr, above=0)
        outer = BlockMomentum(lr, _momentum("momentum", momentum), nesterov=True)
        super().__init__(optimizer, outer, every=every, **options)


class SlowMo(Blocks):
    """Blocks with a slow momentum, measured in units of the inner learning rate.

        gradient = anchor - mean of the workers' parameters
        velocity = slow_momentum * velocity + gradient / inner_lr
        anchor -= slow_lr * inner_lr * velocity

    J. Wang, V. Tantia, N. Ballas, M. Rabbat, "SlowMo: Improving Communication-Efficient Distributed
    SGD with Slow Momentum", ICLR 2020, arXiv:1910.00643.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = mh.SlowMo(torch.optim.SGD(model.parameters(), lr=0.1), slow_momentum=0.5)

    See `Blocks` for further options and common behavior.

    Args:
        slow_lr: the slow learning rate α.
        slow_momentum: the slow momentum β.
        inner_lr: the inner learning rate γ. By default, the learning rate of the first parameter
            group at each sync round.
    """

    _names: ClassVar[Mapping[str, str]] = {
        "outer.inner_lr": "inner_lr",
        "outer.slow_lr": "slow_lr",
        "outer.momentum": "slow_momentum",
    }

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.5,
        inner_lr: float | None = None,
        every: int | Every = 16,
        **options: Unpack[BlockOptions],
    ) -> None:
        if inner_lr is not None:
            inner_lr = real("inner_lr", inner_lr, above=0)
        slow_lr = real("slow_lr", slow_lr, above=0)
        outer = SlowMomentum(inner_lr, slow_lr, _momentum("slow_momentum", slow_momentum))
        super().__init__(optimizer, outer, every=every, **options)


class BMUF(Blocks):
    """Blocks with a block momentum, and with the options that fairseq documents.

        gradient = anchor - mean of the workers' parameters
        velocity = block_momentum * velocity + block_lr * gradient
        anchor -= velocity

    K. Chen, Q. Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training with
    Intra-Block Parallel Optimization and Blockwise Model-Update Filtering", ICASSP 2016.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mh.BMUF(optimizer, block_momentum=0.875, global_sync_iter=50)

    BMUF reproduces four peculiarities of fairseq. With `block_momentum=0` the next anchor is the
    workers' mean, for any `block_lr`. In the first `warmup_iterations` steps each worker trains
    alone, and then all workers take worker 0's parameters. `use_nbm` equals plain momentum with
    `block_lr * (1 + block_momentum)`; Nesterov momentum is `nesterov=True`. Sync rounds follow the
    steps with a number divisible by `global_sync_iter`. See `Blocks` for further options and common
    behavior.

    Args:
        block_lr: factor of the workers' mean difference.
        block_momentum: factor of the previous block's movement. For N workers, 1 - 1/N works well.
        global_sync_iter: number of steps between two sync rounds.
        warmup_iterations: number of steps before the first block.
        use_nbm: fairseq's form of a look-ahead.
        average_sync: average Adam's moments at each sync round and at the end of the warm-up. By
            default the end of the warm-up resets the optimizer state. `state="average"` averages
            the state of any optimizer.
        nesterov: use Nesterov momentum, which is DiLoCo's outer step.
        local_warmup: if False, all workers take the warm-up steps along their mean gradient, as in
            the other methods.
        process_group: the workers; by default all ranks.
    """

    _names: ClassVar[Mapping[str, str]] = {
        "outer.lr": "block_lr",
        "outer.momentum": "block_momentum",
        "outer.nesterov": "nesterov",
        "outer.use_nbm": "use_nbm",
        "every": "global_sync_iter",
        "warmup": "warmup_iterations",
    }

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        block_lr: float = 1.0,
        block_momentum: float = 0.875,
        global_sync_iter: int | Every = 50,
        warmup_iterations: int = 500,
        use_nbm: bool = False,
        average_sync: bool = False,
        nesterov: bool = False,
        local_warmup: bool = True,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        # Saved runs record all settings, even where momentum 0 makes this a plain average.
        self._described = BlockMomentum(
            real("block_lr", block_lr, above=0),
            _momentum("block_momentum", block_momentum),
            flag("nesterov", nesterov),
            flag("use_nbm", use_nbm),
        )
        outer: Outer = self._described if self._described.momentum else Average()
        if flag("average_sync", average_sync):
            state = options.setdefault("state", "average_moments")
            if state not in ("average_moments", "average"):
                raise ValueError(
                    f"average_sync=True averages Adam's moments at each sync round, and "
                    f"state={state!r} does not: pass only one of these options."
                )
        for engine_name, name in (("every", "global_sync_iter"), ("warmup", "warmup_iterations")):
            if engine_name in options:
                raise TypeError(f"BMUF uses fairseq's names: write {name}= for {engine_name}=.")
        warmup_iterations = whole("warmup_iterations", warmup_iterations)
        if not isinstance(global_sync_iter, Every):
            global_sync_iter = Every(global_sync_iter, "global_sync_iter")
        super().__init__(
            optimizer,
            outer,
            every=global_sync_iter,
            warmup=warmup_iterations,
            local_warmup=local_warmup,
            process_group=process_group,
            **options,
        )
