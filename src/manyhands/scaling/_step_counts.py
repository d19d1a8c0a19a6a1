"""What became of a rule's steps: how many there were, and the progress that they have made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from manyhands._core.state_parts import SavedState


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step's statistics."""

    gain: float  # of the average that includes them, at the scale of their step
    skipped: bool  # the gradient scaler found infinities, and no step was made


@dataclass
class StepCounts:
    """What a rule's steps have come to so far. The owner of the progress."""

    progress: float = 0.0  # the sum of the gains
    steps: int = 0
    skipped: int = 0
    short: int = 0  # steps with fewer passes than declared, counted or dropped

    def add(self, outcome: StepOutcome | None, *, late: bool) -> None:
        """Count a skipped step, or, if its statistics came late, its progress.

        If they did not come late, the progress is added when the optimizer has stepped.
        """
        if outcome is not None and outcome.skipped:
            self.skipped += 1
        elif outcome is not None and late:
            self.progress += outcome.gain

    def to_state(self) -> dict[str, float]:
        """Return the counts for a state dict."""
        return asdict(self)

    @classmethod
    def parse_state(cls, entry: SavedState) -> StepCounts:
        """Return the counts of a state dict, or raise."""
        return cls(
            check_progress(float(entry["progress"])),
            int(entry["steps"]),
            int(entry["skipped"]),
            int(entry.get("short", 0)),  # earlier releases had no such steps
        )

    def load_state(self, loaded: StepCounts) -> None:
        """Become `loaded`, in place: the proxies that trainers put around a rule share this."""
        vars(self).update(vars(loaded))


def check_progress(progress: float) -> float:
    """Return the progress, or raise."""
    if not (math.isfinite(progress) and progress >= 0.0):
        raise ValueError(f"progress must be finite and not negative, got {progress}.")
    return float(progress)
