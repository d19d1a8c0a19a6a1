"""Average a step's loss over all tokens, if micro-batches have different numbers of tokens.

Micro-batch i has n_i tokens (or samples, or pixels), and the sum of its losses is l_i. The loss of
the step is

    sum of l_i / N          N = sum of n_i, over all passes and all ranks

and not the mean of the micro-batches' means. After the passes, gradients are averaged over W ranks,
so `backward()` of pass i starts from l_i W / N. One small collective before the passes finds N.

A scaling rule compares the micro-batches' gradients. There are k micro-batches, and k' of them have
tokens. With s_i the gradient of l_i, and v the noise of one token,

    E |s_i|^2 / n_i = n_i sqr + v          E N |G|^2 = N sqr + v

and the sum of the first over i minus the second is (k' - 1) v, however the tokens are divided. So
the estimate (`_noise.py`) is right if pass i's squared norm counts N k' / (k^2 n_i) times, and k'
gradients were compared: the small batch is then the mean micro-batch, of N / k tokens.

Whoever divides a pass's loss or gradient once more, by the passes of a step, is made up for:

    the rule              the gradient, by the passes that it counted (AdaptiveDataParallel)
    a trainer's loop      each loss, by the passes of a whole step. If a step has fewer, the rule
                          multiplies its gradient, so that it is divided by those that it had
    the same, no rule     each loss, by the passes of a whole step
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands._arguments import shown
from manyhands._optimizers.foreign import find_prepared
from manyhands._optimizers.wrappers import gradient_ranks, params_of, unwrap
from manyhands._ranks.ranks import RankGroup
from manyhands.scaling._rule_base import rule_of


class WeightedMean:
    """The mean loss of a step whose micro-batches have different numbers of tokens.

    Make one for each step, on every rank, from the numbers of this rank's micro-batches. Call it
    with each micro-batch's sum of losses, in the same order:

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

    The gradient is the same as if the whole batch were one backward pass. This holds without a
    wrapper, and under `DistributedDataParallel`, `ShardedDataParallel`, `FullyShardedDataParallel`
    and `fully_shard`. A rule's statistics take the numbers into account; its small batch is the
    mean micro-batch. Do not divide the losses by anything else. If a micro-batch has no tokens,
    call the mean with a sum of zero that depends on the model, so that its backward pass takes
    place.

    With several ranks, making a `WeightedMean` takes one small collective.

    Args:
        counts: how many tokens (or samples) each of this rank's micro-batches of the step has.
        optimizer: the optimizer of the step. It knows which ranks' gradients are averaged, and a
            scaling rule in it takes the numbers into account.
        process_group: the ranks whose gradients are averaged, if no optimizer of ours says so; by
            default all.
    """

    def __init__(
        self,
        counts: Sequence[int | float | Tensor],
        optimizer: Optimizer | None = None,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        ranks = None if optimizer is None else gradient_ranks(optimizer)
        if ranks is None:
            ranks = RankGroup.of(process_group)
        mistake = self._prepare(counts, optimizer)
        # Tokens, micro-batches that have any, passes; and at the end whether there is a mistake.
        with_tokens = sum(number > 0 for number in self._left)
        own = [sum(self._left), float(with_tokens), float(len(self._left)), 0.0]
        if mistake is not None:
            # A rank with a mistake takes part, too, and says so: the others would wait for it.
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
            raise RuntimeError(f"the counts of rank {wrong[0]} are wrong: its error says why.")
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
        """Make a mean without a collective, if every rank knows the whole step's numbers.

        All `ranks` have equally many passes. `not_empty` is how many of all these micro-batches
        have tokens, and `total` how many tokens they have.
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
        """Keep this rank's counts; return what is wrong with them, or None."""
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
            may_be_short = batch.loop.decides and batch.short_step != "error"
            if len(numbers) > passes or (len(numbers) < passes and not may_be_short):
                return (
                    f"counts has {len(numbers)} number(s), and a step has {passes} backward "
                    "pass(es), as declared by num_gradients_to_accumulate or a Ramp. Give one "
                    "number for each pass."
                )
        return None

    def _finish(
        self, optimizer: Optimizer | None, ranks: int, total: float, not_empty: int, passes: int
    ) -> None:
        """Keep the numbers of the whole step, on all ranks, that each call's weight is made of."""
        self.total = total
        """The number of tokens in the step, on all ranks."""
        self._not_empty = not_empty
        self._passes = passes
        # and by what others divide the step, after the mean was taken
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
        """Return this micro-batch's part of the mean, for `backward()`."""
        count = self.begin_pass()
        # Without tokens in this micro-batch, or in the whole step, the gradient is zero.
        if not count:
            return loss_sum * 0.0
        return loss_sum * (self._factor / self.total)

    @property
    def passes_left(self) -> int:
        """How many of this rank's micro-batches are still to come."""
        return len(self._left)

    def begin_pass(self) -> float:
        """Return the next micro-batch's count, and pass its weight on to the rule."""
        if not self._left:
            raise RuntimeError("this WeightedMean was called more often than it has counts.")
        count = self._left.pop()
        if self._rule is not None:
            # The pass's squared norm is multiplied by it, when the pass is over.
            squares = self.total * self._not_empty / (self._passes**2 * count) if count else 0.0
            self._rule.port.weigh_pass(squares, self._not_empty, self._own_passes)
        return count
