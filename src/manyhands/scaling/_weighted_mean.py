"""Average the loss of a step over all tokens, for micro-batches with different token counts.

Micro-batch i has n_i tokens (or samples, or pixels) and the summed loss l_i. The loss of a step is

    sum of l_i / N          N = sum of n_i, over all passes and ranks

instead of the mean of the micro-batch means. Gradients are averaged over W ranks, so `backward()`
of pass i starts from l_i W / N. A small collective before the passes computes N.

A scaling rule compares the gradients of k micro-batches, of which k' have tokens. With s_i the
gradient of l_i, and v the noise per token,

    E |s_i|^2 / n_i = n_i sqr + v          E N |G|^2 = N sqr + v

The sum of the first over i, minus the second, is (k' - 1) v for any division of the tokens. So
the estimate in `_noise.py` is unbiased if the squared norm of pass i is multiplied by
N k' / (k^2 n_i), and k' gradients are compared. The small batch is then the mean micro-batch, with
N / k tokens.

The weights also compensate for later divisions: by the counted passes (AdaptiveDataParallel), or by
the passes of a full step (trainers; a rule corrects short steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._arguments import shown
from manyhands._optimizers.foreign import find_prepared
from manyhands._optimizers.wrappers import gradient_ranks, params_of, unwrap
from manyhands._ranks.ranks import RankGroup, members_change
from manyhands.scaling._rule_base import rule_of


class WeightedMean:
    """The mean loss of a step with different token counts in the micro-batches.

    Create an instance for each step, on every rank, from the counts of the local micro-batches.
    Call it with the summed loss of each micro-batch, in the same order:

    >>> import torch, manyhands as mh
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = mh.AdaScale(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2
    ... )
    >>> micro_batches = [torch.randn(3, 4), torch.randn(8, 4)]
    >>> mean = mh.WeightedMean([len(x) for x in micro_batches], optimizer)
    >>> for x in micro_batches:
    ...     mean(model(x).square().sum()).backward()
    >>> optimizer.step()

    The gradient equals the gradient of a single backward pass over the full batch. This holds for
    plain models, `DistributedDataParallel`, `ShardedDataParallel`, `FullyShardedDataParallel` and
    `fully_shard`. The statistics of a rule account for the counts; the small batch is the mean
    micro-batch. Do not divide the losses by any other number. For a micro-batch without tokens,
    pass a zero that depends on the model.

    With multiple ranks, the constructor runs a small collective.

    Args:
        counts: number of tokens (or samples) in each local micro-batch of the step.
        optimizer: the optimizer of the step. It determines the ranks that average gradients. A
            scaling rule receives the counts.
        process_group: the ranks that average gradients, if no manyhands optimizer determines them;
            all by default.
    """

    def __init__(
        self,
        counts: Sequence[int | float | Tensor],
        optimizer: Optimizer | None = None,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        if members_change():
            raise RuntimeError(
                "survive=True does not support WeightedMean, whose counts cannot be exchanged. "
                "Use cursor.mean()."
            )
        ranks = None if optimizer is None else gradient_ranks(optimizer)
        if ranks is None:
            ranks = RankGroup.of(process_group)
        mistake = self._prepare(counts, optimizer)
        # Tokens, micro-batches with tokens, passes, flag for a mistake.
        with_tokens = sum(number > 0 for number in self._left)
        own = [sum(self._left), float(with_tokens), float(len(self._left)), 0.0]
        if mistake is not None:
            # A rank with a mistake still takes part, because the other ranks wait.
            own = [0.0, 0.0, 0.0, 1.0]
        rows = [own]
        if ranks.size > 1:
            device = torch.accelerator.current_accelerator() or torch.device("cpu")
            if optimizer is not None:
                device = params_of(unwrap(optimizer)[-1].param_groups)[0].device
            rows = ranks.all_gather(own, device)
        if mistake is not None:
            raise ValueError(mistake)
        wrong = [rank for rank, row in enumerate(rows) if row[3]]
        if wrong:
            raise RuntimeError(f"rank {wrong[0]} has invalid counts; its error gives the reason.")
        total, not_empty, passes, _ = map(sum, zip(*rows, strict=True))
        self._finish(optimizer, ranks.size, total, int(not_empty), int(passes))

    @classmethod
    def of_known(
        cls,
        counts: Sequence[int | float | Tensor],
        optimizer: Optimizer | None,
        *,
        ranks: int,
        total: int,
        not_empty: int,
    ) -> WeightedMean:
        """Create a mean from numbers that every rank knows, with no collective.

        All `ranks` have equally many passes. Together, `not_empty` micro-batches have `total`
        tokens.
        """
        mean = cls.__new__(cls)
        mistake = mean._prepare(counts, optimizer)
        if mistake is not None:
            raise ValueError(mistake)
        mean._finish(optimizer, ranks, total, not_empty, ranks * len(counts))
        return mean

    def _prepare(
        self, counts: Iterable[int | float | Tensor], optimizer: Optimizer | None
    ) -> str | None:
        """Store this rank's counts; return an error message for invalid counts."""
        self._rule = None if optimizer is None else rule_of(optimizer)
        try:
            numbers = [float(count) for count in counts]
        except (TypeError, ValueError):
            numbers = []
        self._left = numbers[::-1]
        self._own_passes = len(numbers)
        if not numbers or not all(0.0 <= number < float("inf") for number in numbers):
            return (
                "counts must be a list with one number of at least 0 for each micro-batch, got "
                f"{shown(counts)}."
            )
        if self._rule is not None and not self._rule.port.batch.loop.counts:
            batch = self._rule.port.batch
            passes = batch.loop.passes() or batch.passes
            if len(numbers) > passes or (len(numbers) < passes and not batch.loop.decides):
                return (
                    f"counts has {len(numbers)} number(s), and a step has {passes} backward "
                    "pass(es), as declared by num_gradients_to_accumulate or a Ramp. Give one "
                    "number for each pass."
                )
        return None

    def _finish(
        self, optimizer: Optimizer | None, ranks: int, total: float, not_empty: int, passes: int
    ) -> None:
        """Store this step's numbers over all ranks."""
        self.total = total
        """Number of tokens in the step, on all ranks."""
        self._not_empty = not_empty
        self._passes = passes
        self._factor = ranks
        rule = self._rule
        prepared = None if optimizer is None else find_prepared(optimizer)
        if rule is not None and (
            rule.port.batch.loop.decides or not rule.port.batch.passes_divided_by_user
        ):
            self._factor *= self._own_passes
        elif prepared is not None:
            self._factor *= int(prepared.loop.gradient_accumulation_steps)

    def __call__(self, loss_sum: Tensor) -> Tensor:
        """Return this micro-batch's contribution to the mean, for `backward()`."""
        count = self.begin_pass()
        if not count:
            return loss_sum * 0.0
        return loss_sum * (self._factor / self.total)

    @property
    def passes_left(self) -> int:
        """Number of this rank's micro-batches that have not been passed yet."""
        return len(self._left)

    def begin_pass(self) -> float:
        """Return the next count, and pass the weight to the rule."""
        if not self._left:
            raise RuntimeError("this WeightedMean was called more often than it has counts.")
        count = self._left.pop()
        if self._rule is not None:
            # The factor of the squared norm, applied after the pass.
            squares = self.total * self._not_empty / (self._passes**2 * count) if count else 0.0
            self._rule.port.weigh_pass(squares, self._not_empty, self._own_passes)
        return count
