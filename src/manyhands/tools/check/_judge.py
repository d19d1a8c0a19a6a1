"""Run a script on multiple ranks, replay their batches in a single process, and find a cause.

1. The ranks run under the recorder. Some causes are visible in the ranks' records.
2. A replay is a run of a single process with the ranks' batches, joined if possible. Otherwise the
   optimizer waits for the last batch.
3. For steps with multiple passes, a replay has all samples of the step in each pass.
4. Further replays look for an explanation of a difference: the order of batches, the learning
   rates, or the weights of ranks and passes.
"""

import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from manyhands.tools._interpreters import AVAILABLE
from manyhands.tools.check._case import Case, Hypothesis
from manyhands.tools.check._compare import Difference, compare, largest_size
from manyhands.tools.check._gradient_causes import GRADIENT_CAUSES, weighted_otherwise
from manyhands.tools.check._job import CheckedScript
from manyhands.tools.check._processes import single_thread
from manyhands.tools.check._rank_causes import BLOCK_CAUSES, RANK_CAUSES
from manyhands.tools.check._records import Recording
from manyhands.tools.check._report import (
    DIFFERS,
    EQUAL,
    EXCEPT,
    UNKNOWN,
    Finding,
    Verdict,
    finding,
)
from manyhands.tools.check._runs import NotJudged, Runs

# Relative distances that count as rounding.
TIGHT = 1e-6  # in float64
NATIVE = 2e-4  # in the script's precision
WHOLE_STEPS = 1e-5  # between passes with all and with some samples
CAP = 3e-2  # the script is not judged if rounding is larger
GROWN = 1e-12  # the distance before a difference, if rounding grows with each step


def check_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    ranks: int = 2,
    steps: int = 5,
    seconds: float = 300.0,
    module: bool = False,
    allow: Collection[str] = (),
) -> Verdict:
    """Return whether a script or module trains on multiple ranks as in a single process.

    `allow` has names of accepted `EXCEPTIONS`.
    """
    job = CheckedScript(script, tuple(arguments), steps, module=module)
    deadline = time.monotonic() + seconds
    with single_thread(), tempfile.TemporaryDirectory(prefix="manyhands-check-") as folder:
        runs = Runs(job, ranks, Path(folder), deadline)
        verdict = _attempt_both(runs)
    if verdict.code == EQUAL and not verdict.exceptions.keys() <= set(allow):
        verdict.code = EXCEPT
    return verdict


def _attempt_both(runs: Runs) -> Verdict:
    job = runs.job
    check = Check(runs)
    check.attempt()
    if not check.needs_accelerators():
        return check.verdict
    simulating = replace(job, accelerators=runs.world)
    again = Runs(simulating, runs.world, runs.folder, runs.deadline)
    second = Check(again)
    second.attempt()
    if second.verdict.code != UNKNOWN:
        second.verdict.notes.append("the CPU simulated an accelerator for each rank.")
        return second.verdict
    if check.verdict.code == UNKNOWN:
        reason = second.verdict.reason
        check.verdict.reason += f" With accelerators simulated on the CPU: {reason}"
    return check.verdict


class Check:
    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.verdict = Verdict(UNKNOWN, ranks=runs.world)
        self.case = Case([], runs.gradient_of)
        self.floor = TIGHT  # larger distances are differences
        self.largest: list[float] = []  # largest distance in each step

    def attempt(self) -> None:
        try:
            self.judge()
        except NotJudged as reason:
            self.verdict.code = UNKNOWN
            self.verdict.reason = str(reason)

    def needs_accelerators(self) -> bool:
        unaveraged = any(found.cause == "not averaged" for found in self.verdict.findings)
        return self.runs.ranks.asked and (self.verdict.code == UNKNOWN or unaveraged)

    def judge(self) -> None:
        self.runs.run_ranks()
        self.case.ranks = self.runs.ranks.records
        if not self.runs.job.float64:
            self.floor = NATIVE
        if self.runs.ranks.hangs:
            alone = self.runs.run_one(None)
            if alone.failed:
                raise NotJudged("the ranks hang. " + alone.why("As one process"))
            self.differs(finding("hang", "the ranks hang, and one process does not"))
            return
        if not any(record.steps for record in self.case.ranks):
            reason = "no torch optimizer made a step, and no parameter changed otherwise."
            output = self.runs.ranks.last_output()
            if output:
                reason += f" Last output of the script: {output}"
            raise NotJudged(reason)
        if not any(record.grouped for record in self.case.ranks):
            raise NotJudged(
                "the script makes no process group, so each rank trains alone. Call "
                "torch.distributed.init_process_group(). The check does not support crews."
            )
        self.add_notes()
        if self.case.ranks[0].blocks:
            self.judge_blocks()
        elif not self.find(RANK_CAUSES):
            self.judge_values()

    def judge_blocks(self) -> None:
        """Judge ranks that step alone by their equality after a sync round."""
        if self.find(BLOCK_CAUSES):
            return
        if all(self.case.unequal("params", number) for number in range(len(self.case.steps))):
            raise NotJudged("no sync round of blocks ends in these steps. Raise --steps.")
        self.verdict.code = EQUAL
        self.verdict.blocks = True

    def judge_values(self) -> None:
        self.check_movement()
        one = self.runs.first_replay()
        self.verdict.code = EQUAL
        reproducible = True
        if self.compare(one) and not self.allow_rates(one):
            one = self.case.one or one  # with the rates of a scaling rule
            reproducible = self.measure_rounding(one)
            if reproducible and self.compare(one) and not self.runs.plan.rates:
                self.allow_rates(one)
        if self.case.difference is not None:
            self.explain(reproducible)
        self.add_steps()
        if self.case.difference is None:
            self.check_whole_steps()
        if self.runs.plan.how == "apart":
            self.verdict.untested.append("means weighted by tokens, as batches cannot be joined")

    def check_movement(self) -> None:
        """Raise if the steps would be equal even with a bug."""
        first = self.case.ranks[0]
        seen: set[str] = set()
        gradient = 0.0
        finite = False
        moved = False
        previous = first.start
        for step in first.steps:
            gradient = max(gradient, largest_size(step.before), largest_size(step.grads))
            finite = finite or all(bool(p.isfinite().all()) for p in step.params.values())
            for name, value in step.params.items():
                moved = moved or name not in previous or not torch.equal(value, previous[name])
            previous = step.params
        for record in self.case.ranks:
            for batch in record.pass_samples(by_index=False):
                seen.update(batch)
        if not finite:
            raise NotJudged("parameters are not finite after every step. Lower the learning rate.")
        advice = "Use other data, or raise --steps."
        if any(step.grads for step in first.steps) and gradient == 0:
            raise NotJudged(f"all gradients are zero. {advice}")
        if not moved:
            raise NotJudged(f"no parameter changes in {len(first.steps)} steps. {advice}")
        if len(seen) == 1:
            raise NotJudged(f"all samples are equal. {advice}")

    def explain(self, reproducible: bool) -> None:
        """Find the cause of a difference."""
        if reproducible and self.find(GRADIENT_CAUSES):
            return
        if self.judge_coupled(reproducible):
            return
        if not reproducible and self.runs.failure:
            raise NotJudged(
                "the gradient depends on the samples that share a batch, or on their order, so "
                "the ranks' batches cannot be joined. A replay of the batches one by one failed: "
                f"{self.runs.failure}"
            )
        if not reproducible:
            raise NotJudged(
                "the gradient depends on the order of samples in a batch. A frequent reason is "
                "a separate random generator in the loop."
            )
        self.differs(finding("unknown", "none of the known causes"))

    def judge_coupled(self, reproducible: bool) -> bool:
        """Judge by a replay without joined batches, for a loss that couples samples."""
        plan = replace(self.runs.plan, how="apart")
        if plan == self.runs.plan:
            return False
        one = self.runs.replay(plan)
        if one is None:
            return False
        self.runs.plan = plan
        grown = not reproducible and len(self.largest) > 1 and self.largest[-2] > GROWN
        if self.compare(one) and not plan.rates:
            self.allow_rates(one)
        if self.case.difference is not None:
            return self.find(GRADIENT_CAUSES)
        if grown:
            self.verdict.notes.append("rounding grows, so batches were compared one by one.")
        else:
            self.verdict.exceptions["coupled-loss"] = "; batches were compared one by one"
        return True

    def compare(self, one: Recording) -> bool:
        """Return whether the ranks differ from a replay."""
        self.case.one = one
        self.largest, self.case.difference = compare(self.case.ranks[0], one, self.floor)
        return self.case.difference is not None

    def find(self, hypotheses: Sequence[Hypothesis]) -> bool:
        """Add the first finding, and return whether any exists."""
        for hypothesis in hypotheses:
            found = hypothesis(self.case)
            if found is not None:
                self.differs(found)
                return True
        return False

    def measure_rounding(self, one: Recording) -> bool:
        """Raise the floor to the effect of the ranks' order; return whether this is small."""
        reverse = self.runs.replay(replace(self.runs.plan, order=self.runs.plan.order[::-1]))
        if reverse is not None:
            largest, difference = compare(reverse, one, CAP)
            if difference is not None:
                return False
            self.floor = max(self.floor, 30 * max(largest, default=0.0))
        return True

    def allow_rates(self, plain: Recording) -> bool:
        """Accept rates that depend on the number of ranks; return whether all else is equal."""
        name = self.name_rates(plain)
        if not name:
            return False
        first = self.case.ranks[0]
        plan = replace(self.runs.plan, rates=True)
        one = self.runs.replay(plan)
        if one is None or (not first.rule and compare(first, one, self.floor)[1] is not None):
            return False
        self.runs.plan = plan
        if first.rule:
            note = "one process used the ranks' rates and gains in the comparison."
            self.verdict.notes.append(note)
        else:
            self.verdict.exceptions[name] = "; the comparison used the ranks' rates"
        return not self.compare(one)

    def name_rates(self, plain: Recording) -> str:
        """Return the name of the exception, or "" if the rates are a bug."""
        first = self.case.ranks[0]
        if first.rule:
            return "learning-rate"
        ratios = set()
        for a, b in zip(first.steps, plain.steps, strict=False):
            if a.schedules != b.schedules:
                return "schedule" if first.accelerate else ""
            ratios |= {x / y for x, y in zip(a.rates, b.rates, strict=False) if y}
        squares = {round(ratio**2, 6) for ratio in ratios}
        if len(ratios) == 1 and squares.isdisjoint((self.runs.world, self.runs.world**2)):
            return ""
        return "learning-rate"

    def check_whole_steps(self) -> None:
        """Compare with a replay in which each pass has all samples of the step."""
        first = self.case.ranks[0]
        passes = first.pass_ranges()[-1][1]
        if passes <= len(first.steps) or self.runs.plan.how == "apart":
            return
        if any(loader.batches < passes for loader in first.training_loaders().values()):
            return
        self.runs.plan = replace(self.runs.plan, how="whole")
        one = self.runs.replay(self.runs.plan)
        if one is None:
            self.verdict.untested.append("whether passes are weighted by their tokens or samples")
            return
        self.floor = max(self.floor, WHOLE_STEPS)
        if not self.compare(one) or self.case.pair()[2].kind == "params":
            return
        found = weighted_otherwise(self.case)
        if found is not None and found.cause in ("token weights", "uneven batches"):
            self.differs(found)
            self.add_steps()

    def differs(self, found: Finding) -> None:
        alone = self.runs.plan.how == "apart" and self.case.ranks[0].sums
        if found.cause == "ranks weighted" and alone:
            raise NotJudged(
                "the ranks' batches cannot be joined, and one process cannot repeat the sums over "
                "ranks that the script computes before each backward pass."
            )
        if found.cause == "uneven batches":
            self.verdict.exceptions["uneven-batches"] = (
                f" ({found.place}); later steps were not compared"
            )
        else:
            self.verdict.code = DIFFERS
            self.verdict.findings = [found]

    def add_notes(self) -> None:
        first = self.case.ranks[0]
        notes = self.verdict.notes
        if not self.runs.job.float64:
            notes.append("the runs used the script's precision, not float64.")
        if first.noise:
            kinds = " and ".join(first.noise)
            notes.append(f"switched off, or made equal for all samples: {kinds}.")
        if first.norms:
            self.verdict.exceptions["batch-norm"] = ", also in the comparison with one process"
        if first.manual:
            notes.append("no torch optimizer: gradients are the changes of parameters.")
        for key in first.training_loaders():
            lengths = [rank.loaders[key].length for rank in self.case.ranks if key in rank.loaders]
            if len(set(lengths)) > 1:
                self.verdict.untested.append(
                    f"the end of an epoch, as the ranks' loaders have {lengths} batches"
                )
        if not AVAILABLE:
            self.verdict.untested.append("Python's string hash seeds, which the ranks share here")
        if first.idle:
            self.verdict.untested.append("an optimizer that made no step")
        if not first.complete:
            notes.append(f"the script ended after {len(first.steps)} steps.")

    def add_steps(self) -> None:
        difference = self.case.difference
        self.verdict.steps = []
        for number, distance in enumerate(self.largest):
            text = f"equal (largest relative difference {distance:.0e}, allowed {self.floor:.0e})"
            if difference is not None and difference.step == number:
                text = describe_difference(difference)
            self.verdict.steps.append(f"step {number + 1}   {text}")


def describe_difference(difference: Difference) -> str:
    def rounded(name: str) -> float:
        return round(difference.distances[name], 4)

    kind = "parameters" if difference.kind == "params" else "gradients"
    worst = max(difference.names, key=rounded)
    distance = min(difference.distances[worst], 9.99)
    count = f"{len(difference.names)} of {len(difference.distances)}"
    return f"{kind} differ: {distance:.2%} in {worst} ({count} tensors)"
