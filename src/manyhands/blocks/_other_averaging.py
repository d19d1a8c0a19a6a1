"""Is something else averaging what blocks are to average?

In blocks each worker follows its own gradients. A model that is left in `DistributedDataParallel`,
as trainers leave it, or in `ShardedDataParallel`, has the mean gradient on every worker, so that
all take the same steps and each sync round finds what everybody has. Nothing fails, nothing is
saved, and DDP's traffic stays. What can be known of it is said when the optimizer is made, and the
rest after the first block: workers that have gone exactly the same way.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.ranks import RankGroup
from manyhands._core.wrapper import unwrap
from manyhands.blocks.averaging._extras import alive
from manyhands.blocks.averaging._payload import Outcome
from manyhands.sharding.zero._oss import OSS

SAME = 1e-6  # squared lengths that differ by less, relatively, are of the same steps


def check_not_averaged(
    who: str, workers: RankGroup, optimizer: Optimizer, model: nn.Module | None
) -> None:
    """Raise, or warn where it is not certain, if the workers that meet share their gradients."""
    if workers.size == 1:
        return
    advice = (
        f"{who} has to go without: each worker follows its own gradients from one meeting to the "
        "next. Workers that are to train as one are inner_group=, and process_group= those that "
        "meet."
    )
    inner = unwrap(optimizer)[-1]
    if isinstance(inner, OSS) and _overlap(inner.group, workers):
        raise ValueError(f"OSS updates its shards for the same workers that are to meet. {advice}")
    if model is not None and _averages(model) and _overlap(model.process_group, workers):
        raise ValueError(
            f"model= is in {type(model).__name__}, which averages gradients over the same workers "
            f"that are to meet. {advice}"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _found(params, workers):
        gc.collect()  # it may be one that nobody holds any more
        for kind in sorted(_found(params, workers)):
            warnings.warn(
                f"the parameters are in a {kind} that averages gradients over the same workers "
                f"that are to meet. {advice}",
                RuntimeWarning,
                stacklevel=5,
            )


def moved_alike(outcome: Outcome, cosine: float, rounded: bool) -> bool:
    """Whether all workers have taken the same steps.

    Equal lengths are not enough: in its first steps Adam goes equally far whatever the gradients.
    The cosine is of the mean that arrived, which a codec has `rounded`.
    """
    squares = [outcome.squares[rank] for rank in outcome.counted]
    low, high = min(squares, default=0.0), max(squares, default=0.0)
    alike = cosine > (0.95 if rounded else 0.999)
    return len(squares) > 1 and 0.0 < high <= low * (1 + SAME) and alike


def warn_that_workers_move_alike(workers: int) -> None:
    warnings.warn(
        f"in the first block all {workers} workers have taken the same steps (cosine 1, spread "
        "0), so that meetings change nothing. Their gradients are averaged already, if the model "
        "is in DistributedDataParallel or ShardedDataParallel, as a trainer may leave it: take it "
        "out, and use the model itself. Or all workers draw the same samples: give each its own.",
        RuntimeWarning,
        stacklevel=6,
    )


def _found(params: Iterable[Tensor], workers: RankGroup) -> set[str]:
    """The kinds of modules that average the gradients of these parameters over these workers."""
    ours = {id(param) for param in params}
    return {
        type(module).__name__
        for module in alive()
        if _averages(module)
        and any(id(param) in ours for param in module.parameters())
        and _overlap(module.process_group, workers)
    }


def _averages(module: nn.Module) -> bool:
    """Whether it is a DDP, by what all of them have."""
    return "require_backward_grad_sync" in vars(module) and "process_group" in vars(module)


def _overlap(group: object, workers: RankGroup) -> bool:
    """Whether two of the workers are in this process group."""
    if not isinstance(group, dist.ProcessGroup | None):
        return False
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    ours = workers.ranks
    return len(set(ranks) & set(ours)) > 1
