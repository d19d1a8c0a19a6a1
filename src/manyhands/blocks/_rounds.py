"""What a sync round leaves behind: fragments in flight, figures for `snapshot`, state to reset to.

Pending        fragments whose sync round has begun, and whose mean is not merged yet
RoundStats     what the last sync rounds have shown
InitialState   the inner optimizer's state before its first step, for state="reset"
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from torch.optim import Optimizer

from manyhands._core.wrapper import unwrap
from manyhands.blocks._anchor import Anchor, AnchorDifference, OverlappedDifference
from manyhands.blocks._drift import Drift
from manyhands.blocks.averaging._extras import ArrivedMean
from manyhands.blocks.averaging._payload import Note, RoundResult
from manyhands.blocks.crew._membership import BackgroundSync


@dataclass
class Pending:
    """Fragments in flight, and what travels with the last fragment of a block."""

    fragments: Sequence[int]
    merge_at: int  # the step after which the mean is merged
    differences: Sequence[AnchorDifference]
    buffers: Sequence[ArrivedMean]
    state: Sequence[ArrivedMean]  # of the inner optimizer
    note: Note  # as this worker sent it
    background: BackgroundSync

    @property
    def overlaps(self) -> bool:
        """Whether training goes on while the fragments travel."""
        return isinstance(self.differences[0], OverlappedDifference)

    def saved(self) -> dict[str, Any]:
        """Wait for the mean, and return everything in plain values and tensors."""
        self.background.finished()
        result = self.background.result
        if result is None:
            raise RuntimeError(
                "a sync round failed while it was in flight"
            ) from self.background.error
        overlapped = [d for d in self.differences if isinstance(d, OverlappedDifference)]
        return {
            "fragments": list(self.fragments),
            "merge_at": self.merge_at,
            "held": [difference.held for difference in overlapped],
            "arrived": [difference.arrived for difference in overlapped],
            "buffers": [mean.saved() for mean in self.buffers],
            "state": [mean.saved() for mean in self.state],
            "note": astuple(self.note),
            "notes": [astuple(note) for note in result.notes],
            "squares": [*result.squares, result.square_of_mean],
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any], anchor: Anchor) -> Pending:
        """Return what `saved` has described: a mean that arrived but was not merged."""
        fragments = saved["fragments"]
        differences = [OverlappedDifference(d) for f in fragments for d in anchor.differences(f)]
        for difference, held, arrived in zip(
            differences, saved["held"], saved["arrived"], strict=True
        ):
            difference.held.copy_(held)
            difference.arrived.copy_(arrived)
        buffers, state = (
            # (cloned: the caller's state dict must not change when the mean is merged)
            [ArrivedMean(mean["keys"], mean["sizes"], mean["mean"].clone()) for mean in saved[name]]
            for name in ("buffers", "state")
        )
        *squares, square_of_mean = saved["squares"]
        result = RoundResult([Note(*note) for note in saved["notes"]], squares, square_of_mean)
        note, done = Note(*saved["note"]), BackgroundSync.already_done(result)
        return cls(fragments, saved["merge_at"], differences, buffers, state, note, done)


@dataclass
class RoundStats:
    """What the last sync rounds have shown, for `snapshot`."""

    drift: Drift = field(default_factory=Drift)
    workers: int = 0  # in the last round
    left_out: list[int] = field(default_factory=list)  # of the last round: not finite
    left_out_ever: int = 0
    undone: int = 0
    waited: float = 0.0  # seconds in which steps waited for sync rounds
    seconds: float = 0.0  # a step takes on the slowest worker


class InitialState:
    """The inner optimizer's state before its first step (Adagrad has some, most have none)."""

    def __init__(self, optimizer: Optimizer, needed: bool) -> None:
        self._optimizer = optimizer
        bare = self._bare()
        state = bare.state_dict()["state"] if needed and bare.state else {}
        self.state: dict[Any, Any] = copy.deepcopy(state)

    def _bare(self) -> Optimizer:
        # The innermost optimizer: a scaling rule around it keeps its own statistics.
        return unwrap(self._optimizer)[-1]

    def restore(self) -> None:
        """Reset the inner optimizer's state; options such as `lr` stay as they are."""
        bare = self._bare()
        bare.state.clear()
        if self.state:
            groups = bare.state_dict()["param_groups"]
            bare.load_state_dict({"state": copy.deepcopy(self.state), "param_groups": groups})
