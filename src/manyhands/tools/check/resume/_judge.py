"""Run a script until a checkpoint, from there, and without interruption, and compare the runs.

1. The script runs until it has written a checkpoint, and is killed before its next step.
2. It starts again, with the files that it left, and makes some steps. Then all files are put back.
3. It runs without interruption up to the same step.

The state that run 2 starts from is compared with the state in which run 1 was killed, and the
steps of run 2 with those of run 3. Run 2 starts with another seed, which matters only if the
script sets none.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from manyhands.tools.check._compare import gradient_distances
from manyhands.tools.check._files import put_back
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import single_thread
from manyhands.tools.check._report import DIFFERS, EQUAL, UNKNOWN, Finding
from manyhands.tools.check._runs import NotJudged
from manyhands.tools.check.resume._case import ResumeCase, unequal_keys
from manyhands.tools.check.resume._checkpoints import CheckpointWatch
from manyhands.tools.check.resume._data_causes import DATA_CAUSES, variable_batch
from manyhands.tools.check.resume._history import VALUES, HistoryRecorder, RecordPlan
from manyhands.tools.check.resume._rate_causes import RATE_CAUSES
from manyhands.tools.check.resume._records import RankHistory, RankStep
from manyhands.tools.check.resume._report import ResumeVerdict
from manyhands.tools.check.resume._run_causes import RUN_CAUSES, number_of_steps, random_state
from manyhands.tools.check.resume._runs import JobRun, ResumeJob, run_job
from manyhands.tools.check.resume._state_causes import STATE_CAUSES

MOST_STEPS = 60  # to reach the end of the next epoch
PORTS = 3  # to try, as another program may take a free one
MOST_SECONDS = 5.0  # for the same
ROUNDING = 1e-4  # relative difference of gradients that three or more ranks add in other orders


@dataclass(frozen=True)
class ResumeRequest:
    """The script, and how to interrupt and resume it."""

    script: CheckedScript
    ranks: int | None = None  # None: 2, or 1 if the script makes no process group
    then: int | None = None  # ranks of the resumed run
    at: int = 1  # steps before the checkpoint, at least
    arguments: tuple[str, ...] = ()  # of the resumed run, besides the script's
    seconds: float = 300.0


def check_resume(request: ResumeRequest) -> ResumeVerdict:
    """Return whether a killed script resumes as if it had not been interrupted."""
    # The first optimizer imports half of torch: once, here, and not in every process.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with single_thread(), tempfile.TemporaryDirectory(prefix="manyhands-check-") as folder:
        check = ResumeCheck(request, Path(folder))
        try:
            check.judge()
        except NotJudged as reason:
            check.verdict.code = UNKNOWN
            check.verdict.reason = str(reason)
    return check.verdict


class ResumeCheck:
    """Makes the runs, and collects the verdict."""

    def __init__(self, request: ResumeRequest, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self.deadline = time.monotonic() + request.seconds
        self.verdict = ResumeVerdict(EQUAL)
        self.ranks = request.ranks or 2
        self.kept = folder / "files"  # changed by the interrupted and the resumed run

    def judge(self) -> None:
        try:
            killed = self.interrupt()
            at = len(killed[0].steps)
            resumed = self.resume(at, killed)
        finally:
            put_back(self.kept)
        at = self.find_checkpoint(at, killed[0], resumed[0])
        whole = self.run_through(at, len(killed[0].steps), resumed)
        case = ResumeCase(killed, resumed, whole, at)
        if any(0 not in one.states for one in resumed):
            self.judge_without_steps(case)
        else:
            self.compare(case)

    def run(self, job: ResumeJob) -> JobRun:
        job.kept.mkdir(exist_ok=True)
        for _ in range(PORTS):
            made = run_job(job, self.folder, max(self.deadline - time.monotonic(), 1.0))
            if not any("EADDRINUSE" in error for error in made.errors.values()):
                break
        return made

    def interrupt(self) -> list[RankHistory]:
        """Kill the script after a checkpoint, and return the histories of its ranks."""
        at = self.request.at

        def enough(recorder: HistoryRecorder, watch: CheckpointWatch) -> bool:
            if not recorder.made:
                watch.seen = watch.signatures()  # files that were prepared are no checkpoint
                return False
            return watch.written(recorder.least_size()) and recorder.made >= at

        plan = RecordPlan(states=(0,), tensors_from=0)
        job = ResumeJob(self.request.script, self.ranks, self.kept, plan, enough)
        made = self.run(job)
        grouped = any(one.grouped for one in made.histories)
        if self.request.ranks is None and not grouped and not made.late:
            # Without a process group, each rank writes the same files.
            put_back(self.kept)
            self.kept = self.folder / "files of one"
            alone = self.run(replace(job, ranks=1, kept=self.kept))
            if not alone.failed or not made.failed:
                made = alone
                self.ranks = 1
        if made.failed:
            raise NotJudged(made.why(f"on {self.ranks} rank{'s' * (self.ranks > 1)}"))
        first = made.histories[0]
        if not first.steps:
            raise NotJudged("no torch optimizer made a step in the processes that were started.")
        if first.ended:
            raise NotJudged(self.describe_missing_checkpoint(first))
        return made.histories

    def describe_missing_checkpoint(self, history: RankHistory) -> str:
        steps = len(history.steps)
        if history.checkpoint:
            return (
                f"the script wrote {history.checkpoint}, but made no step after that and step "
                f"{self.request.at}. It ended after {steps} steps."
            )
        return (
            f"the script wrote no checkpoint between its first and its last step, of {steps}: no "
            "file of torch, safetensors, pickle or numpy as large as the trained parameters."
        )

    def resume(self, at: int, killed: list[RankHistory]) -> list[RankHistory]:
        """Start the script with the files that it left, and return the histories of its ranks."""
        script = self.request.script
        name = killed[0].checkpoint
        arguments = [word.replace("{checkpoint}", name) for word in self.request.arguments]
        script = replace(script, arguments=(*script.arguments, *arguments))
        ranks = self.request.then or self.ranks
        files = tuple(killed[0].files)
        steps = script.steps

        def enough(recorder: HistoryRecorder, _: CheckpointWatch) -> bool:
            return recorder.made >= steps and has_seen_an_epoch(recorder, 0)

        plan = RecordPlan(states=(0,), tensors_from=0)
        job = ResumeJob(script, ranks, self.kept, plan, enough, seed=1, files=files)
        made = self.run(job)
        if made.failed:
            raise NotJudged(made.why("resumed"))
        if not any(one.read for one in made.histories):
            raise NotJudged(
                f"the script wrote {name} and was killed after step {at}, but did not read it when "
                "it was started again. If it needs other arguments to resume, give --resume-args; "
                "if a later checkpoint is the one to resume from, give --at."
            )
        self.verdict.interrupted = f"Killed after step {at}, when {name} was written. "
        self.verdict.interrupted += f"Resumed with {ranks} process{'es' * (ranks > 1)}."
        return made.histories

    def find_checkpoint(self, at: int, killed: RankHistory, resumed: RankHistory) -> int:
        """Return after which step the state was saved that the resumed run starts from.

        It is earlier than the kill if a checkpoint is written while training goes on.
        """
        if 0 not in resumed.states:
            return at
        saved = killed.states[at]
        trained = {}
        for key in saved.trained:
            if key in saved.names:
                trained[saved.names[key]] = resumed.states[0].parameters.get(key)
        for made in range(at, 0, -1):
            if trained and trained.items() <= killed.steps[made - 1].params.items():
                if made < at:
                    note = f"the state after step {made} was restored, of {at} that were made."
                    self.verdict.notes.append(note)
                return made
        return at

    def run_through(self, at: int, killed: int, resumed: list[RankHistory]) -> list[RankHistory]:
        """Run without interruption to the step at which the resumed run was stopped."""
        last = max(killed, at + max(len(one.steps) for one in resumed))
        if resumed[0].ended:
            last += 1  # if there is another step

        def enough(recorder: HistoryRecorder, _: CheckpointWatch) -> bool:
            return recorder.made >= last and has_seen_an_epoch(recorder, at)

        plan = RecordPlan(states=(0, at, killed), tensors_from=at)
        kept = self.folder / "files of the last run"
        job = ResumeJob(self.request.script, self.ranks, kept, plan, enough)
        try:
            made = self.run(job)
        finally:
            put_back(kept)
        if made.failed:
            raise NotJudged(made.why("without interruption"))
        if len(made.histories[0].steps) < killed:
            raise NotJudged("two runs without interruption make different numbers of steps.")
        return made.histories

    def judge_without_steps(self, case: ResumeCase) -> None:
        """Judge a resumed run that ended before its first pass."""
        found = number_of_steps(case)
        if found is None:
            raise NotJudged("the resumed run makes no step, and none is left.")
        self.verdict.findings = [found]
        self.verdict.code = DIFFERS

    def compare(self, case: ResumeCase) -> None:
        """Compare the resumed run with the other runs, and look for causes."""
        hypotheses = [*STATE_CAUSES, *RATE_CAUSES]
        unequal = self.find_unequal_runs(case)
        if unequal:
            self.verdict.skipped.append(
                f"samples, gradients and parameters, as two runs without interruption differ: "
                f"{unequal}"
            )
        else:
            number = variable_batch(case)
            if number:
                case.leave_out(number)
                self.verdict.skipped.append(
                    f"steps from {case.at + number + 1} on, whose numbers of samples differ"
                )
            hypotheses += [*DATA_CAUSES, *RUN_CAUSES]
            self.describe_steps(case)
        for hypothesis in hypotheses:
            found = hypothesis(case)
            if found is not None:
                self.verdict.findings.append(found)
        if not self.verdict.findings and self.verdict.difference:
            unknown = Finding("unknown", "none that was tried")
            self.verdict.findings.append(random_state(case) or unknown)
        if self.verdict.findings:
            self.verdict.code = DIFFERS
        elif unequal:
            raise NotJudged("the restored state is equal, but the script is not reproducible.")
        elif case.same_ranks and random_state(case) is not None:
            self.verdict.notes.append(
                "the random state differs, but did not matter in these steps."
            )

    def find_unequal_runs(self, case: ResumeCase) -> str:
        """Return in which state two runs without interruption differ before the checkpoint."""
        for killed, whole in zip(case.killed, case.whole, strict=True):
            if len(killed.steps) not in whole.states:
                return ""  # the script ends there
            before = killed.states[len(killed.steps)]
            same = whole.states[len(killed.steps)]
            for kind in ("parameters", "buffers", "optimizer", "random"):
                if unequal_keys(getattr(before, kind), getattr(same, kind)):
                    return {"random": "the random state"}.get(kind, kind)
        return ""

    def describe_steps(self, case: ResumeCase) -> None:
        """Describe the compared steps, and the first that differs."""
        count = len(case.pairs(0))
        if not case.same_ranks:
            self.verdict.compared = f"Compared: the state after step {case.at}"
            self.verdict.compared += ", and the samples up to the end of the epoch."
            self.verdict.skipped.append(
                "gradients, parameters and random state of the steps after it, as "
                f"{len(case.killed)} ranks became {len(case.resumed)}"
            )
            return
        if case.ranks > 2 and count > VALUES:
            self.verdict.skipped.append(
                f"gradients after step {case.at + VALUES} and parameters, as three or more ranks "
                "add in another order after DDP's first step"
            )
        if count:
            self.verdict.compared = f"Compared: steps {case.at + 1} to {case.at + count}."
        for number in range(count):
            for rank in range(case.ranks):
                whole, resumed = case.pairs(rank)[number]
                text = describe_difference(whole, resumed, case.ranks)
                if text:
                    self.verdict.difference = f"Step {case.at + number + 1}: {text}"
                    return


def has_seen_an_epoch(recorder: HistoryRecorder, first: int) -> bool:
    """Return whether the steps after step `first` reach beyond the next epoch, or long enough."""
    steps = recorder.history.steps[first:]
    if not steps:
        return False
    seconds = time.monotonic() - recorder.began
    if not steps[0].epoch or len(steps) >= MOST_STEPS or seconds > MOST_SECONDS:
        return True
    return len({step.epoch for step in steps}) > 2


def describe_difference(whole: RankStep, resumed: RankStep, ranks: int) -> str:
    """Describe what differs first in a step; the empty string if nothing does."""
    if whole.samples(False) != resumed.samples(False):
        return "other samples."
    if whole.rates != resumed.rates:
        return f"the learning rate is {resumed.rates[0]:.4g}, not {whole.rates[0]:.4g}."
    for kind in ("grads", "params"):
        wrong = unequal_keys(getattr(whole, kind), getattr(resumed, kind))
        if not wrong or (ranks > 2 and (kind == "params" or not whole.grad_values)):
            continue
        kind_values = kind.removesuffix("s") + "_values"
        distances = gradient_distances(getattr(resumed, kind_values), getattr(whole, kind_values))
        largest = max(distances.values(), default=1.0)
        if ranks > 2 and largest < ROUNDING:
            continue  # DDP adds in another order after its first step
        name = "gradients" if kind == "grads" else "parameters"
        worst = max(distances, key=lambda each: distances[each], default=wrong[0])
        size = f", by {largest:.1%} in {worst}" if distances else ""
        return f"{name} differ{size} ({len(wrong)} of {len(getattr(whole, kind))} differ)."
    return ""
