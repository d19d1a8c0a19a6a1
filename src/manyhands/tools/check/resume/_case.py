"""Collect the records of a resume check for hypotheses about a difference."""

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.tools.check._report import Finding
from manyhands.tools.check.resume._records import Digests, RankHistory, RankStep, State


@dataclass
class ResumeCase:
    killed: list[RankHistory]
    resumed: list[RankHistory]
    whole: list[RankHistory]  # of the run without interruption
    at: int  # steps before the checkpoint

    @property
    def same_ranks(self) -> bool:
        return len(self.killed) == len(self.resumed)

    @property
    def ranks(self) -> int:
        return min(len(self.killed), len(self.resumed))

    def pairs(self, rank: int) -> list[tuple[RankStep, RankStep]]:
        """Return steps after the checkpoint, without interruption and resumed."""
        return list(zip(self.whole[rank].steps[self.at :], self.resumed[rank].steps, strict=False))

    def states(self, rank: int) -> tuple[State, State]:
        return self.saved(rank), self.resumed[rank].states[0]

    def saved(self, rank: int) -> State:
        """Return the state at the checkpoint."""
        states = self.killed[rank].states
        return states[self.at] if self.at in states else self.whole[rank].states[self.at]

    def leave_out(self, number: int) -> None:
        """Remove steps from resumed step `number` on, in both runs."""
        for histories, first in ((self.resumed, number), (self.whole, self.at + number)):
            for history in histories:
                del history.steps[first:]
                history.ended = False


ResumeHypothesis = Callable[[ResumeCase], Finding | None]


def unequal_keys(saved: Digests, restored: Digests) -> list[str]:
    return [key for key, value in saved.items() if restored.get(key, value) != value]
