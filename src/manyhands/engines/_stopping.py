"""`mh.stopping`: is this the last step? One answer for all ranks.

A stop notice reaches ranks at different moments, and may reach only one of them. Ranks that train
one model have to stop after the same step, or those that go on would wait for the others forever.
Who carries the answer:

    a scaling rule   its own collective, in every step: all ranks know when `step` returns
    blocks           the note that each worker sends in a sync round: all stop at its end
    a crew           nothing: a worker leaves by itself, and the others go on
    otherwise        `StopVote`: a sum of one number, while the next step runs

The vote of a step is begun after it and read after the next one, so nobody waits for it. It costs
one step more: a notice in step k ends the training after step k + 1.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from manyhands._core.ranks import RankGroup
from manyhands._core.stop_notice import stop_notice
from manyhands._core.wrappers import OptimizerWrapper, gradient_ranks, unwrap
from manyhands.engines._listening import listener


def stopping(
    optimizer: Optimizer | None = None, *, process_group: dist.ProcessGroup | None = None
) -> bool:
    """Return whether to stop after this step: the same answer on all ranks.

    Call it on every rank at the end of every step. Give it the optimizer: a scaling rule or blocks
    carry the answer with what they send anyway. With any other optimizer, or without one, ranks
    vote, with a sum of one number that runs beside the next step.

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step in range(3):
    ...     optimizer.step()
    ...     if mh.stopping(optimizer):  # SIGTERM, or what else the engine sends
    ...         mh.save("run", model=model, optimizer=optimizer, step=step)
    ...         break

    The process listens from the first call of `stopping` or `start` on. When it was asked to stop,
    it has until the engine kills it, 30 s with most, to end its step and to save. Blocks stop at
    the end of a sync round. A worker of a crew stops there too if its block ends in time; otherwise
    at once, and its steps since the last round are lost.

    Args:
        optimizer: what the loop steps.
        process_group: the ranks that stop together, if they vote; all, by default.
    """
    listener.start()
    wanted = stop_notice.received
    layer = _outermost_layer(optimizer)
    if layer is not None:
        answer = layer.stop_agreed()
        if answer is not None:
            return answer
        wanted = wanted and layer.may_stop_here()
    ranks = None if optimizer is None or process_group is not None else gradient_ranks(optimizer)
    return _vote_of(ranks or RankGroup.of(process_group)).ask(wanted)


def _outermost_layer(optimizer: Optimizer | None) -> OptimizerWrapper | None:
    if optimizer is None:
        return None
    layers = unwrap(optimizer, every_layer=True)
    return next((layer for layer in layers if isinstance(layer, OptimizerWrapper)), None)


class StopVote:
    """One number from each rank: asked after one step, answered after the next."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks.with_cpu_group()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._stopped = False

    def ask(self, wanted: bool) -> bool:
        """Return whether any rank has wanted to stop when it asked last; ask again."""
        if self._ranks.size == 1:
            return wanted
        before = self._pending
        if before is not None:
            total, work = before
            work.wait()
            self._stopped = self._stopped or bool(total.item())
        if not self._stopped:  # on all ranks, or on none: they have the same total
            total = torch.tensor([float(wanted)])
            # `before` lives until the next vote has begun, as `PendingSums` says.
            self._pending = total, self._ranks.start_all_reduce(total)
        return self._stopped


# A vote has a group of its own, and ends with the group that it is for.
_votes: weakref.WeakKeyDictionary[Any, StopVote] = weakref.WeakKeyDictionary()


def _vote_of(ranks: RankGroup) -> StopVote:
    if ranks.size == 1:
        return StopVote(ranks)
    key = ranks.group or dist.group.WORLD
    vote = _votes.get(key)
    if vote is None:
        vote = _votes[key] = StopVote(ranks)
    return vote
