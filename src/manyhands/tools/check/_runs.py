"""Run a script on multiple ranks, and replay the ranks' batches in a single process."""

import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyhands.tools.check import _machine
from manyhands.tools.check._feed import Feed, FeedPlan
from manyhands.tools.check._files import keep_files, put_back
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import CheckRun, Rank, run, run_script
from manyhands.tools.check._recorder import Recorder
from manyhands.tools.check._records import Recording, Tensors


class NotJudged(Exception):
    """The reason why there is no verdict."""


@dataclass(frozen=True)
class RecordedScript:
    """The work of a rank: run the script under a recorder."""

    script: CheckedScript
    feed: Feed | None  # for a replay

    def run(self, rank: Rank) -> None:
        recorder = Recorder(self.script, self.feed, lambda: self.finish(rank, recorder))
        try:
            mode = _machine.patch(rank, self.script)
            recorder.patch(mode)
            keep_files(rank.out)
            if self.script.grouped:
                torch.distributed.init_process_group()
                torch.nn.Module.no_sync = lambda _: nullcontext()  # type: ignore[attr-defined]
            if self.script.any_devices:
                _machine.accept_any_devices()
            torch.manual_seed(0)  # equal in all runs of a script that sets no seed
            run_script(self.script)
        except BaseException:
            if recorder.record.cut:
                (rank.out / "cut").touch()
            raise
        self.finish(rank, recorder)

    def finish(self, rank: Rank, recorder: Recorder) -> None:
        record = recorder.finished_record()
        if self.feed is None:
            torch.save(recorder.source, rank.out / f"source{rank.number}.pt")
        rank.leave(record)


class Runs:
    def __init__(self, job: CheckedScript, world: int, folder: Path, deadline: float) -> None:
        self.job = job
        self.world = world
        self.folder = folder
        self.deadline = deadline
        self.ranks = CheckRun(folder)
        self.plan = FeedPlan("joined", tuple(range(world)))  # of the compared replay
        self.failure = ""  # of the latest replay

    def run(self, job: CheckedScript, world: int, feed: Feed | None = None) -> CheckRun:
        seconds = max(self.deadline - time.monotonic(), 1.0)
        out = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            return run(RecordedScript(job, feed), world, out, seconds, forks=1)
        finally:
            put_back(out)

    def run_ranks(self) -> None:
        """Run the ranks in float64, or in the script's precision if float64 fails."""
        self._run_short()
        if self.ranks.errors:
            failed = self.ranks
            job = self.job
            self.job = replace(job, float64=False, short=True)
            self._run_short()
            if self.ranks.errors:
                self.ranks = failed
                self.job = job
        if self.ranks.errors or self.ranks.late:
            raise NotJudged(self.ranks.why(f"on {self.world} ranks"))

    def _run_short(self) -> None:
        """Run the ranks with short epochs, or full epochs if necessary."""
        self.ranks = self.run(self.job, self.world)
        incomplete = any(record.cut and not record.complete for record in self.ranks.records)
        if self.job.short and (incomplete or (self.ranks.folder / "cut").exists()):
            self.job = replace(self.job, short=False)
            self.ranks = self.run(self.job, self.world)

    def run_one(self, plan: FeedPlan | None, steps: int | None = None) -> CheckRun:
        """Run a single process as a replay, or with the script's data."""
        feed = None
        if plan is not None:
            feed = Feed(plan, self.ranks.folder, self.ranks.records[0])
        job = replace(self.job, steps=steps or self.job.steps)
        made = self.run(job, 1, feed)
        errors = "".join(made.errors.values())
        if ("process group" in errors or "no_sync" in errors) and not job.grouped:
            self.job = replace(self.job, grouped=True)
            return self.run_one(plan, steps)
        if "does not match the world size" in errors and not job.any_devices:
            self.job = replace(self.job, any_devices=True)
            return self.run_one(plan, steps)
        return made

    def replay(self, plan: FeedPlan) -> Recording | None:
        """Return the record of a replay. None: `failure` has the reason."""
        made = self.run_one(plan)
        self.failure = ""
        if made.failed:
            self.failure = made.why("as one process")
            return None
        wanted = [len(step.passes) * plan.times for step in self.ranks.records[0].steps]
        passes = [len(step.passes) for step in made.records[0].steps[: len(wanted)]]
        if passes != wanted:
            self.failure = "one process makes a different number of steps or passes."
            return None
        return made.records[0]

    def first_replay(self) -> Recording:
        """Choose the plan of replays, and return the first replay."""
        sources = [True] if self._loaders_differ() else [False, True]
        plans = []
        for calls in sources:
            plans += [replace(self.plan, how=how, calls=calls) for how in ("joined", "split")]
        plans += [replace(self.plan, how="apart", calls=calls) for calls in sources]
        reason = ""
        for plan in plans:
            one = self.replay(plan)
            if one is not None:
                self.plan = plan
                return one
            reason = reason or self.failure
        raise NotJudged(f"the ranks' batches cannot be replayed in one process: {reason}")

    def _loaders_differ(self) -> bool:
        """Return whether training batches depend on more than the loaders."""
        keys = self.ranks.records[0].training_loaders().keys()
        given = 0
        for record in self.ranks.records:
            loaders = record.training_loaders()
            if not keys or loaders.keys() != keys:
                return True
            for loader in loaders.values():
                given = max(given, loader.batches)
        # A rank may skip the batches of other ranks.
        return given > 1.5 * self.ranks.records[0].pass_ranges()[-1][1]

    def gradient_of(self, step: int, rank: int, number: int) -> Tensors:
        made = self.run_one(replace(self.plan, only=(step, rank, number)), step + 1)
        if made.failed or len(made.records[0].steps) <= step:
            return {}
        found = made.records[0].steps[step]
        return found.before or found.grads
