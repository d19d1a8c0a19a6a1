"""Run a script on several ranks, and as one process with the ranks' batches."""

import time
from dataclasses import replace
from pathlib import Path

from manyhands.tools.check._feed import Feed, FeedPlan
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import CheckRun, run
from manyhands.tools.check._records import Recording, Tensors


class NotJudged(Exception):
    """Why there is no verdict."""


class Runs:
    """The runs of a script."""

    def __init__(self, job: CheckedScript, world: int, folder: Path, deadline: float) -> None:
        self.job = job
        self.world = world
        self.folder = folder
        self.deadline = deadline
        self.ranks = CheckRun(folder)
        self.plan = FeedPlan("joined", tuple(range(world)))  # of the run that is compared

    def run(self, job: CheckedScript, world: int, feed: Feed | None = None) -> CheckRun:
        seconds = max(self.deadline - time.monotonic(), 1.0)
        return run(job, world, self.folder, seconds, feed)

    def run_ranks(self, fall_back: bool) -> None:
        """Run the ranks; if they fail in float64 and may fall back, in the script's precision."""
        self._run_short()
        if self.ranks.errors and fall_back:
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
        """Run the ranks with short epochs, and with whole epochs if that run is incomplete."""
        self.ranks = self.run(self.job, self.world)
        if self.job.short and self.ranks.was_cut:
            self.job = replace(self.job, short=False)
            self.ranks = self.run(self.job, self.world)

    def run_one(self, plan: FeedPlan | None, steps: int | None = None) -> CheckRun:
        """Run one process with the ranks' batches, or with its data if there is no plan."""
        feed = None
        if plan is not None:
            feed = Feed(plan, self.ranks.folder, self.ranks.records[0])
        job = replace(self.job, steps=steps or self.job.steps)
        made = self.run(job, 1, feed)
        for error in made.errors.values():
            if "process group" in error or "no_sync" in error:
                return self.run(replace(job, grouped=True), 1, feed)
        return made

    def replay(self, plan: FeedPlan) -> Recording | None:
        """Return the record of one process with the ranks' batches, or None if it failed."""
        made = self.run_one(plan)
        if made.failed or not self.fits(plan, made.records[0]):
            return None
        return made.records[0]

    def fits(self, plan: FeedPlan, record: Recording) -> bool:
        """Return whether each step has as many passes as the ranks' batches make."""
        wanted = [len(step.passes) * plan.times for step in self.ranks.records[0].steps]
        return wanted == [len(step.passes) for step in record.steps[: len(wanted)]]

    def first_replay(self) -> Recording:
        """Choose the plan, and return the record of one process with the ranks' batches."""
        sources = [True] if self.loaders_differ() else [False, True]
        plans = []
        for calls in sources:
            plans += [replace(self.plan, how=how, calls=calls) for how in ("joined", "split")]
        plans += [replace(self.plan, how="apart", calls=calls) for calls in sources]
        reason = ""
        for plan in plans:
            made = self.run_one(plan)
            if made.failed:
                reason = reason or made.why("as one process")
            elif self.fits(plan, made.records[0]):
                self.plan = plan
                return made.records[0]
            else:
                reason = reason or "one process makes another number of steps or passes"
        raise NotJudged(f"one process cannot be given what the ranks were given: {reason}")

    def loaders_differ(self) -> bool:
        """Return whether the ranks' loaders do not show which batches they train on."""
        keys = self.ranks.records[0].training_loaders().keys()
        given = 0
        for record in self.ranks.records:
            loaders = record.training_loaders()
            if not keys or loaders.keys() != keys:
                return True
            for loader in loaders.values():
                given = max(given, loader.batches)
        # A rank may skip the other ranks' batches.
        return given > 1.5 * self.ranks.records[0].pass_ranges()[-1][1]

    def gradient_of(self, step: int, rank: int, number: int) -> Tensors:
        """Return the gradient of a step that sees only one rank's batch of one pass."""
        made = self.run_one(replace(self.plan, only=(step, rank, number)), step + 1)
        if made.failed or len(made.records[0].steps) <= step:
            return {}
        found = made.records[0].steps[step]
        return found.before or found.grads
