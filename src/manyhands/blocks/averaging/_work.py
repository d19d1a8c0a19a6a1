"""Count the steps and samples of a worker."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Steps of one worker, and on how many samples it took them: its weight in a sync round."""

    steps: int = 0
    counted: int = 0  # of these, the steps whose samples are known
    samples: int = 0  # of the counted steps

    def plus(self, samples: int | None) -> Work:
        """Add a step on this many samples; None: not known."""
        if samples is None:
            return Work(self.steps + 1, self.counted, self.samples)
        return Work(self.steps + 1, self.counted + 1, self.samples + samples)

    def minus(self, other: Work) -> Work:
        return Work(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


NO_WORK = Work()
