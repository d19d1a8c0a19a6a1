"""Define the work of a rank in a resume check."""

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch

from manyhands.tools.check import _machine
from manyhands.tools.check._files import keep_files
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import Rank, run_script
from manyhands.tools.check.resume._checkpoints import CheckpointWatch, ReadWatch
from manyhands.tools.check.resume._history import HistoryRecorder
from manyhands.tools.check.resume._meeting import Meeting

MOST_STEPS = 60  # to reach the end of the next epoch
MOST_SECONDS = 5.0  # to reach the end of the next epoch


@dataclass(frozen=True)
class ResumeJob:
    """The work of a rank: run the script until all ranks stop."""

    script: CheckedScript
    kept: Path  # the folder of `keep_files`, shared with the resumed run
    states: tuple[int, ...]  # steps after which to record the state
    tensors_from: int  # first step with recorded gradients and parameters
    steps: int  # least number of steps
    until_checkpoint: bool = False  # stop after a checkpoint, not after an epoch
    seed: int = 0  # of a script that sets no seed
    files: tuple[str, ...] = ()  # of the interrupted run

    def run(self, rank: Rank) -> None:
        meeting = Meeting(rank.out / "meeting", rank.number, rank.world)

        def finish() -> None:
            history = recorder.history
            if history.ended and rank.number == 0:
                watch.written(recorder.least_size())
            history.files = sorted(watch.files)
            history.checkpoint = watch.latest
            history.read = sorted(reads.read)
            meeting.leave()
            rank.leave(history)

        def stops(recorder: HistoryRecorder) -> bool:
            return meeting.stops(recorder.made + 1, lambda: self.is_enough(recorder, watch))

        recorder = HistoryRecorder(self.states, self.tensors_from, stops, finish)
        reads = ReadWatch(self.files)
        try:
            _machine.patch(rank, replace(self.script, float64=False))
            recorder.patch()
            keep_files(self.kept)
            reads.patch()
            watch = CheckpointWatch(self.kept / "kept")
            torch.manual_seed(self.seed)
            random.seed(self.seed)
            numpy.random.seed(self.seed)
            run_script(self.script)
        except BaseException:
            meeting.leave()
            raise
        recorder.history.ended = True
        finish()

    def is_enough(self, recorder: HistoryRecorder, watch: CheckpointWatch) -> bool:
        """Return whether to stop before the next step."""
        if not self.until_checkpoint:
            return recorder.made >= self.steps and has_seen_an_epoch(recorder, self.tensors_from)
        if not recorder.made:
            watch.seen = watch.signatures()  # files before the first step are no checkpoint
            return False
        return watch.written(recorder.least_size()) and recorder.made >= self.steps


def has_seen_an_epoch(recorder: HistoryRecorder, first: int) -> bool:
    """Return whether steps after `first` include the next epoch, or reach a limit."""
    steps = recorder.history.steps[first:]
    if not steps:
        return False
    seconds = time.monotonic() - recorder.began
    if not steps[0].epoch or len(steps) >= MOST_STEPS or seconds > MOST_SECONDS:
        return True
    return len({step.epoch for step in steps}) > 2
