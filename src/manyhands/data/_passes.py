"""How a step's samples are divided among ranks, and each rank's part into passes.

    n samples, W ranks, at most m in a pass

    rank r has the samples from  n r / W  to  n (r + 1) / W  (rounded down)
    all ranks take  k = ceil(ceil(n / W) / m)  passes, and cut their part into k in the same way

So parts differ by one sample at most. If there are fewer samples than ranks or passes, some passes
have none. Their rank gets one of the step's samples as a *filler*, because its model has to take
part in the step, and the filler's loss has weight zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from manyhands.data._spans import Spans, count, take


@dataclass(frozen=True)
class Pass:
    """One micro-batch of one rank, and the step that it belongs to."""

    samples: int  # 0: a filler
    index: int  # among the passes of its step
    counts: tuple[int, ...]  # samples of each of this rank's passes in the step
    step_samples: int  # on all ranks, in all passes
    not_empty: int  # passes that have samples, on all ranks
    ranks: int

    @property
    def last(self) -> bool:
        """Whether it is the last pass of its step."""
        return self.index == len(self.counts) - 1

    @property
    def uneven(self) -> bool:
        """Whether the step's mean is not the mean of its passes' means."""
        return self.step_samples != self.samples * len(self.counts) * self.ranks


def divide_step(
    step: Spans, rank: int, ranks: int, most: int | None, *, in_turns: bool = False
) -> list[tuple[Pass, Spans]]:
    """Return this rank's passes, and the positions of each.

    `in_turns`: the ranks take turns at the samples, instead of one range each.

    >>> [(each.samples, spans) for each, spans in divide_step(((0, 10),), 1, 2, most=3)]
    [(2, ((5, 7),)), (3, ((7, 10),))]
    """
    n = count(step)
    start, stop = n * rank // ranks, n * (rank + 1) // ranks
    if in_turns:
        single = [(p, p + 1) for first, end in step for p in range(first, end)]
        rest: Spans = tuple(single[rank::ranks])
        start, stop = 0, len(rest)
    else:
        rest = take(step, start)[1] if start else step
    divided = []
    for each in _passes_of_rank(n, stop - start, ranks, most):
        spans, rest = take(rest, each.samples)
        divided.append((each, spans))
    return divided


@lru_cache(maxsize=64)  # nearly all steps are equally large
def _passes_of_rank(n: int, own: int, ranks: int, most: int | None) -> list[Pass]:
    """Return the passes of a rank that has `own` of a step's n samples."""
    passes = number_of_passes(n, ranks, most)
    counts = tuple(b - a for a, b in pairwise(own * i // passes for i in range(passes + 1)))
    sizes = (n // ranks + (r < n % ranks) for r in range(ranks))
    not_empty = sum(min(passes, size) for size in sizes)
    return [Pass(each, i, counts, n, not_empty, ranks) for i, each in enumerate(counts)]


def number_of_passes(samples: int, ranks: int, most: int | None) -> int:
    """Return how many passes each rank takes in a step of so many samples."""
    largest = -(-samples // ranks)
    return 1 if most is None else max(1, -(-largest // most))
