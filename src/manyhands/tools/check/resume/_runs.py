"""Define the work of a rank in a resume check."""

import random
from collections.abc import Callable
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


@dataclass(frozen=True)
class ResumeJob:
    """The work of a rank: run the script until all ranks stop."""

    script: CheckedScript
    meeting: Meeting
    kept: Path  # the folder of `keep_files`, shared with the resumed run
    states: tuple[int, ...]  # steps after which to record the state
    tensors_from: int  # first step with recorded gradients and parameters
    enough: Callable[[HistoryRecorder, CheckpointWatch], bool]  # whether to stop before a step
    seed: int = 0  # of a script that sets no seed
    files: tuple[str, ...] = ()  # of the interrupted run

    def run(self, rank: Rank) -> None:
        def finish() -> None:
            history = recorder.history
            if history.ended and rank.number == 0:
                watch.written(recorder.least_size())
            history.files = sorted(watch.files)
            history.checkpoint = watch.latest
            history.read = sorted(reads.read)
            self.meeting.leave(rank.number)
            rank.leave(history)

        def stops(recorder: HistoryRecorder) -> bool:
            return self.meeting.stops(
                rank.number, recorder.made + 1, lambda: self.enough(recorder, watch)
            )

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
            self.meeting.leave(rank.number)
            raise
        recorder.history.ended = True
        finish()
