"""Run a script up to a checkpoint, from the checkpoint, and without interruption; compare.

1. The script runs until a checkpoint is written, and is killed before the next step.
2. The script starts again with the files of run 1, and makes some steps. Then all files are
   restored.
3. The script runs without interruption up to the last step of run 2.

The first state of run 2 must equal the last state of run 1. The steps of run 2 must equal the steps
of run 3. Run 2 has a different seed, which matters if the script sets no seed, and different seeds
of Python's string hashes, as after a real restart.
"""

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from manyhands.tools.check._compare import gradient_distances
from manyhands.tools.check._files import put_back
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import CheckRun, run, single_thread
from manyhands.tools.check._report import DIFFERS, EQUAL, UNKNOWN, describe, finding
from manyhands.tools.check._runs import NotJudged
from manyhands.tools.check.resume._case import ResumeCase, unequal_keys
from manyhands.tools.check.resume._data_causes import DATA_CAUSES, variable_batch
from manyhands.tools.check.resume._history import VALUES
from manyhands.tools.check.resume._rate_causes import RATE_CAUSES
from manyhands.tools.check.resume._records import RankHistory, RankStep
from manyhands.tools.check.resume._report import ResumeVerdict
from manyhands.tools.check.resume._run_causes import RUN_CAUSES, number_of_steps, random_state
from manyhands.tools.check.resume._runs import ResumeJob
from manyhands.tools.check.resume._state_causes import STATE_CAUSES

ROUNDING = 1e-4  # relative difference of gradients after a different order of sums


@dataclass(frozen=True)
class ResumeRequest:
    """The script, with conditions of the runs."""

    script: CheckedScript
    ranks: int | None = None  # None: 2, or 1 if the script makes no process group
    then: int | None = None  # ranks of the resumed run
    at: int = 1  # least steps before the checkpoint
    arguments: tuple[str, ...] = ()  # additional arguments of the resumed run
    seconds: float = 300.0


def check_resume(request: ResumeRequest) -> ResumeVerdict:
    """Return whether a killed script resumes like a run without interruption."""
    with single_thread(), tempfile.TemporaryDirectory(prefix="manyhands-check-") as folder:
        check = ResumeCheck(request, Path(folder))
        try:
            check.judge()
        except NotJudged as reason:
            check.verdict.code = UNKNOWN
            check.verdict.reason = str(reason)
    return check.verdict


class ResumeCheck:
    def __init__(self, request: ResumeRequest, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self.deadline = time.monotonic() + request.seconds
        self.verdict = ResumeVerdict(EQUAL)
        self.ranks = 2  # of the first and the last run
        self.asked = False  # whether the script asked for accelerators
        self.simulates = False  # whether the CPU simulates an accelerator for each rank
        self.kept = folder / "files"  # copies of files that the first two runs change

    def judge(self) -> None:
        try:
            killed = self.interrupt_with_accelerators()
            at = len(killed[0].steps)
            resumed = self.resume(at, killed)
        finally:
            put_back(self.kept)
        at = self.find_checkpoint(at, killed[0], resumed[0])
        whole = self.run_through(at, len(killed[0].steps), resumed)
        case = ResumeCase(killed, resumed, whole, at)
        if all(0 in one.states for one in resumed):
            self.compare(case)
            return
        found = number_of_steps(case)  # the resumed run ended before the first pass
        if found is None:
            raise NotJudged("the resumed run makes no step, and no step remains.")
        self.verdict.findings = [found]
        self.verdict.code = DIFFERS

    def run(self, job: ResumeJob, ranks: int, forks: int) -> CheckRun:
        job.kept.mkdir(exist_ok=True)
        out = Path(tempfile.mkdtemp(dir=self.folder))
        if self.simulates:
            job = replace(job, script=replace(job.script, accelerators=ranks))
        made = run(job, ranks, out, max(self.deadline - time.monotonic(), 1.0), forks)
        self.asked |= made.asked
        return made

    def interrupt_with_accelerators(self) -> list[RankHistory]:
        """Interrupt the script. If this fails, simulate the accelerators that the script needs."""
        try:
            return self.interrupt()
        except NotJudged as reason:
            if not self.asked:
                raise
            first = reason
        put_back(self.kept)
        self.kept = self.folder / "files with accelerators"
        self.simulates = True
        try:
            killed = self.interrupt()
        except NotJudged as reason:
            text = f"{first} With accelerators simulated on the CPU: {reason}"
            raise NotJudged(text) from None
        self.verdict.notes.append("the CPU simulated an accelerator for each rank.")
        return killed

    def interrupt(self) -> list[RankHistory]:
        """Kill the script after a checkpoint, and return the ranks' histories."""
        at = self.request.at
        self.ranks = self.request.ranks or 2
        job = ResumeJob(self.request.script, self.kept, (0,), 0, at, until_checkpoint=True)
        made = self.run(job, self.ranks, forks=self.ranks)
        grouped = any(one.grouped for one in made.records)
        if self.request.ranks is None and not grouped and not made.late:
            # Without a process group, all ranks write to common files.
            put_back(self.kept)
            self.kept = self.folder / "files of one"
            alone = self.run(replace(job, kept=self.kept), 1, forks=1)
            if not alone.failed or not made.failed:
                made = alone
                self.ranks = 1
        if made.failed:
            raise NotJudged(made.why(f"on {self.ranks} rank{'s' * (self.ranks > 1)}"))
        first = made.records[0]
        steps = len(first.steps)
        if not steps:
            reason = "no torch optimizer made a step."
            if output := made.last_output():
                reason += f" Last output of the script: {output}"
            raise NotJudged(reason)
        if first.ended and first.checkpoint:
            raise NotJudged(
                f"the script wrote {first.checkpoint}, but made no step after the checkpoint and "
                f"after step {at}. The script ended after {steps} steps."
            )
        if first.ended:
            raise NotJudged(
                f"the script wrote no checkpoint between the first and the last of {steps} steps. "
                "A checkpoint has files of torch, safetensors, pickle, numpy or HDF5, with at "
                "least 45 % of the trained parameters' size."
            )
        return made.records

    def resume(self, at: int, killed: list[RankHistory]) -> list[RankHistory]:
        """Restart with the files of the killed run, and return the ranks' histories."""
        script = self.request.script
        name = killed[0].checkpoint
        arguments = [word.replace("{checkpoint}", name) for word in self.request.arguments]
        script = replace(script, arguments=(*script.arguments, *arguments))
        ranks = self.request.then or self.ranks
        files = tuple(killed[0].files)
        job = ResumeJob(script, self.kept, (0,), 0, script.steps, seed=1, files=files)
        made = self.run(job, ranks, forks=0)  # with new seeds of string hashes
        if made.failed:
            raise NotJudged(made.why("in the resumed run"))
        if not any(one.read for one in made.records):
            raise NotJudged(
                f"the script wrote {name} and was killed after step {at}, but the resumed run did "
                "not read this checkpoint. If resuming requires arguments, give --resume-args. If "
                "resuming requires a later checkpoint, give --at."
            )
        self.verdict.interrupted = f"Killed after step {at}, when {name} was written. "
        self.verdict.interrupted += f"Resumed with {ranks} process{'es' * (ranks > 1)}."
        return made.records

    def find_checkpoint(self, at: int, killed: RankHistory, resumed: RankHistory) -> int:
        """Return the number of steps before the checkpoint.

        The checkpoint precedes the kill by some steps if the script saves asynchronously.
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
                    note = f"the resumed run restored the state after step {made} of {at}."
                    self.verdict.notes.append(note)
                return made
        return at

    def run_through(self, at: int, killed: int, resumed: list[RankHistory]) -> list[RankHistory]:
        """Run without interruption to the last step of the resumed run."""
        last = max(killed, at + max(len(one.steps) for one in resumed))
        if resumed[0].ended:
            last += 1  # if there is another step
        kept = self.folder / "files of the last run"
        states = (0, at, killed)
        job = ResumeJob(self.request.script, kept, states, at, last)
        try:
            made = self.run(job, self.ranks, forks=self.ranks)
        finally:
            put_back(kept)
        if made.failed:
            raise NotJudged(made.why("in the run without interruption"))
        if len(made.records[0].steps) < killed:
            raise NotJudged("two runs without interruption make different numbers of steps.")
        return made.records

    def compare(self, case: ResumeCase) -> None:
        hypotheses = [*STATE_CAUSES, *RATE_CAUSES]
        unequal = self.find_unequal_runs(case)
        if unequal:
            self.verdict.untested.append(
                "samples, gradients and parameters, as two runs without interruption have "
                f"different {unequal}"
            )
        else:
            number = variable_batch(case)
            if number:
                case.leave_out(number)
                self.verdict.untested.append(
                    f"steps from {case.at + number + 1} on, as the numbers of samples differ"
                )
            hypotheses += [*DATA_CAUSES, *RUN_CAUSES]
            self.describe_steps(case)
        for hypothesis in hypotheses:
            found = hypothesis(case)
            if found is not None:
                self.verdict.findings.append(found)
        if not self.verdict.findings and self.verdict.difference:
            unknown = finding("unknown", "none of the known causes")
            self.verdict.findings.append(random_state(case) or unknown)
        if self.verdict.findings:
            self.verdict.code = DIFFERS
        elif unequal:
            raise NotJudged("the restored state is equal, but the script is not reproducible.")

    def find_unequal_runs(self, case: ResumeCase) -> str:
        """Return the state that differs between runs 1 and 3 at the kill."""
        for killed, whole in zip(case.killed, case.whole, strict=True):
            if len(killed.steps) not in whole.states:
                return ""  # the script ends there
            before = killed.states[len(killed.steps)]
            same = whole.states[len(killed.steps)]
            for kind in ("parameters", "buffers", "optimizer", "random"):
                if unequal_keys(getattr(before, kind), getattr(same, kind)):
                    return {"random": "random states"}.get(kind, kind)
        return ""

    def describe_steps(self, case: ResumeCase) -> None:
        count = len(case.pairs(0))
        if not case.same_ranks:
            self.verdict.compared = f"Compared: the state after step {case.at}"
            self.verdict.compared += ", and the samples up to the end of the epoch."
            self.verdict.untested.append(
                "gradients, parameters and random states of later steps, as "
                f"{len(case.killed)} ranks became {len(case.resumed)}"
            )
            return
        if case.ranks > 2 and count > VALUES:
            self.verdict.untested.append(
                f"gradients after step {case.at + VALUES} and parameters, as DDP changes the order "
                "of sums over three or more ranks after the first step"
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


def describe_difference(whole: RankStep, resumed: RankStep, ranks: int) -> str:
    """Describe the first difference in a step."""
    if whole.samples(False) != resumed.samples(False):
        return "samples differ."
    if whole.rates != resumed.rates:
        return f"the learning rate is {resumed.rates[0]:.4g}, not {whole.rates[0]:.4g}."
    for kind in ("grads", "params"):
        wrong = unequal_keys(getattr(whole, kind), getattr(resumed, kind))
        if not wrong or (ranks > 2 and (kind == "params" or not whole.grad_values)):
            continue
        distances = gradient_distances(resumed.grad_values, whole.grad_values)
        if ranks > 2 and max(distances.values(), default=1.0) < ROUNDING:
            continue  # DDP changes the order of sums after the first step
        name = "gradients" if kind == "grads" else "parameters"
        return f"{name} differ: {describe(wrong, len(getattr(whole, kind)))}."
    return ""
