"""Does something else average the workers' gradients already?

In blocks each worker follows its own gradients. If a trainer leaves the model in
`DistributedDataParallel` or `ShardedDataParallel`, all workers have the mean gradient, take the
same steps, and a sync round changes nothing. Nothing fails, and DDP's traffic stays. So there is an
error or a warning when the optimizer is made, if such a wrapper can be found then, and otherwise a
warning after the first block, if all workers moved exactly the same way.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands._core.modules import modules_holding
from manyhands._core.ranks import RankGroup
from manyhands._core.state_parts import ShardedOptimizer
from manyhands._core.wrappers import unwrap
from manyhands.blocks.averaging._payload import RoundResult

SAME = 1e-6  # relative difference of squared lengths, below which steps are the same


def check_not_averaged(
    class_name: str, workers: RankGroup, optimizer: Optimizer, model: nn.Module | None
) -> None:
    """Raise if the workers of the blocks share their gradients; warn if it is not certain."""
    if workers.size == 1:
        return
    advice = (
        f"{class_name} needs a model without it: each worker follows its own gradients from one "
        "sync round to the next. Pass ranks that train as one worker as inner_group=, and one "
        "rank of each worker as process_group=."
    )
    inner = unwrap(optimizer)[-1]
    if isinstance(inner, ShardedOptimizer) and _overlap(inner.group, workers):
        raise ValueError(
            f"{type(inner).__name__} shards its updates over the same workers as the blocks. "
            f"{advice}"
        )
    if model is not None and _averages(model) and _overlap(model.process_group, workers):
        raise ValueError(
            f"model= is in {type(model).__name__}, which averages gradients over the same workers "
            f"as the blocks. {advice}"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _found(params, workers):
        gc.collect()  # a wrapper that nothing holds any more must not cause a warning
        for kind in sorted(_found(params, workers)):
            warnings.warn(
                f"the parameters are in a {kind} that averages gradients over the same workers "
                f"as the blocks. {advice}",
                RuntimeWarning,
                stacklevel=5,
            )


def moved_identically(result: RoundResult, cosine: float, rounded: bool) -> bool:
    """Return whether all workers have taken the same steps.

    Equal lengths are not enough: in its first steps Adam goes equally far whatever the gradients.
    With a codec (`rounded`) the cosine is that of rounded values, and need not be as close to 1.
    """
    squares = [result.squares[rank] for rank in result.included]
    low, high = min(squares, default=0.0), max(squares, default=0.0)
    alike = cosine > (0.95 if rounded else 0.999)
    return len(squares) > 1 and 0.0 < high <= low * (1 + SAME) and alike


def warn_identical_moves(workers: int) -> None:
    warnings.warn(
        f"in the first block all {workers} workers have taken the same steps (cosine 1, spread "
        "0), so that sync rounds change nothing. Either the model is in DistributedDataParallel or "
        "ShardedDataParallel, as a trainer may leave it: unwrap it, and use the model itself. Or "
        "all workers draw the same samples: give each worker its own.",
        RuntimeWarning,
        stacklevel=6,
    )


def _found(params: Sequence[Tensor], workers: RankGroup) -> set[str]:
    """Return the class names of modules that average these gradients over these workers."""
    return {
        type(module).__name__
        for module, _ in modules_holding(params, _averages)
        if _overlap(module.process_group, workers)
    }


def _averages(module: nn.Module) -> bool:
    # Two attributes that torch's DDP, its subclasses and ShardedDataParallel have in common.
    return "require_backward_grad_sync" in vars(module) and "process_group" in vars(module)


def _overlap(group: object, workers: RankGroup) -> bool:
    """Return whether two or more of the workers are in this process group."""
    if not isinstance(group, dist.ProcessGroup | None):
        return False
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return len(set(ranks) & set(workers.ranks)) > 1
