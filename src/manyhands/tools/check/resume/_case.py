"""Hold the records of a resume check for the hypotheses about a difference."""

from collections.abc import Callable
from dataclasses import dataclass

from manyhands.tools.check._report import Finding
from manyhands.tools.check.resume._records import Digests, RankHistory, RankStep, State

# Where to look for each cause.
LOOK = {
    "parameters": "model.load_state_dict(), and its place before DDP and the optimizer are made",
    "adapter weights": "how the adapters' weights are loaded, and whether they stay trainable",
    "running statistics": "whether the checkpoint has the model's buffers",
    "weight average": "whether the average, teacher or target is saved and loaded",
    "optimizer state": "optimizer.state_dict() in the checkpoint, and load_state_dict()",
    "optimizer state of another rank": "who saves and who loads the optimizer's state",
    "gradient scaler": "scaler.state_dict() in the checkpoint, and load_state_dict()",
    "schedule not restored": "scheduler.state_dict() in the checkpoint, and load_state_dict()",
    "schedule off": "last_epoch, calls of scheduler.step() while loading, and the step counter",
    "schedule stepped twice": "how often scheduler.step() is called per step after loading",
    "learning rate": "the learning rate, and the schedule's settings after loading",
    "samples repeated": "the position in the epoch, and skipping the batches already trained on",
    "samples skipped": "the position in the epoch, and batches that are skipped twice",
    "epoch counter": "the epoch in the checkpoint, sampler.set_epoch(), and range(start, ...)",
    "shuffle order": "the seed of the order: derive it from the epoch, or save its generator",
    "random state": "saving the random state of each rank, and restoring it last before the loop",
    "random state of another rank": "saving a random state for each rank",
    "other samples": "the split of the data, and the random numbers of augmentation",
    "number of steps": "the number of epochs or steps left, and the counter that is restored",
}


@dataclass
class ResumeCase:
    """The records that hypotheses look at, by rank."""

    killed: list[RankHistory]
    resumed: list[RankHistory]
    whole: list[RankHistory]
    at: int  # steps that the checkpoint contains

    @property
    def same_ranks(self) -> bool:
        return len(self.killed) == len(self.resumed)

    @property
    def ranks(self) -> int:
        """Return the number of ranks that both runs have."""
        return min(len(self.killed), len(self.resumed))

    def pairs(self, rank: int) -> list[tuple[RankStep, RankStep]]:
        """Return steps after the checkpoint, without interruption and resumed."""
        return list(zip(self.whole[rank].steps[self.at :], self.resumed[rank].steps, strict=False))

    def states(self, rank: int) -> tuple[State, State]:
        """Return the state at the checkpoint and the one that was restored."""
        return self.saved(rank), self.resumed[rank].states[0]

    def saved(self, rank: int) -> State:
        """Return the state at the checkpoint, which may be earlier than the kill."""
        states = self.killed[rank].states
        return states[self.at] if self.at in states else self.whole[rank].states[self.at]

    def leave_out(self, number: int) -> None:
        """Forget the resumed steps from `number` on, and those of the run without interruption."""
        for histories, first in ((self.resumed, number), (self.whole, self.at + number)):
            for history in histories:
                del history.steps[first:]
                history.ended = False

    def start(self, rank: int) -> State:
        return self.whole[rank].states[0]


ResumeHypothesis = Callable[[ResumeCase], Finding | None]


def finding(cause: str, text: str) -> Finding:
    return Finding(cause, text, look=LOOK.get(cause, ""))


def unequal_keys(saved: Digests, restored: Digests) -> list[str]:
    """Return the keys in both states with other values."""
    return [key for key, value in saved.items() if restored.get(key, value) != value]


def describe(names: list[str], total: int) -> str:
    """Describe some of `total` tensors."""
    if len(names) == total > 1:
        return f"all {total}"
    if len(names) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    return "".join(names)
